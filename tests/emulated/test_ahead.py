"""A workspace that is reserved serves every call up to its size, whichever kernel that gets."""

import pytest
import torch

import overlap_gemm
from cute_emulator import Emulator
from overlap_gemm.backends import plans
from overlap_gemm.backends.ahead import reserve
from overlap_gemm.backends.plans import plan_for
from overlap_gemm.kernels.geometry import ExchangeShape
from overlap_gemm.runtime.virtual import VirtualWorld
from overlap_gemm.runtime.workspace import workspaces
from overlap_gemm.spec import PATTERNS
from overlap_gemm.tuning.settings import configured

CPU = torch.device("cpu")


@pytest.mark.parametrize("pattern", ["reduce_scatter", "one_shot", "output_gather"])
def test_calls_up_to_what_was_reserved_allocate_nothing(monkeypatch, pattern):
    """``"one_shot"`` stands for an all-reduce: the model settles which; and whether a scatter is one."""
    monkeypatch.setattr(plans, "SMALLEST_BUFFER", 1 << 10)
    monkeypatch.setattr(plans, "SMALLEST_FLAGS", 1)
    with Emulator("sm_100a", 2) as emulator, VirtualWorld(2, emulator=emulator) as world:
        held = [reserve(g, CPU, torch.bfloat16, [PATTERNS[pattern].op], 4096, 1024) for g in world.ranks]
        assert overlap_gemm.workspace_bytes() == sum(held)
        for rows in (1, 2, 100, 300, 700, 1000, 2048, 4095, 4096):
            for columns, depth in ((16, None), (1024, None), (1024, 64), (1024, 1 << 17)):
                shape = ExchangeShape.even(rows, columns, 2, pattern)
                monkeypatch.setattr(plans, "compiled_kernel", lambda *_: None)
                for group in world.ranks:
                    tiles = [{"mma": "1cta", "tile": (128, columns)} for columns in (64, 128, 256)]
                    for fields in ({}, *(tiles if pattern != "one_shot" else ())):
                        with configured(**fields):
                            plan_for(group, CPU, torch.bfloat16, shape, "k", "k", False, depth)
        assert overlap_gemm.workspace_bytes() == sum(held)
        larger = ExchangeShape.even(9000, 1024, 2, pattern)
        plan_for(world.ranks[0], CPU, torch.bfloat16, larger, "k", "k", False)
        assert overlap_gemm.workspace_bytes() > sum(held)


def test_what_is_reserved_within_a_block_that_asks_for_puts_is_for_puts():
    with Emulator("sm_90a", 2) as emulator, VirtualWorld(2, emulator=emulator) as world:
        ops = ["gemm_all_reduce", "all_gather_gemm"]
        with configured(transport="nvshmem"):
            held = [reserve(group, CPU, torch.bfloat16, ops, 100, 64) for group in world.ranks]
        assert {space.size.kind for space in workspaces()} == {"puts", "gather puts"}
        assert overlap_gemm.workspace_bytes() == sum(held)
