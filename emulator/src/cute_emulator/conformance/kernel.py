"""Hand-written kernels: PTX text, its memory and launches, and their execution on the machine."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from cute_emulator.errors import EmulatorError
from cute_emulator.execution.launch import Launch, Machine
from cute_emulator.execution.scheduler import Schedule
from cute_emulator.rules import CHECKS, OPTIONAL_CHECKS, STRICT_CHECKS

if TYPE_CHECKING:
    from cute_emulator.conformance.script import Script

REGISTERS = (
    ".reg .pred %p<32>; .reg .b16 %h<32>; .reg .b32 %r<64>; .reg .b64 %d<32>; "
    ".reg .f32 %f<32>; .reg .f64 %g<16>;"
)
PRELUDE = """
mov.u32 %r0, %tid.x; shr.u32 %r1, %r0, 5; and.b32 %r2, %r0, 31; shl.b32 %r3, %r0, 2; cvt.u64.u32 %d9, %r3;
add.s64 %d10, %d0, %d9; add.s64 %d11, %d1, %d9; add.s64 %d12, %d2, %d9;
mov.b32 %r10, buf; mov.b32 %r11, bar; add.s32 %r12, %r10, %r3; mov.u32 %r13, %ctaid.x;
cvt.u32.u64 %r14, %d4;
setp.eq.b32 %p0, %r0, 0; setp.eq.b32 %p1, %r1, 0; setp.eq.b32 %p2, %r1, 1; setp.eq.b32 %p3, %r2, 0;
setp.eq.b32 %p4, %r13, 0; setp.eq.b32 %p5, %r14, 0;
"""
"""First instructions of every kernel of a case.

%d0, %d1, %d2: data, output and flags in global memory; %d3: the tensor map; %d4 and %r14: the rank. %d10 to
%d12: this thread's word of the first three. %r0 to %r2: thread, warp, lane; %r10, %r12: `buf` and the
thread's word of it; %r11: `bar`; %r13: CTA. %p0: thread 0; %p1, %p2: warp 0, 1; %p3: lane 0; %p4: CTA 0; %p5:
rank 0.
"""
SMEM = ".shared .align 1024 .b8 buf[{buf}]; .shared .align 8 .b64 bar; .shared .align 8 .b64 bar2; "
SMEM += ".shared .align 4 .b32 slot;"
WORDS = 2048
"""Words of each array in global memory."""


def module(body: str, nparams: int, smem: str = "", target: str = "sm_100a", head: str = "") -> str:
    """Returns a module with one entry `k`, whose 64-bit parameters are loaded into %d0, %d1, ..."""
    params = ", ".join(f".param .u64 k_{n}" for n in range(nparams))
    loads = "".join(f"ld.param.u64 %d{n}, [k_{n}];\n" for n in range(nparams))
    directives, head = (head, "") if head.startswith((".max", ".req")) else ("", head)
    return (
        f".version 8.8\n.target {target}\n.address_size 64\n{head}\n"
        f".visible .entry k({params}) {directives}\n{{\n{REGISTERS}\n{smem}\n{loads}{body}\nret;\n}}\n"
    )


def aligned(count: int, dtype: Any = np.uint32, fill: Any = 0) -> np.ndarray:
    """Returns an array that starts at a multiple of 128 bytes."""
    size = count * np.dtype(dtype).itemsize
    raw = np.empty(size + 128, np.uint8)
    start = -raw.ctypes.data % 128
    out = raw[start : start + size].view(dtype)
    out[:] = fill
    return out


def launch(ptx: str, args: list[Any], **shape: Any) -> Launch:
    """Returns a launch of `k` whose parameters are arrays (their addresses) or ints."""
    values = [a.ctypes.data if isinstance(a, np.ndarray) else a for a in args]
    params = tuple(struct.pack("<Q", v & (1 << 64) - 1) for v in values)
    shape = {"grid": (1, 1, 1), "block": (32, 1, 1), **shape}
    return Launch(ptx, "k", params=params, **shape)


def options(mode: str, seed: int, shuffled: bool, strict: bool) -> dict[str, Any]:
    """Returns the arguments of a machine for one run of a case."""
    schedule = Schedule("random", lanes=True, grids="random") if shuffled else Schedule()
    checks = CHECKS + STRICT_CHECKS + OPTIONAL_CHECKS if strict else CHECKS
    return {"mode": mode, "seed": seed, "schedule": schedule, "checks": checks}


@dataclass(frozen=True)
class Kernel:
    """One version of a case.

    Attributes:
        bodies: PTX after the prelude, one for each launch of the stream, in order.
        shape: Launch shape, in the names of `Launch`. For launches after the first, `programmatic` is taken
            from `dependent`.
        dependent: Whether each launch is a programmatic dependent launch.
        ranks: Number of ranks that run the same launches; the memory is the last rank's.
        buf: Bytes of `buf` in shared memory.
        options: Options of the machine.
        head: Directives of the entry, such as `.maxnreg 64`.
        arch: Architecture.
        tensor_map: Function of the address of the output that returns the 128 bytes of the tensor map.
        multicast: Whether %d2 is a multicast address, of the output and a copy of it on another rank.
    """

    bodies: tuple[str, ...]
    shape: Mapping[str, Any] = field(default_factory=dict)
    dependent: tuple[bool, ...] = ()
    ranks: int = 1
    buf: int = 4096
    options: Mapping[str, Any] = field(default_factory=dict)
    head: str = ""
    arch: str = "sm_100a"
    tensor_map: Any = None
    multicast: bool = False

    def ptx(self, number: int = 0) -> str:
        """Returns the PTX text of one launch."""
        return module(
            PRELUDE + self.bodies[number], 5, SMEM.format(buf=self.buf), target=self.arch, head=self.head
        )

    def run(
        self, mode: str = "immediate", seed: int = 0, shuffled: bool = False, strict: bool = False
    ) -> Machine:
        """Runs the launches once.

        Raises:
            EmulatorError: A fault or a deadlock ended the run.
        """
        m = Machine(self.arch, self.ranks, **options(mode, seed, shuffled, strict), **self.options)
        data, out, flags, tmap = (aligned(n) for n in (WORDS, WORDS, WORDS, 32))
        data[:] = np.arange(WORDS)
        kind = "symmetric" if self.ranks > 1 else "tensor"
        arrays = {"data": data, "out": out, "flags": flags, "map": tmap}
        if self.multicast:
            arrays["copy"], named = aligned(WORDS), arrays.pop("flags")
            copies = [arrays[name].ctypes.data for name in ("copy", "out")]
            m.memory.register_multicast(named.ctypes.data, named.nbytes, copies)
        for name, array in arrays.items():
            rank = 0 if name == "copy" else self.ranks - 1
            m.memory.register(array.ctypes.data, array.nbytes, rank, name, kind)
        if self.tensor_map is not None:
            tmap.view(np.uint8)[:] = np.frombuffer(self.tensor_map(out.ctypes.data), np.uint8)
        for number in range(len(self.bodies)):
            for rank in range(self.ranks):
                one = launch(self.ptx(number), [data, out, flags, tmap, rank], **self.shape)
                later = number < len(self.dependent) and self.dependent[number]
                m.submit(replace(one, rank=rank, programmatic=later))
        m.run()
        return m


@dataclass(frozen=True)
class Case:
    """A bug and its fixed twin.

    Attributes:
        name: Description of the bug, unique.
        rule: Name of the rule on the page of rules.
        kinds: Kinds of findings, or names of errors that end a run; one of them must occur.
        broken: Kernel, or script of the host, with the bug.
        fixed: Kernel or script without the bug.
        strict: Whether only checks that are not enabled by default detect the bug.
    """

    name: str
    rule: str
    kinds: tuple[str, ...]
    broken: Kernel | Script
    fixed: Kernel | Script
    strict: bool = False


RUNS: tuple[dict[str, Any], ...] = (
    {"mode": "immediate"},
    {"mode": "lazy"},
    {"mode": "random", "seed": 1, "shuffled": True},
)
"""Settings of each kernel's runs: the default first, then those of `check`."""


def findings(
    kernel: Kernel | Script, strict: bool = False, runs: Iterable[Mapping[str, Any]] = RUNS
) -> list[str]:
    """Returns the sorted kinds of findings in some runs of a kernel or script, errors by name."""
    kinds = set()
    for setting in runs:
        try:
            machine = kernel.run(**setting, strict=strict)
        except EmulatorError as error:
            kinds.add(type(error).__name__)
        else:
            kinds |= {finding.kind for finding in machine.report.findings}
    return sorted(kinds)
