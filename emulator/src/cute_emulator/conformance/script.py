"""Scripts of a host with streams: Python text with three tensors and a copy kernel, and their execution."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import Any

import torch
from cuda.bindings import runtime

from cute_emulator.conformance.kernel import options
from cute_emulator.host.emulator import Emulator
from cute_emulator.host.script import one_device

COPY = """
.version 8.6
.target sm_90a
.address_size 64
.visible .entry copy(.param .u64 out, .param .u64 in)
{
    .reg .b64 %d<8>; .reg .b32 %r<4>;
    ld.param.u64 %d1, [out]; ld.param.u64 %d2, [in]; mov.u32 %r1, %tid.x; mul.wide.u32 %d3, %r1, 4;
    add.s64 %d1, %d1, %d3; add.s64 %d2, %d2, %d3; ld.global.b32 %r2, [%d2]; st.global.b32 [%d1], %r2;
    ret;
}
"""
N = 64
"""Elements of each tensor."""


@dataclass(frozen=True)
class Script:
    """One version of a case.

    Attributes:
        name: File name in findings, without its suffix.
        text: Python text. Its globals are `torch`, `runtime` (CUDA's), `N`, tensors `x`, `y`, `z` of N
            floats on the device, and a stream `side`. `copy(out, source, stream=None)` launches a kernel,
            `device(fill)` returns a new tensor, `captured(source, out)` a graph of one copy.
    """

    name: str
    text: str

    def run(
        self, mode: str = "immediate", seed: int = 0, shuffled: bool = False, strict: bool = False
    ) -> Emulator:
        """Runs it once, on one rank whose host is a party."""

        def copy(out: Any, source: Any, stream: Any = None) -> None:
            handle = (stream or torch.cuda.current_stream()).cuda_stream
            emulator.launch(COPY, "copy", (1, 1, 1), (N, 1, 1), [out, source], stream=handle)

        def device(fill: float = 1.0) -> Any:
            return torch.full((N,), fill, device="cuda")

        def captured(source: Any, out: Any) -> Any:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                copy(out, source)
            return graph

        emulator = Emulator("sm_90a", collect=True, **options(mode, seed, shuffled, strict))
        with emulator, one_device(emulator):
            names = {
                "torch": torch, "runtime": runtime, "N": N, "side": torch.cuda.Stream(), "copy": copy,
                "device": device, "captured": captured,
                **{name: device(fill) for name, fill in (("x", 1.0), ("y", 2.0), ("z", 3.0))},
            }  # fmt: skip
            torch.cuda.synchronize()
            exec(compile(f"def script():\n{indented(self.text)}\nscript()", f"{self.name}.py", "exec"), names)
        return emulator


def indented(text: str) -> str:
    """Returns the lines of a text, indented."""
    return textwrap.indent(textwrap.dedent(text).strip(), "    ")
