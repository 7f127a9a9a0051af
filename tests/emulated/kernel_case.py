"""Runs a kernel by itself, without ops or workspaces of the runtime: plain GEMM or GEMM reduce-scatter."""

from dataclasses import dataclass, field

import torch
from cuda.bindings.driver import CUstream
from cutlass import Int32, Int64
from cutlass.cute.runtime import from_dlpack

from overlap_gemm.kernels.config import GemmConfig
from overlap_gemm.kernels.exchange import Exchange
from overlap_gemm.kernels.geometry import ExchangeShape, slots_offset, workspace_bytes
from overlap_gemm.schedules import owned_rows

TORCH = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
STREAM = CUstream(0)


@dataclass
class KernelCase:
    """Sizes and data of one launch on every rank."""

    config: GemmConfig
    rows: int
    cols: int
    depth: int
    world: int = 1
    seed: int = 0
    a: list = field(default_factory=list)
    b: list = field(default_factory=list)
    outs: list = field(default_factory=list)
    bias: torch.Tensor | None = None

    def __post_init__(self):
        cfg, generator = self.config, torch.Generator().manual_seed(self.seed)

        def operand(rows, major):
            matrix = torch.randn(rows, self.depth, generator=generator).to(TORCH[cfg.in_dtype])
            return matrix if major == "k" else matrix.t().contiguous().t()

        self.shape = ExchangeShape.even(self.rows, self.cols, self.world)
        self.a = [operand(self.rows, cfg.a_major) for _ in range(self.world)]
        self.b = [operand(self.cols, cfg.b_major) for _ in range(self.world)]
        if cfg.bias:
            self.bias = torch.randn(self.cols, generator=generator).to(TORCH[cfg.in_dtype])
        own = [owned_rows(self.rows, self.shape.shard, rank) for rank in range(self.world)]
        self.own = own
        self.outs = [torch.full((max(n, 1), self.cols), torch.nan, dtype=TORCH[cfg.out_dtype]) for n in own]

    def launch(self, emulator, compiled, exchanges=(None,), num_clusters=1000):
        """Queues the launch of every rank."""
        clusters = min(num_clusters, self.shape.num_clusters(self.config))
        for rank, exchange in enumerate(exchanges):
            with emulator.rank(rank):
                compiled(
                    _matrix(self.a[rank]),
                    _matrix(self.b[rank]),
                    _matrix(self.outs[rank]),
                    None
                    if self.bias is None
                    else from_dlpack(self.bias, assumed_align=16).mark_layout_dynamic(),
                    exchange,
                    clusters,
                    STREAM,
                )

    def check(self):
        """Every element within the bound of its roundings; rows nobody owns untouched."""
        cfg = self.config
        partials = [a.double() @ b.double().t() for a, b in zip(self.a, self.b, strict=True)]
        exact = sum(partials) + (0 if self.bias is None else self.bias.double())
        magnitude = sum(p.abs() for p in partials)
        slot = torch.finfo(TORCH[cfg.slot_dtype]).eps / 2 if self.world > 1 else 0
        out = torch.finfo(TORCH[cfg.out_dtype]).eps / 2
        products = sum(a.double().abs() @ b.double().abs().t() for a, b in zip(self.a, self.b, strict=True))
        bound = slot * magnitude + 1.02 * out * exact.abs() + 2.0**-24 * (self.depth + 8) * products + 1e-30
        for rank, rows in enumerate(self.own):
            if rows == 0:
                assert self.outs[rank].isnan().all(), f"rank {rank} owns nothing, but its output was written"
                continue
            mine = slice(rank * self.shape.shard, rank * self.shape.shard + rows)
            error = (self.outs[rank].double() - exact[mine]).abs()
            wrong = ~(error <= bound[mine])  # NaN is wrong
            assert not wrong.any(), (
                f"rank {rank}: {int(wrong.sum())} of {wrong.numel()} wrong, at {wrong.nonzero()[0].tolist()}"
            )


class Workspaces:
    """One symmetric workspace per rank, for launches of any of some cases."""

    def __init__(self, emulator, cases, reach=lambda rank, peer: True):
        world, config = cases[0].world, cases[0].config
        flags = max(case.shape.num_flags(case.config) for case in cases)
        self.buffer = max(-(-case.shape.buffer_bytes(case.config) // 128) * 128 for case in cases)
        self.slots = slots_offset(flags)
        self.memory = emulator.symmetric((workspace_bytes(flags, self.buffer, staging=True),), torch.uint8)
        for tensor in self.memory.tensors:
            tensor[: self.slots] = 0
        self.config = config
        self.records = [emulator.register(torch.zeros(16, dtype=torch.int32), rank) for rank in range(world)]
        self.words = [emulator.register(torch.zeros(1, dtype=torch.int32), rank) for rank in range(world)]
        self.peers = [
            emulator.register(
                torch.tensor(
                    [
                        address if rank == peer or reach(rank, peer) else -1 - peer
                        for peer, address in enumerate(self.memory.addresses)
                    ]
                ),
                rank,
            )
            for rank in range(world)
        ]

    def exchanges(self, case):
        """The exchange arguments of every rank."""
        return [
            Exchange(
                from_dlpack(self.peers[rank], assumed_align=8).mark_layout_dynamic(),
                Int32(rank),
                Int32(case.world),
                Int32(case.shape.shard),
                Int64(self.slots),
                Int64(self.buffer),
                Int64(10**12),
                Int64(self.records[rank].data_ptr()),
                Int64(self.words[rank].data_ptr()),
                Int32(1),
            )
            for rank in range(case.world)
        ]


def _matrix(tensor):
    leading = 1 if tensor.stride(1) == 1 else 0
    return from_dlpack(tensor, assumed_align=16).mark_layout_dynamic(leading_dim=leading)
