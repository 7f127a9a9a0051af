"""Implementations of the ops (fused, decomposed, torch, sequential) and the choice among them (`select`)."""
