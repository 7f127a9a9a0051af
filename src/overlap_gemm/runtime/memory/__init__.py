"""Memory that the ranks of a group share: who allocates it, what it holds, who frees it."""
