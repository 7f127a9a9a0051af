"""benchmarks/timeline.py, on a trace like torch.profiler's."""

import json
import runpy
from pathlib import Path

import pytest

TIMELINE = Path(__file__).parents[2] / "benchmarks" / "timeline.py"
EVENTS = [
    {"cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 900},
    {"cat": "kernel", "name": "nvjet_tst_128x256", "ts": 1000, "dur": 300, "args": {"stream": 7}},
    {"cat": "kernel", "name": "ncclDevKernel_AllGather", "ts": 1100, "dur": 250, "args": {"stream": 20}},
    {"cat": "gpu_memcpy", "name": "Memcpy PtoP", "ts": 1200, "dur": 50, "args": {"stream": 21}},
    {
        "cat": "gpu_user_annotation",
        "name": "overlap_gemm gemm_reduce_scatter M=8 fused",
        "ts": 1000,
        "dur": 300,
    },
    {"cat": "gpu_user_annotation", "name": "somebody else's", "ts": 900, "dur": 10},
]


@pytest.fixture
def timeline():
    return runpy.run_path(str(TIMELINE))


def test_spans_of_streams_and_of_our_ops(timeline):
    found = timeline["spans"](EVENTS)
    assert [(s.stream, s.kind, round(s.start * 1e6), round(s.seconds * 1e6)) for s in found] == [
        (7, "product", 0, 300),
        (20, "NCCL", 100, 250),
        (21, "copy", 200, 50),
        (None, "range", 0, 300),
    ]


def test_a_picture_of_every_trace(timeline, tmp_path):
    ways = {"ours": timeline["spans"](EVENTS), "torch": timeline["spans"](EVENTS[:3])}
    traces = {title: {way: [vars(s) for s in found] for way, found in ways.items()} for title in ("a", "b")}
    (tmp_path / "layer.json").write_text(json.dumps(traces))
    timeline["main"](tmp_path / "layer.json", tmp_path)
    for picture in (tmp_path / "layer-0.png", tmp_path / "layer-1.png"):
        assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 10_000
