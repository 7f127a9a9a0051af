"""The rule `wgmma-registers`."""

from __future__ import annotations

from typing import Any

from cute_emulator.machine.events import WgmmaChanged
from cute_emulator.rules.rule import Row, Rule


def _look(checks: Any, event: WgmmaChanged) -> None:
    if "wgmma" in checks.enabled:
        checks.report.add(
            "wgmma-registers",
            f"no wgmma.wait_group between: {event.warp} has changed registers of {event.operand} of "
            f"the wgmma "
            f"of line {checks.report.place(event.line)}, which is in flight",
            event.line,
            key=(event.line, event.operand),
        )


RULE = Rule(
    "wgmma-registers",
    judges=r"wgmma\.mma_async",
    rows=(
        Row(
            "Registers of a wgmma in flight, A's and D's, are left alone until a `wait_group` that covers it",
            suite="wgmma registers",
        ),
    ),
    on={WgmmaChanged: _look},
)
