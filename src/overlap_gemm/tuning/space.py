"""Which kernel configuration a call gets: the candidates of an architecture, and the choice among them.

The choice must be the same on every rank, since a slot's layout follows from it; so it is the model's
(`tuning.time_model`), which looks only at facts that all ranks share.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

from ..config.arch import MmaKind, arch_of
from ..config.gemm_config import DTYPE_BYTES, GemmConfig
from ..config.rules import K_SPLITS, may_split
from ..config.scale_blocks import Blocks
from ..exchange.geometry import ExchangeShape
from ..spec import patterns_of
from .machine import Machine, machine_for
from .measured import Kernel
from .settings import settings
from .time_model import Facts, FusedTime, efficiency_key, fused_all_gather, fused_time

SHAPE = ("mma", "tile", "cluster", "k_split")
"""The fields of a configuration among which a choice is made."""

MODEL_ERROR = 0.25
"""Relative error of a predicted time at most, on a device whose constants were measured: kernels whose times
differ by more are not measured."""

MOST_KERNELS = 5
"""Kernels to be measured in addition to the model's choice."""


def candidates(
    arch: str, dtype: str, machine: Machine | None = None, blocks: Blocks | None = None
) -> list[GemmConfig]:
    """The configurations of an architecture among which a call's is chosen: those with a known efficiency.

    Args:
        arch: target, e.g. ``"sm_90a"``.
        dtype: of A and B, and unless that is an 8-bit type of slots and output.
        machine: whose efficiencies; the default is `machine_for`'s.
        blocks: of 8-bit types, which the scales are of; None: of rows.
    """
    machine = machine or constants(arch)
    timed = None if machine.why_as_rows(blocks) else blocks
    known = machine.efficiencies(timed)
    every = every_config(arch, dtype, blocks=blocks)
    return [config for config in every if _key(config, timed) in known]


def _key(config: GemmConfig, blocks: Blocks | None) -> str:
    return efficiency_key(config if config.blocks == blocks else replace(config, blocks=blocks))


@lru_cache
def every_config(arch: str, dtype: str = "bf16", **fields: Any) -> tuple[GemmConfig, ...]:
    """Every combination of MMA kind, tile, cluster and cut of K of an architecture.

    Args:
        arch: target, e.g. ``"sm_90a"``.
        dtype: of A and B.
        **fields: other fields; what no kernel has with these is left out.
    """
    return tuple(
        config if split == 1 else replace(config, k_split=split)
        for mma, kind in arch_of(arch).mma.items()
        for tile in kind.tiles
        for cluster in kind.clusters
        if (config := _config(arch, mma, tile, cluster, dtype, **fields)) is not None
        for split in (K_SPLITS if may_split(mma, tile) else (1,))
    )


def _config(
    arch: str, mma: MmaKind, tile: tuple[int, int], cluster: tuple[int, int], dtype: str, **fields: Any
) -> GemmConfig | None:
    """None where sums of 8-bit products have no room to be promoted, or are not scaled so."""
    given: dict[str, Any] = {"arch": arch, "mma": mma, "tile": tile, "cluster": cluster, "in_dtype": dtype}
    given |= fields
    if DTYPE_BYTES[dtype] > 1:
        return GemmConfig(**given, out_dtype=dtype, slot_dtype=dtype)  # type: ignore[arg-type]
    try:
        config = GemmConfig(**given)
    except ValueError:
        return None
    if config.sum_parts > 1 and config.blocks is not None:
        # Room that no further A/B stage has: the ring takes a whole tile, which no mainloop waits for then.
        return replace(config, ring_stages=config.subtiles)
    return config


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
        **operands: fields that the call's tensors decide: majors, bias, blocks.

    Raises:
        ValueError: the overridden fields make a configuration no kernel exists for.
    """
    facts, machine = facts_of(shape, dtype, depth, operands.get("blocks")), constants(arch)
    return choose_config(facts, machine, arch, num_sms, shape.pattern, **operands)


def executed_as(facts: Facts, machine: Machine, arch: str, num_sms: int) -> Facts:
    """The op whose kernel carries out that of `facts`: itself, but for some reduce-scatters of few rows.

    There each owner's rows, however few, are tiles of their own, so that a rank reads its weight once for
    every owner. An all-reduce has all rows in one tile, and a rank keeps those that it owns of the same sums.
    (16 rows, 8192 columns and K = 28672 on four H200: 74.2 us, and 35.9 by the all-reduce.) Not where
    `configured` names a kernel, an algorithm or a transport; when a kernel begins (`launch`) names none.
    """
    # "copy_engine" is an all-gather GEMM's, and may be some ranks' alone.
    named = settings().names_kernels
    if facts.spec.whole is None or facts.world == 1 or facts.m > machine.whole_rows or named:
        return facts
    whole = replace(facts, op=facts.spec.whole, shard=0)
    by_all, by_owners = (expected(way, machine, arch, num_sms)[1].total for way in (whole, facts))
    return whole if by_all <= machine.whole_gain * by_owners else facts


def expected(
    facts: Facts, machine: Machine, arch: str, num_sms: int, pattern: str | None = None
) -> tuple[GemmConfig, FusedTime]:
    """The kernel that the op of `facts` gets, and where its time goes.

    Args:
        facts: of the call; its op is taken for the kernel's, whatever `executed_as` says of it.
        machine: whose constants.
        arch: target.
        num_sms: SMs that every rank may use.
        pattern: how it exchanges tiles; the default is `pattern_of`'s.
    """
    pattern = pattern or pattern_of(facts, machine, arch, num_sms)
    config = choose_config(facts, machine, arch, num_sms, pattern)
    return config, seconds_of(config, facts, machine, num_sms, pattern)


def with_pattern(
    arch: str,
    dtype: str,
    shape: ExchangeShape,
    num_sms: int,
    depth: int | None,
    blocks: Blocks | None = None,
) -> ExchangeShape:
    """The shape with the pattern that it will have: a reduce-scatter may be an all-reduce (`executed_as`).

    An all-reduce is one-shot or two-shot: as `configured` asks, else what the model expects to be faster: one
    trip with (P - 1) times the bytes, or two trips with 2 (P - 1) / P times. At H200's rates the turn is
    after 128 rows of 8192 columns on four ranks, before that on eight. (Measured on four with 256 rows and
    K = 28672: 93 us in one shot, 93 to 98 in two.)

    Args:
        arch: target.
        dtype: ``"bf16"`` or ``"f16"``.
        shape: of the call.
        num_sms: SMs that every rank may use.
        depth: K over all ranks, where they have agreed on it.
        blocks: which the scales of 8-bit operands are of; None: of rows.
    """
    machine = constants(arch)
    facts = executed_as(facts_of(shape, dtype, depth, blocks), machine, arch, num_sms)
    if len(patterns_of(facts.op)) == 1 and facts.op == shape.spec.op:
        return shape
    pattern = pattern_of(facts, machine, arch, num_sms)
    return ExchangeShape.even(shape.rows, shape.cols, shape.world, pattern, blocks)


def pattern_of(facts: Facts, machine: Machine, arch: str, num_sms: int) -> str:
    """How the op of `facts` exchanges tiles, or its operand's shards; see `with_pattern`."""
    ways = patterns_of(facts.op)
    asked = settings().algorithm
    if asked in ways:
        return asked
    if len(ways) == 1:
        return ways[0]
    return min(ways, key=lambda pattern: expected(facts, machine, arch, num_sms, pattern)[1].total)


def facts_of(shape: ExchangeShape, dtype: str, depth: int | None, blocks: Blocks | None = None) -> Facts:
    """What the model needs to know of a call."""
    op = shape.spec.spec
    rows = shape.rows * (shape.world if op.x == "m" else 1)
    return Facts(op.name, rows, shape.cols, depth, dtype, shape.world, shape.shard, blocks)


def choose_config(
    facts: Facts,
    machine: Machine,
    arch: str,
    num_sms: int,
    pattern: str | None = None,
    **operands: Any,
) -> GemmConfig:
    """`default_config` with the constants of `machine`."""
    pattern = pattern or patterns_of(facts.op)[0]
    asked = settings()
    config = _choose(facts, machine, arch, num_sms, pattern, (*operands.items(), *asked.fields))
    is_late = config.loads_weights_early and not asked.early_weights
    return replace(config, launch="dependent") if is_late else config


@lru_cache(maxsize=1024)  # a call of the op must not spend longer choosing its kernel than running it
def _choose(
    facts: Facts,
    machine: Machine,
    arch: str,
    num_sms: int,
    pattern: str,
    fields: tuple[tuple[str, Any], ...],
) -> GemmConfig:
    best = min(
        _eligible(facts, machine, arch, num_sms, fields),
        key=lambda config: seconds_of(config, facts, machine, num_sms, pattern).total,
    )
    chosen = replace(best, **dict(fields))
    # What is gathered is the output, whatever partial sums travel as.
    return replace(chosen, slot_dtype=chosen.out_dtype) if facts.spec.gathers_output else chosen


def _eligible(
    facts: Facts,
    machine: Machine,
    arch: str,
    num_sms: int,
    fields: tuple[tuple[str, Any], ...],
    is_measured: bool = False,
) -> list[GemmConfig]:
    """Returns the configurations that a call of `facts` may get with these fields.

    No table has swapped kernels of all-gather GEMMs: only a measurement chooses them.
    """
    fitting = _resident(_fitting(arch, facts.dtype, machine, fields, facts.blocks), num_sms)
    if facts.m > machine.few_rows or (facts.spec.gathers_operand and not is_measured):
        fitting = [c for c in fitting if c.mma != "swap_ab"] or fitting
    return fitting


def proposals(facts: Facts, machine: Machine, arch: str, num_sms: int) -> list[tuple[Kernel, float]]:
    """Returns the kernels among which a measurement decides, and their predicted seconds.

    The model's choice comes first, then up to `MOST_KERNELS` others by growing time, as far as the model does
    not tell them from it: its times are right within `MODEL_ERROR`.

    Args:
        facts: Of the call.
        machine: Whose constants.
        arch: Target.
        num_sms: SMs that every rank may use.
    """
    own = executed_as(facts, machine, arch, num_sms)
    default = pattern_of(own, machine, arch, num_sms)
    config, time = expected(own, machine, arch, num_sms, default)
    patterns = patterns_of(facts.op)
    others: dict[Kernel, float] = {}
    for pattern in patterns:
        for other in _eligible(facts, machine, arch, num_sms, (), is_measured=True):
            if own.op == facts.op and pattern == default and same_kernel(other, config):
                continue
            fields = tuple((name, getattr(other, name)) for name in SHAPE)
            kernel = Kernel(fields, pattern if len(patterns) > 1 else None)
            others[kernel] = seconds_of(other, facts, machine, num_sms, pattern).total
    near = [(k, s) for k, s in others.items() if s <= (1 + MODEL_ERROR) * time.total]
    return [(Kernel(), time.total), *sorted(near, key=lambda found: found[1])[:MOST_KERNELS]]


def same_kernel(one: GemmConfig, other: GemmConfig) -> bool:
    """Whether two configurations have the same MMA kind, tile, cluster and cut of K."""
    return all(getattr(one, name) == getattr(other, name) for name in SHAPE)


def seconds_of(config: GemmConfig, facts: Facts, machine: Machine, num_sms: int, pattern: str) -> FusedTime:
    """Where the time of the op of `facts` goes by the kernel of `config` and a pattern."""
    if facts.spec.gathers_operand:
        return fused_all_gather(config, facts, machine, num_sms)
    return fused_time(config, facts, machine, num_sms, pattern)


def possible(
    arch: str, dtype: str, fields: tuple[tuple[str, Any], ...], blocks: Blocks | None = None
) -> list[GemmConfig]:
    """Every configuration that a call could get under the fields of `configured`.

    Raises:
        ValueError: no kernel exists for one of them.
    """
    fitting = _fitting(arch, dtype, constants(arch), fields, blocks)
    return [replace(config, **dict(fields)) for config in fitting]


def _fitting(
    arch: str,
    dtype: str,
    machine: Machine,
    fields: tuple[tuple[str, Any], ...],
    blocks: Blocks | None = None,
) -> list[GemmConfig]:
    """The candidates of the shape that is asked for, else any kernels of it; all, where none has it.

    Of all candidates, those that the other fields go with: not every kernel has every type of slots.
    """
    wanted = [(name, value) for name, value in fields if name in SHAPE]
    # No call gets a kernel where there are none with its blocks; the model has a time all the same.
    known = candidates(arch, dtype, machine, blocks) or candidates(arch, dtype, machine)
    for every in (known, every_config(arch, dtype, blocks=blocks)):
        fitting = [c for c in every if all(getattr(c, name) == value for name, value in wanted)]
        if fitting:
            return [c for c in fitting if _goes_with(c, fields)] or fitting
    return known


def _resident(configs: list[GemmConfig], num_sms: int) -> list[GemmConfig]:
    """Those of which two clusters have room at once, since one place may be a relay kernel's.

    Where there is none, those with the smallest clusters.
    """
    room = max(num_sms // 2, min(config.cluster_ctas for config in configs))
    return [config for config in configs if config.cluster_ctas <= room]


def _goes_with(config: GemmConfig, fields: tuple[tuple[str, Any], ...]) -> bool:
    try:
        replace(config, **dict(fields))
    except ValueError:
        return False
    return True


def constants(arch: str) -> Machine:
    """Those of `machine_for`; every architecture that kernels exist for has some."""
    machine = machine_for(arch)
    assert machine is not None, f"a kernel's architecture {arch} has constants"
    return machine
