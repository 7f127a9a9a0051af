"""The registry of ops."""

from .op import OpSpec

ALL_GATHER_GEMM = OpSpec(
    "all_gather_gemm", 2, "AG-GEMM", x="m", weight="n", out="n", dual="gemm_reduce_scatter"
)
GEMM_REDUCE_SCATTER = OpSpec(
    "gemm_reduce_scatter", 1, "GEMM-RS", x="k", weight="k", out="m",
    dual="all_gather_gemm", whole="gemm_all_reduce",
)  # fmt: skip
GEMM_ALL_REDUCE = OpSpec("gemm_all_reduce", 3, "GEMM-AR", x="k", weight="k", out=None)
GEMM_ALL_GATHER = OpSpec("gemm_all_gather", 4, "GEMM-AG", x=None, weight="n", out=None)

COLUMN_PARALLEL_GEMM = OpSpec("column_parallel_gemm", 0, "GEMM", x=None, weight="n", out="n")
"""A rank's own product, whose gradient alone is communicated: not one of `OPS`."""

OPS = {op.name: op for op in (ALL_GATHER_GEMM, GEMM_REDUCE_SCATTER, GEMM_ALL_REDUCE, GEMM_ALL_GATHER)}
"""By name, in the order in which they are listed."""


def op_coded(code: int) -> str:
    """The name of the op with this number in failure records."""
    return next((op.name for op in OPS.values() if op.code == code), "a kernel")


def op_named(name: object) -> OpSpec:
    """The op of a name.

    Raises:
        ValueError: There is none.
    """
    spec = OPS.get(name) if isinstance(name, str) else None
    if spec is None:
        raise ValueError(f"op must be one of {', '.join(OPS)}, got {name!r}")
    return spec
