"""Weakens every flag and wait of the all-reduce and output all-gather kernels, one at a time.

As `test_mutations.py`, whose explanations these share.
"""

import pytest
import torch

from overlap_gemm.emulator import mutate
from overlap_gemm.testing.cases import Case
from overlap_gemm.testing.emulated import judge, run_launches

from .op_runs import SMALL, world_of
from .test_mutations import FLAGS_AND_WAITS, REASONS, TWO_CALLS

# One CTA per rank; three tiles a rank computes for each owner, or three of its own.
WAYS = {
    "one-shot": ("gemm_all_reduce", "one_shot", (64, 384, 64)),
    "two-shot": ("gemm_all_reduce", "two_shot", (128, 384, 64)),
    "gather": ("gemm_all_gather", None, (64, 768, 64)),
}
PARTS = 4
FIRST_LOOKS = {
    "two-shot": {
        "ld.relaxed.sys.global.b32#4: .sys -> .gpu": "the receive warps' first look at a result's flag, "
        "which is not raised yet here; the acquire behind it shows",
    }
}
TRIED = [mutate.Setting("immediate"), *(mutate.Setting("lazy", seed) for seed in range(2))]


def checking(way, launches=2):
    """A check for `mutate.run`: two ranks of Hopper, launches through the public op, results judged."""
    op, algorithm, sizes = WAYS[way]
    case = Case(op, *sizes, torch.bfloat16)

    def check(options):
        with world_of("sm_90a", 2, SMALL["sm_90a"], algorithm=algorithm, num_sms=1, **options) as world:
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
        reasons=REASONS | TWO_CALLS | FIRST_LOOKS.get(way, {}),
        part=(part, PARTS),
    )
    print(*outcomes, sep="\n")
    assert outcomes
    assert [str(o) for o in outcomes if o.verdict == "NOT DETECTED"] == []
