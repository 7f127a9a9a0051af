"""Device primitives without policy: addresses, flags, bounded waits, LL packets, bulk stores.

All inline PTX of the package is here.
"""
