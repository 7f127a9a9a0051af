"""The ops inside stacks that exist, one file each. A stack is imported when its file is, and not before."""
