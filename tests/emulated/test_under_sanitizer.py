"""What compute-sanitizer is given on a GPU: ranks that run one after another and wait for nobody."""

import runpy
from pathlib import Path

import pytest
import torch

from cute_emulator import Emulator

SCRIPT = runpy.run_path(str(Path(__file__).parents[1] / "gpu" / "under_sanitizer.py"))


@pytest.mark.parametrize("number", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_ranks_run_one_after_another(number):
    with Emulator("sm_90a", 2) as emulator, emulator.rank(0):
        world = SCRIPT["ArrivedWorld"]
        SCRIPT["check"](SCRIPT["KERNELS"][number], lambda: world(2, emulator=emulator), torch.device("cpu"))
