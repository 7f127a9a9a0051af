"""Shared memory of a cluster in one window of addresses, of which each CTA has a part."""

CTA_WINDOW = 1 << 24
OFFSET = CTA_WINDOW - 1
"""Bits of a shared address that are the offset in its CTA's window."""
WINDOW = 0xFFFFFFFF
"""Bits of a generic address that are one of shared, local or parameter space."""
SMEM_BASE = 1024
"""Where a CTA's variables begin in its part: the first KiB is the system's."""
