"""The end of a run: a TMA copy that begins where in a row none can."""

from __future__ import annotations

from cute_emulator.rules import ptx
from cute_emulator.rules.rule import Pair, Row, Rule, pair

KIND = "tensor-copy-start"


def _pairs() -> list[Pair]:
    """Returns tiled copies that begin in their row where none does (measured; not reductions)."""
    copies = {
        "load": f"{ptx.INIT} {ptx.TENSOR_IN} {ptx.AWAIT}",
        "store": f"{ptx.INIT} {ptx.STORE} {ptx.SHARED} bar.sync 0; {ptx.TENSOR_OUT}",
        "reduction": f"{ptx.INIT} {ptx.STORE} {ptx.SHARED} bar.sync 0; {ptx.TENSOR_REDUCE}",
    }
    starts = (("load", 1, 4), ("load", -2, -4), ("store", 2, 4), ("store", -4, 0),
              ("reduction", 1, 4), ("reduction", -4, 0))  # fmt: skip
    return [
        pair(f"a TMA {what} that begins at byte {4 * wrong} of a row", "tensor-copy start", "EmulatorError",
             copies[what].replace("%r20, 0;", "%r20, |C|;"), {"|C|": str(wrong)}, {"|C|": str(right)},
             shape=ptx.TWO, arch="sm_90a", tensor_map=ptx.rows_map)
        for what, wrong, right in starts
    ]  # fmt: skip


RULE = Rule(
    KIND,
    judges="",
    rows=(
        Row(
            "The innermost coordinate of a tiled TMA copy is a multiple of 16 bytes, and not negative "
            "if it writes global memory. Measured on one H200; not in the ISA (below)",
            suite="tensor-copy start",
        ),
    ),
    pairs=tuple(_pairs()),
    ends="error",
)
