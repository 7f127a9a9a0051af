"""Lists of weights of `gemm_all_to_all` on virtual ranks of one GPU: one kernel on each rank."""

import pytest

from overlap_gemm.backends.fused.launch_plan import Plan
from overlap_gemm.runtime.virtual import VirtualWorld
from tests.support.emulated.list_cases import Operands


@pytest.mark.parametrize("scaled", [False, True], ids=["16-bit", "8-bit"])
@pytest.mark.parametrize("rows", [30, 1000, 4096])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_list_is_one_launch(device, monkeypatch, ranks, rows, scaled):
    launched, launch = [], Plan.launch

    def counting(plan, *arguments):
        launched.append(plan)
        return launch(plan, *arguments)

    monkeypatch.setattr(Plan, "launch", counting)
    with VirtualWorld(ranks, device=device) as world:
        for seed in range(4):
            case = Operands(rows, [136 * ranks, 72 * ranks, 72 * ranks], 1024, scaled, seed, device)
            launched.clear()
            outs = case.call(world)
            world.synchronize()
            case.check(outs)
            assert len(launched) == ranks
