"""Timeline of warps and asynchronous operations, as a Chrome/Perfetto trace and as a picture.

Time is that of a simple model (`machine.clocks`). Each warp has a clock; async work has a latency and a rate.
A waiting warp continues at the latest time of the operations that it waited for. A timeline shows what
overlaps; it is no estimate of the time of a GPU::

    trace = Trace(roles={4: "mma", 5: "load"})
    with Emulator("sm_100a", trace=trace):
        compiled(a, b, c, stream)
    trace.save_json("gemm.json")  # open in ui.perfetto.dev
    trace.save_png("gemm.png")
    trace.save_html("gemm.html")
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cute_emulator.machine.clocks import Clocks, Place, Span
from cute_emulator.machine.roles import Roles, role_of
from cute_emulator.trace_html import page

_COLOURS = {
    "active": "#2a9d5c",
    "wait": "#d8d8d8",
    "load": "#3465a4",
    "tensor": "#c4572b",
    "store": "#8a5fb0",
}


@dataclass
class Trace:
    """Recorder of a run, the argument `trace=` of the emulator.

    Attributes:
        roles: Names of warps by their number in the CTA, or a function of the number.
        clocks: Model of time that records the spans.
    """

    roles: Roles = field(default_factory=dict)
    clocks: Clocks = field(default_factory=Clocks, repr=False)

    @property
    def spans(self) -> list[Span]:
        """Returns the recorded spans, in the order in which they ended."""
        return self.clocks.spans

    # -- output

    def name(self, row: int | str) -> str:
        """Returns the name of a row: `warp 4 (mma)`, `tensor`."""
        if isinstance(row, str):
            return row
        role = role_of(self.roles, row)
        return f"warp {row} ({role})" if role else f"warp {row}"

    def chrome(self) -> dict[str, Any]:
        """Returns the trace in Chrome's JSON format; one cycle of the model is shown as one microsecond."""
        events: list[dict[str, Any]] = []
        for pid, (place, rows) in enumerate(self._by_row().items()):
            launch, rank, cta = place
            events.append(_metadata("process_name", pid, 0, f"launch {launch} rank {rank} CTA {cta}"))
            for tid, (row, spans) in enumerate(rows.items()):
                events.append(_metadata("thread_name", pid, tid, self.name(row)))
                for number, span in enumerate(spans):
                    events.extend(_chrome_span(span, pid, tid, number))
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def save_json(self, path: str | Path) -> None:
        """Writes `chrome()` to a file."""
        Path(path).write_text(json.dumps(self.chrome()))

    def save_html(
        self, path: str | Path, title: str = "Timeline of warps and asynchronous operations"
    ) -> None:
        """Writes a page with a timeline of all CTAs that zooms; it needs no network and no other file.

        Raises:
            ValueError: Nothing was recorded.
        """
        if not self.spans:
            raise ValueError("the trace is empty: pass it as trace= to an emulator that runs a kernel")
        groups = [
            {
                "name": f"rank {rank}, launch {launch}, CTA {cta}",
                "rows": [
                    {
                        "name": self.name(row),
                        "separate": isinstance(row, str),
                        "spans": [[s.begin, s.end, s.kind, s.what, s.instructions] for s in spans],
                    }
                    for row, spans in rows.items()
                ],
            }
            for (launch, rank, cta), rows in sorted(
                self._by_row().items(), key=lambda item: (item[0][1], item[0])
            )
        ]
        end = max(span.end for span in self.spans)
        Path(path).write_text(page(title, groups, end, _COLOURS), encoding="utf-8")

    def save_png(self, path: str | Path, max_ctas: int = 4) -> None:
        """Draws one row per warp and kind of operation of the first `max_ctas` CTAs, by launch and rank.

        Raises:
            ValueError: Nothing was recorded.
        """
        if not self.spans:
            raise ValueError("the trace is empty: pass it as trace= to an emulator that runs a kernel")
        import matplotlib

        matplotlib.use("Agg", force=False)
        from matplotlib import pyplot
        from matplotlib.patches import Patch

        shown = list(self._by_row().items())[:max_ctas]
        rows = [(place, row, spans) for place, by_row in shown for row, spans in by_row.items()]
        figure, axes = pyplot.subplots(figsize=(14, 1 + 0.28 * len(rows)), layout="constrained")
        for y, (_, _, spans) in enumerate(rows):
            for kind in sorted({s.kind for s in spans}):
                bars = [(s.begin, max(s.end - s.begin, 1)) for s in spans if s.kind == kind]
                axes.broken_barh(bars, (y - 0.4, 0.8), color=_COLOURS[kind], linewidth=0)
        labels = [f"rank {place[1]} CTA {place[2]}  {self.name(row)}" for place, row, _ in rows]
        axes.set_yticks(range(len(rows)), labels, fontsize=8)
        axes.invert_yaxis()
        axes.set_xlabel("cycles of the model")
        axes.legend(
            handles=[Patch(color=c, label=k) for k, c in _COLOURS.items()],
            loc="upper center", bbox_to_anchor=(0.5, 1.0 + 1.2 / (1 + len(rows))), ncols=5, frameon=False,
        )  # fmt: skip
        figure.suptitle(
            "Timeline of warps and async operations: overlapping work is in several rows at once",
            x=0.01,
            ha="left",
            fontsize=10,
        )
        figure.savefig(path, dpi=110)
        pyplot.close(figure)

    def _by_row(self) -> dict[Place, dict[int | str, list[Span]]]:
        """Returns spans by CTA and row: warps first, in order, then asynchronous work."""
        grouped: dict[Place, dict[int | str, list[Span]]] = {}
        for span in sorted(self.spans, key=lambda s: (s.place, isinstance(s.row, str), str(s.row).zfill(3))):
            grouped.setdefault(span.place, {}).setdefault(span.row, []).append(span)
        return grouped


def _metadata(name: str, pid: int, tid: int, value: str) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": {"name": value}}


def _chrome_span(span: Span, pid: int, tid: int, number: int) -> list[dict[str, Any]]:
    common = {"pid": pid, "tid": tid, "cat": span.kind}
    if isinstance(span.row, int):
        name = span.what if span.kind == "wait" else "active"
        args = {"instructions": span.instructions}
        return [
            {**common, "ph": "X", "name": name, "ts": span.begin, "dur": span.end - span.begin, "args": args}
        ]
    identity = {"name": span.what, "id": f"{pid}.{tid}.{number}"}  # operations in flight overlap
    return [{**common, **identity, "ph": ph, "ts": ts} for ph, ts in (("b", span.begin), ("e", span.end))]
