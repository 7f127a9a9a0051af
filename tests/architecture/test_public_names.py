"""What a user may rely on. A change here is a change of the interface and wants to be seen as one."""

import ast
import inspect
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import overlap_gemm
from overlap_gemm import nn, parallel, pipelines

SCALED = (
    "scale_x=None", "scale_w=None", "out_dtype=None", "block=None", "partials=None", "invariant=None",
    "epilogue=None",
)  # fmt: skip
"""What every op takes last."""

SIGNATURES = {
    "all_gather_gemm": (
        "x_shard", "weight", "*", "group=None", "bias=None", "return_gathered=False", "backend='auto'",
        "rows=None", "dim=0", "save_gathered=False", "columns=None", "deterministic=None", "reserve_sms=None",
        *SCALED,
    ),
    "gemm_reduce_scatter": (
        "x", "weight", "*", "group=None", "bias=None", "backend='auto'", "dim=0", "k=None",
        "deterministic=None", "reserve_sms=None", *SCALED,
    ),
    "gemm_all_reduce": (
        "x", "weight", "*", "group=None", "bias=None", "backend='auto'", "k=None", "deterministic=None",
        "reserve_sms=None", *SCALED,
    ),
    "gemm_all_gather": (
        "x", "weight", "*", "group=None", "bias=None", "backend='auto'", "columns=None",
        "deterministic=None", "reserve_sms=None", *SCALED,
    ),
    "gemm_all_to_all": ("x", "weight", "*", "heads=None", "options"),
    "all_to_all_gemm": ("x", "weight", "*", "heads=None", "options"),
    "epilogue": (
        "function=None", "*", "inputs=None", "outputs=None", "of='complete'", "pairs=False", "gradient=None",
        "result=None", "block=None", "then=None",
    ),
    "init": ("*", "device=None", "timeout=None"),
    "finalize": (),
    "close_workspaces": ("group=None",),
    "configured": (
        "*", "reserve_sms=None", "algorithm=None", "transport=None", "shard_transport=None",
        "tile_transport=None", "fields",
    ),
    "reserve": (
        "ops", "*", "max_rows", "columns", "group=None", "dtype=torch.bfloat16", "block=None", "device=None",
    ),
    "promising": ("*", "partials=None", "invariant=None"),
    "register": ("entry", "patterns"),
    "retry": ("error",),
    "stats": (),
    "quantize_rows": ("x", "dtype=torch.float8_e4m3fn", "*", "block=None", "power_of_two=False"),
    "swizzle_scales": ("scale",),
    "warmup": (
        "op", "shapes", "*", "group=None", "dtype=torch.bfloat16", "block=None", "device=None", "bias=False",
        "backend='auto'", "deterministic=None", "reserve_sms=None", "backward=False", "autotune=None",
        "partials=None", "invariant=None", "epilogue=None",
    ),
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
        [
            *SIGNATURES, "Arch", "CaptureError", "CommTimeoutError", "DisagreementError",
            "GroupThreadError", "InvarianceError", "MismatchedCallsError", "Mma", "OverlappingCallsError",
            "OpSpec", "PatternSpec", "SymmetricMemoryError", "TransportSpec", "World", "explain",
        ]
    )  # fmt: skip
    assert all(hasattr(overlap_gemm, name) for name in overlap_gemm.__all__)


def test_signatures():
    assert {name: signature(getattr(overlap_gemm, name)) for name in SIGNATURES} == SIGNATURES


def test_parallelize():
    assert signature(parallel.parallelize) == (
        "model", "mesh", "*", "sequence_parallel=True", "logits='replicated'", "backend='auto'",
        "float8=None", "partials=None", "invariant=None", "fuse=None", "activation=None",
    )  # fmt: skip


def test_layers_and_styles():
    for module, names in (
        (
            nn,
            (
                "ColumnParallelLinear",
                "RowParallelLinear",
                "ParallelMLP",
                "ParallelAttention",
                "ParallelBlock",
                "UlyssesAttention",
                "full_state_dict",
                "clip_grad_norm_",
            ),
        ),
        (parallel, ("OverlapColwiseParallel", "OverlapRowwiseParallel", "OverlapSharedGather")),
        (parallel, ("parallelize", "exportable", "full_state_dict")),
    ):
        for name in names:
            assert inspect.getdoc(getattr(module, name)), name


def test_public_objects_are_documented():
    for name in overlap_gemm.__all__:
        assert len(inspect.getdoc(getattr(overlap_gemm, name))) > 40, name


def test_type_checkers_see_the_public_names_from_where_they_are_loaded():
    tree = ast.parse(Path(overlap_gemm.__file__).read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level == 1]
    seen = {alias.name: f"overlap_gemm.{node.module}" for node in imports for alias in node.names}
    assert sorted(seen) == sorted(overlap_gemm.__all__)
    for name, home in seen.items():
        assert getattr(overlap_gemm, name) is getattr(import_module(home), name)
    assert set(overlap_gemm.__all__) <= set(dir(overlap_gemm))
    with pytest.raises(AttributeError, match="has no attribute 'gemm_reduce_scater'"):
        overlap_gemm.gemm_reduce_scater  # noqa: B018


def loaded(code, names):
    """Those of `names` that a fresh interpreter has imported after `code`."""
    code += f"; import sys; print(*sorted({names!r} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_importing_the_package_starts_nothing():
    """No process group, no MPI, no CuTe DSL, no CUDA context, and nothing that takes seconds to import."""
    code = (
        "import torch, torch.distributed as dist; from overlap_gemm import *;"
        "assert not dist.is_initialized() and not torch.cuda.is_initialized()"
    )
    assert loaded(code, {"torch._dynamo", "mpi4py", "cutlass", "nvshmem", "transformers", "matplotlib"}) == []


@pytest.mark.parametrize("code", ["import overlap_gemm; dir(overlap_gemm)", "import overlap_gemm.pipelines"])
def test_kernel_authors_need_no_torch(code):
    ours = {"overlap_gemm.api.functional", "overlap_gemm.kernel", "overlap_gemm.runtime"}
    assert loaded(code, {"torch"} | ours) == []


def test_an_op_may_be_the_first_thing_used_inside_a_compiled_function():
    code = (
        "import torch, overlap_gemm, torch.distributed as dist, tempfile;"
        "dist.init_process_group('gloo', init_method=f'file://{tempfile.mktemp()}', rank=0, world_size=1);"
        "f = torch.compile(lambda x, w: overlap_gemm.gemm_all_reduce(x, w), backend='eager', fullgraph=True);"
        "x, w = torch.randn(4, 8), torch.randn(6, 8);"
        "torch.testing.assert_close(f(x, w), x @ w.t());"
        "dist.destroy_process_group()"
    )
    assert loaded(code, {"overlap_gemm.dispatch.ops"}) == ["overlap_gemm.dispatch.ops"]


def test_examples_of_kernels_need_only_the_pipelines_and_the_emulator():
    for file in (Path(__file__).parents[2] / "examples").glob("*.py"):
        imports = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom)]
        if file.name == "same_bits.py":  # of models
            continue
        ours = {node.module for node in imports if node.module.startswith(("overlap_gemm", "cute_emulator"))}
        assert ours == {"overlap_gemm.pipelines", "cute_emulator"}, file.name


def test_pipelines_are_documented():
    for name in set(pipelines.__all__) - {"RECORD_WORDS"}:
        assert len(inspect.getdoc(getattr(pipelines, name))) > 40, name
