"""Tensor-parallel GEMMs that communicate inside the GEMM kernel, and the public functions for them.

Public names are imported at their first use (PEP 562). A module that does not need torch, such as
:mod:`overlap_gemm.pipelines`, therefore does not import it.

A saved program may call ``torch.ops.overlap_gemm`` without a public name. Its process must import
:mod:`overlap_gemm.dispatch.ops`, which registers the ops.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .api.ahead import reserve, warmup
    from .api.all_to_all import all_to_all_gemm, gemm_all_to_all
    from .api.explanation import explain
    from .api.functional import all_gather_gemm, gemm_all_gather, gemm_all_reduce, gemm_reduce_scatter
    from .api.quantization import quantize_rows, swizzle_scales
    from .api.registration import Arch, Mma, OpSpec, PatternSpec, TransportSpec, register
    from .api.statistics import stats
    from .epilogues import epilogue
    from .runtime.agree import DisagreementError
    from .runtime.bootstrap import World, finalize, init
    from .runtime.failures import CommTimeoutError, MismatchedCallsError, OverlappingCallsError
    from .runtime.identity import GroupThreadError, retry
    from .runtime.memory.symmetric import SymmetricMemoryError
    from .runtime.memory.workspace import close_workspaces, workspace_bytes
    from .runtime.order import CaptureError
    from .spec.promises import InvarianceError
    from .tuning.settings import configured, promising

__version__ = "0.1.0"

HOMES = (
    "api.ahead",
    "api.all_to_all",
    "api.explanation",
    "api.functional",
    "api.quantization",
    "api.registration",
    "api.statistics",
    "epilogues",
    "runtime.agree",
    "runtime.bootstrap",
    "runtime.failures",
    "runtime.identity",
    "runtime.order",
    "runtime.memory.symmetric",
    "runtime.memory.workspace",
    "spec.promises",
    "tuning.settings",
)
"""Modules that define the public names."""

__all__ = [
    "Arch",
    "CaptureError",
    "CommTimeoutError",
    "DisagreementError",
    "GroupThreadError",
    "InvarianceError",
    "MismatchedCallsError",
    "Mma",
    "OpSpec",
    "OverlappingCallsError",
    "PatternSpec",
    "SymmetricMemoryError",
    "TransportSpec",
    "World",
    "all_gather_gemm",
    "all_to_all_gemm",
    "close_workspaces",
    "configured",
    "epilogue",
    "explain",
    "finalize",
    "gemm_all_gather",
    "gemm_all_reduce",
    "gemm_all_to_all",
    "gemm_reduce_scatter",
    "init",
    "promising",
    "quantize_rows",
    "register",
    "reserve",
    "retry",
    "stats",
    "swizzle_scales",
    "warmup",
    "workspace_bytes",
]

if not TYPE_CHECKING:  # a type checker that saw __getattr__ would accept every name

    def __getattr__(name: str) -> object:
        if name not in __all__:
            registry = sys.modules.get(f"{__name__}.api.registration")
            if registry is not None and name in registry.FUNCTIONS:  # an op that a user registered
                return registry.FUNCTIONS[name]
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        # The first access imports all names: torch must not register an op in the middle of a trace.
        for home in HOMES:
            module = vars(import_module(f".{home}", __name__))
            globals().update({public: module[public] for public in __all__ if public in module})
        return globals()[name]

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


if find_spec("cute_emulator") is not None:  # if an emulator is open, fused calls on the CPU run in it
    import_module("cute_emulator.clients").register("overlap_gemm.integrations.cute_emulator")
