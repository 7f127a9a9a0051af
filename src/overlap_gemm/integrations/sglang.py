"""Plug-in for SGLang: replaces the `torch.ops.symm_mem` products of its workers by this package's ops.

SGLang finds it by its entry point (group `sglang.srt.plugins`) and loads it in every process before it builds
a model. It does nothing unless `OVERLAP_GEMM_SGLANG=1`. The products are those of `--enable-layernorm-sp`.
"""

import os

SWITCH = "OVERLAP_GEMM_SGLANG"
"""Environment variable; "1" enables the plug-in."""


def register() -> None:
    """Installs `torch_symm_mem` if the plug-in is enabled. SGLang may call it several times in a process."""
    if os.environ.get(SWITCH) != "1":
        return
    from . import torch_symm_mem

    torch_symm_mem.install_once()
