"""A plug-in for SGLang: its workers' `torch.ops.symm_mem` products are this package's.

SGLang finds it by its entry point (group `sglang.srt.plugins`) and loads it in every process, before a model
is made; it does nothing unless `OVERLAP_GEMM_SGLANG=1`. The products are those of `--enable-layernorm-sp`.
"""

import os

SWITCH = "OVERLAP_GEMM_SGLANG"
"""Environment variable; "1" switches the plug-in on."""


def register() -> None:
    """Installs `torch_symm_mem` where it is switched on. SGLang may call it several times in a process."""
    if os.environ.get(SWITCH) != "1":
        return
    from . import torch_symm_mem

    if not torch_symm_mem.installed():
        torch_symm_mem.install()
