"""``python -m overlap_gemm.emulator``: old name of ``python -m cute_emulator``."""

from cute_emulator.__main__ import main

main()
