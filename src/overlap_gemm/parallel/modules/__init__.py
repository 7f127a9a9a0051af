"""Forwards of the modules of a parallelized model, one file for each kind of module."""
