"""Weakens every flag and wait of the kernels of ops whose operand is sent, one at a time."""

import pytest

from cute_emulator import mutate
from tests.support.emulated.gather_world import World
from tests.support.emulated.mutated_words import FLAGS_AND_WAITS

PARTS = 2
REASONS = {
    f"cp.async.bulk.wait_group#{which}: full -> .read": "what the comm lane stores is the caller's output, "
    "which nobody reads before the kernel's end; the stage only has to be read"
    for which in (0, 1)
} | {
    pattern: reason
    for reason, patterns in {
        "a wait for the same rank's data, or for its 'has read', follows each wait for its entry: that flag "
        "orders what is read, and what is overwritten in the next call": (
            "ld.acquire.sys.global.b64#[024]: .acquire -> .relaxed",
            "st.release.sys.global.b64#1: .release -> .relaxed",
        ),
        "the load role of the same CTA has observed this entry, before the ring's last stage is full": (
            "ld.acquire.sys.global.b64#2: .sys -> .gpu",
            "ld.relaxed.sys.global.b64#[45]: .sys -> .gpu",
        ),
    }.items()
    for pattern in patterns
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


def exchanging(transport):
    """Returns a check for `mutate.run`: two ranks of Hopper, three calls."""

    def check(options):
        with World("sm_90a", 2, transport=transport, sms=1, **options) as world:
            for rows in (256, 66, 256):
                world.call(rows, 256, 128, "all_to_all_gemm", bias=False)
            world.run()

    return check


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("transport", ["copy_engine", "peer_bulk"])
def test_every_weakened_flag_and_wait_of_an_input_exchange_shows(transport, part):
    outcomes = mutate.run(
        exchanging(transport),
        [*TRIED, mutate.Setting("lazy", 1)],
        select=FLAGS_AND_WAITS,
        reasons=REASONS,
        part=(part, PARTS),
    )
    print(*outcomes, sep="\n")
    assert outcomes
    assert [str(o) for o in outcomes if o.verdict == "NOT DETECTED"] == []
