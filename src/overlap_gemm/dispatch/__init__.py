"""Dispatch of calls: checks of arguments, cache of known calls, choice of a backend, and torch custom ops."""
