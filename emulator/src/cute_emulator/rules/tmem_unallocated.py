"""The rule `tmem-unallocated`."""

from __future__ import annotations

from typing import Any

import numpy as np

from cute_emulator.machine.events import TensorMemoryUsed
from cute_emulator.rules.ptx import SM100, umma
from cute_emulator.rules.rule import Pair, Row, Rule

KIND = "tmem-unallocated"


def _look(checks: Any, event: TensorMemoryUsed) -> None:
    for cta in event.ctas:
        for first, columns, _ in event.cells:
            here = slice(first, first + columns)
            missing = np.flatnonzero((cta.tmem_owner[here] == 0) & (cta.tmem_freed[here, 0] == 0))
            if len(missing):
                checks.report.add(
                    KIND,
                    f"no tcgen05.alloc before: the {event.what} of line {checks.report.place(event.line)} of "
                    f"{event.group.warp} uses columns {first} to {first + columns - 1} of {cta}, of which "
                    f"{len(missing)}, from {first + int(missing[0])} on, are not allocated to it",
                    event.line,
                )


def _pairs() -> tuple[Pair, ...]:
    product = "tcgen05.mma.cta_group::1.kind::f16 [|D|], %d20, %d20, %r21, %p14;"
    copied = "tcgen05.cp.cta_group::1.|S| [|D|], %d20;"
    cases = {"a product into columns that nobody allocated": (product, "%r40", "%r30")}
    cases["a product into columns beyond its allocation"] = (product, "%r41", "%r30")
    for shape in ("128x256b", "4x256b", "128x128b", "32x128b.warpx4", "64x128b.warpx2::02_13"):
        text = copied.replace("|S|", shape)
        cases[f"tcgen05.cp.{shape} into columns that nobody allocated"] = (text, "%r40", "%r30")
        cases[f"tcgen05.cp.{shape} into columns beyond its allocation"] = (text, "%r42", "%r30")
    at = "add.s32 %r40, %r30, 64; add.s32 %r41, %r30, 30; add.s32 %r42, %r30, 30;"
    return tuple(
        Pair(name, umma(at, text), {"|D|": wrong}, {"|D|": right}, SM100)
        for name, (text, wrong, right) in cases.items()
    )


RULE = Rule(
    KIND,
    judges=r"tcgen05\.(mma|cp)",
    rows=(
        Row(
            "A product and a `tcgen05.cp` use columns of tensor memory that are allocated to their "
            "CTA, in both "
            "CTAs of a pair (9.7.16.7)",
            suite=KIND,
        ),
    ),
    on={TensorMemoryUsed: _look},
    pairs=_pairs(),
)
