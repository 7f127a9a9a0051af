import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from overlap_gemm.testing.ranks import Ranks

LAUNCH = Path(__file__).parents[2] / "launch"
PRELOAD = ("overlap_gemm.nn", "overlap_gemm.parallel", "transformers.models.llama.modeling_llama")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """`ranks(P)`: a set of P processes that the tests of a session share."""
    pools: dict[int, Ranks] = {}

    def pool(size: int) -> Ranks:
        if size not in pools or not pools[size].alive:
            pools[size] = Ranks(size, preload=PRELOAD)
        return pools[size]

    yield pool
    for pool_of_size in pools.values():
        pool_of_size.close()


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
