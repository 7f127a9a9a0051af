"""tcgen05.mma: its instruction descriptor, the location of its operands, and the product itself.

Tensor memory (TMEM) of a CTA is `uint32 [128, 512]`; an address is `lane << 16 | column`. D takes one 32-bit
column per element, also if D is f16 (then in the low half). Location of row m of D (PTX ISA 9.7.16.10.5):

- cta_group 1, M 128: row m in lane m
- cta_group 1, M 64:  row m in lane 32 * (m // 16) + m % 16, plus the lane of the D address (0 or 16)
- cta_group 2, M 256: CTA r holds rows 128 r + lane, all N columns
- cta_group 2, M 128: CTA r holds rows 64 r + lane % 64; lanes 0..63 hold columns 0..N/2-1, lanes 64..127
  columns N/2..N-1

A is read from the shared memory (rows split over the CTAs as D's are) or the TMEM of each CTA. B is read from
shared memory: with two CTAs each holds N/2 of its rows at the same descriptor offset.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from cute_emulator.numbers import formats, tensor_cores
from cute_emulator.numbers.arrays import F32, I64
from cute_emulator.units import operands
from cute_emulator.units.block_scale import Scaling
from cute_emulator.units.mma import add
from cute_emulator.units.smem_desc import SmemDescriptor, decode_umma, gather_steps

TMEM_LANES, TMEM_COLUMNS = 128, 512

Tmem = NDArray[np.uint32]
Smem = NDArray[np.uint8]
Cells = tuple[int, int, tuple[int, ...]]
_Any = TypeVar("_Any", bound=np.generic)

_F8F6F4 = {0: "e4m3", 1: "e5m2", 3: "e2m3", 4: "e3m2", 5: "e2m1"}
_OPERAND_TYPES = {
    "f16": {0: "f16", 1: "bf16"},
    "tf32": {2: "tf32"},
    "i8": {0: "u8", 1: "s8"},
    "f8f6f4": _F8F6F4,
    "mxf8f6f4": _F8F6F4,
    "mxf4": {1: "e2m1"},
    "mxf4nvf4": {1: "e2m1"},
}
KINDS = tuple(_OPERAND_TYPES)
"""Kinds of `tcgen05.mma` that are modelled."""
_SHAPES = {(1, 64): 8, (1, 128): 8, (2, 128): 16, (2, 256): 16}  # CTAs and M: step of N
_EXACT_K = 256  # float32 represents the sum of this many products of bytes, 255 * 255 at most, exactly


@dataclass(frozen=True)
class InstructionDescriptor:
    """Decoded 32-bit instruction descriptor (PTX ISA 9.7.16.4.2).

    Attributes:
        m: Rows of D over all CTAs of the group.
        n: Columns of D.
        a_type: Element type of A, as for `formats.widen`.
        b_type: Element type of B.
        d_type: `f32`, `f16` or `s32`.
        a_mn_major: Whether A's rows are contiguous in shared memory (the "transpose" bit).
        b_mn_major: Whether B's rows are contiguous in shared memory.
        negate_a: Whether A is negated.
        negate_b: Whether B is negated.
        packed: Whether a byte holds two 4-bit elements.
        saturate: Whether an integer D saturates.
        scaling: Block scaling of the operands, or `None`.
        k_bytes: Bytes of K that one instruction covers: 32 of all types, or 48 of packed ones on sm_103.
    """

    m: int
    n: int
    a_type: str
    b_type: str
    d_type: str
    a_mn_major: bool
    b_mn_major: bool
    negate_a: bool = False
    negate_b: bool = False
    packed: bool = False
    saturate: bool = False
    scaling: Scaling | None = None
    k_bytes: int = 32

    @property
    def k(self) -> int:
        """Returns the K extent of one instruction, in elements."""
        return self.k_holders * (2 if self.packed else 1)

    @property
    def k_holders(self) -> int:
        """Returns the K extent in elements, or in bytes for packed elements (two in a byte)."""
        return self.k_bytes // formats.ELEMENT_BYTES[self.a_type]


@lru_cache(maxsize=256)
def decode_instruction(descriptor: int, kind: str, cta_group: int, block: int = 0) -> InstructionDescriptor:
    """Decodes an instruction descriptor and checks its shape.

    Args:
        descriptor: The 32-bit register operand.
        kind: `f16`, `tf32`, `i8`, `f8f6f4`, `mxf8f6f4`, `mxf4` or `mxf4nvf4`.
        cta_group: 1 or 2.
        block: Elements of K that share a scale factor, 0 without scale factors.

    Raises:
        ValueError: A reserved value, an illegal shape, or a kind that is not modelled.
    """
    where = f"tcgen05.mma kind::{kind} cta_group::{cta_group}, instruction descriptor {descriptor:#010x}"
    if kind not in _OPERAND_TYPES:
        raise ValueError(f"{where}: this kind is not modelled ({', '.join(_OPERAND_TYPES)} are)")
    if descriptor >> 2 & 1:
        raise ValueError(f"{where}: sparsity is not modelled")
    types, d_code = _OPERAND_TYPES[kind], 1 if block else descriptor >> 4 & 3
    four_bits = kind in ("mxf4", "mxf4nvf4")
    a_code, b_code = descriptor >> 7 & 7, descriptor >> 10 & (3 if four_bits else 7)
    d_types = {"i8": {2: "s32"}, "f16": {0: "f16", 1: "f32"}, "f8f6f4": {0: "f16", 1: "f32"}}.get(
        kind, {1: "f32"}
    )
    if a_code not in types or b_code not in types or d_code not in d_types:
        raise ValueError(f"{where}: reserved types D={d_code} A={a_code} B={b_code}")
    scaling = None
    if block:
        if descriptor >> 3 & 1 or (descriptor >> 31 & 1 and not four_bits):
            raise ValueError(f"{where}: a K of neither sm_100 nor sm_103")
        scale = "ue8m0" if descriptor >> 23 & 1 else "e4m3"
        if scale == "e4m3" and kind != "mxf4nvf4":
            raise ValueError(f"{where}: scale factors of this kind are ue8m0")
        scaling = Scaling(block, scale, descriptor >> 29 & 3, descriptor >> 4 & 3)
        m, shapes = (descriptor >> 27 & 3) << 7, {(1, 128): 8, (2, 128): 16, (2, 256): 16}
    else:
        m, shapes = (descriptor >> 24 & 0x1F) << 4, _SHAPES
    n = (descriptor >> 17 & 0x3F) << 3
    step = shapes.get((cta_group, m))
    if step is None or n % step or not step <= n <= 256:
        raise ValueError(
            f"{where}: no shape M={m} N={n}" + (f"; N is a multiple of {step} up to 256" if step else "")
        )
    bits = [bool(descriptor >> i & 1) for i in (13, 14, 15, 16)]
    if kind == "i8" and (bits[0] or bits[1]):
        raise ValueError(f"{where}: integers are not negated")
    return InstructionDescriptor(
        m=m,
        n=n,
        a_type=types[a_code],
        b_type=types[b_code],
        d_type=d_types[d_code],
        negate_a=bits[0],
        negate_b=bits[1],
        a_mn_major=bits[2],
        b_mn_major=bits[3],
        packed=four_bits,
        saturate=kind == "i8" and bool(descriptor >> 3 & 1),
        scaling=scaling,
        k_bytes=48 if block and descriptor >> 31 & 1 else 32,
    )


@dataclass(frozen=True, eq=False)
class Mma:
    """One decoded `tcgen05.mma`, or several with the same D joined to one of a larger K.

    Attributes:
        shape: Instruction descriptor.
        d: TMEM address of D, the same in every CTA of the group.
        a: Shared-memory descriptor of A, or its TMEM address.
        b: Shared-memory descriptor of B.
        accumulate: Whether D is an input (`enable-input-d`).
        scale_d: Exponent s of `scale-input-d`: D enters as D * 2**-s.
        scales: TMEM addresses of the scale factors of A and of B, or `None`.
        disabled_lanes: `bool [128]` per CTA in order, lanes of D that are not written, or `None`.
        further: Shared-memory descriptors of A and of B in the K steps that follow.
    """

    shape: InstructionDescriptor
    d: int
    a: SmemDescriptor | int
    b: SmemDescriptor
    accumulate: bool
    scale_d: int = 0
    scales: tuple[int, int] | None = None
    disabled_lanes: NDArray[np.bool_] | None = None
    further: tuple[tuple[SmemDescriptor | int, SmemDescriptor], ...] = ()

    def run(self, smem: Sequence[Smem], tmem: Sequence[Tmem], by_instruction: bool = False) -> None:
        """Multiplies and accumulates into D.

        Args:
            smem: Shared memory of the CTAs of the group (one or two), in rank order.
            tmem: Tensor memory of the CTAs; changed in place.
            by_instruction: Whether products are added by the rule of `tensor_cores`, instruction by
                instruction, instead of in NumPy's order.

        Raises:
            IndexError: An operand exceeds shared memory.
            ValueError: D or A exceeds tensor memory, or the combination is not modelled.
        """
        shape, ctas = self.shape, len(smem)
        rows = shape.m // ctas
        lane, column = self.d >> 16, self.d & 0xFFFF
        lanes = (0, 16) if (ctas, rows) == (1, 64) else (0,)
        blocks = 2 if (ctas, rows) == (2, 64) else 1
        columns = shape.n // blocks
        if lane not in lanes or column + columns > TMEM_COLUMNS:
            raise ValueError(
                f"tcgen05.mma: D of M={shape.m} N={shape.n} at tensor memory {self.d:#x} does not fit"
            )
        halves = [self._operand_b(s, shape.n // ctas) for s in smem]
        b: NDArray[np.floating] = halves[0] if ctas == 1 else np.concatenate(halves)
        if shape.d_type == "s32" and b.shape[1] > _EXACT_K:
            b = b.astype(np.float64)
        for cta in range(ctas):
            a: NDArray[np.floating] = self._operand_a(smem[cta], tmem[cta], rows, ctas)
            right = b
            if shape.scaling is not None:
                a, right = self._scaled(shape.scaling, tmem[cta], a, b, blocks)
            with np.errstate(all="ignore"):
                product = a @ right.T
                for block, cells in enumerate(_split_lanes(tmem[cta], lane, rows, ctas)):
                    d = cells[..., column : column + columns]
                    part = product[:, block * columns : (block + 1) * columns].reshape(d.shape)
                    if by_instruction and self._has_rule:
                        values, half = d.view(np.float32), right[block * columns : (block + 1) * columns]
                        old = values.reshape(rows, columns) if self.accumulate else None
                        width = tensor_cores.BLACKWELL[shape.a_type]
                        total = tensor_cores.add_steps(old, a, half, shape.k, width)
                        values[...] = total.reshape(d.shape)
                    elif self.disabled_lanes is None:
                        self._accumulate(d, part)
                    else:
                        off = _split_lanes(self.disabled_lanes[cta][:, None], lane, rows, ctas)[block]
                        new = d.copy()
                        self._accumulate(new, part)
                        np.copyto(d, new, where=~off)

    def smem_reads(self, ctas: int) -> I64:
        """Returns byte addresses of the 16-byte chunks read from each CTA's shared memory, flat."""
        return np.concatenate([tile.chunk_addresses(*form) for tile, form in self.smem_tiles(ctas)])

    def smem_tiles(self, ctas: int) -> list[tuple[SmemDescriptor, tuple[int, int, int, bool]]]:
        """Returns the tiles of B and A in each CTA's shared memory.

        A tile is its descriptor, and rows, k, bytes of an element, whether MN-major.
        """
        shape, extent = self.shape, self.shape.k_holders
        size = formats.ELEMENT_BYTES[shape.b_type]
        tiles = [
            (tile, (shape.n // ctas, k, size, shape.b_mn_major)) for tile, k in self.b.pieces(extent, size)
        ]
        if isinstance(self.a, SmemDescriptor):
            size = formats.ELEMENT_BYTES[shape.a_type]
            tiles += [
                (tile, (shape.m // ctas, k, size, shape.a_mn_major))
                for tile, k in self.a.pieces(extent, size)
            ]
        return tiles

    def scale_cells(self, ctas: int) -> list[Cells]:
        """Returns the cells of the scale factors of A and of B, in the form of `d_cells`."""
        scaling, shape = self.shape.scaling, self.shape
        if scaling is None or self.scales is None:
            return []
        split = 2 if (ctas, shape.m) == (2, 128) else 1
        rows = shape.m // ctas, shape.n // split
        ids = scaling.a, scaling.b
        return [
            (at & 0xFFFF, scaling.columns(r, shape.k, i), (0, 1))
            for at, r, i in zip(self.scales, rows, ids, strict=True)
        ]

    def d_cells(self, ctas: int) -> Cells:
        """Returns the first column, the columns, and the halves of each 32 lanes (0, 1) of D in every CTA."""
        first, rows = self.d & 0xFFFF, self.shape.m // ctas
        halves = ((self.d >> 20) & 1,) if (ctas, rows) == (1, 64) else (0, 1)
        return first, self.shape.n // 2 if (ctas, rows) == (2, 64) else self.shape.n, halves

    def a_cells(self) -> Cells:
        """Returns the cells of A in the form of `d_cells`; no columns if A is in shared memory."""
        if isinstance(self.a, SmemDescriptor):
            return 0, 0, ()
        return self.a & 0xFFFF, self.shape.k_bytes // 4, (0, 1)

    def _operand_b(self, smem: Smem, rows: int) -> F32:
        shape = self.shape
        size = formats.ELEMENT_BYTES[shape.b_type]
        steps = (self.b, *[b for _, b in self.further])
        tile = _gather(smem, steps, rows, shape.k_holders, size, shape.b_mn_major)
        b = operands.from_smem(tile, shape.b_type, shape.packed, shape.b_mn_major)
        return -b if shape.negate_b else b

    def _operand_a(self, smem: Smem, tmem: Tmem, rows: int, ctas: int) -> F32:
        shape = self.shape
        size = formats.ELEMENT_BYTES[shape.a_type]
        if isinstance(self.a, SmemDescriptor):
            steps = (self.a, *[a for a, _ in self.further if isinstance(a, SmemDescriptor)])
            tile = _gather(smem, steps, rows, shape.k_holders, size, shape.a_mn_major)
            a = operands.from_smem(tile, shape.a_type, shape.packed, shape.a_mn_major)
        else:
            words = shape.k_bytes // 4
            lane, column = self.a >> 16, self.a & 0xFFFF
            if (ctas, rows) == (2, 64):
                raise ValueError(
                    "tcgen05.mma with A in tensor memory, cta_group::2 and M=128 is not modelled"
                )
            if lane > (16 if rows == 64 else 0) or column + words > TMEM_COLUMNS:
                raise ValueError(f"tcgen05.mma: A at tensor memory {self.a:#x} does not fit")
            (cells,) = _split_lanes(tmem, lane, rows, ctas)
            cells = np.ascontiguousarray(cells[..., column : column + words]).reshape(rows, words)
            a = operands.from_tmem(cells, shape.a_type, shape.packed)
        return -a if shape.negate_a else a

    def _scaled(
        self, scaling: Scaling, tmem: Tmem, a: NDArray[np.floating], b: NDArray[np.floating], splits: int
    ) -> tuple[NDArray[np.floating], NDArray[np.floating]]:
        """Multiplies A and B by their scale factors; `splits` is 2 if D's lanes split its columns."""
        assert self.scales is not None
        shape, every = self.shape, (0, 1, 2, 3)
        left = scaling.factors(tmem, self.scales[0], a.shape[0], shape.k, scaling.a, every)
        size = 4 // splits
        parts = [every[n * size : (n + 1) * size] for n in range(splits)]
        right = [
            scaling.factors(tmem, self.scales[1], shape.n // splits, shape.k, scaling.b, q) for q in parts
        ]
        return scaling.apply(a, left), scaling.apply(b, np.concatenate(right))

    @property
    def _has_rule(self) -> bool:
        """Returns whether `tensor_cores` has a rule for the types, and no part of D is scaled or disabled."""
        plain = self.disabled_lanes is None and not self.scale_d
        return plain and self.shape.d_type == "f32" and self.shape.a_type in tensor_cores.BLACKWELL

    def _accumulate(self, d: Tmem, product: NDArray[np.floating]) -> None:
        if self.shape.d_type == "s32":
            old = d.view(np.int32) if self.accumulate else None
            d[...] = add(product, old, "s32", self.shape.saturate).view(np.uint32)
            return
        if self.shape.d_type == "f16":
            before = formats.f16_to_f32(d) if self.accumulate else np.float32(0)
            d[...] = formats.f32_to_f16((product + np.ldexp(before, -self.scale_d)).astype(np.float32))
            return
        values = d.view(np.float32)
        if not self.accumulate:
            values[...] = product
        elif self.scale_d:
            values[...] = product + np.ldexp(values, -self.scale_d)
        else:
            values += product


@lru_cache(maxsize=1024)
def decode_mma(
    kind: str,
    ctas: int,
    d: int,
    a: int,
    a_in_tmem: bool,
    b: int,
    descriptor: int,
    accumulate: bool,
    scale_d: int,
    block: int = 0,
    scales: tuple[int, int] | None = None,
    disabled: tuple[int, ...] = (),
) -> Mma:
    """Decodes a `tcgen05.mma` from its operands, cached: a mainloop repeats a few instructions.

    `disabled` contains the words of the disable-output-lane vector.

    Raises:
        ValueError: A descriptor is reserved or not modelled.
    """
    shape = decode_instruction(descriptor, kind, ctas, block)
    left = a if a_in_tmem else decode_umma(a)
    off: NDArray[np.bool_] | None = None
    if any(disabled):
        words = np.array(disabled, np.uint32).view(np.uint8)
        off = np.unpackbits(words, bitorder="little").reshape(ctas, TMEM_LANES).astype(np.bool_)
    return Mma(shape, d, left, decode_umma(b), accumulate, scale_d, scales, off)


@lru_cache(maxsize=1024)
def continues(mma: Mma, later: Mma) -> bool:
    """Returns whether a later product only adds K steps, so that joining changes only sums in `float32`.

    False if D is rounded to f16 between them, or if A may occupy cells of D.
    """
    a, b = later.a, later.b
    return (
        mma.d == later.d
        and mma.shape == later.shape
        and later.accumulate
        and not later.scale_d
        and mma.disabled_lanes is None
        and later.disabled_lanes is None
        and mma.scales is None
        and mma.shape.d_type in ("f32", "s32")
        and not mma.shape.saturate
        and isinstance(a, SmemDescriptor)
        and isinstance(mma.a, SmemDescriptor)
        and a.differs_in_start(mma.a)
        and b.differs_in_start(mma.b)
    )


@lru_cache(maxsize=1024)
def join(run: tuple[Mma, ...]) -> Mma:
    """Joins a product and those that continue it."""
    return replace(run[0], further=tuple([(mma.a, mma.b) for mma in run[1:]]))


def _gather(
    smem: Smem, steps: tuple[SmemDescriptor, ...], rows: int, k: int, element_bytes: int, mn_major: bool
) -> NDArray[np.unsignedinteger]:
    """Gathers steps as `gather_steps` does, also tiles in two pieces."""
    if steps[0].following is None:
        return gather_steps(smem, steps, rows, k, element_bytes, mn_major)
    pieces = [piece for step in steps for piece in step.pieces(k, element_bytes)]
    return np.concatenate([tile.gather(smem, rows, n, element_bytes, mn_major) for tile, n in pieces], axis=1)


def _split_lanes(cells: NDArray[_Any], lane: int, rows: int, ctas: int) -> list[NDArray[_Any]]:
    """Returns views of the lanes that hold D's rows, in row order: one view per block of columns."""
    if rows == TMEM_LANES:
        return [cells]
    if ctas == 2:
        return [cells[:64], cells[64:]]
    return [cells.reshape(4, 32, -1)[:, lane : lane + 16]]
