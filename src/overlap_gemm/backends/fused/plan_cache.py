"""How plans (`plan`) of ops that exchange tiles are made, and kept with the group.

A configuration (`tuning.space`) and a transport make a kernel (`build`), the compile cache keeps it,
a workspace (`runtime.memory.workspace`) is what it exchanges tiles through, and an executor
(`runtime.executor`) runs it on a CUDA device or in the emulator. Nothing here knows one op from another but
by its `ExchangeShape`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import torch

from ...config.gemm_config import GemmConfig
from ...config.scale_blocks import Blocks
from ...config.visitors import SCALES, Visitor, bias_of
from ...exchange.geometry import ExchangeShape, Puts, tile_layout, tile_puts
from ...runtime.executor import Executor
from ...runtime.group import Group
from ...runtime.identity import call_signature
from ...runtime.memory.workspace import Workspace
from ...runtime.peers import Peers, peers_of
from ...spec import GEMM_ALL_REDUCE, PATTERNS, patterns_of
from ...tuning.settings import settings
from ...tuning.space import constants, default_config, with_pattern
from ..epilogues import counts_of
from ..scales.scaling import FLOAT8
from . import ways
from .compiled import compiled_kernel, compiled_relay
from .launch_plan import Plan, Product, Relayed
from .ways import Way, obtain_way

DTYPES = {torch.bfloat16: "bf16", torch.float16: "f16"}

MOST_PLANS = 4096
"""Plans kept for a group; one is made again in a fraction of a millisecond."""


class Reusable(Protocol):
    """What a group keeps."""

    @property
    def is_open(self) -> bool:
        """Whether it may still be used."""


P = TypeVar("P", bound=Reusable)


def peers_for(group: Group, device: torch.device) -> Peers:
    """This rank's side of a group; the ranks agree at the first call for it, which is collective."""
    return peers_of(group, device, lambda arch: constants(arch).digest)


def plan_for(
    group: Group,
    device: torch.device,
    dtype: torch.dtype,
    shape: ExchangeShape,
    a_major: str,
    b_major: str,
    epilogue: tuple[Visitor, ...] = (),
    depth: int | None = None,
    out_dtype: torch.dtype | None = None,
    blocks: Blocks | None = None,
    weight_dtype: torch.dtype | None = None,
) -> Plan:
    """The plan of a call; made, which compiles and allocates, at the first one of its kind.

    Holds while `Plan.is_open` and the caller's `settings` are the same.

    Args:
        group: the ranks.
        device: where this one's tensors are.
        dtype: of A.
        shape: of the call; an all-reduce gets its pattern here, one-shot or two-shot.
        a_major: see `operands.major`.
        b_major: see `operands.major`.
        epilogue: what complete sums go through.
        depth: K over all ranks, where they have agreed on it.
        out_dtype: of slots, result and bias, where the operands have scales.
        blocks: which these are of, None: of rows.
        weight_dtype: of the weight, where the operands have scales; None: A's.

    Raises:
        DisagreementError, SymmetricMemoryError: on every rank, if one of them cannot.
        CaptureError: something had to be made during CUDA graph capture.
        ValueError: no kernel exists for the caller's settings, or no grid fits on the SMs left to it.
        RuntimeError: puts are needed or asked for, and there are none.
    """
    peers, asked = peers_for(group, device), settings()
    key = (dtype, shape, a_major, b_major, epilogue, depth, out_dtype, blocks, weight_dtype, asked)
    plan: Plan | None = peers.plans.get(key)
    if plan is not None:
        return plan
    agreed, (kind, operands) = peers.agreed, kind_of(dtype, out_dtype, epilogue, blocks, weight_dtype)
    operands |= {"a_major": a_major, "b_major": b_major}
    shape = _with_pattern(peers, kind, shape, depth, blocks, epilogue)
    config = default_config(agreed.arch, kind, shape, agreed.num_sms, depth, **operands)
    reserve = peers.reserve_sms if asked.reserve_sms is None else asked.reserve_sms
    return keep_plan(peers, key, lambda: _make_plan(peers, config, shape, reserve))


def kind_of(
    dtype: torch.dtype,
    out_dtype: torch.dtype | None,
    epilogue: tuple[Visitor, ...] = (),
    blocks: Blocks | None = None,
    weight_dtype: torch.dtype | None = None,
) -> tuple[str, dict[str, Any]]:
    """What kernels call the operands' type, and the fields of a configuration that follow from all types.

    Args:
        dtype: of A.
        out_dtype: of slots, result and bias, where the operands have scales.
        epilogue: what complete sums go through.
        blocks: which the scales are of, None: of rows.
        weight_dtype: of B, where the operands have scales; None: A's.
    """
    if out_dtype is not None and not blocks:
        epilogue = (SCALES, *epilogue)
    if out_dtype is None:
        return DTYPES[dtype], {"epilogue": epilogue}
    kind = DTYPES[out_dtype]
    fields = {"epilogue": epilogue, "out_dtype": kind, "slot_dtype": kind, "blocks": blocks}
    if weight_dtype not in (None, dtype):
        fields["b_dtype"] = FLOAT8[weight_dtype]
    return FLOAT8[dtype], fields


def bias_visitor(has_bias: bool, dtype: torch.dtype) -> tuple[Visitor, ...]:
    """The epilogue of a result of this type, with or without a bias."""
    return (bias_of(DTYPES[dtype]),) if has_bias else ()


def _with_pattern(
    peers: Peers,
    kind: str,
    shape: ExchangeShape,
    depth: int | None,
    blocks: Blocks | None,
    epilogue: tuple[Visitor, ...],
) -> ExchangeShape:
    """The shape with the pattern of the call (`tuning.space.with_pattern`), as the epilogue allows.

    A reduce-scatter with operands for the rows of a rank's result computes no other rows. An all-reduce with
    outputs is one-shot: each rank has all columns of a row's sums.
    """
    operands = [operand for visitor in epilogue for operand in visitor.operands]
    if shape.spec.op == GEMM_ALL_REDUCE.name and any(visitor.writes for visitor in epilogue):
        (pattern,) = (name for name in patterns_of(shape.spec.op) if PATTERNS[name].cut is None)
        return ExchangeShape.even(shape.rows, shape.cols, shape.world, pattern, blocks)
    if shape.spec.op != GEMM_ALL_REDUCE.name and any(o.kind not in ("columns", "scalar") for o in operands):
        return shape
    agreed = peers.agreed
    return with_pattern(agreed.arch, kind, shape, agreed.num_sms, depth, blocks)


def keep_plan(peers: Peers, key: Hashable, make: Callable[[], P]) -> P:
    """The plan that the group has for a key; makes it if there is none."""
    with peers.lock:
        plan: P | None = peers.plans.get(key)
        if plan is None or not plan.is_open:
            if len(peers.plans) >= MOST_PLANS:
                peers.plans.clear()
            plan = peers.plans[key] = make()
        return plan


def _make_plan(peers: Peers, config: GemmConfig, shape: ExchangeShape, reserve: int) -> Plan:
    executor, group = peers.executor, peers.group
    work = shape.num_clusters(config)
    if group.size == 1:
        resident = resident_clusters(executor, config.cluster_ctas, reserve)
        gemm = compiled_kernel(executor, config, None, shape.pattern)
        return Plan(executor, shape.pattern, (Product(config, gemm, min(resident, work)),))
    asked = settings().transport_of(shape.spec.spec)
    workspace, way = obtain_way(peers, ways.wanted(asked, config), lambda way: way.tiles_class(config, shape))
    if config.is_swap_ab and not way.puts and "launch" not in dict(settings().fields):
        config = replace(config, launch="dependent")  # measured: 3 to 4 % of a call of few rows

    def compiled() -> tuple[int, Any, Any]:
        resident = resident_clusters(executor, config.cluster_ctas, reserve, way.relays)
        gemm = compiled_kernel(executor, config, way, shape.pattern)
        return resident, gemm, compiled_relay(executor) if way.relays else None

    # All ranks have this configuration, but for how each one's operands lie, and whether it has columns.
    common = replace(config, a_major="k", b_major="k", epilogue=(), launch="ordered")
    kind = (common, way.device, shape.pattern)
    resident, gemm, relay = peers.prepare(kind, f"compiling {config.name} for {shape.spec.op}", compiled)
    travel = None
    if way.relays:
        puts = tile_puts(config, shape, group.rank, workspace.size.zeroed, workspace.size.buffer)
        travel = Relayed(relay, shape.spec.op, both(puts))
    return Plan(
        executor,
        shape.pattern,
        (Product(config, gemm, min(resident, work)),),
        workspace,
        exchange_arguments(workspace, way, shape.shard, peers.agreed.timeout_ns, executor),
        travel=travel,
        signature=signature_of(config, shape, way.device),
        counts=counts_of(config, *shape.block, executor.device),
    )


def signature_of(config: GemmConfig, shape: ExchangeShape, transport: str) -> int:
    """Returns the signature of a call: the layout of its tiles, and the transport.

    Not the operands' majors, K or whether there is a bias: these are a rank's own.
    """
    return call_signature(shape.spec.op, **tile_layout(config, shape), transport=transport)


def both(lists: Sequence[Puts]) -> tuple[Puts, ...]:
    """The two lists that a relay takes; what is missing is empty."""
    return (*lists, Puts())[:2]


def resident_clusters(executor: Executor, size: int, reserve: int, relayed: bool = False) -> int:
    """Clusters of a persistent grid, all of which must be resident at once, since they wait for each other.

    Args:
        executor: where.
        size: CTAs of a cluster.
        reserve: SMs to leave to others.
        relayed: whether one cluster's place is left to the relay kernel.

    Raises:
        ValueError: not one cluster fits.
    """
    fit = min(executor.max_clusters(size), max(executor.num_sms - reserve, 0) // size) - relayed
    if fit < 1:
        relay = " alongside the relay kernel" if relayed else ""
        raise ValueError(
            f"no room{relay} for a cluster of {size} CTAs on {executor.num_sms} SMs less "
            f"reserve_sms={reserve}: the device holds {executor.max_clusters(size)} such clusters"
        )
    return fit


def exchange_arguments(
    workspace: Workspace, way: Way, shard: int, timeout_ns: int, executor: Executor
) -> Any:
    """The kernel's `Exchange` for a workspace: where the peers' blocks are, and what bounds its waits."""
    from ...exchange.arguments import Exchange

    size = workspace.size
    return Exchange(
        way.peers(workspace.memory),
        workspace.group.rank,
        workspace.group.size,
        shard,
        size.zeroed,
        size.buffer,
        timeout_ns,
        workspace.record.data_ptr(),
        executor.order.word.data_ptr(),
        0,  # each launch has its own number,
        0,  # and each call its signature
    )
