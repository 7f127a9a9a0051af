"""The rule `exit-pending`."""

from __future__ import annotations

from typing import Any

from cute_emulator.machine.events import CtaEnded
from cute_emulator.rules import ptx
from cute_emulator.rules.rule import Pair, Row, Rule

KIND = "exit-pending"


AWAIT = {
    "load": "wait at its mbarrier before the end",
    "tensor": "wait at its mbarrier before the end",
    "read": "cp.async.bulk.wait_group.read 0 in the thread that issued it before the end",
    "write": "cp.async.bulk.wait_group 0 before the end",
}
"""Waits for the operations in flight of a CTA, by kind: `exit` ends the thread and releases barriers only."""


def _look(checks: Any, event: CtaEnded) -> None:
    for left in event.cta.pending.values():
        checks.report.add(
            KIND,
            f"no {AWAIT[left.kind]}: {event.cta} exits while {left.what} has not happened; an exit does "
            "not wait for it",
            left.line,
            key=left.what,
        )


def _pairs() -> tuple[Pair, ...]:
    load = f"{ptx.INIT} {ptx.IN} |W|"
    store = f"{ptx.STORE} {ptx.SHARED} bar.sync 0; {ptx.OUT}"
    store = store.replace("@%p0 cp.async.bulk.wait_group 0;", "|W|")
    product = f"{ptx.READY_SM100} @%p0 {ptx.MMA} @%p0 {ptx.COMMIT} |W|"
    free = ptx.FREE.replace("|N|", "32")
    return (
        Pair("a CTA ends before its bulk load", load, {"|W|": ""}, {"|W|": ptx.AWAIT},
             {"shape": ptx.TWO}),
        Pair("a CTA ends before its bulk store has read", store, {"|W|": ""},
             {"|W|": "@%p0 cp.async.bulk.wait_group.read 0;"}, {"shape": ptx.TWO}),
        Pair("a CTA ends before its tcgen05.commit arrives", product, {"|W|": free},
             {"|W|": ptx.AWAIT + free}, ptx.SM100),
    )  # fmt: skip


RULE = Rule(
    KIND,
    judges=r"cp\.(reduce\.)?async|wgmma\.mma_async|tcgen05\.(mma|cp)|tcgen05\.commit",
    rows=(
        Row(
            "A CTA ends when none of its operations is in flight",
            suite=KIND,
        ),
    ),
    check="exit",
    on={CtaEnded: _look},
    pairs=_pairs(),
)
