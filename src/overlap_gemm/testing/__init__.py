"""Code that commands, benchmarks and tests share: cases, workloads, and the check of results."""
