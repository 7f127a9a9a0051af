"""Launches: grids of CTAs, the schedule that gives warps their turns, and what a stream waits for."""
