"""The rule `wgmma-fence`."""

from __future__ import annotations

from typing import Any

from cute_emulator.machine.events import WgmmaUnfenced
from cute_emulator.rules.rule import Row, Rule


def _look(checks: Any, event: WgmmaUnfenced) -> None:
    if "wgmma" in checks.enabled:
        checks.report.add(
            "wgmma-fence",
            f"no wgmma.fence before: the wgmma of line {checks.report.place(event.line)} of "
            f"{event.warp} uses "
            "registers that other instructions may access",
            event.line,
        )


RULE = Rule(
    "wgmma-fence",
    judges=r"wgmma\.mma_async",
    rows=(
        Row(
            "A wgmma's registers are fenced: before the first, and after any access to its "
            "accumulator or to A in registers (9.7.15.5)",
            suite="wgmma.fence",
        ),
    ),
    on={WgmmaUnfenced: _look},
)
