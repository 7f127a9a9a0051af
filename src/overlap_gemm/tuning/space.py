"""Which kernel configuration a call gets: the candidates of an architecture, and the choice among them.

The choice must be the same on every rank, since a slot's layout follows from it; so it is the model's
(`tuning.model`), which looks only at facts that all ranks share.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

from ..kernels.config import CLUSTERS, MMA_KINDS, TILES, GemmConfig, MmaKind
from ..kernels.geometry import ExchangeShape, Pattern
from .machine import Machine, machine_for
from .model import Facts, efficiency_key, fused_reduce_scatter
from .settings import settings

OPS: dict[Pattern, str] = {
    "reduce_scatter": "gemm_reduce_scatter",
    "one_shot": "gemm_all_reduce",
    "two_shot": "gemm_all_reduce",
    "output_gather": "gemm_all_gather",
}
"""Which op exchanges tiles so."""


def candidates(arch: str, dtype: str, machine: Machine | None = None) -> list[GemmConfig]:
    """The configurations of an architecture among which a call's is chosen: those with a known efficiency.

    Args:
        arch: target, e.g. ``"sm_90a"``.
        dtype: of A, B, slots and output: ``"bf16"`` or ``"f16"``.
        machine: whose efficiencies; the default is `machine_for`'s.
    """
    known = (machine or constants(arch)).efficiency
    return [config for config in every_config(arch, dtype) if efficiency_key(config) in known]


def every_config(arch: str, dtype: str = "bf16") -> list[GemmConfig]:
    """Every combination of MMA kind, tile and cluster of an architecture."""
    return [
        _config(arch, mma, tile, cluster, dtype)
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
    arch: str,
    dtype: str,
    shape: ExchangeShape,
    num_sms: int,
    depth: int | None = None,
    /,
    **operands: Any,
) -> GemmConfig:
    """The configuration that the model expects to be fastest, then with the fields of `configured`.

    Args:
        arch: target.
        dtype: ``"bf16"`` or ``"f16"``.
        shape: of the call; the same on all ranks.
        num_sms: SMs that every rank may use.
        depth: K over all ranks, where they have agreed on it.
        **operands: fields that the call's tensors decide: majors, bias.

    Raises:
        ValueError: the overridden fields make a configuration no kernel exists for.
    """
    facts = Facts(OPS[shape.pattern], shape.rows, shape.cols, depth, dtype, shape.world, shape.shard)
    return choose_config(facts, constants(arch), arch, num_sms, **operands)


def choose_config(facts: Facts, machine: Machine, arch: str, num_sms: int, **operands: Any) -> GemmConfig:
    """`default_config` with the constants of `machine`."""
    return _choose(facts, machine, arch, num_sms, (*operands.items(), *settings().fields))


@lru_cache(maxsize=1024)  # a call of the op must not spend longer choosing its kernel than running it
def _choose(
    facts: Facts, machine: Machine, arch: str, num_sms: int, fields: tuple[tuple[str, Any], ...]
) -> GemmConfig:
    fitting = _fitting(candidates(arch, facts.dtype, machine), fields)
    best = min(fitting, key=lambda config: fused_reduce_scatter(config, facts, machine, num_sms).total)
    return replace(best, **dict(fields))


def possible(arch: str, dtype: str, fields: tuple[tuple[str, Any], ...]) -> list[GemmConfig]:
    """Every configuration that a call could get under the fields of `configured`.

    Raises:
        ValueError: no kernel exists for one of them.
    """
    return [replace(config, **dict(fields)) for config in _fitting(candidates(arch, dtype), fields)]


def _fitting(every: list[GemmConfig], fields: tuple[tuple[str, Any], ...]) -> list[GemmConfig]:
    """Those that have the shape that is asked for; all, where none has it."""
    wanted = [(name, value) for name, value in fields if name in ("mma", "tile", "cluster")]
    return [c for c in every if all(getattr(c, name) == value for name, value in wanted)] or every


def constants(arch: str) -> Machine:
    """Those of `machine_for`; every architecture that kernels exist for has some."""
    machine = machine_for(arch)
    assert machine is not None, f"a kernel's architecture {arch} has constants"
    return machine
