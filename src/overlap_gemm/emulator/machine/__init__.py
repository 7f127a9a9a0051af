"""The emulated machine: memory, warps, schedules, barriers, the async engine and launches."""
