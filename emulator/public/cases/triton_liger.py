"""A kernel of Liger-Kernel in Triton."""

import sys

from liger import compare

compare(sys.argv[1], in_cute=False)
