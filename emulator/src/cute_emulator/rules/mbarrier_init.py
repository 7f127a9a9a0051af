"""The rule `mbarrier-init`."""

from __future__ import annotations

from typing import Any

from cute_emulator.machine.conflicts import MbarrierUnfenced
from cute_emulator.rules import ptx
from cute_emulator.rules.rule import Pair, Row, Rule

KIND = "mbarrier-init"


def _look(checks: Any, event: MbarrierUnfenced) -> None:
    checks.report.add(
        KIND,
        f"no fence.mbarrier_init after the init: {event.what} (line {checks.report.place(event.line)}) uses "
        f"{event.barrier}",
        event.line,
        key=event.barrier.address,
    )


def _pairs() -> tuple[Pair, ...]:
    init = "@%p0 mbarrier.init.shared.b64 [%r11], 1; |F| bar.sync 0;"
    fence = "@%p0 fence.mbarrier_init.release.cluster;"
    proxy = "@%p0 fence.proxy.async.shared::cta;"
    words = {
        "": {"|F|": ""},
        ", but one of global memory": {"|F|": "@%p0 fence.proxy.async.global;"},
        ", but one of the generic proxy": {"|F|": "@%p0 fence.acq_rel.cta;"},
    }
    load = f"{init} {ptx.IN} {ptx.AWAIT}"
    return tuple(
        Pair(f"a bulk load arrives at an mbarrier with no fence after its init{what}", load, wrong,
             {"|F|": proxy if what else fence}, {"shape": ptx.TWO})
        for what, wrong in words.items()
    )  # fmt: skip


RULE = Rule(
    KIND,
    judges=r"mbarrier\.init",
    rows=(
        Row(
            "Other CTAs and the async proxy use an mbarrier after a fence of its init "
            "(`fence.mbarrier_init`, or one at least as strong)",
            suite=KIND,
        ),
    ),
    check="mbarrier",
    on={MbarrierUnfenced: _look},
    pairs=_pairs(),
)
