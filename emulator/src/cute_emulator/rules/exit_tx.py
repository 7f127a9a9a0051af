"""The rule `exit-tx`."""

from __future__ import annotations

from typing import Any

from cute_emulator.machine.events import CtaEnded
from cute_emulator.rules import ptx
from cute_emulator.rules.rule import Pair, Row, Rule

KIND = "exit-tx"


def _look(checks: Any, event: CtaEnded) -> None:
    for barrier in event.cta.mbarriers.values():
        if barrier.tx:
            checks.report.add(
                KIND,
                f"{event.cta} exits with {barrier}, which still expects these bytes",
                barrier.expected,
                key=barrier.address,
            )


def _pairs() -> tuple[Pair, ...]:
    expect = "@%p0 mbarrier.arrive.expect_tx.shared.b64 %d8, [%r11], 256;"
    return (
        Pair("bytes are expected that no thread sends", f"{ptx.INIT} |E|", {"|E|": expect}, {"|E|": ""},
             {"shape": ptx.TWO}, strict=True),
        Pair("more bytes are expected than the copy sends", f"{ptx.INIT} {ptx.IN} |E|",
             {"|E|": expect.replace("arrive.expect_tx", "expect_tx.relaxed.cta").replace("%d8, ", "")},
             {"|E|": ptx.AWAIT}, {"shape": ptx.TWO}, kinds="exit-tx exit-pending", strict=True),
    )  # fmt: skip


RULE = Rule(
    KIND,
    judges=r"mbarrier.*expect_tx",
    rows=(
        Row(
            "Bytes that an mbarrier expects arrive before the end",
            setting="strict, and if a thread waits",
            suite=KIND,
        ),
    ),
    setting="strict",
    check="tx",
    on={CtaEnded: _look},
    pairs=_pairs(),
)
