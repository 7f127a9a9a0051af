import threading
import time

import pytest
import torch

from overlap_gemm import gemm_reduce_scatter
from overlap_gemm.tuning.spans import record, span, watch


class Transfer:
    """A transfer that arrives when the test says so, and that may be waited for once, as gloo's."""

    def __init__(self):
        self.arrived = threading.Event()
        self.waits = 0

    def wait(self):
        self.waits += 1
        assert self.arrived.wait(timeout=10)


def test_without_a_recording_nothing_stands_between_caller_and_transfer():
    works = [Transfer()]
    assert watch("t", works) is works
    with span("compute", "c"):
        pass


def test_a_transfer_ends_when_it_arrives_not_when_it_is_awaited():
    transfer = Transfer()
    with record() as spans:
        works = watch("to 1", [transfer])
        with span("compute", "before"):
            pass
        transfer.arrived.set()
        time.sleep(0.5)  # for the thread that waits for it, on a busy machine
        with span("compute", "after"):
            time.sleep(0.02)
        for work in works:
            work.wait()
    found = {s.label: s for s in spans}
    assert found["to 1"].kind == "transfer"
    assert found["before"].begin <= found["to 1"].end < found["after"].begin
    assert found["after"].end - found["after"].begin >= 0.02
    assert transfer.waits == 1


def test_spans_come_in_the_order_in_which_they_began():
    with record() as spans:
        with span("compute", "outer"), span("compute", "inner"):
            pass
        with span("compute", "last"):
            pass
    assert [s.label for s in spans] == ["outer", "inner", "last"]
    assert 0 <= spans[0].begin <= spans[-1].end < 10


def test_a_failed_transfer_fails_where_it_is_awaited():
    class Broken:
        def wait(self):
            raise RuntimeError("peer is gone")

    with record(), pytest.raises(RuntimeError, match="peer is gone"):
        watch("to 1", [Broken()])[0].wait()


def test_one_recording_at_a_time_and_a_new_one_after_an_error():
    with record(), pytest.raises(RuntimeError, match="already open"), record():
        pass
    with pytest.raises(ZeroDivisionError), record():
        1 / 0  # noqa: B018
    with record() as spans:
        pass
    assert spans == []


def test_an_op_shows_up():
    with record() as spans:
        gemm_reduce_scatter(torch.randn(4, 3), torch.randn(2, 3))
    assert [(s.kind, s.label) for s in spans] == [("compute", "GEMM")]
