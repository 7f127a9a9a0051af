"""Runs the PTX that CuTe DSL compiles for sm_90a and sm_100a on a CPU, several ranks at once."""
