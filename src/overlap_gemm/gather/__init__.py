"""Gather of input shards from peers, alongside the product that reads them. Imports no torch."""
