"""Runs a kernel by itself, without ops or workspaces of the runtime: plain GEMM or GEMM reduce-scatter."""

from dataclasses import dataclass, field
from functools import cache

import torch
import torch.nn.functional as F
from cuda.bindings.driver import CUstream
from cutlass import Int32, Int64
from cutlass.cute.runtime import from_dlpack

from cute_emulator import Emulator
from overlap_gemm.api.quantization import swizzle_scales
from overlap_gemm.build import compile_kernel, make_kernel
from overlap_gemm.config.gemm_config import GemmConfig
from overlap_gemm.config.scale_blocks import MX
from overlap_gemm.exchange.arguments import Exchange
from overlap_gemm.exchange.geometry import SLOT_BUFFERS, STAGING_BUFFERS, ExchangeShape, slots_offset
from overlap_gemm.spec.sharding import Shards

TORCH = {
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "f32": torch.float32,
    "i64": torch.int64,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}
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
    extras: list = field(default_factory=list)

    def __post_init__(self):
        cfg, generator = self.config, torch.Generator().manual_seed(self.seed)

        def operand(rows, major, dtype):
            matrix = torch.randn(rows, self.depth, generator=generator).to(TORCH[dtype])
            return matrix if major == "k" else matrix.t().contiguous().t()

        self.shape = ExchangeShape.even(self.rows, self.cols, self.world)
        self.a = [operand(self.rows, cfg.a_major, cfg.in_dtypes[0]) for _ in range(self.world)]
        self.b = [operand(self.cols, cfg.b_major, cfg.in_dtypes[1]) for _ in range(self.world)]
        self.own = own = Shards(self.rows, self.world, self.shape.shard).sizes
        self.scales = [self._scales(generator) for _ in range(self.world)]
        self.extras = [self._extras(rank, generator) for rank in range(self.world)]
        columns = self.cols // cfg.subtile_step
        self.outs = [torch.full((max(n, 1), columns), torch.nan, dtype=TORCH[cfg.out_dtype]) for n in own]

    def _scales(self, generator):
        """Of blocks: what the kernel reads."""
        if self.config.blocks is None:
            return []
        rows, columns, width = self.config.blocks
        blocks = [
            (-(-self.rows // rows), -(-self.depth // width)),
            (-(-self.cols // columns), -(-self.depth // width)),
        ]
        if self.config.blocks == MX:  # powers of two
            return [2.0 ** torch.randint(-3, 4, shape, generator=generator) for shape in blocks]
        return [2 ** (4 * torch.rand(shape, generator=generator) - 2) for shape in blocks]

    def dequantised(self, rank):
        """A and B of a rank in float64, with the scales of their blocks."""
        found = [self.a[rank].double(), self.b[rank].double()]
        for i, scales in enumerate(self.scales[rank]):
            rows, width = self.config.blocks[i], self.config.blocks[2]
            wide = scales.double().repeat_interleave(rows, 0).repeat_interleave(width, 1)
            found[i] *= wide[: len(found[i]), : self.depth]
        return found

    def _extras(self, rank, generator):
        """What each visitor reads and writes: each rank its own, or the same where sums are complete."""
        made = []
        for number, visitor in enumerate(self.config.epilogue):
            if visitor.of == "complete":
                generator = torch.Generator().manual_seed(self.seed + number)
            made.append([])
            rows, columns = max(self.own[rank], 1), self.cols // (2 if visitor.epilogue.pairs else 1)
            for operand in visitor.reads:
                extra = torch.randn(operand.shape(self.config, self.rows, columns), generator=generator)
                if visitor.of == "complete" and operand.kind in ("rows", "element"):
                    extra = extra[rank * self.shape.shard :][:rows].clone()
                made[-1].append(extra.to(TORCH[operand.dtype]))
            for operand in visitor.writes:
                begin = 0 if operand.kind == "row_counts" else torch.nan
                shape = operand.shape(self.config, rows, self.cols)
                made[-1].append(torch.full(shape, begin, dtype=TORCH[operand.dtype]))
        return made

    def _visited(self, sums, rank, of):
        """The reference's sums, visited."""
        for visitor, extras in zip(self.config.epilogue, self.extras[rank], strict=True):
            if visitor.of == of:
                read = [extra.double() for extra in extras[: len(visitor.reads)]]
                sums, *_ = visitor.epilogue.on_tensors(sums, read)
        return sums

    def _outputs(self, sums, rank):
        """Each output of the last visitor, in float64: (kind, before its rows are reduced, as stored)."""
        visitor, extras = self.config.epilogue[-1], self.extras[rank][-1]
        number = len(visitor.reads)
        wide = [
            extra.double()[:, None] if operand.kind == "rows" else extra.double()
            for operand, extra in zip(visitor.reads, extras[:number], strict=True)
        ]
        _, *values = visitor.epilogue.apply((sums,), wide)
        written = zip(visitor.writes, extras[number:], strict=True)
        stored = [extra for operand, extra in written if operand.kind in ("element", "row_values")]
        kinds = [kind for _, kind in visitor.epilogue.outputs]
        return list(zip(kinds, values, stored, strict=True))

    def launch(self, emulator, compiled, exchanges=(None,), num_clusters=1000):
        """Queues the launch of every rank."""
        clusters = min(num_clusters, self.shape.num_clusters(self.config))
        for rank, exchange in enumerate(exchanges):
            extras = [extra for of_visitor in self.extras[rank] for extra in of_visitor]
            scales, step = (), self.shape.shard if len(exchanges) > 1 else self.rows
            if self.config.blocks is not None:
                of_a, of_b = self.scales[rank]
                is_mx = self.config.blocks == MX
                scales = (
                    _atoms(of_a, step) if is_mx else _lines(of_a.t(), step),
                    _atoms(of_b, self.cols) if is_mx else _lines(of_b, of_b.shape[1]),
                )
            with emulator.rank(rank):
                compiled(
                    _matrix(self.a[rank]),
                    self._weights(rank) if self.config.has_two_weights else _matrix(self.b[rank]),
                    _matrix(self.outs[rank]),
                    scales + tuple(_extra(x) for x in extras) or None,
                    exchange,
                    clusters,
                    STREAM,
                )

    def _weights(self, rank):
        """Gates and ups of B's bands, with a gap between them; of odd seeds ups lie in front of gates."""
        parts = self.b[rank].unflatten(0, (-1, 2, 32)).unbind(1)
        size, gap = parts[0].numel(), 4096
        memory = torch.full((2 * size + gap,), torch.nan, dtype=self.b[rank].dtype)
        places = (size + gap, 0) if self.seed % 2 else (0, size + gap)
        pair = [memory[place : place + size].view(-1, self.depth) for place in places]
        for matrix, part in zip(pair, parts, strict=True):
            matrix.copy_(part.flatten(0, 1))
        return tuple(map(_matrix, pair))

    def check(self):
        """Every element within the bound of its roundings; rows nobody owns untouched."""
        cfg = self.config
        partials = [
            self._visited(a @ b.t(), rank, "partial")
            for rank, (a, b) in enumerate(map(self.dequantised, range(self.world)))
        ]
        total = sum(partials)
        magnitude = sum(p.abs() for p in partials)
        slot = torch.finfo(TORCH[cfg.slot_dtype]).eps / 2 if self.world > 1 else 0
        out = torch.finfo(TORCH[cfg.out_dtype]).eps / 2
        products = sum(
            self._visited(a.abs() @ b.abs().t(), rank, "partial").abs()
            for rank, (a, b) in enumerate(map(self.dequantised, range(self.world)))
        )
        # Of 8-bit types wgmma cuts each product 13 bits below the largest of its instruction, which of these
        # operands is less than 16 times the mean.
        narrow = 2.0**-9 if cfg.has_bytes and cfg.on.narrow_bytes else 2.0**-24 * (self.depth + 8)
        loss = slot * magnitude + narrow * products + 1e-30
        most_of = torch.finfo(TORCH[cfg.out_dtype]).max
        least_step = torch.finfo(TORCH[cfg.out_dtype]).smallest_normal * out  # half of a subnormal one
        for rank, rows in enumerate(self.own):
            if rows == 0:
                assert self.outs[rank].isnan().all(), f"rank {rank} owns nothing, but its output was written"
                continue
            mine = slice(rank * self.shape.shard, rank * self.shape.shard + rows)
            least, exact, most = (
                self._visited(total[mine] + sign * loss[mine], rank, "complete").clamp(-most_of, most_of)
                for sign in (-1, 0, 1)
            )
            visited = torch.maximum((least - exact).abs(), (most - exact).abs())
            bound = visited + 1.02 * out * exact.abs() + least_step
            _check_within(self.outs[rank], exact, bound, f"rank {rank}")
            if cfg.epilogue and cfg.epilogue[-1].writes:
                self._check_outputs(total[mine], loss[mine], rank)

    def _check_outputs(self, total, loss, rank):
        """The outputs of the last visitor, those of rows added up over the columns' parts."""
        least, exact, most = (self._outputs(total + sign * loss, rank) for sign in (-1, 0, 1))
        for (_, low, _), (kind, value, stored), (_, high, _) in zip(least, exact, most, strict=True):
            bound = torch.maximum((low - value).abs(), (high - value).abs())
            if kind == "element":
                bound += 1.02 * torch.finfo(stored.dtype).eps / 2 * value.abs()
            else:
                value, bound = (one.sum(1) if kind == "row_sum" else one.amax(1) for one in (value, bound))
            _check_within(stored, value, bound, f"rank {rank}, {kind}")


def _check_within(found, exact, bound, where):
    wrong = ~((found.double() - exact).abs() <= bound + 1e-6 * exact.abs())  # NaN is wrong
    assert not wrong.any(), (
        f"{where}: {int(wrong.sum())} of {wrong.numel()} wrong, at {wrong.nonzero()[0].tolist()}"
    )


class Workspaces:
    """One symmetric workspace per rank, for launches of any of some cases."""

    def __init__(self, emulator, cases, reach=lambda rank, peer: True):
        world, config = cases[0].world, cases[0].config
        flags = max(case.shape.num_flags(case.config) for case in cases)
        self.buffer = max(-(-case.shape.buffer_bytes(case.config) // 128) * 128 for case in cases)
        self.slots = slots_offset(flags)
        nbytes = slots_offset(flags) + (SLOT_BUFFERS + STAGING_BUFFERS) * self.buffer
        self.memory = emulator.symmetric((nbytes,), torch.uint8)
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
                Int32(0),
            )
            for rank in range(case.world)
        ]


def _lines(scales, step):
    """Of `blocks`: of every `step` rows or k blocks lines of whole 16 bytes, filled with what is not read."""
    parts = scales.split(step, 1)
    whole = torch.cat([F.pad(part, (0, -part.shape[1] % 4), value=torch.nan) for part in parts], 1)
    return _matrix(whole.contiguous()[:, : whole.shape[1] - -parts[-1].shape[1] % 4])


def _atoms(scales, step):
    """Of `mx`: those of every `step` rows in atoms of their own, filled up with what must not be read."""
    full = lambda part: (0, -part.shape[1] % 4, 0, -len(part) % 128)  # noqa: E731
    parts = [swizzle_scales(F.pad(part, full(part), value=torch.nan)) for part in scales.split(step)]
    words = torch.cat([part.view(torch.uint8).view(torch.int16) for part in parts])
    return _matrix(words.view(-1, -(-scales.shape[1] // 4) * 256))


def _extra(tensor):
    if tensor.ndim == 2:
        return _matrix(tensor)
    return from_dlpack(tensor, assumed_align=16).mark_layout_dynamic()


def _matrix(tensor):
    leading = 1 if tensor.stride(1) == 1 else 0
    return from_dlpack(tensor, assumed_align=16).mark_layout_dynamic(leading_dim=leading)


@cache
def compiled_kernel(config, transport=None):
    """Compiles a kernel once for all tests of this process, since a compile takes seconds.

    A test that changes kernels in place uses the fixture `changed_kernels`.
    """
    return compile_kernel(make_kernel(config, transport))


def launched(config, transport, world, target=None, **sizes):
    """The case of one launch on every rank, in random mode; `target`: what the emulator is, if not `arch`."""
    case = KernelCase(config, world=world, **sizes)
    with Emulator(target or config.arch, world, mode="random") as emulator:
        compiled = compiled_kernel(config, transport)
        exchanges = Workspaces(emulator, [case]).exchanges(case) if transport else (None,)
        case.launch(emulator, compiled, exchanges, num_clusters=2)
        emulator.run()
    return case
