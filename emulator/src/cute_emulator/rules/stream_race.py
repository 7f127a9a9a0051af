"""The rule `stream-race`."""

from __future__ import annotations

from typing import Any

from cute_emulator.machine.conflicts import StreamWorks
from cute_emulator.rules.rule import Row, Rule, script

KIND = "stream-race"


def _look(checks: Any, event: StreamWorks) -> None:
    old, new = event.old, event.new
    checks.report.add(
        KIND,
        f"no event, wait_stream or synchronize between: {new.verb} of {event.spot} by {new.work.what}, and "
        f"{old.verb} by {old.work.what}",
        key=(new.work.what, old.work.what, new.verb),
        places=event.lines,
    )


PAIRS = (
    script(
        "torch beside a kernel",
        """
        copy(y, x, side)
        if fixed:
            torch.cuda.current_stream().wait_stream(side)
        y.add_(1)
        """,
    ),
    script(
        "kernel beside torch",
        """
        with torch.cuda.stream(side):
            if fixed:
                side.wait_stream(torch.cuda.default_stream())
            w = y * 2
        if fixed:
            torch.cuda.current_stream().wait_stream(side)
        copy(y, x)
        w
        """,
    ),
    script(
        "wrong stream awaited",
        """
        other = torch.cuda.Stream()
        copy(y, x, side)
        (side if fixed else other).synchronize()
        copy(z, y)
        """,
    ),
    script(
        "replay beside a kernel",
        """
        graph = captured(x, y)
        graph.replay()
        if fixed:
            side.wait_stream(torch.cuda.current_stream())
        copy(z, y, side)
        """,
    ),
    script(
        "input changed under a replay",
        """
        graph = captured(x, y)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            graph.replay()
        if fixed:
            torch.cuda.current_stream().wait_stream(side)
        x.copy_(z)
        """,
    ),
    script(
        "two graphs",
        """
        first, second = captured(x, y), captured(y, z)
        first.replay()
        with torch.cuda.stream(side):
            if fixed:
                side.wait_stream(torch.cuda.default_stream())
            second.replay()
        """,
    ),
    script(
        "launch in the default stream",
        """
        side.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(side):
            y.mul_(2)
            copy(z, y, side if fixed else torch.cuda.default_stream())
        """,
    ),
    script(
        "non blocking stream",
        """
        (status, handle) = runtime.cudaStreamCreateWithFlags(0 if fixed else 1)
        assert status == runtime.cudaError_t.cudaSuccess
        y.mul_(2)
        copy(z, y, torch.cuda.ExternalStream(int(handle)))
        """,
    ),
    script(
        "neighbouring columns",
        """
        half = x.view(8, 8)
        side.wait_stream(torch.cuda.current_stream())
        half[:, :4].add_(1)
        with torch.cuda.stream(side):
            half[:, 4 if fixed else 3 :].add_(1)
        """,
    ),
    script(
        "two streams",
        """
        copy(y, x)
        if fixed:
            side.wait_stream(torch.cuda.current_stream())
        copy(z, y, side)
        """,
        kinds="race",
    ),
    script(
        "event too early",
        """
        event = torch.cuda.Event()
        if not fixed:
            event.record()
        copy(y, x)
        if fixed:
            event.record()
        side.wait_event(event)
        copy(z, y, side)
        """,
        kinds="race",
    ),
    script(
        "event never recorded",
        """
        event = torch.cuda.Event()
        copy(y, x)
        if fixed:
            event.record()
        event.wait(side)
        copy(z, y, side)
        """,
        kinds="race",
    ),
    script(
        "wrong way round",
        """
        copy(y, x, side)
        if fixed:
            torch.cuda.current_stream().wait_stream(side)
        else:
            side.wait_stream(torch.cuda.current_stream())
        copy(z, y)
        """,
        kinds="race",
    ),
    script(
        "one of two readers awaited",
        """
        other, main = torch.cuda.Stream(), torch.cuda.current_stream()
        for stream in (side, other):
            stream.wait_stream(main)
            copy(z if stream is side else torch.empty_like(z), x, stream)
        main.wait_stream(other)
        if fixed:
            main.wait_stream(side)
        copy(x, y)
        """,
        kinds="race",
    ),
)

RULE = Rule(
    KIND,
    judges="",
    rows=(
        Row(
            "Works of two streams (kernels, torch's operations, copies, replays of a graph) that "
            "touch the same bytes, one of them writing, are ordered: by their stream, an event, "
            "`wait_stream`, or a host that waited for the first before it issued the second. "
            "Concurrent launches are judged access by access, as `race`",
            kinds="`stream-race`, `race`",
            suite=KIND,
        ),
    ),
    setting="scripts",
    on={StreamWorks: _look},
    pairs=PAIRS,
)
