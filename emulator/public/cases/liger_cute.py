"""A kernel of Liger-Kernel in the CuTe DSL."""

import sys

from liger import compare

compare(sys.argv[1].removeprefix("cute-"), in_cute=True)
