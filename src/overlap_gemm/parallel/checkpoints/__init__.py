"""Weights of a parallelized model: initialization, loading from files, conversion, saving."""
