"""Choice of the kernel configuration of a call: candidates of an architecture, and the choice among them.

The choice must be the same on every rank, because the layout of slots depends on it. So the model makes it
(`tuning.time_model`), which uses only facts that all ranks share.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

from ..config.arch import MmaKind, arch_of
from ..config.gemm_config import DTYPE_BYTES, GemmConfig
from ..config.orders import joins_shards
from ..config.rules import K_SPLITS, may_split
from ..config.scale_blocks import OperandTypes
from ..exchange.geometry import ExchangeShape
from ..spec import patterns_of
from .machine import Machine, machine_for
from .measured import Kernel
from .settings import settings
from .time_model import (
    Facts,
    FusedTime,
    efficiency_key,
    fused_all_gather,
    fused_input_exchange,
    fused_time,
)

SHAPE = ("mma", "tile", "cluster", "k_split")
"""Fields of a configuration among which a choice is made."""

MODEL_ERROR = 0.25
"""Maximum relative error of a predicted time on a device with measured constants.

Kernels whose predicted times differ by more are not measured.
"""

MOST_KERNELS = 5
"""Maximum number of kernels to be measured in addition to the model's choice."""


def candidates(arch: str, types: OperandTypes, machine: Machine | None = None) -> list[GemmConfig]:
    """Returns the configurations of an architecture with a known efficiency, among which a call's is chosen.

    Args:
        arch: Target architecture, for example ``"sm_90a"``.
        types: Types of A and B; slots and output have the same dtype unless it is an 8-bit one.
        machine: Constants with the efficiencies; default `machine_for`'s.
    """
    machine = machine or constants(arch)
    timed = None if machine.missing_block_timings(types.blocks) else types.blocks
    known = machine.efficiencies(timed)

    def is_known(config: GemmConfig) -> bool:
        return efficiency_key(config if config.blocks == timed else replace(config, blocks=timed)) in known

    return list(filter(is_known, every_config(arch, types.dtype, blocks=types.blocks)))


@lru_cache
def every_config(arch: str, dtype: str = "bf16", **fields: Any) -> tuple[GemmConfig, ...]:
    """Returns every combination of MMA kind, tile, cluster and split of K of an architecture.

    Args:
        arch: Target architecture, for example ``"sm_90a"``.
        dtype: Type of A and B.
        **fields: Other fields; combinations without a kernel are omitted.
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
    """Returns a configuration; None if promoted 8-bit sums do not fit, or are not scaled as requested."""
    arguments: dict[str, Any] = {
        "arch": arch,
        "mma": mma,
        "tile": tile,
        "cluster": cluster,
        "in_dtype": dtype,
    }
    arguments |= fields
    if DTYPE_BYTES[dtype] > 1:
        return GemmConfig(**({"out_dtype": dtype, "slot_dtype": dtype} | arguments))
    try:
        config = GemmConfig(**arguments)
    except ValueError:
        return None
    if config.sum_parts > 1 and config.blocks is not None:
        # The free space is too small for another A/B stage: the ring gets a full tile, so no mainloop waits.
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
    """Returns the configuration that the model expects to be fastest, with the fields of `configured`.

    Args:
        arch: Target architecture.
        dtype: Type of A and B, as `GemmConfig.in_dtype`.
        shape: Shape of the exchange, the same on all ranks.
        num_sms: Number of SMs that every rank may use.
        depth: K over all ranks, if they have agreed on it.
        **operands: Fields that the call's tensors determine: majors, bias, blocks.

    Raises:
        ValueError: No kernel exists for the configured fields.
    """
    facts, machine = facts_of(shape, OperandTypes(dtype, operands.get("blocks")), depth), constants(arch)
    return choose_config(facts, machine, arch, num_sms, shape.pattern, **operands)


def lower_small_rs_to_ar(facts: Facts, machine: Machine, arch: str, num_sms: int) -> Facts:
    """Returns the facts of the op whose kernel runs: an all-reduce for some small reduce-scatters.

    In a reduce-scatter each owner's rows, however few, are separate tiles, so a rank reads its weight once
    for every owner. An all-reduce has all rows in one tile, and a rank keeps its local rows of the same sums.
    (16 rows, 8192 columns and K = 28672 on four H200: 74.2 us, and 35.9 us by the all-reduce.) The op is
    unchanged if `configured` restricts the choice of kernels: by a field (but not `launch`), an algorithm, or
    a transport of tiles.
    """
    named = settings().names_kernels(facts.spec)
    if facts.spec.unsharded is None or facts.world == 1 or facts.m > machine.ar_rows or named:
        return facts
    as_all_reduce = replace(facts, op=facts.spec.unsharded, shard=0)
    by_all, by_owners = (expected(each, machine, arch, num_sms)[1].total for each in (as_all_reduce, facts))
    return as_all_reduce if by_all <= machine.ar_gain * by_owners else facts


def expected(
    facts: Facts, machine: Machine, arch: str, num_sms: int, pattern: str | None = None
) -> tuple[GemmConfig, FusedTime]:
    """Returns the configuration of the kernel for the op of `facts`, and the parts of its time.

    Args:
        facts: Facts of the call; the kernel of its op is used, without `lower_small_rs_to_ar`.
        machine: Constants.
        arch: Target architecture.
        num_sms: Number of SMs that every rank may use.
        pattern: Pattern of the exchange; default `pattern_of`'s.
    """
    pattern = pattern or pattern_of(facts, machine, arch, num_sms)
    config = choose_config(facts, machine, arch, num_sms, pattern)
    return config, seconds_of(config, facts, machine, num_sms, pattern)


def with_pattern(
    arch: str, types: OperandTypes, shape: ExchangeShape, num_sms: int, depth: int | None
) -> ExchangeShape:
    """Returns the shape with its final pattern: a small reduce-scatter may run as an all-reduce.

    See `lower_small_rs_to_ar`. An all-reduce is one-shot or two-shot, as `configured`, otherwise the one that
    the model expects to be faster. One-shot is one trip with (P - 1) times the bytes; two-shot is two trips
    with 2 (P - 1) / P times. With H200's constants two-shot is faster from 128 rows of 8192 columns on four
    ranks, earlier on eight. (Measured on four with 256 rows and K = 28672: 93 us one-shot, 93 to 98 us
    two-shot.)

    Args:
        arch: Target architecture.
        types: Types of A and B.
        shape: Shape of the exchange.
        num_sms: Number of SMs that every rank may use.
        depth: K over all ranks, if they have agreed on it.
    """
    machine = constants(arch)
    facts = lower_small_rs_to_ar(facts_of(shape, types, depth), machine, arch, num_sms)
    if len(patterns_of(facts.op)) == 1 and facts.op == shape.spec.op:
        return shape
    pattern = pattern_of(facts, machine, arch, num_sms)
    return ExchangeShape.even(shape.rows, shape.cols, shape.world, pattern, types.column_unit)


def pattern_of(facts: Facts, machine: Machine, arch: str, num_sms: int) -> str:
    """Returns the pattern by which the op of `facts` exchanges tiles, or its operand's shards."""
    patterns = patterns_of(facts.op)
    algorithm = settings().algorithm
    if algorithm in patterns:
        return algorithm
    if len(patterns) == 1:
        return patterns[0]
    return min(patterns, key=lambda pattern: expected(facts, machine, arch, num_sms, pattern)[1].total)


def facts_of(shape: ExchangeShape, types: OperandTypes, depth: int | None) -> Facts:
    """Returns the model's facts of a call."""
    op = shape.spec.spec
    rows = shape.rows * (shape.world if op.x == "m" else 1)
    extents, (dtype, blocks) = (rows, shape.cols, depth), types
    return Facts(op.name, *extents, dtype, shape.world, shape.shard, blocks, shape.weights)


def choose_config(
    facts: Facts,
    machine: Machine,
    arch: str,
    num_sms: int,
    pattern: str | None = None,
    **operands: Any,
) -> GemmConfig:
    """Returns `default_config` with the constants of `machine`."""
    pattern = pattern or patterns_of(facts.op)[0]
    current = settings()
    config = _choose(facts, machine, arch, num_sms, pattern, (*operands.items(), *current.fields))
    is_late = config.loads_weights_early and not current.early_weights
    return replace(config, launch="dependent") if is_late else config


@lru_cache(maxsize=1024)  # choosing a kernel must not take longer than running it
def _choose(
    facts: Facts,
    machine: Machine,
    arch: str,
    num_sms: int,
    pattern: str,
    fields: tuple[tuple[str, Any], ...],
) -> GemmConfig:
    """Returns the fastest eligible configuration, with the configured fields."""

    def order(config: GemmConfig) -> tuple[float, float]:
        time = seconds_of(config, facts, machine, num_sms, pattern)
        return time.total, time.waves  # kernels that memory limits have equal times

    best = min(_eligible(facts, machine, arch, num_sms, fields), key=order)
    chosen = replace(best, **dict(fields))
    # Slots contain the output, whatever type partial sums have.
    sends_results = facts.spec.gathers_output or facts.spec.weight is None
    return replace(chosen, slot_dtype=chosen.out_dtype) if sends_results else chosen


def _eligible(
    facts: Facts,
    machine: Machine,
    arch: str,
    num_sms: int,
    fields: tuple[tuple[str, Any], ...],
    is_measured: bool = False,
) -> list[GemmConfig]:
    """Returns the configurations that a call of `facts` may get with these fields.

    Of swapped kernels whose x is sent, only those of an all-gather GEMM that join shards, without parts of K,
    were compared with the model: only a measurement chooses others. Kernels that exchange x within a
    tile's K do not split it.
    """
    spec = facts.spec
    fitting = _resident(_fitting(arch, OperandTypes(facts.dtype, facts.blocks), machine, fields), num_sms)
    if spec.operand_is_sent and not spec.gathers_operand:
        fitting = [c for c in fitting if c.k_split == 1] or fitting

    def may_swap(config: GemmConfig) -> bool:
        if not spec.operand_is_sent or is_measured:
            return True
        joins = spec.gathers_operand and joins_shards(config, facts.m, facts.full_shard)
        return joins and config.k_split == 1

    few = facts.m <= machine.few_rows
    return [c for c in fitting if c.mma != "swap_ab" or (few and may_swap(c))] or fitting


def proposals(facts: Facts, machine: Machine, arch: str, num_sms: int) -> list[tuple[Kernel, float]]:
    """Returns the kernels that are measured against each other, with their predicted seconds.

    The model's choice comes first. Up to `MOST_KERNELS` others follow by increasing time, if their times are
    within `MODEL_ERROR` of it.

    Args:
        facts: Facts of the call.
        machine: Constants.
        arch: Target architecture.
        num_sms: Number of SMs that every rank may use.
    """
    lowered = lower_small_rs_to_ar(facts, machine, arch, num_sms)
    default = pattern_of(lowered, machine, arch, num_sms)
    config, time = expected(lowered, machine, arch, num_sms, default)
    patterns = patterns_of(facts.op)
    others: dict[Kernel, float] = {}
    for pattern in patterns:
        for other in _eligible(facts, machine, arch, num_sms, (), is_measured=True):
            if lowered.op == facts.op and pattern == default and same_kernel(other, config):
                continue
            fields = tuple((name, getattr(other, name)) for name in SHAPE)
            kernel = Kernel(fields, pattern if len(patterns) > 1 else None)
            others[kernel] = seconds_of(other, facts, machine, num_sms, pattern).total
    similar = [(k, s) for k, s in others.items() if s <= (1 + MODEL_ERROR) * time.total]
    return [(Kernel(), time.total), *sorted(similar, key=lambda pair: pair[1])[:MOST_KERNELS]]


def same_kernel(one: GemmConfig, other: GemmConfig) -> bool:
    """Returns whether two configurations have the same MMA kind, tile, cluster and split of K."""
    return all(getattr(one, name) == getattr(other, name) for name in SHAPE)


def seconds_of(config: GemmConfig, facts: Facts, machine: Machine, num_sms: int, pattern: str) -> FusedTime:
    """Returns the parts of the time of the op of `facts` by the kernel of `config` and a pattern."""
    if facts.spec.gathers_operand:
        return fused_all_gather(config, facts, machine, num_sms)
    if facts.spec.operand_is_sent:
        return fused_input_exchange(config, facts, machine, num_sms)
    return fused_time(config, facts, machine, num_sms, pattern)


def possible(arch: str, types: OperandTypes, fields: tuple[tuple[str, Any], ...]) -> list[GemmConfig]:
    """Returns every configuration that a call could get with these fields of `configured`.

    Raises:
        ValueError: No kernel exists for one of them.
    """
    fitting = _fitting(arch, types, constants(arch), fields)
    return [replace(config, **dict(fields)) for config in fitting]


def _fitting(
    arch: str, types: OperandTypes, machine: Machine, fields: tuple[tuple[str, Any], ...]
) -> list[GemmConfig]:
    """Returns the candidates with the requested shape fields, or any kernels with them, or all candidates.

    Candidates that are not compatible with the other fields are omitted: not every kernel supports every slot
    type.
    """
    requested = [(name, value) for name, value in fields if name in SHAPE]
    # If there is no kernel with these blocks, no call gets one, but the model still has a time.
    known = candidates(arch, types, machine) or candidates(arch, OperandTypes(types.dtype), machine)
    for every in (known, every_config(arch, types.dtype, blocks=types.blocks)):
        fitting = [c for c in every if all(getattr(c, name) == value for name, value in requested)]
        if fitting:
            return [c for c in fitting if _is_valid_with(c, fields)] or fitting
    return known


def _resident(configs: list[GemmConfig], num_sms: int) -> list[GemmConfig]:
    """Returns the configurations of which two clusters fit on the SMs at once.

    A relay kernel, which puts tiles to peers without P2P access, may take the place of one cluster.

    If there are none, returns those with the smallest clusters.
    """
    room = max(num_sms // 2, min(config.cluster_ctas for config in configs))
    return [config for config in configs if config.cluster_ctas <= room]


def _is_valid_with(config: GemmConfig, fields: tuple[tuple[str, Any], ...]) -> bool:
    """Returns whether the configuration is valid with the configured fields."""
    try:
        replace(config, **dict(fields))
    except ValueError:
        return False
    return True


def constants(arch: str) -> Machine:
    """Returns the constants of `machine_for`, which exist for every architecture with kernels."""
    machine = machine_for(arch)
    assert machine is not None, f"a kernel's architecture {arch} has constants"
    return machine
