"""Ops that tests try, by what they have."""

from overlap_gemm.spec import OPS, patterns_of
from overlap_gemm.testing import cases as _  # noqa: F401 (registers the ops that come in so)

EVERY = dict(OPS)
"""All ops that the library registers itself."""

SHARDED = {name: op for name, op in EVERY.items() if op.weight is not None}
"""Ops of which each rank has a part of the weight."""

FUSED = {name: op for name, op in EVERY.items() if patterns_of(name)}
"""Ops that have a fused kernel."""

SCALED = {name: op for name, op in EVERY.items() if not op.reshards_k}
"""Ops that take operands with scales."""
