"""What tests and benchmarks share: cases, references, tolerances and a set of ranks to run them on."""
