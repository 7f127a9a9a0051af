"""The rule `reuse-race`."""

from __future__ import annotations

from typing import Any

from cute_emulator.machine.conflicts import FreedTouched, ReusedWorks
from cute_emulator.rules.rule import Row, Rule, script

KIND = "reuse-race"


def _reused(checks: Any, event: ReusedWorks) -> None:
    old, new = event.old, event.new
    checks.report.add(
        KIND,
        f"no record_stream, event or synchronize between: {new.verb} of {event.spot} by {new.work.what}, and "
        f"{old.verb} by {old.work.what}, memory of {old.tenant.where} that was freed and may be handed out "
        "again",
        key=(new.work.what, old.work.what, new.verb),
        places=event.lines,
    )


def _replayed(checks: Any, event: FreedTouched) -> None:
    touch = event.touch
    checks.report.add(
        KIND,
        f"no reference is left to memory of {touch.tenant.where} that {touch.work.what} {touch.verb}s: it "
        "was freed after a graph captured its address, and may be another tensor's",
        key=(touch.work.what, touch.tenant.where),
        places=event.lines,
    )


PAIRS = (
    script(
        "freed under a kernel",
        """
        t = device()
        side.wait_stream(torch.cuda.current_stream())
        copy(z, t, side)
        if fixed:
            torch.cuda.current_stream().wait_stream(side)
        del t
        device(2.0)
        """,
    ),
    script(
        "reuse without record stream",
        """
        t = x * 2
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            z.copy_(t)
        if fixed:
            t.record_stream(side)
        del t
        u = torch.empty(N, device="cuda")
        copy(u, y)
        """,
    ),
    script(
        "pinned freed under a kernel",
        """
        host = torch.ones(N, pin_memory=True)
        copy(y, host)
        if fixed:
            torch.cuda.synchronize()
        del host
        torch.empty(N, pin_memory=True).zero_()
        """,
    ),
    script(
        "graph of freed memory",
        """
        t = x * 3
        graph = captured(t, y)
        torch.cuda.synchronize()
        if not fixed:
            del t
        graph.replay()
        """,
    ),
)

RULE = Rule(
    KIND,
    judges="",
    rows=(
        Row(
            "The next allocation of the same stream may reuse freed memory: accesses of other "
            "streams are in `record_stream`, or ordered before the new owner's "
            "first use. Pinned memory waits for copies, not for kernels. Memory that a graph captured"
            " stays allocated for its replays",
            suite=KIND,
        ),
    ),
    setting="scripts",
    on={ReusedWorks: _reused, FreedTouched: _replayed},
    pairs=PAIRS,
)
