"""Model of an epilogue's time: in the kernel, and after the op.

- **Kernel.** Inputs and outputs with a value for each element are read and written at the memory's rate.
  Those of an SM's last tile follow its sums, so nothing hides them. Functions of the special function units
  take time on each SM. Row sums and maxima take a reduction for each element, and a handover between CTAs;
  a function of complete rows takes one more.
  In sums over ranks of 8-bit operands, less of all this is hidden (`Machine.exposed_visits`).
  Scales of an 8-bit result's blocks take a maximum and a product.
- **One pass** after the op (`backends.triton_kernels.epilogue_rows`, or what a compiler makes): a launch, and
  each tensor once. A norm waits for its rows' sums, which takes as long as a launch (`h200x2-norms.json`,
  `h200x2-norms-after.json`).
- **Partial sums.** The kernel visits a rank's full product. Only the backend `sequential` runs operations,
  before the sum over the ranks: each by itself, on float32 tensors, with a launch, its operands and its
  result. Dtypes are converted before and after. Epilogues of `TORCH_OPERATIONS` are these few operations,
  without conversions.

Values for rows, columns and the full result take no time. Measured on two H200
(`h200x2-epilogues.json`, `h200x2-scaled-epilogues.json`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..config.gemm_config import DTYPE_BYTES
from ..epilogues import Epilogue, Value
from ..epilogues.library import BINARY, TORCH_OPERATIONS
from ..spec import PATTERNS
from ..spec.sharding import ceil_div
from .machine import Machine
from .space import lower_small_rs_to_ar, pattern_of
from .time_model import Facts, collective_seconds

WIDE = 4
"""Bytes of an element of the tensors on which torch runs the function."""

TILE = 128 * 128
"""Elements of an SM's last tile."""

WIDE_BLOCKS = 0.27
"""Ratio of the time of an 8-bit result's blocks with 16-bit operands to `Machine.block_value`, measured with
8-bit ones: longer products hide more of it. Mean of three shapes (`h200x2-result-blocks.json`), of which the
one whose gather takes longest hides most."""

SPECIAL = {"exp": 1, "sqrt": 1, "rsqrt": 1, "reciprocal": 1, "sigmoid": 2, "div": 1, "tanh": 1, "erf": 2}
"""Instructions of the special function units in an operation of `device.values`; `erf` branches between two
polynomials."""


class EpilogueTime(NamedTuple):
    """Predicted seconds of an epilogue, in addition to the op.

    Attributes:
        kernel: In the fused kernel.
        operations: By torch's operations, one after the other.
        one_pass: By one pass over memory after the op, as a compiler or a kernel for rows makes it.
        is_partial: Whether the sums are partial: the operations then precede the sum over the ranks.
    """

    kernel: float
    operations: float
    one_pass: float
    is_partial: bool = False

    def added(self, seconds: Mapping[str, float], kernels: Sequence[str]) -> dict[str, float]:
        """Returns the times of backends with the epilogue; those not in `kernels` take one pass more.

        With partial sums, backends other than "fused" take the operations.
        """
        if self.is_partial:
            kernel, others = self.kernel, self.operations
            return {name: time + (kernel if name == "fused" else others) for name, time in seconds.items()}
        least = min(self.kernel, self.one_pass)
        return {name: time + (least if name in kernels else self.one_pass) for name, time in seconds.items()}

    def why_after(self) -> str | None:
        """Returns the reason the epilogue is applied after a fused op; None if the kernel is faster."""
        if self.is_partial or self.one_pass >= self.kernel:
            return None
        after, kernel = self.one_pass * 1e6, self.kernel * 1e6
        return f"which takes {after:.1f} us, and the kernel {kernel:.1f} us (predicted)"

    def __str__(self) -> str:
        """Returns the times in microseconds, for `explain` and `plan`."""
        kernel, operations, one_pass = (f"{seconds * 1e6:.1f}" for seconds in self[:3])
        others = f"{one_pass} us by one pass over memory after the op"
        if self.is_partial:
            others = f"{operations} us by torch's operations before the sum over the ranks"
        return f"predicted in addition to the op: {kernel} us in the kernel, {others}"


def epilogue_time(
    epilogue: Epilogue, sizes: Sequence[int], facts: Facts, machine: Machine, arch: str, sms: int
) -> EpilogueTime:
    """Returns the times of an epilogue.

    Args:
        epilogue: Epilogue of the call.
        sizes: Bytes of an element of each input.
        facts: Facts of the call, the same on all ranks.
        machine: Constants.
        arch: Target architecture.
        sms: Number of SMs that every rank may use.
    """
    (m, n, _), is_partial = facts.extents, epilogue.is_partial(facts.spec.sums)
    rows, columns = facts.spec.result(m, n, lambda extent: ceil_div(extent, facts.world))
    if is_partial:
        rows = m
    elements = rows * columns // (2 if epilogue.pairs else 1)
    size = max(DTYPE_BYTES[facts.dtype], 2)
    tally = _tally(epilogue, sizes, size)
    gathered = sum(kind == "gathered_rows" for _, kind in epilogue.inputs)
    moved = gathered * collective_seconds(
        "all_gather", WIDE * m * (facts.world - 1) / facts.world, facts.world, machine
    )
    launches = 1 + (epilogue.then is not None)
    one_pass = launches * machine.launch + elements * tally.least / machine.memory_rate
    operations = tally.launches * machine.launch + elements * tally.bytes / machine.memory_rate

    in_kernel = elements * (1.0 if is_partial else _share(facts, machine, arch, sms))
    of_sm = in_kernel / sms
    last = min(of_sm, TILE) / TILE
    reductions = sum(kind != "element" for _, kind in epilogue.outputs)
    visits = in_kernel * tally.extra / machine.memory_rate + reductions * of_sm * machine.row_value
    if facts.spec.sums and DTYPE_BYTES[facts.dtype] == 1:
        visits *= machine.exposed_visits  # includes the last tile's
    elif tally.extra:
        visits += last * machine.last_inputs
    handovers = reductions + (epilogue.then is not None)  # rows are awaited once, whatever their values
    kernel = visits + of_sm * tally.special * machine.special + handovers * machine.row_handover
    if epilogue.block:
        kernel += of_sm * machine.block_value * (1.0 if DTYPE_BYTES[facts.dtype] == 1 else WIDE_BLOCKS)
    return EpilogueTime(moved + kernel, moved + max(operations, one_pass), moved + one_pass, is_partial)


def _share(facts: Facts, machine: Machine, arch: str, sms: int) -> float:
    """Returns the ratio of the elements that a rank's kernel visits to those of its result."""
    lowered = lower_small_rs_to_ar(facts, machine, arch, sms)
    if lowered.op != facts.op:  # each rank sums all rows
        return facts.world
    if facts.spec.out is None and facts.world > 1:
        is_cut = facts.spec.gathers_output or PATTERNS[pattern_of(facts, machine, arch, sms)].returns
        return 1 / facts.world if is_cut else 1.0
    return 1.0


@dataclass
class _Tally:
    """Work of an epilogue on tensors and in a kernel, for each element of the result.

    Attributes:
        launches: Number of torch's operations.
        bytes: Bytes that they read and write.
        special: Instructions of the special function units.
        least: Bytes of one pass that reads sums and inputs and writes the result and the outputs.
        extra: Bytes that a kernel reads and writes in addition to the result.
    """

    launches: int = 0
    bytes: float = 0.0
    special: int = 0
    least: float = 0.0
    extra: float = 0.0

    def step(self, *sizes: int) -> None:
        """Adds an operation that reads and writes these bytes for each element."""
        self.launches += 1
        self.bytes += sum(sizes)


@dataclass(frozen=True)
class _Counted(Value):
    """Placeholder value whose operations are added to a tally.

    Attributes:
        tally: Tally of the epilogue.
        is_full: Whether there is a value for each element.
    """

    tally: _Tally
    is_full: bool

    def unary(self, name: str) -> Value:
        return self._after(name, self)

    def binary(self, name: str, left: Any, right: Any) -> Value:
        return self._after(name, *(one for one in (left, right) if isinstance(one, _Counted)))

    def _after(self, name: str, *operands: _Counted) -> Value:
        full = sum(operand.is_full for operand in operands)
        self.tally.step(*[WIDE] * (full + 1 if full else 0))
        self.tally.special += SPECIAL.get(name, 0) if full else 0
        return _Counted(self.tally, full > 0)


def _tally(epilogue: Epilogue, sizes: Sequence[int], size: int) -> _Tally:
    """Returns the work of an epilogue.

    Args:
        epilogue: Epilogue of the call.
        sizes: Bytes of an element of each input.
        size: Bytes of an element of sums and results.
    """
    tally, sums = _Tally(), 2 if epilogue.pairs else 1
    result = size if epilogue.result is None else DTYPE_BYTES[epilogue.result]
    tally.least = sums * size + result
    for _ in range(sums):
        if epilogue.pairs:  # torch copies the columns of a pair
            tally.step(size, size)
        if size != WIDE:
            tally.step(size, WIDE)
    for (_, kind), nbytes in zip(epilogue.inputs, sizes, strict=True):
        is_full = kind == "element"
        if nbytes != WIDE:
            tally.step(*((nbytes, WIDE) if is_full else ()))
        tally.least += nbytes * is_full
        tally.extra += nbytes * is_full
    inputs = [_Counted(tally, kind == "element") for _, kind in epilogue.inputs]
    epilogue.apply([_Counted(tally, True)] * sums, inputs)
    kinds: list[str] = [kind for _, kind in epilogue.outputs]
    if epilogue.then is not None:
        epilogue.finish(_Counted(tally, True), [_Counted(tally, False)] * len(kinds), inputs)
        kinds += [kind for _, kind in epilogue.returned]
    if epilogue.block:  # magnitudes, maxima, scaled values; the scales take no time
        tally.step(WIDE, WIDE)
        tally.step(WIDE)
        tally.step(WIDE, WIDE)
    for stored_kind, nbytes in zip(("element", *kinds), (result, *[size] * len(kinds)), strict=True):
        if stored_kind != "element":
            tally.step(WIDE)
        elif nbytes != WIDE:
            tally.step(WIDE, nbytes)
    stored = size * kinds.count("element")
    tally.least += stored
    tally.extra += stored
    if (operations := TORCH_OPERATIONS.get(epilogue.key)) is not None:
        _count_by_torch(tally, operations, [(size, True)] * (sums - 1) + [
            (nbytes, kind == "element") for (_, kind), nbytes in zip(epilogue.inputs, sizes, strict=True)
        ], size)  # fmt: skip
    return tally


def _count_by_torch(
    tally: _Tally, operations: Sequence[str], others: list[tuple[int, bool]], size: int
) -> None:
    """Replaces launches and bytes of a tally by those of `TORCH_OPERATIONS`.

    Args:
        tally: Tally to change.
        operations: Names of the operations.
        others: For each operand after the first sum, bytes of an element, and whether it has all elements.
        size: Bytes of an element of sums and results.
    """
    tally.launches, tally.bytes, result = 0, 0.0, size
    for name in operations:
        read = [result]
        if name in BINARY:
            nbytes, is_full = others.pop(0)
            read += [nbytes] * is_full
            result = max(result, nbytes)  # dtypes are promoted
        tally.step(*read, result)
    if result != size:
        tally.step(result, size)
