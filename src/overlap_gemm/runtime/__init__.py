"""The process and its peers: how it started, which group it talks to, whether the ranks agree."""
