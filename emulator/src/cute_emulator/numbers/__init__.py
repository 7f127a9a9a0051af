"""Number formats, lanes, bits and exact floating-point arithmetic.

Nothing here knows of instructions.
"""
