"""Removes or weakens every synchronisation of the all-reduce and output all-gather kernels, one at a time.

As `test_mutations.py`, whose explanations these share; all but the flags and waits are a core hour's work.
"""

import pytest
import torch

from cute_emulator import mutate
from overlap_gemm.testing.cases import Case
from overlap_gemm.testing.emulated import judge, run_launches
from tests.support.emulated.mutated_words import FLAGS_AND_WAITS, REASONS, TWO_CALLS, WARPS, waits
from tests.support.emulated.op_runs import SMALL, world_of

# One CTA per rank; three tiles a rank computes for each owner, or three of its own.
WAYS = {
    "one-shot": ("gemm_all_reduce", "one_shot", (64, 384, 64)),
    "two-shot": ("gemm_all_reduce", "two_shot", (64, 768, 64)),
    "gather": ("gemm_all_gather", None, (64, 768, 64)),
}
DEEP = {"one-shot": 1152, "two-shot": 1152, "gather": 576}
"""K of which a rank has more k tiles than the 8 A/B stages."""

KINDS = {"sm_90a": "pingpong", "sm_100a": "1cta"}
"""Which of `test_mutations.KERNELS` these are."""

PARTS = 4
FIRST_LOOKS = {
    "two-shot": {
        "ld.relaxed.sys.global.b64#4: .sys -> .gpu": "the receive warps' first look at a result's flag, "
        "which is not raised yet here; the acquire after it shows",
    }
}
TRIED = [mutate.Setting("immediate"), *(mutate.Setting("lazy", seed) for seed in range(2))]


def checking(way, arch="sm_90a", depth=None, launches=2):
    """A check for `mutate.run`: two ranks, launches through the public op, results judged."""
    op, algorithm, (rows, columns, few) = WAYS[way]
    case = Case(op, rows, columns, depth or few, torch.bfloat16)

    def check(options):
        with world_of(arch, 2, SMALL[arch], algorithm=algorithm, num_sms=1, **options) as world:
            for given, outs in run_launches(case, world, launches):
                assert judge(case, given, outs, torch.bfloat16).holds

    return check


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("way", WAYS)
def test_every_weakened_flag_and_wait_shows(way, part):
    outcomes = mutate.run(
        checking(way),
        TRIED,
        select=FLAGS_AND_WAITS,
        reasons=REASONS | TWO_CALLS,
        part=(part, PARTS),
    )
    print(*outcomes, sep="\n")
    assert outcomes
    assert [str(o) for o in outcomes if o.verdict == "NOT DETECTED"] == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("arch", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_every_broken_synchronisation_shows(way, arch, part):
    outcomes = mutate.run(
        checking(way, arch, DEEP[way]),
        mutate.settings(1, 2, WARPS[arch]),
        reasons=REASONS | TWO_CALLS | FIRST_LOOKS.get(way, {}) | waits(KINDS[arch]),
        part=(part, PARTS),
    )
    print(*outcomes, sep="\n")
    assert len(outcomes) > 50 // PARTS
    assert [str(o) for o in outcomes if o.verdict == "NOT DETECTED"] == []
