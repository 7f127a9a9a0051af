"""Words that are polled while bulk stores write them, compared with tiles that flags announce."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from overlap_gemm.runtime.virtual import VirtualWorld
from overlap_gemm.testing.cases import Case
from overlap_gemm.testing.emulated import run_launches
from overlap_gemm.tuning.settings import configured

KERNEL: dict[str, Any] = {"mma": "pingpong", "tile": (64, 128), "cluster": (1, 1)}
"""One for all sizes: what takes the time is compilation."""

SIZES = {"tail": (512, 1024, 256), "many-tiles": (1024, 1024, 64), "ragged": (200, 160, 72)}
"""K is short: all that is in question are the words that travel."""


def assert_same_bits(
    op: str,
    fields: dict[str, Any],
    shape: str,
    make_world: Callable[[], AbstractContextManager[VirtualWorld]],
    launches: int,
) -> None:
    """`ll_bulk` gives the bits of `peer_bulk` in calls on changing data.

    Args:
        op: the op's public name.
        fields: what else `configured` is given.
        shape: of `SIZES`.
        make_world: opens the virtual ranks, for either transport anew.
        launches: how many calls, queued together.
    """
    case = Case(op, *SIZES[shape], torch.bfloat16)

    def outs(transport: str) -> list[torch.Tensor]:
        with configured(**KERNEL, **fields, transport=transport), make_world() as world:
            return [torch.cat(each) for _, each in run_launches(case, world, launches)]

    for polled, flagged in zip(outs("ll_bulk"), outs("peer_bulk"), strict=True):
        assert torch.equal(polled, flagged)
