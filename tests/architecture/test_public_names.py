"""What a user may rely on. A change here is a change of the interface and wants to be seen as one."""

import inspect
import subprocess
import sys

import overlap_gemm
from overlap_gemm import nn, parallel

SIGNATURES = {
    "all_gather_gemm": (
        "x_shard", "weight", "*", "group=None", "bias=None", "return_gathered=False", "backend='auto'",
        "rows=None", "dim=0", "save_gathered=False",
    ),
    "gemm_reduce_scatter": ("x", "weight", "*", "group=None", "bias=None", "backend='auto'", "dim=0"),
    "gemm_all_reduce": ("x", "weight", "*", "group=None", "bias=None", "backend='auto'"),
    "gemm_all_gather": ("x", "weight", "*", "group=None", "bias=None", "backend='auto'", "columns=None"),
    "init": ("*", "device=None", "timeout=None"),
    "finalize": (),
    "close_workspaces": ("group=None",),
    "workspace_bytes": ("group=None",),
}  # fmt: skip


def signature(function):
    shown, keyword_only = [], False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            keyword_only = True
            shown.append("*")
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
        shown.append(parameter.name + default)
    return tuple(shown)


def test_public_names():
    assert sorted(overlap_gemm.__all__) == sorted(
        [*SIGNATURES, "CommTimeoutError", "SymmetricMemoryError", "World", "explain"]
    )
    assert all(hasattr(overlap_gemm, name) for name in overlap_gemm.__all__)


def test_signatures():
    assert {name: signature(getattr(overlap_gemm, name)) for name in SIGNATURES} == SIGNATURES


def test_layers_and_styles():
    for module, names in (
        (nn, ("ColumnParallelLinear", "RowParallelLinear", "ParallelMLP", "full_state_dict")),
        (parallel, ("OverlapColwiseParallel", "OverlapRowwiseParallel", "OverlapSharedGather")),
    ):
        for name in names:
            assert inspect.getdoc(getattr(module, name)), name


def test_public_objects_are_documented():
    for name in overlap_gemm.__all__:
        assert len(inspect.getdoc(getattr(overlap_gemm, name))) > 40, name


def test_importing_the_package_starts_nothing():
    """No process group, no MPI, no CuTe DSL, no CUDA context, and nothing that takes seconds to import."""
    code = (
        "import sys, overlap_gemm, torch, torch.distributed as dist;"
        "assert not dist.is_initialized() and not torch.cuda.is_initialized();"
        "heavy = {'torch._dynamo', 'mpi4py', 'cutlass', 'nvshmem', 'transformers', 'matplotlib'};"
        "print(sorted(heavy & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
