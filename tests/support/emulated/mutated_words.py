"""PTX instructions to weaken one at a time, and the reasons why some changes are no mistakes."""

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


def waits(kind):
    """Why waits of a kernel may be missing undetected, by their mutations' keys."""
    return {f"{WAIT}#{ordinal}: remove": reason for ordinal, reason in WAITS[kind].items()}
