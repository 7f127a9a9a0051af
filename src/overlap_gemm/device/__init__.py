"""What the hardware can do, without policy: addresses, flags, bounded waits, bulk copies, fragment views.

All inline PTX of the package is here.
"""
