"""GEMM reduce-scatter by puts to peers within reach (`configured(transport="nvshmem")`).

What runs is NVSHMEM's own device code for such peers: a warp's copy, a fence, a signal stored. On hardware it
goes over NVLink: tests/gpu/test_nvshmem.py.
"""

from contextlib import contextmanager
from fnmatch import fnmatchcase

import pytest
import torch

import overlap_gemm
from overlap_gemm.device.failure import Role
from overlap_gemm.emulator import mutate
from overlap_gemm.kernels.geometry import EPOCH_OFFSET, RELAY_EPOCH_OFFSET
from overlap_gemm.runtime import workspace
from overlap_gemm.runtime.workspace import CommTimeoutError
from overlap_gemm.testing.cases import Case
from overlap_gemm.testing.emulated import judge, run_launches
from overlap_gemm.tuning.settings import configured

from .op_runs import SMALL, lagging, world_of

RAGGED = Case("gemm_reduce_scatter", 200, 136, 72, torch.bfloat16)
TINY = Case("gemm_reduce_scatter", 128, 128, 64, torch.bfloat16)


@contextmanager
def by_puts(ranks, arch="sm_90a", **options):
    with configured(transport="nvshmem"), world_of(arch, ranks, **options) as world:
        yield world


def right(case, world, launches):
    verdicts = [judge(case, given, outs, case.dtype) for given, outs in run_launches(case, world, launches)]
    assert len(verdicts) == launches
    assert all(verdict.holds for verdict in verdicts), verdicts


def workspaces(kind):
    return [space for space in workspace.workspaces() if space.size.kind == kind]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "ranks", "mode"),
    [
        ("sm_90a", 2, "immediate"),
        ("sm_90a", 3, "random"),
        ("sm_90a", 4, "lazy"),
        ("sm_100a", 2, "lazy"),
        ("sm_100a", 4, "random"),
    ],
)
def test_results(arch, ranks, mode):
    with by_puts(ranks, arch, mode=mode) as world:
        right(RAGGED, world, 3)
        right(TINY, world, 1)


@pytest.mark.slow
def test_puts_and_stores_take_turns_with_a_rank_that_lags_behind():
    with by_puts(2, schedule=lagging(1)) as world:
        for shape in [(128, 128, 64), (2, 64, 64), (200, 136, 72)]:
            case = Case("gemm_reduce_scatter", *shape, torch.bfloat16)
            right(case, world, 2)
            with configured(transport="peer_bulk"):
                right(case, world, 1)
        puts, stores = workspaces("puts"), workspaces("slots")
        assert (len(puts), len(stores)) == (2, 2), "one of each a rank"
        for space, epochs in [*((each, [6, 6]) for each in puts), *((each, [3, 0]) for each in stores)]:
            words = space.memory.local[: space.size.zeroed].view(torch.int32)
            assert [words[at // 4].item() for at in (EPOCH_OFFSET, RELAY_EPOCH_OFFSET)] == epochs


def test_results_and_then_a_dead_rank_is_named():
    with by_puts(3) as world:
        right(RAGGED, world, 1)
        emulator = world.executor(0).emulator
        emulator.faults.kill(1)
        with pytest.raises(CommTimeoutError) as caught:
            right(RAGGED, world, 1)
    failure = caught.value.failure
    assert (failure.source, failure.expected, failure.seen) == (1, 2, 1)
    assert failure.role in (Role.RECEIVE_PARTIAL, Role.CALL_ENTERED)


def test_other_ops_refuse_to_put():
    x, weight = torch.randn(64, 64).bfloat16(), torch.randn(64, 64).bfloat16()
    calls = {
        "all_gather_gemm": {"rows": 128},
        "gemm_all_reduce": {},
        "gemm_all_gather": {"columns": 128},
    }
    with by_puts(2) as world:
        for op, told in calls.items():
            with pytest.raises(ValueError, match="only for gemm_reduce_scatter"):
                getattr(overlap_gemm, op)(x, weight, group=world.names[0], backend="fused", **told)
        assert workspace.workspace_bytes() == 0


@pytest.mark.slow
def test_one_rank_alone_has_nobody_to_put_to():
    with by_puts(1) as world:
        right(TINY, world, 1)


TILES = Case("gemm_reduce_scatter", 128, 384, 64, torch.bfloat16)
ENTRY = Case("gemm_reduce_scatter", 1, 64, 64, torch.bfloat16)
FLAGS_AND_FENCES = (
    "st.release.sys.global.b64*",
    "ld.*.sys.global.b64#?: *",
    "fence.acq_rel.sys*",
    "membar.sys#1?: *",  # some of NVSHMEM's; a put to a peer within reach comes to one of these
)
HERE = "between the GEMM and the relay, or the own receive role, of one GPU"
STREAM = "that the calls before have read their slots, the relay knows from its stream"
# By kernel and key, what may go undetected.
UNDETECTED = {
    "GEMM": {
        "st.release.sys.global.b64#?: .sys -> .gpu": HERE,
        "st.release.sys.global.b64#0: .release -> .relaxed": STREAM,
    },
    "relay": {
        "ld.*.sys.global.b64#?: .sys -> .gpu": HERE,
        "ld.acquire.sys.global.b64#0: .acquire -> .relaxed": STREAM,
    },
}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_weakened_flag_shows():
    """Of both kernels: what the GEMM's roles and the relay release and acquire, and NVSHMEM's own fences."""

    def check(options):
        with by_puts(2, fields=SMALL["sm_90a"], num_sms=2, **options) as world:
            right(TILES, world, 2)
            right(ENTRY, world, 4)

    tried = [mutate.Setting("immediate"), *(mutate.Setting("lazy", seed) for seed in range(2))]
    outcomes = mutate.run(check, tried, select=FLAGS_AND_FENCES)
    print(*outcomes, sep="\n")
    names = {"FusedGemm": "GEMM", "Relay": "relay", "nvshmem": "relay"}
    unexplained = []
    for outcome in outcomes:
        mutation = outcome.mutation
        kernel = next(name for part, name in names.items() if part in mutation.function)
        known = any(fnmatchcase(mutation.key, pattern) for pattern in UNDETECTED[kernel])
        if outcome.verdict == "NOT DETECTED" and not known:
            unexplained.append(str(outcome))
    assert unexplained == []
    detected = [o.mutation for o in outcomes if o.verdict == "detected"]
    assert any("put_signal" in m.function and "membar" in m.key for m in detected)
