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
WAIT = "mbarrier.try_wait.parity.shared.b64"
DRAIN = "a drain at a role's end, needed in clusters"
# By kind and ordinal of the wait. From 1: the load role's drain of its 8, or 6, A/B stages.
WAITS = {
    "1cta": dict.fromkeys(range(1, 9), DRAIN)
    | {11: "drains the first accumulator; the second's wait implies it"},
    "2cta": dict.fromkeys(range(1, 9), "the epilogue's wait implies it: the accumulator's commit comes after")
    | {11: "drains the first accumulator; the second's wait implies it"},
    "cooperative": dict.fromkeys(range(1, 7), DRAIN),
    "pingpong": dict.fromkeys(range(1, 9), DRAIN)
    | {
        13: "the turn at the ring: needed where a tile has more subtiles than the ring has stages",
    },
}
WARPS = {"sm_100a": 11, "sm_90a": 12}
IN_CLUSTERS = {"fence.mbarrier_init*: remove": "the cluster barrier after it releases as well"}
REASONS = {
    "atom.*: .acq_rel -> .relaxed": "the next launch reads the epoch, in stream order",
    "mbarrier.arrive.shared.b64#[12]: remove": "frees stages after the last tile; nothing follows",
    "wgmma.fence.sync.aligned#1: remove": "registers are untouched between k tiles; ptxas wants it (C7520)",
    "bar.warp.sync#*: remove": "lanes of an emulated warp part at branches only, and none is before it",
}


TWO_CALLS = {
    "st.release.sys.global.b64#0: .release -> .relaxed": "guards the call after next: the next test",
    "ld.acquire.sys.global.b64#0: .acquire -> .relaxed": "guards the call after next: the next test",
    "st.release.sys.global.b64#2: .sys -> .gpu": "the last tile of two ranks is an own one",
    "fence.proxy.async.global#0: remove": "from loads to a peer's bulk stores two calls later: not modelled",
}
"""What two calls of two ranks do not show."""

FLAGS_AND_WAITS = ("*.sys*", "cp.async.bulk.wait_group*", "fence.proxy*")
"""What stands between a peer's bytes and their reader; a GPU in one piece hides most of its absence."""


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


@pytest.mark.parametrize(
    "kind",
    ["pingpong", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("1cta", "2cta", "cooperative"))],
)
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


@pytest.mark.parametrize("kind", [pytest.param("1cta", marks=pytest.mark.slow), "pingpong"])
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


def waits(kind):
    """Why waits of a kernel may be missing undetected, by their mutations' keys."""
    return {f"{WAIT}#{ordinal}: remove": reason for ordinal, reason in WAITS[kind].items()}


def part_of_the_whole(kind, part, parts):
    """Every `parts`-th mutation of a kernel under all settings."""
    arch, fields, sizes, num_sms = KERNELS[kind]
    check = checking(arch, fields, sizes, num_sms)
    clusters = IN_CLUSTERS if fields.get("cluster", (1, 1)) != (1, 1) else {}
    tried = mutate.settings(1, 2, WARPS[arch])
    return mutate.run(check, tried, reasons=REASONS | TWO_CALLS | waits(kind) | clusters, part=(part, parts))
