"""Flags that nobody has raised for long: a workspace's calls are counted on, whatever tiles they have.

Small calls raise the flags of few tiles. When a large one comes after many of them, the flags of its other
tiles are as many calls old, and must not count as raised.
"""

import pytest
import torch

from cute_emulator import Emulator, EmulatorError, Schedule
from overlap_gemm.device import flags
from overlap_gemm.exchange.geometry import EPOCH_OFFSET
from overlap_gemm.runtime.failures import CommTimeoutError
from overlap_gemm.runtime.memory.workspace import workspaces
from overlap_gemm.runtime.virtual import VirtualWorld
from overlap_gemm.testing.cases import Case
from overlap_gemm.testing.emulated import judge, queue_launch
from overlap_gemm.tuning.settings import configured
from tests.support.emulated.programs import grow_old
from tests.support.emulated.sequences import ARCHS

WAYS = {
    "scatter": ("gemm_reduce_scatter", {}),
    "one-shot": ("gemm_all_reduce", {"algorithm": "one_shot"}),
    "two-shot": ("gemm_all_reduce", {"algorithm": "two_shot"}),
    "output gather": ("gemm_all_gather", {}),
    "gather by copies": ("all_gather_gemm", {"transport": "copy_engine"}),
    "gather by kernel": ("all_gather_gemm", {"transport": "peer_bulk"}),
    "LL": ("gemm_all_reduce", {"algorithm": "two_shot", "transport": "ll"}),
}
OLD = 2**31 + 6
"""Calls: two to four days of serving."""


def run(arch, way, age, network=False, ranks=2, starved=1):
    """Small calls, as many as the age says, then a large one in which a rank lags; all judged."""
    op, how = WAYS[way]
    width = ranks if op in ("gemm_all_gather", "all_gather_gemm") else 1
    small, large = (Case(op, m, n * width, 64, torch.bfloat16) for m, n in ((1, 8), (130, 128)))
    lagging = Schedule(starved=lambda rank, cta, warp: rank == starved)
    with (
        configured(**ARCHS[arch], **how),
        Emulator(arch, ranks, schedule=lagging, num_sms=3, network=network) as emulator,
        VirtualWorld(ranks, emulator=emulator, without_p2p=network) as world,
    ):
        for calls in ([small, small], [small, small.with_seed(1), large, large.with_seed(2), small]):
            queued = [(case, *queue_launch(case, world)) for case in calls]
            world.synchronize()
            verdicts = [judge(case, given, outs, torch.bfloat16) for case, given, outs in queued]
            assert all(verdict.holds for verdict in verdicts), verdicts
            if len(calls) == 2:
                for held in workspaces():
                    grow_old(held, age)
        made = [held.memory.local[EPOCH_OFFSET:][:8].view(torch.int64).item() for held in workspaces()]
    assert made == [age + 5] * ranks, "one workspace a rank, for small calls and large ones"


QUICK = ("two-shot", "output gather", "gather by copies", "LL")
"""Each kind of wait: for partial sums and results, for results of peers, for shards, for words."""


@pytest.mark.parametrize("arch", ["sm_90a", pytest.param("sm_100a", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("way", "age"),
    [
        *((way, OLD) for way in QUICK),
        ("scatter", 2**32 - 4),
        *(
            pytest.param(way, age, marks=pytest.mark.slow)
            for way in WAYS
            for age in (2**31 - 4, OLD, 2**32 - 4, 2**33 + 2, 2**46)
            if (way, age) not in [("scatter", 2**32 - 4), *((quick, OLD) for quick in QUICK)]
        ),
    ],
)
def test_a_flag_left_alone_for_long_is_not_raised(arch, way, age):
    run(arch, way, age)


@pytest.mark.parametrize("arch", ["sm_90a", pytest.param("sm_100a", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "way",
    [pytest.param(way, marks=pytest.mark.slow) for way in WAYS if way != "LL"],
)
def test_nor_is_one_that_is_put(arch, way):
    """NVSHMEM's signals, the flags of what is staged for them, and the pieces of a shard."""
    op, how = WAYS[way]
    WAYS["put"] = op, {name: value for name, value in how.items() if name != "transport"}
    run(arch, "put", OLD, network=True)


@pytest.mark.slow
@pytest.mark.usefixtures("changed_kernels")
@pytest.mark.parametrize(
    "way",
    [
        "scatter",
        "gather by copies",
        *(pytest.param(way, marks=pytest.mark.slow) for way in ("two-shot", "output gather")),
    ],
)
def test_with_32_bits_it_would_be(monkeypatch, way):
    """The control."""
    monkeypatch.setattr(flags, "EPOCH_BITS", 32)
    with pytest.raises((AssertionError, EmulatorError, CommTimeoutError)):
        run("sm_90a", way, OLD)
