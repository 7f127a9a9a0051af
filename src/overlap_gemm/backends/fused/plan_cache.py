"""Plans of ops that exchange tiles, and the cache of all plans.

The cache is `Peers.plans`: one for each rank, group and device. Its key contains the op or the shape, dtypes,
layouts and the caller's `settings`. A plan needs a configuration (`tuning.space`), a compiled kernel
(`compiled`), a workspace (`runtime.memory.workspace`) and an executor (`runtime.executor`). Ops that exchange
tiles differ by their `ExchangeShape` only. `exchange_plans` and `gather_plans` have the plans of ops that
send x.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import torch

from ...config.gemm_config import GemmConfig
from ...config.scale_blocks import OperandTypes
from ...config.visitors import SCALES, Visitor, bias_of
from ...exchange.geometry import ExchangeShape, Puts, tile_layout, tile_puts
from ...runtime.executor import Executor
from ...runtime.group import Group
from ...runtime.identity import call_signature
from ...runtime.memory.workspace import Workspace
from ...runtime.peers import Peers, peers_of
from ...spec import GEMM_ALL_REDUCE, PATTERNS, OpSpec, patterns_of
from ...tuning.settings import settings
from ...tuning.space import constants, default_config, with_pattern
from ..epilogues import counts_of
from ..scales.product_types import ProductTypes
from ..scales.scaling import FLOAT8
from .compiled import compiled_kernel, compiled_relay
from .launch_plan import Plan, Product, RelayKernel
from .transport_hosts import TransportHost, obtain_transport, requested_transport

DTYPES = {torch.bfloat16: "bf16", torch.float16: "f16"}

MOST_PLANS = 4096
"""Limit of plans in a cache. A full cache is cleared; making a plan again takes less than a millisecond."""


class Reusable(Protocol):
    """Cached object of a group."""

    @property
    def is_open(self) -> bool:
        """Returns whether the object can still be used."""

    def signed(self, options: str) -> Any:
        """Returns the object for calls with these options (`Plan.signed`)."""


P = TypeVar("P", bound=Reusable)


def peers_for(group: Group, device: torch.device) -> Peers:
    """Returns the state of this rank in a group on a device. Collective at the first call."""
    return peers_of(group, device, lambda arch: constants(arch).digest)


def plan_for(
    group: Group,
    device: torch.device,
    types: ProductTypes,
    shape: ExchangeShape,
    a_major: str,
    b_major: str,
    epilogue: tuple[Visitor, ...] = (),
    depth: int | None = None,
    parts: int = 1,
) -> Plan:
    """Returns the plan of a call that exchanges tiles, or of a plain GEMM in a group of one.

    Collective at the first call of a signature, which compiles the kernel and allocates the workspace. The
    plan may be kept while `Plan.is_open` and the `settings` are the same.

    Args:
        group: Ranks that take part.
        device: Device of this rank's tensors.
        types: Types of the product, also of slots and bias.
        shape: Shape of the call. The pattern of an all-reduce, one-shot or two-shot, is chosen here.
        a_major: Contiguous dimension of A, "m" or "k" (`tma_operands.major`).
        b_major: Contiguous dimension of B, "n" or "k".
        epilogue: Epilogue that the kernel applies to complete sums.
        depth: K over all ranks; None if it is not the same on all ranks, or not agreed.
        parts: Number of matrices along K, the same on all ranks (`parts_of_k`).

    Raises:
        DisagreementError, SymmetricMemoryError: On every rank, if one of them cannot make the plan.
        CaptureError: The plan does not exist, and a CUDA graph is being captured.
        ValueError: The settings select no kernel, or no cluster fits on the SMs that are not reserved.
        RuntimeError: Puts are needed or configured, and NVSHMEM cannot be linked.
    """
    peers, requested = peers_for(group, device), settings()
    key = shape, epilogue, depth, (types, a_major, b_major, parts), requested, group.signed
    plan: Plan | None = peers.plans.get(key)
    if plan is not None:
        return plan
    agreed, (kind, fields) = peers.agreed, kind_of(types, epilogue)
    fields |= {"a_major": a_major, "b_major": b_major, "weights": len(shape.weights) or parts}
    shape = _with_pattern(peers, kind, shape, depth, epilogue)
    config = default_config(agreed.arch, kind.dtype, shape, agreed.num_sms, depth, **fields)
    reserve = reserve_of(peers)
    return keep_plan(peers, group, key, lambda: _make_plan(peers, config, shape, reserve))


def kind_of(types: ProductTypes, epilogue: tuple[Visitor, ...] = ()) -> tuple[OperandTypes, dict[str, Any]]:
    """Returns the types of A and B in kernels, and the fields of `GemmConfig` that dtypes determine.

    Args:
        types: Types of the product.
        epilogue: Epilogue that the kernel applies; scales of rows are added in front of it.
    """
    result = epilogue[-1].epilogue.sums_result if epilogue else None
    if types.scaled_to is None:
        return OperandTypes(DTYPES[types.x]), {
            "epilogue": epilogue,
            **({} if result is None else {"out_dtype": result}),
        }
    if not types.blocks:
        epilogue = (SCALES, *epilogue)
    kind = DTYPES[types.scaled_to]
    fields = {"epilogue": epilogue, "out_dtype": result or kind, "slot_dtype": kind, "blocks": types.blocks}
    if types.weight not in (None, types.x):
        fields["b_dtype"] = FLOAT8[types.weight]
    return OperandTypes(FLOAT8[types.x], types.blocks), fields


def bias_visitor(has_bias: bool, dtype: torch.dtype, spec: OpSpec | None = None) -> tuple[Visitor, ...]:
    """Returns the epilogue that adds a bias of this dtype; () without a bias.

    Args:
        has_bias: Whether there is a bias.
        dtype: Dtype of the bias.
        spec: Op; if its columns are sent, the bias is that of all columns of a rank's product. None: another.
    """
    is_sent = spec is not None and spec.weight is None and spec.out == "n"
    return (bias_of(DTYPES[dtype], "partial" if is_sent else "complete"),) if has_bias else ()


def _with_pattern(
    peers: Peers, kind: OperandTypes, shape: ExchangeShape, depth: int | None, epilogue: tuple[Visitor, ...]
) -> ExchangeShape:
    """Returns the shape with the pattern of the call: the model's choice, with two exceptions.

    The model's choice is `tuning.space.with_pattern`. The exceptions:

    - An all-reduce is one-shot if its epilogue needs it (`Epilogue.needs_one_shot`).
    - A reduce-scatter whose epilogue reads matrices or an element per row keeps its pattern. An all-reduce
      in its place would need the operands of other ranks' rows.
    """
    operands = [operand for visitor in epilogue for operand in visitor.operands]
    if shape.spec.op == GEMM_ALL_REDUCE.name and any(one.epilogue.needs_one_shot for one in epilogue):
        (pattern,) = (name for name in patterns_of(shape.spec.op) if PATTERNS[name].cut is None)
        return ExchangeShape.even(shape.rows, shape.cols, shape.world, pattern, kind.column_unit)
    if shape.spec.op != GEMM_ALL_REDUCE.name and any(o.kind not in ("columns", "scalar") for o in operands):
        return shape
    agreed = peers.agreed
    return with_pattern(agreed.arch, kind, shape, agreed.num_sms, depth)


def reserve_of(peers: Peers) -> int:
    """Returns the SMs that kernels leave free on this rank: by the settings, else the environment."""
    requested = settings().reserve_sms
    return peers.reserve_sms if requested is None else requested


def keep_plan(peers: Peers, group: Group, key: Hashable, make: Callable[[], P]) -> P:
    """Returns the cached plan of a key; makes and signs it if it is missing or closed.

    The lock of `peers` is held.

    Args:
        peers: State of this rank in the group, which owns the plans.
        group: Group of the calls, with the options that are part of their signature (`Group.signed`).
        key: Everything that the plan depends on, these options included.
        make: Function that makes the plan; it may be collective.
    """
    with peers.lock:
        plan: P | None = peers.plans.get(key)
        if plan is None or not plan.is_open:
            if len(peers.plans) >= MOST_PLANS:
                peers.plans.clear()
            plan = peers.plans[key] = make().signed(group.signed)
        return plan


def _make_plan(peers: Peers, config: GemmConfig, shape: ExchangeShape, reserve: int) -> Plan:
    """Returns the plan of an op that exchanges tiles; collective, since it may allocate."""
    executor, group = peers.executor, peers.group
    work = shape.num_clusters(config)
    if group.size == 1:
        resident = resident_clusters(executor, config.cluster_ctas, reserve)
        gemm = compiled_kernel(executor, config, None, shape.pattern)
        return Plan(executor, shape.pattern, (Product(config, gemm, min(resident, work)),))
    requested = settings().transport_of(shape.spec.spec)
    workspace, transport = obtain_transport(
        peers, requested_transport(requested, config), lambda host: host.tiles_class(config, shape)
    )
    if config.is_swap_ab and not transport.puts and "launch" not in dict(settings().fields):
        config = replace(config, launch="dependent")  # measured: 3 to 4 % of a call of few rows

    def compiled() -> tuple[int, Any, Any]:
        resident = resident_clusters(executor, config.cluster_ctas, reserve, transport.relays)
        gemm = compiled_kernel(executor, config, transport, shape.pattern)
        return resident, gemm, compiled_relay(executor) if transport.relays else None

    # All ranks have this configuration, except for their operands' majors, and their epilogue's columns. The
    # result's type is that of slots, or the epilogue's, which ranks have compared.
    as_sent = {"out_dtype": config.slot_dtype, "epilogue": ()}
    common = replace(config, a_major="k", b_major="k", launch="ordered", **as_sent)  # type: ignore[arg-type]
    kind = (common, transport.device, shape.pattern)
    resident, gemm, relay = peers.prepare(kind, f"compiling {config.name} for {shape.spec.op}", compiled)
    side_work = None
    if transport.relays:
        puts = tile_puts(config, shape, group.rank, workspace.size.zeroed, workspace.size.buffer)
        side_work = RelayKernel(relay, shape.spec.op, two_lists(puts))
    return Plan(
        executor,
        shape.pattern,
        (Product(config, gemm, min(resident, work)),),
        workspace,
        exchange_arguments(workspace, transport, shape.shard, peers.agreed.timeout_ns, executor),
        side_work=side_work,
        signature=signature_of(config, shape, transport.device),
        counts=counts_of(config, *shape.block, executor.device),
    )


def signature_of(config: GemmConfig, shape: ExchangeShape, transport: str) -> int:
    """Returns the signature of a call, which kernels compare with the peers': layout of tiles, and transport.

    Facts that may differ between ranks are not included: the layouts of operands, K, and the bias.
    """
    return call_signature(shape.spec.op, **tile_layout(config, shape), transport=transport)


def two_lists(lists: Sequence[Puts]) -> tuple[Puts, ...]:
    """Returns two lists of puts, as the relay kernel takes them; missing lists are empty."""
    return (*lists, Puts())[:2]


def resident_clusters(executor: Executor, size: int, reserve: int, relayed: bool = False) -> int:
    """Returns the largest persistent grid in clusters. Clusters wait for each other, so all must be resident.

    Args:
        executor: Executor that launches the kernel.
        size: CTAs of a cluster.
        reserve: SMs left to other kernels.
        relayed: Whether the place of one cluster is left to the relay kernel.

    Raises:
        ValueError: No cluster fits.
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
    workspace: Workspace, transport: TransportHost, shard: int, timeout_ns: int, executor: Executor
) -> Any:
    """Returns the `Exchange` of a workspace; each launch replaces its number and signature.

    Args:
        workspace: Workspace, which must outlive the result.
        transport: Host part of the call's transport, for the table of peers.
        shard: Rows (or columns) of a full shard.
        timeout_ns: Limit of a kernel's wait for a peer, in nanoseconds.
        executor: Executor that launches the kernel, for the order of launches.
    """
    from ...exchange.arguments import Exchange

    size = workspace.size
    return Exchange(
        transport.peers(workspace.memory),
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
