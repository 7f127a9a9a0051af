"""A workspace that is reserved serves every call up to its size, whichever kernel that gets."""

import torch

import overlap_gemm
from overlap_gemm.backends import plans
from overlap_gemm.backends.ahead import reserve
from overlap_gemm.backends.plans import plan_for
from overlap_gemm.emulator import Emulator
from overlap_gemm.kernels.geometry import ExchangeShape
from overlap_gemm.runtime.virtual import VirtualWorld
from overlap_gemm.tuning.settings import configured

CPU = torch.device("cpu")


def test_calls_up_to_what_was_reserved_allocate_nothing(monkeypatch):
    monkeypatch.setattr(plans, "SMALLEST_BUFFER", 1 << 10)
    monkeypatch.setattr(plans, "SMALLEST_FLAGS", 1)
    with Emulator("sm_100a", 2) as emulator, VirtualWorld(2, emulator=emulator) as world:
        held = [reserve(g, CPU, torch.bfloat16, ExchangeShape.even(4096, 1024, 2)) for g in world.ranks]
        assert overlap_gemm.workspace_bytes() == sum(held)
        for rows in (1, 2, 100, 1000, 2048, 4095, 4096):
            for columns in (8, 1024):
                shape = ExchangeShape.even(rows, columns, 2)
                monkeypatch.setattr(plans, "compiled_kernel", lambda *_: None)
                for group in world.ranks:
                    for tile in ((128, 64), (128, 128), (128, 256)):
                        with configured(mma="1cta", tile=tile):
                            plan_for(group, CPU, torch.bfloat16, shape, "k", "k", False)
        assert overlap_gemm.workspace_bytes() == sum(held)
        plan_for(world.ranks[0], CPU, torch.bfloat16, ExchangeShape.even(9000, 1024, 2), "k", "k", False)
        assert overlap_gemm.workspace_bytes() > sum(held)
