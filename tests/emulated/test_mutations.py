"""Removes or weakens every synchronisation operation of the GEMM reduce-scatter kernels, one at a time.

An hour or two per kernel on one core: `bash launch/test.sh -m slow -n auto tests/emulated/test_mutations.py`
deals the parts of each run to all cores. What goes undetected must be explained here.
"""

import pytest
import torch

from cute_emulator import Emulator, mutate
from overlap_gemm.runtime.virtual import VirtualWorld
from overlap_gemm.testing.cases import Case
from overlap_gemm.testing.emulated import judge, run_launches
from overlap_gemm.tuning.settings import configured
from tests.support.emulated.mutated_words import (
    FLAGS_AND_WAITS,
    REASONS,
    TWO_CALLS,
    WARPS,
    waits,
)

# One CTA per rank, three foreign and three own tiles, more k tiles in each than the 8 A/B stages.
KERNELS = {
    "1cta": ("sm_100a", {"mma": "1cta", "tile": (128, 64)}, (256, 192, 1152), 1),
    "2cta": ("sm_100a", {"mma": "2cta", "tile": (256, 128), "cluster": (2, 1)}, (512, 384, 1152), 2),
    "pingpong": ("sm_90a", {"mma": "pingpong", "tile": (64, 128), "cluster": (1, 1)}, (128, 384, 1152), 1),
    "cooperative": (
        "sm_90a",
        {"mma": "cooperative", "tile": (128, 128), "cluster": (1, 1)},
        (256, 384, 1152),
        1,
    ),
}
PARTS = 12
IN_CLUSTERS = {"fence.mbarrier_init*: remove": "the cluster barrier after it releases as well"}


def checking(arch, fields, sizes, num_sms, launches=2):
    """A check for `mutate.run`: two ranks, launches through the public op, results judged."""
    case = Case("gemm_reduce_scatter", *sizes, torch.bfloat16)

    def check(options):
        with (
            configured(**fields),
            Emulator(arch, 2, num_sms=num_sms, **options) as emulator,
            VirtualWorld(2, emulator=emulator) as world,
        ):
            for given, outs in run_launches(case, world, launches):
                assert judge(case, given, outs, torch.bfloat16).holds

    return check


@pytest.mark.slow
@pytest.mark.parametrize("kind", KERNELS)
def test_every_weakened_flag_and_bulk_wait_shows(kind):
    """`.sys` -> `.gpu`, acquire or release -> relaxed, full wait -> `.read`, a group less, no proxy fence."""
    arch, fields, (rows, columns, _), num_sms = KERNELS[kind]
    check = checking(arch, fields, (rows, columns, 64), num_sms)
    tried = [mutate.Setting("lazy", 0), mutate.Setting("immediate"), mutate.Setting("lazy", 1)]
    outcomes = mutate.run(check, tried, select=FLAGS_AND_WAITS, reasons=REASONS | TWO_CALLS)
    print(*outcomes, sep="\n")
    assert [str(o) for o in outcomes if o.verdict == "NOT DETECTED"] == []
    detected = {o.mutation.key.split(": ")[1] for o in outcomes if o.verdict == "detected"}
    assert {"remove", ".sys -> .gpu", ".release -> .relaxed", ".acquire -> .relaxed"} <= detected
    assert {"full -> .read", "wait for one group less"} <= detected


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["1cta", "pingpong"])
def test_every_weakened_entry_flag_shows(kind):
    """The flags by which ranks tell of their entry, which guard the slots of the call after next."""
    arch, fields, _, num_sms = KERNELS[kind]
    check = checking(arch, fields, (1, 128, 64), num_sms, launches=4)
    tried = [mutate.Setting("immediate"), *(mutate.Setting("lazy", seed) for seed in range(3))]
    outcomes = mutate.run(check, tried, select="*.sys*", reasons=REASONS)
    print(*outcomes, sep="\n")
    assert [str(o) for o in outcomes if o.verdict == "NOT DETECTED"] == []


@pytest.mark.slow
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("kind", KERNELS)
def test_every_broken_synchronisation_shows(kind, part):
    outcomes = part_of_the_whole(kind, part, PARTS)
    print(*outcomes, sep="\n")
    assert len(outcomes) > 50 // PARTS
    assert [str(o) for o in outcomes if o.verdict == "NOT DETECTED"] == []


def part_of_the_whole(kind, part, parts):
    """Every `parts`-th mutation of a kernel under all settings."""
    arch, fields, sizes, num_sms = KERNELS[kind]
    check = checking(arch, fields, sizes, num_sms)
    clusters = IN_CLUSTERS if fields.get("cluster", (1, 1)) != (1, 1) else {}
    tried = mutate.settings(1, 2, WARPS[arch])
    return mutate.run(check, tried, reasons=REASONS | TWO_CALLS | waits(kind) | clusters, part=(part, parts))
