"""Tests that need CUDA devices. Without one they are not collected, and the header of the run says so."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from overlap_gemm.testing.ranks import Ranks, rank_pools

# 8 virtual ranks' streams and torch's own are more than the 8 queues that a context has by default: streams
# that share one wait for each other, and a rank for a rank behind it in the queue. Read when CUDA starts.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

DEVICES = torch.cuda.device_count()


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    return None if DEVICES else True


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", 0)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """`ranks(P)`: P processes with a GPU each, shared by the tests of a session."""
    with rank_pools(device="cuda", timeout=60) as pool:
        yield pool
