"""When each stream of a GPU did what: a picture of torch.profiler's traces, one way above the other.

    bash launch/torchrun.sh -n 2 python benchmarks/layer.py --timeline layer-timeline.json
    python benchmarks/timeline.py layer-timeline.json pictures/

The ranges that the library puts around its ops (op, extents, backend) are drawn above the streams.
"""

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

KINDS = {
    "NCCL": ("nccl",),
    "fused": ("fusedgemm", "fused_gemm"),
    "gate": ("kernel_gatetransport",),
    "product": ("nvjet", "gemm", "cutlass", "sm90_xmma"),
    "copy": ("memcpy", "memset"),
}
"""What a kernel is, by what its name (in lower case) contains; the first that fits. Else "other"."""

COLOURS = {
    "NCCL": "#c44e52", "fused": "#4c72b0", "gate": "#8172b3", "product": "#55a868", "copy": "#dd8452",
    "other": "#b0b0b0", "range": "#e8e8e8",
}  # fmt: skip

LABELLED = 0.03
"""Ranges of at least this share of the picture have their names in it."""


@dataclass(frozen=True)
class Span:
    """Something that a stream was busy with.

    Attributes:
        stream: CUDA's number of it; None: one of the library's ranges.
        kind: of `KINDS`, "other" or "range".
        name: the kernel's or the range's.
        start, seconds: when, after the trace's first span, and how long.
    """

    stream: int | None
    kind: str
    name: str
    start: float
    seconds: float


def record(call: Callable[[], object]) -> list[Span]:
    """Returns the spans of one call on this process's GPU, after one to warm up."""
    call()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        call()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        return spans(json.loads(file.read_text())["traceEvents"])


def spans(events: list[dict[str, Any]]) -> list[Span]:
    """Returns the spans among the events of a Chrome trace, whose times are microseconds."""
    result = []
    for event in events:
        name, start, seconds = event.get("name", ""), event.get("ts", 0) / 1e6, event.get("dur", 0) / 1e6
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            result.append(Span(event["args"]["stream"], kind_of(name), name, start, seconds))
        elif event.get("cat") == "gpu_user_annotation" and name.startswith("overlap_gemm"):
            result.append(Span(None, "range", name, start, seconds))
    first = min((span.start for span in result), default=0.0)
    return [Span(s.stream, s.kind, s.name, s.start - first, s.seconds) for s in result]


def kind_of(name: str) -> str:
    """Returns the first of `KINDS` that fits a kernel's name."""
    lower = name.lower()
    return next((kind for kind, parts in KINDS.items() if any(part in lower for part in parts)), "other")


def draw(traces: Mapping[str, list[Span]], title: str, file: Path) -> None:
    """Draws a row for each stream of each implementation, on one axis of time in milliseconds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    rows = [
        (way, stream)
        for way, all_ in traces.items()
        for stream in sorted({s.stream for s in all_}, key=_order)
    ]
    figure, axes = pyplot.subplots(figsize=(14, 1.4 + 0.45 * len(rows)), layout="constrained")
    total = max((s.start + s.seconds for all_ in traces.values() for s in all_), default=0.0)
    for at, (way, stream) in enumerate(rows):
        for span in traces[way]:
            if span.stream == stream:
                where = [(span.start * 1e3, span.seconds * 1e3)]
                axes.broken_barh(where, (at - 0.4, 0.8), color=COLOURS[span.kind], edgecolor="white", lw=0.2)
                if stream is None and span.seconds > LABELLED * total:
                    words = span.name.removeprefix("overlap_gemm ").split()
                    label = f"{words[0].removeprefix('gemm_')}\n{words[-1]}" if words else ""
                    axes.text(where[0][0], at, label, fontsize=5, va="center", clip_on=True)
    labels = [f"{way}: {'ops' if stream is None else f'stream {stream}'}" for way, stream in rows]
    axes.set_yticks(range(len(rows)), labels)
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.set_title(title)
    used = [kind for kind in COLOURS if any(s.kind == kind for all_ in traces.values() for s in all_)]
    handles = [Patch(color=COLOURS[kind], label=kind) for kind in used]
    figure.legend(handles=handles, ncols=len(used), loc="outside lower center", fontsize=8, frameon=False)
    figure.savefig(file, dpi=130)
    pyplot.close(figure)


def main(file: Path, folder: Path) -> None:
    """Draws every trace in a file of `layer.py --timeline` into a folder."""
    for number, (title, traces) in enumerate(json.loads(file.read_text()).items()):
        result = {name: [Span(**span) for span in spans_] for name, spans_ in traces.items()}
        draw(result, title, folder / f"{file.stem}-{number}.png")


def _order(stream: int | None) -> int:
    return -1 if stream is None else stream


if __name__ == "__main__":
    import typer

    typer.run(main)
