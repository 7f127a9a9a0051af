"""The process and its peers: startup, process groups, agreement between ranks, execution, shared memory."""
