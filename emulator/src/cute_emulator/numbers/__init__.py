"""Number formats, lanes, bits and exact floating-point arithmetic.

The package does not depend on instructions.
"""
