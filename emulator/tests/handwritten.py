"""Runs hand-written PTX on the machine, with NumPy arrays as its memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from cute_emulator.conformance.kernel import REGISTERS, aligned, launch, module
from cute_emulator.execution.launch import Machine

__all__ = ["LANE_OUT", "REGISTERS", "aligned", "launch", "machine", "module", "per_lane", "run"]


def machine(arrays: list[Any], **options: Any) -> Machine:
    """A machine that knows some arrays."""
    m = Machine(options.pop("arch", "sm_100a"), **options)
    for n, a in enumerate({a.ctypes.data: a for a in arrays}.values()):
        m.memory.register(a.ctypes.data, a.nbytes, name=f"array {n}")
    return m


def run(body: str, args: list[Any], smem: str = "", head: str = "", **options: Any) -> Machine:
    """Compiles, launches and runs; options of the launch and of the machine may be mixed."""
    shape = {k: options.pop(k) for k in ("grid", "block", "cluster", "dynamic_smem") if k in options}
    m = machine([a for a in args if isinstance(a, np.ndarray)], **options)
    m.submit(launch(module(body, len(args), smem, head=head), args, **shape))
    m.run()
    return m


LANE_OUT = """
mov.u32 %r63, %tid.x;
mul.wide.u32 %d31, %r63, {size};
add.s64 %d30, %d0, %d31;
"""


def per_lane(body: str, inputs: list[np.ndarray], dtype: Any, result: str, kind: str) -> np.ndarray:
    """Runs `body` on one warp: input n of each lane arrives in %r{n} (or %d{10+n}, %h{n}), by its size.

    Returns:
        `dtype [32]`: the register `result` of each lane, stored as `.kind`.
    """
    out = np.zeros(32, dtype)
    text = "mov.u32 %r63, %tid.x;\n"
    for n, a in enumerate(inputs):
        register = {2: f"%h{n}", 4: f"%r{n}", 8: f"%d{10 + n}"}[a.itemsize]
        text += f"mul.wide.u32 %d31, %r63, {a.itemsize};\nadd.s64 %d30, %d{n + 1}, %d31;\n"
        text += f"ld.global.b{8 * a.itemsize} {register}, [%d30];\n"
    text += body + LANE_OUT.format(size=out.itemsize) + f"st.global.{kind} [%d30], {result};\n"
    run(text, [out, *inputs])
    return out
