"""Tests that need CUDA devices. Without one they do not run, and the header of the run says so."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.support.ranks import Ranks, rank_pools

# 8 virtual ranks' streams and torch's own are more than the 8 queues that a context has by default: streams
# that share one wait for each other, and a rank for a rank after it in the queue. Read when CUDA starts.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

DEVICES = torch.cuda.device_count()


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    return None if DEVICES else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects without a device what pytest collects all the same: paths named on the command line."""
    ours = [] if DEVICES else [item for item in items if item.path.is_relative_to(Path(__file__).parent)]
    if ours:
        config.hook.pytest_deselected(items=ours)
        items[:] = [item for item in items if item not in ours]


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", 0)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """`ranks(P)`: P processes with a GPU each, shared by the tests of a session."""
    with rank_pools(device="cuda", timeout=60) as pool:
        yield pool
