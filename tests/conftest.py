"""What holds for all tests: their order, and what processes side by side share."""

import tempfile
from typing import Any

import pytest
import torch

FIRST_SIDE_BY_SIDE = ("multi", "emulated", "emulator")
"""Folders that take longest: the others fill what time is left."""


def pytest_configure(config: pytest.Config) -> None:
    """Gives a run without a GPU one folder of compiled kernels, for all its processes, and no other run's.

    Processes side by side, and those that tests start, then compile an op's kernel once between them.
    """
    if not hasattr(config, "workerinput") and not torch.cuda.is_available():
        folder = tempfile.TemporaryDirectory(prefix="overlap_gemm_kernels_")
        config.add_cleanup(folder.cleanup)
        patch = pytest.MonkeyPatch()
        patch.setenv("OVERLAP_GEMM_CACHE_DIR", folder.name)
        config.add_cleanup(patch.undo)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Puts tests/compiled last, and side by side the longest first.

    A compile that makes host code, outside the emulator, loads the DSL's own CUDA runtime into the process
    for good. What the DSL's JIT makes in an emulator opened after that finds this one
    (cudaErrorInsufficientDriver); only TVM-FFI functions, made from object files, find the emulator's.
    """

    def place(item: pytest.Item) -> int:
        if "compiled" in item.path.parts:
            return len(FIRST_SIDE_BY_SIDE) + 1
        folders = enumerate(FIRST_SIDE_BY_SIDE) if hasattr(config, "workerinput") else ()
        return next((i for i, name in folders if name in item.path.parts), len(FIRST_SIDE_BY_SIDE))

    items.sort(key=place)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile`: files go to the processes one by one in our order, tests/multi to one of them.

    The sets of ranks of tests/multi keep two cores busy by themselves, and take a while to start. In our
    order, since every process must come to tests/compiled last.
    """
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class InOrder(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "tests/multi" if nodeid.startswith("tests/multi/") else super()._split_scope(nodeid)

    config.option.loadscopereorder = False
    return InOrder(config, log)


def pytest_report_header() -> str | None:
    """Says what a machine without a CUDA device does not run."""
    return None if torch.cuda.is_available() else "no CUDA device: tests/gpu is not collected"
