"""The rule `tmem-leak`."""

from __future__ import annotations

from typing import Any

import numpy as np

from cute_emulator.machine.events import CtaEnded
from cute_emulator.rules import ptx
from cute_emulator.rules.rule import Pair, Row, Rule

KIND = "tmem-leak"


def _look(checks: Any, event: CtaEnded) -> None:
    cta = event.cta
    if cta.tmem_owner.any():
        columns = int(np.count_nonzero(cta.tmem_owner))
        checks.report.add(
            KIND,
            f"{cta} exits with {columns} columns of tensor memory allocated",
            cta.tmem_alloc_line,
            key=0,
        )


def _pairs() -> tuple[Pair, ...]:
    return tuple(
        Pair(f"{columns} columns are not freed", f"{ptx.ALLOC} |F|".replace("|N|", str(columns)),
             {"|F|": ""}, {"|F|": ptx.FREE.replace("|N|", str(columns))}, {"shape": ptx.FOUR})
        for columns in (32, 512)
    )  # fmt: skip


RULE = Rule(
    KIND,
    judges=r"tcgen05\.alloc",
    rows=(
        Row(
            "Tensor memory is freed before its CTA ends",
            suite=KIND,
        ),
    ),
    check="exit",
    on={CtaEnded: _look},
    pairs=_pairs(),
)
