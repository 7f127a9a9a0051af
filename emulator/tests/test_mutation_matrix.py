"""Every synchronisation operation of the test kernels, broken one at a time: noticed, or explained here."""

import pytest

from cute_emulator import mutate

from .kernels.gemm_sm90 import GemmSm90
from .kernels.gemm_sm100 import GemmSm100
from .test_mutate import make_check

TAIL = "a producer's tail: stages are released in order, so the wait for the last one covers this one"
TWICE = "two fences in a row, either is enough"
END = "the end of the kernel completes the writes; only the reads of shared memory must be over before"
COVERED = "without multicast the last commit of a stage precedes the accumulator's, which the epilogue awaits"
WAIT, FENCE = "mbarrier.try_wait.parity.shared.b64", "fence.mbarrier_init.release.cluster"
FULL = "cp.async.bulk.wait_group#0: full -> .read"

CASES = {
    "sm100": (
        GemmSm100(stages=2, tile=(128, 128)),
        (300, 248, 520),
        {f"{WAIT}#1: remove": TAIL, f"{WAIT}#2: remove": COVERED, f"{WAIT}#5: remove": TAIL, FULL: END},
    ),
    "sm100-2cta": (
        GemmSm100(stages=2, tile=(256, 64), two_cta=True, cluster=(2, 2)),
        (500, 248, 392),
        {
            f"{FENCE}#0: remove": TWICE,
            f"{FENCE}#1: remove": TWICE,
            f"{WAIT}#1: remove": TAIL,
            f"{WAIT}#5: remove": TAIL,
            FULL: END,
        },
    ),
    "sm90": (
        GemmSm90(stages=2, cluster=(2, 1)),
        (600, 136, 520),
        {f"{WAIT}#1: remove": TAIL, FULL: END},
    ),
}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", CASES)
def test_every_operation_is_noticed_or_explained(name, tmp_path, monkeypatch):
    monkeypatch.setenv("CUTE_DSL_DUMP_DIR", str(tmp_path))
    gemm, size, reasons = CASES[name]
    outcomes = mutate.run(make_check(gemm, *size, 1), mutate.settings(seeds=2, warps=6), reasons=reasons)
    print("\n".join(map(str, outcomes)))
    assert len(outcomes) > 20
    assert [str(o) for o in outcomes if o.verdict not in ("detected", "explained")] == []
    assert {o.mutation.key for o in outcomes if o.verdict == "explained"} == set(reasons)  # none is stale
