"""Weakens every flag and wait of the all-gather GEMM's kernels, one at a time."""

import pytest

from cute_emulator import mutate
from tests.support.emulated.gather_world import World
from tests.support.emulated.mutated_words import FLAGS_AND_WAITS

PARTS = 2
REASONS = {
    f"cp.async.bulk.wait_group#{which}: full -> .read": "what the comm lane stores is the caller's output, "
    "which nobody reads before the kernel's end; the stage only has to be read"
    for which in (0, 1)
}
TRIED = [
    mutate.Setting("immediate"),
    mutate.Setting("lazy", 0),
    *(mutate.Setting("random", n) for n in (1, 2, 3)),
]


def checking(transport, keep):
    """A check for `mutate.run`: two ranks of Hopper, four calls, one of two weights, results judged.

    The last launch of a call keeps. After another launch of the call, which has waited for every shard, it
    would have nothing to wait for: so one call of one weight keeps, too.
    """

    def check(options):
        with World("sm_90a", 2, transport=transport, sms=1, **options) as world:
            world.call(384, 256, 64)
            world.several(384, [128, 128], 64, keep)
            world.several(384, [128], 64, keep)
            world.call(384, 256, 64)
            world.run()

    return check


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize(("transport", "keep"), [("copy_engine", False), ("peer_bulk", True)])
def test_every_weakened_flag_and_wait_shows(transport, keep, part):
    outcomes = mutate.run(
        checking(transport, keep),
        TRIED,
        select=FLAGS_AND_WAITS,
        reasons=REASONS,
        part=(part, PARTS),
    )
    print(*outcomes, sep="\n")
    assert outcomes
    assert [str(o) for o in outcomes if o.verdict == "NOT DETECTED"] == []
