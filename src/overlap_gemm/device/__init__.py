"""Primitives of the hardware, without policy: addresses, flags, bounded waits, bulk copies.

All inline PTX of the package is here.
"""
