"""Weights of a parallelized model: drawn, loaded from files, converted, saved."""
