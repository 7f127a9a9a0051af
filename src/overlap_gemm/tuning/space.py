"""Which kernel configuration a call gets: the candidates of an architecture, and the choice among them.

The choice must be the same on every rank, since a slot's layout follows from it; so it looks only at facts
that all ranks share (never at K, which may differ between ranks).

Estimate: the tiles of all shards are dealt to the SMs in waves, and a wave takes as long as its tile has
elements, divided by how well a tile of that shape feeds the tensor cores (`EFFICIENCY`). The efficiencies are
expectations from published GEMM surveys, not measurements of this kernel; a measured table replaces them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from ..kernels.config import CLUSTERS, MMA_KINDS, TILES, GemmConfig
from ..kernels.geometry import ReduceScatterShape

EFFICIENCY: dict[tuple[str, tuple[int, int]], float] = {
    ("1cta", (128, 64)): 0.55,
    ("1cta", (128, 128)): 0.75,
    ("1cta", (128, 256)): 0.90,
    ("2cta", (256, 128)): 0.90,
    ("2cta", (256, 256)): 1.00,
    ("pingpong", (64, 128)): 0.70,
    ("pingpong", (64, 256)): 0.80,
    ("pingpong", (128, 128)): 0.92,
    ("cooperative", (128, 128)): 0.85,
    ("cooperative", (128, 256)): 1.00,
}
"""Share of the best tile's rate that a tile shape reaches; expected, see the module's docstring."""

_overrides: ContextVar[Mapping[str, Any]] = ContextVar("overrides", default=MappingProxyType({}))


@contextmanager
def configured(**fields: Any) -> Iterator[None]:
    """Within the block, the fused backend's configurations have these fields of `GemmConfig`.

    Every rank must use the same ones. Combinations no kernel exists for raise ValueError at the call.
    """
    token = _overrides.set({**_overrides.get(), **fields})
    try:
        yield
    finally:
        _overrides.reset(token)


def candidates(arch: str, dtype: str) -> list[GemmConfig]:
    """One configuration per (MMA kind, tile) of an architecture, with the smallest cluster it needs.

    Args:
        arch: target, e.g. ``"sm_90a"``.
        dtype: of A, B, slots and output: ``"bf16"`` or ``"f16"``.
    """
    return [
        GemmConfig(
            arch=arch,  # type: ignore[arg-type]
            mma=mma,
            tile=tile,
            cluster=CLUSTERS[mma][0],
            in_dtype=dtype,  # type: ignore[arg-type]
            out_dtype=dtype,  # type: ignore[arg-type]
            slot_dtype=dtype,  # type: ignore[arg-type]
        )
        for mma in MMA_KINDS[arch]
        for tile in TILES[mma]
    ]


def every_config(arch: str) -> list[GemmConfig]:
    """Every combination of MMA kind, tile and cluster of an architecture, in bf16."""
    return [
        replace(config, cluster=cluster)
        for config in candidates(arch, "bf16")
        for cluster in CLUSTERS[config.mma]
    ]


def default_config(arch: str, dtype: str, shape: ReduceScatterShape, num_sms: int) -> GemmConfig:
    """The configuration with the smallest estimate, then with the fields of `configured`.

    Args:
        arch: target.
        dtype: ``"bf16"`` or ``"f16"``.
        shape: of the call; the same on all ranks.
        num_sms: SMs of the device (or of this rank's share of it).

    Raises:
        ValueError: the overridden fields make a configuration no kernel exists for.
    """
    fields = _overrides.get()
    wanted = [(name, fields[name]) for name in ("mma", "tile") if name in fields]
    every = candidates(arch, dtype)
    fitting = [c for c in every if all(getattr(c, name) == value for name, value in wanted)]
    best = min(fitting or every, key=lambda config: estimate(config, shape, num_sms))
    return replace(best, **fields)


def estimate(config: GemmConfig, shape: ReduceScatterShape, num_sms: int) -> float:
    """Relative time of the mainloops: waves x elements of a CTA tile / efficiency."""
    clusters = max(1, num_sms // config.cluster_size)
    waves = -(-shape.num_clusters(config) // clusters)
    rows, columns = config.cta_tile
    return waves * rows * columns / EFFICIENCY[config.mma, config.tile]
