"""Backend ``fused``: one persistent kernel that computes and communicates.

This is where the parts meet: a configuration (`tuning.space`) and a transport make a kernel
(`kernels.build`), the compile cache keeps it, a workspace (`runtime.workspace`) is what it exchanges tiles
through, and an executor (`runtime.executor`) runs it on a CUDA device or in the emulator.

A call allocates its output and nothing else, waits for nothing on the host, and can be captured in a CUDA
graph, once the first call of its kind has compiled the kernel and made the workspace.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..kernels.config import GemmConfig
from ..kernels.geometry import MAX_WORLD, SLOT_BUFFERS, STAGING_BUFFERS, ReduceScatterShape, slots_offset
from ..runtime.executor import Executor, open_emulator, why_no_cuda
from ..runtime.group import Group
from ..runtime.peers import Peers, peers_of
from ..runtime.workspace import SizeClass, Workspace, obtain
from ..sharding import Shards
from ..tuning.machine import machine_for
from ..tuning.settings import settings
from ..tuning.space import constants, default_config
from .base import Problem
from .compiled import compiled_kernel, compiled_relay, transport_for

DTYPES = {torch.bfloat16: "bf16", torch.float16: "f16"}

ROW_ELEMENTS = 8
"""TMA wants rows at multiples of 16 bytes: 8 elements of a 16-bit type (CUDA driver API, tensor maps)."""

SMALLEST_BUFFER = 1 << 20
SMALLEST_FLAGS = 1 << 12
"""Size classes begin with this slot buffer (bytes) and these flags; each further class has twice as much."""

MOST_PLANS = 4096
"""Plans kept for a group; one is made again in a fraction of a millisecond."""


class Fused:
    """The fused kernels. Today: gemm_reduce_scatter with 16-bit operands."""

    name = "fused"
    deterministic = True

    def why_not(self, problem: Problem) -> str | None:
        """Fused kernels exist for some ops, dtypes and devices."""
        if problem.op != "gemm_reduce_scatter":
            return f"there is no fused kernel for {problem.op} yet"
        if problem.dtype not in DTYPES:
            return f"fused kernels take bfloat16 or float16, not {problem.dtype}"
        if problem.features % ROW_ELEMENTS:
            return f"N={problem.features} must be a multiple of {ROW_ELEMENTS}: TMA rows are whole 16 bytes"
        if problem.world_size > MAX_WORLD:
            return f"a workspace has words for {MAX_WORLD} ranks, not {problem.world_size}"
        if problem.device_type == "cuda":
            return why_no_cuda(torch.cuda.current_device())
        if open_emulator() is None:
            return f"fused kernels need a Hopper or Blackwell GPU, or the emulator; not {problem.device_type}"
        return None

    def why_slower(self, problem: Problem) -> str | None:
        """Worth comparing on GPUs whose ranks reach each other and whose constants are known."""
        if problem.virtual:
            return None
        if problem.device_type != "cuda":
            return "the emulator is there to be right, not to be fast; ask for it with backend='fused'"
        if problem.reach is None:
            return "nobody asked what the ranks' GPUs reach"
        if problem.reach.why_not is None and machine_for(problem.reach.arch) is None:
            return f"nothing is known of its time on {problem.reach.arch}; ask for it with backend='fused'"
        return problem.reach.why_not

    def bind(
        self,
        problem: Problem,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        shards: Shards,
        group: Group,
    ) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
        """See `Backend.bind`: what is left is where the tensors lie, the output, and the launch."""
        rows, columns, depth = shards.size(group.rank), weight.shape[0], problem.k

        def run(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return self.gemm_reduce_scatter(x, weight, bias, shards, group, depth)

        if not (shards.total and columns and has_tma_strides(x) and has_tma_strides(weight)):
            return run
        shape = ReduceScatterShape(shards.total, columns, group.size, shards.chunk)
        majors = major(x, "m"), major(weight, "n")
        plan = plan_for(group, x.device, x.dtype, shape, *majors, bias is not None, depth)

        def run_as_planned(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            addresses = x.data_ptr() | weight.data_ptr() | (0 if bias is None else bias.data_ptr())
            if addresses % 16 or not plan.is_open:
                return run(x, weight, bias)
            out = x.new_empty(max(rows, 1), columns)
            plan.launch(x, weight, out, bias)
            return out if rows else out[:0]

        return run if bias is not None and bias.stride(0) != 1 else run_as_planned

    def gemm_reduce_scatter(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        shards: Shards,
        group: Group,
        depth: int | None = None,
    ) -> Tensor:
        """See `Backend.gemm_reduce_scatter`. Every rank's partial is rounded once, before the sum.

        `depth` is K over all ranks, where they have agreed on it.
        """
        rows, columns = shards.size(group.rank), weight.shape[0]
        if shards.total == 0 or columns == 0:
            return x.new_empty(rows, columns)
        a, b = aligned(x), aligned(weight)
        shape = ReduceScatterShape(shards.total, columns, group.size, shards.chunk)
        majors = major(a, "m"), major(b, "n")
        plan = plan_for(group, x.device, x.dtype, shape, *majors, bias is not None, depth)
        # A rank that owns no row passes one row, which the kernel leaves alone.
        out = x.new_empty(max(rows, 1), columns)
        plan.launch(a, b, out, None if bias is None else aligned_bias(bias))
        return out[:rows]

    def all_gather_gemm(self, *_: Any) -> NoReturn:
        """Not built."""
        raise AssertionError("why_not excludes this op")

    gemm_all_reduce = gemm_all_gather = all_gather_gemm


@dataclass(frozen=True)
class ReduceScatterPlan:
    """All that GEMM reduce-scatters of one kind have in common: a call is a plan and its tensors.

    In a group of one it is a plain GEMM's.

    Attributes:
        executor: where.
        config: which kernel; its majors, dtypes and bias are those of the tensors.
        shape: global sizes, the same on all ranks.
        gemm: the compiled kernel.
        num_clusters: its grid.
        workspace: what tiles are exchanged through; None in a group of one.
        exchange: where that is and what bounds waits, as the kernel takes it.
        relay: the compiled kernel that puts staged tiles, if there is one.
    """

    executor: Executor
    config: GemmConfig
    shape: ReduceScatterShape
    gemm: Any
    num_clusters: int
    workspace: Workspace | None = None
    exchange: Any = None
    relay: Any = None

    @property
    def is_open(self) -> bool:
        """Whether it may still be launched: until its workspace is closed, or its emulator ends."""
        return self.executor.is_open and (self.workspace is None or self.workspace.is_open)

    def launch(self, a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None) -> None:
        """Starts a call of this rank, behind every other fused launch of its device.

        Args:
            a: `[M, K]`, see `aligned`.
            b: `[N, K]`, see `aligned`.
            out: `[max(own rows, 1), N]`.
            bias: `[N]` or None, see `aligned_bias`.

        Raises:
            CommTimeoutError, OverlappingCallsError: an earlier call on this workspace failed.
        """
        workspace, executor, order = self.workspace, self.executor, self.executor.order
        with executor.active(a, b, out, bias) as stream:
            if workspace is None:  # waits for nobody, so it may run beside whatever it likes
                self.gemm(a, b, out, bias, None, self.num_clusters, stream)
                return
            assert workspace.is_open, "a plan of a closed workspace"
            workspace.raise_if_failed()
            with order.lock:
                workspace.captured |= order.follow(stream)
                exchange = self.exchange._replace(call=order.next_call())
                if self.relay is None:
                    self.gemm(a, b, out, bias, exchange, self.num_clusters, stream)
                    return
                with executor.fork() as second:
                    self.gemm(a, b, out, bias, exchange, self.num_clusters, stream)
                    self.relay(self.shape.rows, self.shape.cols, exchange, second)


def peers_for(group: Group, device: torch.device) -> Peers:
    """This rank's side of a group; the ranks agree at the first call for it, which is collective."""
    return peers_of(group, device, lambda arch: constants(arch).digest)


def plan_for(
    group: Group,
    device: torch.device,
    dtype: torch.dtype,
    shape: ReduceScatterShape,
    a_major: str,
    b_major: str,
    bias: bool,
    depth: int | None = None,
) -> ReduceScatterPlan:
    """The plan of a call; made, which compiles and allocates, at the first one of its kind.

    Holds while `ReduceScatterPlan.is_open` and the caller's `settings` are the same.

    Args:
        group: the ranks.
        device: where this one's tensors are.
        dtype: of them.
        shape: of the call.
        a_major: see `major`.
        b_major: see `major`.
        bias: whether there is one.
        depth: K over all ranks, where they have agreed on it.

    Raises:
        DisagreementError, SymmetricMemoryError: on every rank, if one of them cannot.
        CaptureError: something had to be made during CUDA graph capture.
        ValueError: no kernel exists for the caller's settings, or no grid fits on the SMs left to it.
    """
    peers, asked = peers_for(group, device), settings()
    key = (dtype, shape, a_major, b_major, bias, depth, asked)
    plan: ReduceScatterPlan | None = peers.plans.get(key)
    if plan is not None:
        return plan
    operands = {"a_major": a_major, "b_major": b_major, "bias": bias}
    agreed = peers.agreed
    config = default_config(agreed.arch, DTYPES[dtype], shape, agreed.num_sms, depth, **operands)
    reserve = peers.reserve_sms if asked.reserve_sms is None else asked.reserve_sms
    with peers.lock:
        if (plan := peers.plans.get(key)) is None:
            if len(peers.plans) >= MOST_PLANS:
                peers.plans.clear()
            plan = peers.plans[key] = _make_plan(peers, config, shape, reserve)
        return plan


def _make_plan(
    peers: Peers, config: GemmConfig, shape: ReduceScatterShape, reserve: int
) -> ReduceScatterPlan:
    executor, group = peers.executor, peers.group
    work = shape.num_clusters(config)
    if group.size == 1:
        resident = resident_clusters(executor, config.cluster_size, reserve)
        gemm = compiled_kernel(executor, config, "local")
        return ReduceScatterPlan(executor, config, shape, gemm, min(resident, work))
    workspace = obtain(peers, size_class(config, shape))
    transport = transport_for(config.arch, workspace.reaches_all)
    staged = transport == "staged"
    resident = resident_clusters(executor, config.cluster_size, reserve, beside=staged)
    return ReduceScatterPlan(
        executor,
        config,
        shape,
        compiled_kernel(executor, config, transport),
        min(resident, work),
        workspace,
        exchange_arguments(workspace, shape, peers.agreed.timeout_ns, executor),
        compiled_relay(executor, config) if staged else None,
    )


def resident_clusters(executor: Executor, size: int, reserve: int, beside: bool = False) -> int:
    """Clusters of a persistent grid, all of which must be resident at once, since they wait for each other.

    Args:
        executor: where.
        size: CTAs of a cluster.
        reserve: SMs to leave to others.
        beside: whether one cluster's place is left to the relay kernel.

    Raises:
        ValueError: not one cluster fits.
    """
    fit = min(executor.max_clusters(size), max(executor.num_sms - reserve, 0) // size) - beside
    if fit < 1:
        relay = " beside the relay kernel" if beside else ""
        raise ValueError(
            f"no room{relay} for a cluster of {size} CTAs on {executor.num_sms} SMs less "
            f"reserve_sms={reserve}: the device holds {executor.max_clusters(size)} such clusters"
        )
    return fit


def aligned(matrix: Tensor) -> Tensor:
    """`matrix` `[rows, K]` as TMA can read it: itself, or a copy with zeros appended along K.

    Rows (or, of a transposed matrix, columns) must begin at multiples of 16 bytes. Zeros along K add nothing
    to a product, and where the other operand is shorter the hardware reads zeros.
    """
    if has_tma_strides(matrix) and matrix.data_ptr() % 16 == 0:
        return matrix
    rows, depth = matrix.shape
    padded = matrix.new_zeros(rows, max(-(-depth // ROW_ELEMENTS), 1) * ROW_ELEMENTS)
    padded[:, :depth] = matrix
    return padded


def has_tma_strides(matrix: Tensor) -> bool:
    """Whether TMA could read `matrix` `[rows, K]`, if it begins at a multiple of 16 bytes."""
    inner, outer = (1, 0) if matrix.stride(1) == 1 else (0, 1)
    return (
        matrix.stride(inner) == 1
        and matrix.stride(outer) % ROW_ELEMENTS == 0
        and matrix.stride(outer) >= matrix.shape[inner]
        and matrix.shape[1] > 0
    )


def aligned_bias(bias: Tensor) -> Tensor:
    """`bias` as the epilogue reads it, 16 bytes at a time: itself, or a contiguous and aligned copy."""
    return bias if bias.stride(0) == 1 and bias.data_ptr() % 16 == 0 else bias.clone()


def major(matrix: Tensor, other: str) -> Any:
    """``"k"`` if K is the contiguous dimension of `[rows, K]`, else ``other``."""
    return "k" if matrix.stride(1) == 1 else other


def size_class(config: GemmConfig, shape: ReduceScatterShape) -> SizeClass:
    """The smallest class of workspace that holds a call's flags, slots and staged tiles."""
    flags = _power_of_two(max(shape.num_flags(config), SMALLEST_FLAGS))
    buffer = _power_of_two(max(shape.buffer_bytes(config), SMALLEST_BUFFER))
    return SizeClass(slots_offset(flags), buffer, SLOT_BUFFERS, STAGING_BUFFERS)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def exchange_arguments(
    workspace: Workspace, shape: ReduceScatterShape, timeout_ns: int, executor: Executor
) -> Any:
    """The kernel's `Exchange` for a workspace: where the peers' blocks are, and what bounds its waits."""
    from ..kernels.exchange import Exchange

    size = workspace.size
    return Exchange(
        workspace.memory.bases,
        workspace.group.rank,
        workspace.group.size,
        shape.shard,
        size.zeroed,
        size.buffer,
        timeout_ns,
        workspace.record.data_ptr(),
        executor.order.word.data_ptr(),
        0,  # each launch has its own number
    )
