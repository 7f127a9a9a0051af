"""Runs hand-written PTX on the machine, with NumPy arrays as its memory."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from overlap_gemm.emulator.run.launch import Launch, Machine

REGISTERS = (
    ".reg .pred %p<32>; .reg .b16 %h<32>; .reg .b32 %r<64>; .reg .b64 %d<32>; "
    ".reg .f32 %f<32>; .reg .f64 %g<16>;"
)


def module(body: str, nparams: int, smem: str = "", target: str = "sm_100a", head: str = "") -> str:
    """A module with one entry `k`, whose 64-bit parameters are loaded into %d0, %d1, .."""
    params = ", ".join(f".param .u64 k_{n}" for n in range(nparams))
    loads = "".join(f"ld.param.u64 %d{n}, [k_{n}];\n" for n in range(nparams))
    return (
        f".version 8.8\n.target {target}\n.address_size 64\n{head}\n"
        f".visible .entry k({params})\n{{\n{REGISTERS}\n{smem}\n{loads}{body}\nret;\n}}\n"
    )


def aligned(count: int, dtype: Any = np.uint32, fill: Any = 0) -> np.ndarray:
    """An array that starts at a multiple of 128 bytes."""
    size = count * np.dtype(dtype).itemsize
    raw = np.empty(size + 128, np.uint8)
    start = -raw.ctypes.data % 128
    out = raw[start : start + size].view(dtype)
    out[:] = fill
    return out


def machine(arrays: list[Any], **options: Any) -> Machine:
    """A machine that knows some arrays."""
    m = Machine(options.pop("arch", "sm_100a"), **options)
    for n, a in enumerate({a.ctypes.data: a for a in arrays}.values()):
        m.memory.register(a.ctypes.data, a.nbytes, name=f"array {n}")
    return m


def launch(ptx: str, args: list[Any], **shape: Any) -> Launch:
    """A launch of `k` whose parameters are arrays (their addresses) or ints."""
    values = [a.ctypes.data if isinstance(a, np.ndarray) else a for a in args]
    params = tuple(struct.pack("<Q", v & (1 << 64) - 1) for v in values)
    shape = {"grid": (1, 1, 1), "block": (32, 1, 1), **shape}
    return Launch(ptx, "k", params=params, **shape)


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
