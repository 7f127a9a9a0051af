"""What stands in for a process with GPUs: the DSL's host path, torch's, the emulator behind both."""
