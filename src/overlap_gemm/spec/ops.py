"""Registry of the ops."""

from .op import OpSpec

ALL_GATHER_GEMM = OpSpec(
    "all_gather_gemm", 2, "AG-GEMM", x="m", weight="n", out="n", dual="gemm_reduce_scatter"
)
GEMM_REDUCE_SCATTER = OpSpec(
    "gemm_reduce_scatter", 1, "GEMM-RS", x="k", weight="k", out="m",
    dual="all_gather_gemm", unsharded="gemm_all_reduce",
)  # fmt: skip
GEMM_ALL_REDUCE = OpSpec("gemm_all_reduce", 3, "GEMM-AR", x="k", weight="k", out=None)
GEMM_ALL_GATHER = OpSpec("gemm_all_gather", 4, "GEMM-AG", x=None, weight="n", out=None)

COLUMN_PARALLEL_GEMM = OpSpec("column_parallel_gemm", 0, "GEMM", x=None, weight="n", out="n")
"""A rank's product without communication; its gradient communicates. It is not in `OPS`."""

GEMM_ALL_TO_ALL = OpSpec(
    "gemm_all_to_all", 5, "GEMM-A2A", x="m", weight=None, out="n", dual="all_to_all_gemm"
)
ALL_TO_ALL_GEMM = OpSpec(
    "all_to_all_gemm", 6, "A2A-GEMM", x="k", weight=None, out="m", dual="gemm_all_to_all"
)
"""Both all-to-all ops are registered by `api.all_to_all`."""

OPS = {op.name: op for op in (ALL_GATHER_GEMM, GEMM_REDUCE_SCATTER, GEMM_ALL_REDUCE, GEMM_ALL_GATHER)}
"""Ops by name, in the order of lists and tables; registered ones are last. The first two are each other's
dual. In `gemm_all_gather` x is not sharded; it sends columns of the product."""


def add_op(spec: OpSpec) -> None:
    """Adds an op to `OPS`.

    Raises:
        ValueError: The name or code is that of another op, or the code is 0. The weight is sharded. The op
            does not send exactly one of x and the product. Its dual is registered, and has other axes than
            `OpSpec.dual_axes`. A dual may be registered later.
    """
    if any(spec.name == other.name or spec.code == other.code for other in OPS.values()) or not spec.code:
        known = ", ".join(f"{op.name} ({op.code})" for op in OPS.values())
        raise ValueError(
            f"op {spec.name} ({spec.code}) needs a name, and a number of 1 or more, of its own; there are "
            f"{known}"
        )
    if spec.weight is not None or len(spec.sent) != 1:
        sent = " and ".join(move.kind for move in spec.sent) or "nothing"
        raise ValueError(
            f"op {spec.name} must have weight=None (every rank has all of it), and send x or its result by "
            f"one collective; with x={spec.x!r}, weight={spec.weight!r}, out={spec.out!r} it does: {sent}"
        )
    dual = OPS.get(spec.dual or "")
    if dual is not None and (dual.x, dual.weight, dual.out) != spec.dual_axes:
        raise ValueError(
            f"the dual of {spec.name} has (x, weight, out) = {spec.dual_axes}, and {dual.name} has "
            f"{(dual.x, dual.weight, dual.out)}"
        )
    OPS[spec.name] = spec


def op_coded(code: int) -> str:
    """Returns the name of the op in `OPS` with this code, or "a kernel": users' kernels may have any code."""
    return next((op.name for op in OPS.values() if op.code == code), "a kernel")


def op_named(name: object) -> OpSpec:
    """Returns the op with this name.

    Raises:
        ValueError: No op has this name, or it is not a string.
    """
    spec = OPS.get(name) if isinstance(name, str) else None
    if spec is None:
        raise ValueError(f"op must be one of {', '.join(OPS)}, got {name!r}")
    return spec
