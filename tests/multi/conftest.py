import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.models import FAMILIES, MORE_FAMILIES
from tests.support.ranks import Ranks, rank_pools

LAUNCH = Path(__file__).parents[2] / "launch"
PRELOAD = (
    "pytest",  # what every test's file imports
    "cutlass",  # what the first call imports: a second of processor time in each rank
    "overlap_gemm.nn",
    "overlap_gemm.parallel",
    "overlap_gemm.parallel.modules.lora",
    "torch._dynamo.backends.debugging",  # what the first torch.compile imports
    "torch._inductor.compile_fx",
    *(f"transformers.models.{family}.modeling_{family}" for family in (*FAMILIES, *MORE_FAMILIES)),
)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """`ranks(P)`: a set of P processes that the tests of a file share.

    Starting one takes 0.2 s of processor time. Those of a whole session kept the groups of every test, whose
    thousand threads took a third of a core for as long as the processes lasted.
    """
    with rank_pools(preload=PRELOAD) as pool:
        yield pool


@pytest.fixture
def launch() -> Callable[..., subprocess.CompletedProcess[str]]:
    """`launch("torchrun", 2, "python", ...)`: a command on several ranks, by a script of `launch/`."""

    def start(launcher: str, ranks: int, *command: str | Path) -> subprocess.CompletedProcess[str]:
        inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        return subprocess.run(
            ["bash", LAUNCH / f"{launcher}.sh", "-n", str(ranks), *map(str, command)],
            env={**inherited, "OVERLAP_GEMM_PYTHON": sys.executable},
            capture_output=True,
            text=True,
            timeout=240,
        )

    return start
