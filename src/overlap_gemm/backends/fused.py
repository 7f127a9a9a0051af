"""Backend ``fused``: one persistent kernel that computes and communicates.

This is where the parts meet: a configuration (`tuning.space`) and a transport make a kernel
(`kernels.build`), the compile cache keeps it, a workspace (`runtime.workspace`) is what it exchanges tiles
through, and an executor (`runtime.executor`) runs it on a CUDA device or in the emulator.

A call allocates its output and nothing else, waits for nothing on the host, and can be captured in a CUDA
graph, once the first call of its kind has compiled the kernel and made the workspace.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..kernels.config import GemmConfig
from ..kernels.geometry import SLOT_BUFFERS, STAGING_BUFFERS, ReduceScatterShape, slots_offset
from ..runtime.compile_cache import OPTIONS, CompileCache
from ..runtime.executor import EmulatorExecutor, Executor, cuda_executor, open_emulator, why_no_cuda
from ..runtime.group import Group
from ..runtime.symmetric import init_nvshmem_library
from ..runtime.virtual import virtual_world
from ..runtime.workspace import SizeClass, Workspace, obtain, timeout_ns
from ..sharding import Shards
from ..tuning.space import default_config
from .base import Problem

DTYPES = {torch.bfloat16: "bf16", torch.float16: "f16"}

ROW_ELEMENTS = 8
"""TMA wants rows at multiples of 16 bytes: 8 elements of a 16-bit type (CUDA driver API, tensor maps)."""

SMALLEST_BUFFER = 1 << 20
SMALLEST_FLAGS = 1 << 12
"""Size classes begin with this slot buffer (bytes) and these flags; each further class has twice as much."""


class Fused:
    """The fused kernels. Today: gemm_reduce_scatter with 16-bit operands."""

    name = "fused"

    def why_not(self, problem: Problem) -> str | None:
        """Fused kernels exist for some ops, dtypes and devices."""
        if problem.op != "gemm_reduce_scatter":
            return f"there is no fused kernel for {problem.op} yet"
        if problem.dtype not in DTYPES:
            return f"fused kernels take bfloat16 or float16, not {problem.dtype}"
        if problem.features % ROW_ELEMENTS:
            return f"N={problem.features} must be a multiple of {ROW_ELEMENTS}: TMA rows are whole 16 bytes"
        if problem.device_type == "cuda":
            return why_no_cuda(torch.cuda.current_device())
        if open_emulator() is None:
            return f"fused kernels need a Hopper or Blackwell GPU, or the emulator; not {problem.device_type}"
        return None

    def why_slower(self, problem: Problem) -> str | None:
        """They run only where they are asked for: what they need is not found out beforehand."""
        return "it needs memory that all ranks of the group reach; ask for it with backend='fused'"

    def gemm_reduce_scatter(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, shards: Shards, group: Group
    ) -> Tensor:
        """See `Backend.gemm_reduce_scatter`. Only the peers' partials are rounded before the sum."""
        rows, columns = shards.size(group.rank), weight.shape[0]
        if shards.total == 0 or columns == 0:
            return x.new_empty(rows, columns)
        a, b = aligned(x), aligned(weight)
        executor = executor_for(group, x.device)
        shape = ReduceScatterShape(shards.total, columns, group.size, shards.chunk)
        config = default_config(
            executor.arch,
            DTYPES[x.dtype],
            shape,
            executor.num_sms,
            a_major=major(a, "m"),
            b_major=major(b, "n"),
            bias=bias is not None,
        )
        # A rank that owns no row passes one row, which the kernel leaves alone.
        out = x.new_empty(max(rows, 1), columns)
        launch(executor, config, shape, group, a, b, out, None if bias is None else aligned_bias(bias))
        return out[:rows]

    def all_gather_gemm(self, *_: Any) -> NoReturn:
        """Not built."""
        raise AssertionError("why_not excludes this op")

    gemm_all_reduce = gemm_all_gather = all_gather_gemm


def launch(
    executor: Executor,
    config: GemmConfig,
    shape: ReduceScatterShape,
    group: Group,
    a: Tensor,
    b: Tensor,
    out: Tensor,
    bias: Tensor | None,
) -> None:
    """Starts one GEMM reduce-scatter of one rank (a plain GEMM in a group of one).

    Args:
        executor: where.
        config: which kernel; its majors, dtypes and bias are those of the tensors.
        shape: global sizes, the same on all ranks.
        group: the ranks.
        a: `[M, K]`, see `aligned`.
        b: `[N, K]`, see `aligned`.
        out: `[max(own rows, 1), N]`.
        bias: `[N]` or None, see `aligned_bias`.
    """
    with executor.active(a, b, out, bias) as stream:
        resident, work = executor.max_clusters(config.cluster_size), shape.num_clusters(config)
        if group.size == 1:
            gemm = compiled_kernel(executor, config, "local")
            gemm(a, b, out, bias, None, min(resident, work), stream)
            return
        workspace = obtain(group, size_class(config, shape), executor)
        transport = transport_for(config.arch, workspace.reaches_all)
        gemm = compiled_kernel(executor, config, transport)
        relay = compiled_relay(executor, config) if transport == "staged" else None
        workspace.raise_if_failed()
        workspace.order_after_last_use(executor.device)
        exchange = exchange_arguments(workspace, shape)
        if relay is None:
            gemm(a, b, out, bias, exchange, min(resident, work), stream)
            return
        if resident < 2:
            raise ValueError(
                f"transport nvshmem on {config.arch}: one cluster of {config.cluster_size} fits on "
                f"{executor.num_sms} SMs, which leaves the relay kernel beside it no room"
            )
        with executor.fork() as second:
            gemm(a, b, out, bias, exchange, min(resident - 1, work), stream)
            relay(shape.rows, shape.cols, exchange, second)


def aligned(matrix: Tensor) -> Tensor:
    """`matrix` `[rows, K]` as TMA can read it: itself, or a copy with zeros appended along K.

    Rows (or, of a transposed matrix, columns) must begin at multiples of 16 bytes. Zeros along K add nothing
    to a product, and where the other operand is shorter the hardware reads zeros.
    """
    inner, outer = (1, 0) if matrix.stride(1) == 1 else (0, 1)
    if (
        matrix.stride(inner) == 1
        and matrix.stride(outer) % ROW_ELEMENTS == 0
        and matrix.stride(outer) >= matrix.shape[inner]
        and matrix.shape[1] > 0
        and matrix.data_ptr() % 16 == 0
    ):
        return matrix
    rows, depth = matrix.shape
    padded = matrix.new_zeros(rows, max(-(-depth // ROW_ELEMENTS), 1) * ROW_ELEMENTS)
    padded[:, :depth] = matrix
    return padded


def aligned_bias(bias: Tensor) -> Tensor:
    """`bias` as the epilogue reads it, 16 bytes at a time: itself, or a contiguous and aligned copy."""
    return bias if bias.stride(0) == 1 and bias.data_ptr() % 16 == 0 else bias.clone()


def major(matrix: Tensor, other: str) -> Any:
    """``"k"`` if K is the contiguous dimension of `[rows, K]`, else ``other``."""
    return "k" if matrix.stride(1) == 1 else other


def executor_for(group: Group, device: torch.device) -> Executor:
    """Where a rank's kernels run: with its virtual world, on its CUDA device, or in the open emulator."""
    if (world := virtual_world(group)) is not None:
        return world.executor(group.rank)
    if device.type == "cuda":
        return cuda_executor(torch.cuda.current_device() if device.index is None else device.index)
    emulator = open_emulator()
    assert emulator is not None, "why_not excludes a CPU without an emulator"
    return EmulatorExecutor(emulator)


def transport_for(arch: str, reaches_all: bool) -> str:
    """How tiles reach their owners: ``"peer_bulk"``, ``"nvshmem"``, or ``"staged"`` for a relay kernel.

    On sm_90 puts inside the GEMM would cost it its register reallocation (ptxas C7506, C7510).
    """
    if reaches_all:
        return "peer_bulk"
    return "staged" if arch == "sm_90a" else "nvshmem"


def compiled_kernel(executor: Executor, config: GemmConfig, transport: str) -> Any:
    """The kernel of a configuration: GEMM reduce-scatter, or a plain GEMM for transport ``"local"``."""

    def build() -> Any:
        from ..kernels.build import DirectCall, compile_kernel, make_kernel
        from ..transports import Nvshmem, PeerBulk, Staged

        if transport == "nvshmem":
            return DirectCall(compile_kernel(make_kernel(config, Nvshmem())))
        ways = {"local": lambda: None, "peer_bulk": PeerBulk, "staged": Staged}
        return compile_kernel(make_kernel(config, ways[transport]()), OPTIONS)

    return _from_cache(executor, (config, transport), build, puts=transport == "nvshmem")


def compiled_relay(executor: Executor, config: GemmConfig) -> Any:
    """The relay kernel beside the GEMM of a configuration (`kernels.relay`)."""
    config = replace(config, a_major="k", b_major="k", bias=False)  # which do not matter to it

    def build() -> Any:
        from ..kernels.build import DirectCall, compile_relay
        from ..transports import Nvshmem

        return DirectCall(compile_relay(config, Nvshmem()))

    return _from_cache(executor, (config, "relay"), build, puts=True)


def _from_cache(executor: Executor, key: object, build: Callable[[], Any], puts: bool) -> Any:
    """A compiled kernel from memory or disk; one that calls NVSHMEM (``puts``) is initialised.

    Such a one is not kept on disk, and called the DSL's own way: NVSHMEM initialises the library that a
    kernel is loaded from, and neither what comes from disk nor a TVM-FFI function tells it.
    """

    def build_and_initialise() -> Any:
        compiled = build()
        if puts and executor.device.type == "cuda":
            init_nvshmem_library(compiled)
        return compiled

    return _cache(executor.on_disk and not puts).get(key, executor.arch, build_and_initialise)


@cache
def _cache(on_disk: bool) -> CompileCache:
    return CompileCache() if on_disk else CompileCache(folder=None)


@lru_cache(maxsize=1024)
def size_class(config: GemmConfig, shape: ReduceScatterShape) -> SizeClass:
    """The smallest class of workspace that holds a call's flags, slots and staged tiles."""
    flags = _power_of_two(max(shape.num_flags(config), SMALLEST_FLAGS))
    buffer = _power_of_two(max(shape.buffer_bytes(config), SMALLEST_BUFFER))
    return SizeClass(slots_offset(flags), buffer, SLOT_BUFFERS, STAGING_BUFFERS)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def exchange_arguments(workspace: Workspace, shape: ReduceScatterShape) -> Any:
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
        timeout_ns(),
        workspace.record.data_ptr(),
    )
