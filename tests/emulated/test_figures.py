"""Warp instructions per tile, with and without the comm role, do not grow unseen.

`python -m tests.emulated.test_figures` from the root of the repository writes the figures anew.
"""

import json
from pathlib import Path

import pytest
import torch

from cute_emulator import Emulator
from overlap_gemm.runtime.virtual import VirtualWorld
from overlap_gemm.testing.cases import Case
from overlap_gemm.testing.emulated import judge, run_launches
from overlap_gemm.tuning.settings import configured
from tests.support.chosen import in_turn

FILE = Path(__file__).parents[2] / "benchmarks/results/instructions.json"
KERNELS = {
    "sm_100a 1cta 128x128": ("sm_100a", {"mma": "1cta", "tile": (128, 128)}),
    "sm_100a 2cta 256x128": ("sm_100a", {"mma": "2cta", "tile": (256, 128)}),
    "sm_90a pingpong 128x128": ("sm_90a", {"mma": "pingpong", "tile": (128, 128), "cluster": (1, 1)}),
    "sm_90a cooperative 128x128": ("sm_90a", {"mma": "cooperative", "tile": (128, 128), "cluster": (1, 1)}),
}
OPS = {
    "GEMM": (1, False),
    "GEMM with bias": (1, True),
    "GEMM-RS on 2 ranks": (2, False),
    "GEMM-RS on 4 ranks": (4, False),
}
"""Ranks, and whether a bias is added."""
SLACK = 1.03
"""Polls depend on who runs when, so a few instructions come and go with unrelated changes."""


def instructions_per_tile(arch: str, fields: dict, ranks: int, bias: bool) -> float:
    """Warp instructions per 128 x 128 tile and rank of a right run."""
    case = Case("gemm_reduce_scatter", 1024, 128, 128, torch.bfloat16, bias=bias)
    with (
        configured(**fields),
        Emulator(arch, ranks, "immediate", num_sms=2) as emulator,
        VirtualWorld(ranks, emulator=emulator) as world,
    ):
        [(given, outs)] = run_launches(case, world, 1)
        assert judge(case, given, outs, torch.bfloat16).holds
        return emulator.report.instructions / (ranks * 1024 // 128)


@pytest.mark.parametrize(
    ("op", "kernel"),
    in_turn(OPS, KERNELS),
)
def test_nothing_has_grown(kernel, op):
    now, recorded = (
        instructions_per_tile(*KERNELS[kernel], *OPS[op]),
        json.loads(FILE.read_text())[kernel][op],
    )
    assert now <= SLACK * recorded, f"{now:.0f} warp instructions per tile, recorded {recorded}"


if __name__ == "__main__":
    figures = {
        kernel: {op: round(instructions_per_tile(*given, *sizes)) for op, sizes in OPS.items()}
        for kernel, given in KERNELS.items()
    }
    FILE.write_text(json.dumps(figures, indent=1) + "\n")
