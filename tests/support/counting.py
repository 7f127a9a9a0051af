"""What a call costs the host, counted and not timed: a number that no other process can disturb."""

import contextlib
import gc
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch


@contextlib.contextmanager
def counted_ops() -> Iterator["Counter[str]"]:
    """Counts the calls of each op in the block, backward passes included, by the names that profilers see."""
    ops: Counter[str] = Counter()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        yield ops
    names = [event.name.split() for event in profile.events()]
    ops.update(words[1] for words in names if words and words[0] == "overlap_gemm")


def python_calls(function: Callable[[], object]) -> "Counter[str]":
    """How often each Python function is entered by `function()`, at its second call.

    Args:
        function: What is called; not counted itself.
    """
    function()
    entered: Counter[str] = Counter()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            entered[f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_code.co_name}"] += 1

    # A collection would run others' finalizers and callbacks (hypothesis has one), in whatever call it comes.
    collects = gc.isenabled()
    gc.disable()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
        if collects:
            gc.enable()
    code = getattr(function, "__code__", None)
    if code is not None:
        del entered[f"{code.co_filename.rpartition('/')[2]}:{code.co_name}"]
    return entered
