"""Which kernel configuration a call gets: the candidates of an architecture, and the choice among them.

The choice must be the same on every rank, since a slot's layout follows from it; so it looks only at facts
that all ranks share (never at K, which may differ between ranks).

Estimate: the tiles of all shards are dealt to the SMs in waves, and a wave takes as long as its tile has
elements, divided by how well a tile of that shape feeds the tensor cores (`EFFICIENCY`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from ..kernels.config import CLUSTERS, MMA_KINDS, TILES, GemmConfig, MmaKind
from ..kernels.geometry import ReduceScatterShape

EFFICIENCY: dict[tuple[MmaKind, tuple[int, int], tuple[int, int]], float] = {
    ("1cta", (128, 64), (1, 1)): 0.55,
    ("1cta", (128, 128), (1, 1)): 0.75,
    ("1cta", (128, 256), (1, 1)): 0.90,
    ("2cta", (256, 128), (2, 1)): 0.90,
    ("2cta", (256, 256), (2, 1)): 1.00,
    ("pingpong", (64, 128), (1, 1)): 0.47,
    ("pingpong", (64, 256), (1, 1)): 0.60,
    ("pingpong", (64, 256), (2, 1)): 0.96,
    ("pingpong", (128, 128), (1, 1)): 0.71,
    ("pingpong", (128, 128), (2, 1)): 0.97,
    ("pingpong", (128, 128), (1, 2)): 0.96,
    ("cooperative", (128, 128), (1, 1)): 0.71,
    ("cooperative", (128, 128), (2, 1)): 0.96,
    ("cooperative", (128, 256), (1, 1)): 0.95,
    ("cooperative", (128, 256), (2, 1)): 1.00,
    ("cooperative", (128, 256), (1, 2)): 1.00,
}
"""(MMA kind, tile, cluster) -> share of the best kernel's rate on a large product.

sm_90: measured on one H200 at 8192^3 (docs/notes/2026-11-20-h200.md). sm_100: expected from published
surveys; no such device has been measured.
"""

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
    """The configurations of an architecture among which a call's is chosen: those of `EFFICIENCY`.

    Args:
        arch: target, e.g. ``"sm_90a"``.
        dtype: of A, B, slots and output: ``"bf16"`` or ``"f16"``.
    """
    return [
        _config(arch, mma, tile, cluster, dtype)
        for mma, tile, cluster in EFFICIENCY
        if mma in MMA_KINDS[arch]
    ]


def every_config(arch: str) -> list[GemmConfig]:
    """Every combination of MMA kind, tile and cluster of an architecture, in bf16."""
    return [
        _config(arch, mma, tile, cluster, "bf16")
        for mma in MMA_KINDS[arch]
        for tile in TILES[mma]
        for cluster in CLUSTERS[mma]
    ]


def _config(
    arch: str, mma: MmaKind, tile: tuple[int, int], cluster: tuple[int, int], dtype: str
) -> GemmConfig:
    return GemmConfig(
        arch=arch,  # type: ignore[arg-type]
        mma=mma,
        tile=tile,
        cluster=cluster,
        in_dtype=dtype,  # type: ignore[arg-type]
        out_dtype=dtype,  # type: ignore[arg-type]
        slot_dtype=dtype,  # type: ignore[arg-type]
    )


def default_config(
    arch: str, dtype: str, shape: ReduceScatterShape, num_sms: int, **operands: Any
) -> GemmConfig:
    """The configuration with the smallest estimate, then with the fields of `configured`.

    Args:
        arch: target.
        dtype: ``"bf16"`` or ``"f16"``.
        shape: of the call; the same on all ranks.
        num_sms: SMs of the device (or of this rank's share of it).
        **operands: fields that the call's tensors decide: majors, bias.

    Raises:
        ValueError: the overridden fields make a configuration no kernel exists for.
    """
    return _choose(arch, dtype, shape, num_sms, tuple({**operands, **_overrides.get()}.items()))


@lru_cache(maxsize=1024)  # a call of the op must not spend longer choosing its kernel than running it
def _choose(
    arch: str, dtype: str, shape: ReduceScatterShape, num_sms: int, fields: tuple[tuple[str, Any], ...]
) -> GemmConfig:
    wanted = [(name, value) for name, value in fields if name in ("mma", "tile", "cluster")]
    every = candidates(arch, dtype)
    fitting = [c for c in every if all(getattr(c, name) == value for name, value in wanted)]
    best = min(fitting or every, key=lambda config: estimate(config, shape, num_sms))
    return replace(best, **dict(fields))


def estimate(config: GemmConfig, shape: ReduceScatterShape, num_sms: int) -> float:
    """Relative time of the mainloops: waves x elements of a CTA tile / efficiency."""
    clusters = max(1, num_sms // config.cluster_size)
    waves = -(-shape.num_clusters(config) // clusters)
    rows, columns = config.cta_tile
    return waves * rows * columns / EFFICIENCY[config.mma, config.tile, config.cluster]
