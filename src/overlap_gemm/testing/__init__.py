"""What commands, benchmarks and tests share: cases to try the ops on, and the verdict on their results."""
