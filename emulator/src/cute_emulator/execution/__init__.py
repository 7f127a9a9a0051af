"""Launches: grids of CTAs, the order in which warps run, and the waits of streams."""
