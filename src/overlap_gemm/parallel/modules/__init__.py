"""Forwards of single modules of a parallelized model, one file a kind."""
