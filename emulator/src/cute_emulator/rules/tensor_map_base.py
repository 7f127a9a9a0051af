"""The end of a run: a tensor map that is not aligned."""

from __future__ import annotations

from typing import Any

from cute_emulator.rules import ptx
from cute_emulator.rules.rule import Pair, Row, Rule

KIND = "tensor-map-base"


def _pairs() -> list[Pair]:
    """Returns tensor maps whose base is no multiple of 16 bytes."""

    def shifted(by: int) -> Any:
        def make(address: int) -> bytes:
            raw = bytearray(ptx.rows_map(address))
            raw[:8] = (address + by).to_bytes(8, "little")
            return bytes(raw)

        return make

    text = ptx.INIT + f"{ptx.STORE} {ptx.SHARED} bar.sync 0; {ptx.TENSOR_OUT}"
    return [
        Pair(f"a tensor map that begins {by} bytes after a multiple of 16", text, {}, {},
             {"shape": ptx.TWO, "tensor_map": shifted(16)}, kinds="EmulatorError",
             broken_kernel={"tensor_map": shifted(by)})
        for by in (2, 4, 8)
    ]  # fmt: skip


RULE = Rule(
    KIND,
    judges="",
    rows=(
        Row(
            "A tensor map begins at a multiple of 16 bytes; its box and its address in shared memory are "
            "aligned",
            suite="tensor-map base",
        ),
    ),
    pairs=tuple(_pairs()),
    ends="error",
)
