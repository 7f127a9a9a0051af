"""Lanes of one warp that hand values over through shared memory without anything that orders them.

Since Volta the lanes of a warp need not run in lock-step: what one lane stored another may load only behind
`bar.warp.sync`, or whatever else makes the lanes meet. Every ordinary store of a warp is kept until it does
so. A shuffle or a vote counts, too, though by the letter it orders no memory: kernels rely on it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from overlap_gemm.emulator.numbers.lanes import lane_list

if TYPE_CHECKING:
    from overlap_gemm.emulator.errors import Report
    from overlap_gemm.emulator.machine.warp import Cta, Warp

KEPT = 64  # stores of a warp that are looked at; those before are forgotten


class LaneStore(NamedTuple):
    """A store of a warp that no other lane may have seen yet.

    Attributes:
        cta: Whose memory it went to.
        mask: Lanes.
        offsets: Of each of these lanes, in bytes, or one of all of them.
        low: Lowest byte.
        end: End of the highest.
        size: Bytes of a lane.
        line: In the PTX.
    """

    cta: Cta
    mask: int
    offsets: Any
    low: int
    end: int
    size: int
    line: int


def check_load(
    report: Report, warp: Warp, cta: Cta, mask: int, offsets: Any, low: int, end: int, size: int, line: int
) -> None:
    """Reports a load that gets what another lane of its warp stored since the lanes met last.

    Args:
        report: Where to.
        warp: That loads.
        cta: Whose memory it is.
        mask: Lanes that load.
        offsets: Of all 32 lanes, in bytes, or one of all of them.
        low: Lowest byte.
        end: End of the highest.
        size: Bytes of a lane.
        line: In the PTX.
    """
    near = [s for s in warp.unsynced if s.cta is cta and s.low < end and low < s.end]
    if not near:
        return
    first = min(s.low for s in near)
    writer = np.full(max(s.end for s in near) - first, -1, np.int64)
    lines = np.zeros(len(writer), np.int64)
    for store in near:
        lanes = lane_list(store.mask)
        single = [store.offsets] * len(lanes) if store.offsets.__class__ is int else store.offsets.tolist()
        for lane, at in zip(lanes, single, strict=True):
            where = slice(at - first, at - first + store.size)
            shared = store.offsets.__class__ is int and len(lanes) > 1
            writer[where] = 32 if shared else lane
            lines[where] = store.line
    for lane in lane_list(mask):
        at = (offsets if offsets.__class__ is int else int(offsets[lane])) - first
        found = writer[max(at, 0) : max(at + size, 0)]
        others = np.flatnonzero((found >= 0) & (found < 32) & (found != lane))
        if len(others):
            other = int(found[others[0]])
            theirs = int(lines[max(at, 0) + int(others[0])])
            report.add(
                "lane-race",
                f"lane {lane} of {warp} reads in line {report.place(line)} shared {first + max(at, 0):#x} of "
                f"{cta}, which lane {other} wrote in line {report.place(theirs)}: no bar.warp.sync between",
                line,
                key=(line, theirs),
                other=theirs,
            )
            return
