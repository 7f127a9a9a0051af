"""Tests that need CUDA devices. Without one they are not collected, and the header of the run says so."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from overlap_gemm.testing.ranks import Ranks

DEVICES = torch.cuda.device_count()


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    return None if DEVICES else True


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", 0)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """`ranks(P)`: P processes with a GPU each, shared by the tests of a session."""
    pools: dict[int, Ranks] = {}

    def pool(size: int) -> Ranks:
        if size not in pools or not pools[size].alive:
            pools[size] = Ranks(size, device="cuda", timeout=60)
        return pools[size]

    yield pool
    for pool_of_size in pools.values():
        pool_of_size.close()
