"""Memory shared by the ranks of a group: allocation, contents, release."""
