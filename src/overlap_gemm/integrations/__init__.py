"""The ops inside other software stacks, one file for each. A stack is imported only with its file."""
