"""The rule `host-race`."""

from __future__ import annotations

from typing import Any

from cute_emulator.machine.conflicts import HostWorks
from cute_emulator.rules.rule import Row, Rule, script

KIND = "host-race"


def _look(checks: Any, event: HostWorks) -> None:
    old, new = event.old, event.new
    checks.report.add(
        KIND,
        f"no synchronize between: {new.verb} of {event.spot} by {new.work.what}, and {old.verb} by "
        f"{old.work.what}",
        key=(new.work.what, old.work.what, new.verb),
        places=event.lines,
    )


PAIRS = (
    script(
        "pinned read too early",
        """
        host = torch.zeros(N, pin_memory=True)
        copy(y, x)
        host.copy_(y, non_blocking=True)
        if fixed:
            torch.cuda.synchronize()
        host.sum().item()
        """,
    ),
    script(
        "to cpu read too early",
        """
        host = x.to("cpu", non_blocking=True)
        if fixed:
            torch.cuda.current_stream().synchronize()
        host.tolist()
        """,
    ),
    script(
        "kernel writes pinned",
        """
        host = torch.zeros(N, pin_memory=True)
        copy(host, x)
        if fixed:
            torch.cuda.synchronize()
        float(host[3])
        """,
    ),
    script(
        "pinned source overwritten",
        """
        host = torch.ones(N).pin_memory()
        y.copy_(host, non_blocking=True)
        if fixed:
            event = torch.cuda.Event()
            event.record()
            event.synchronize()
        host.zero_()
        """,
    ),
)

RULE = Rule(
    KIND,
    judges="",
    rows=(
        Row(
            "The host reads and writes pinned memory after it has waited for the work that writes"
            ' or reads it: copies with `non_blocking=True` (which `.to("cpu")` makes pinned), '
            "kernels that use its address",
            suite=KIND,
        ),
    ),
    setting="scripts",
    on={HostWorks: _look},
    pairs=PAIRS,
)
