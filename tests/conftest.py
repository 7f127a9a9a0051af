"""What holds for all tests: their order, and what processes side by side share."""

import contextlib
import faulthandler
import fcntl
import gc
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from _pytest.faulthandler import fault_handler_stderr_fd_key

from overlap_gemm import register  # noqa: F401  # makes all public names, and so registers every op

FIRST_SIDE_BY_SIDE = ("multi", "emulated", "emulator")
"""Folders that take longest: the others fill what time is left."""
KERNELS = "overlap_gemm_test_kernels_"


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """This process's lock on a folder, which ends with the process, however that ends.

    Raises:
        OSError: another process holds it, or it is gone, or another user's.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def folder_of_this_run() -> Iterator[str]:
    """An empty folder that goes with the run; those that killed runs have left go first."""
    for left in Path(tempfile.gettempdir()).glob(f"{KERNELS}*"):
        with contextlib.suppress(OSError), held(left):
            shutil.rmtree(left)
    new = Path(tempfile.mkdtemp())
    with held(new):  # and only now named as one that may be left
        folder = new.rename(new.with_name(KERNELS + new.name))
        try:
            yield str(folder)
        finally:
            shutil.rmtree(folder)


def pytest_configure(config: pytest.Config) -> None:
    """Lets processes that tests start import the tools; gives a run without a GPU two folders of its own.

    All its processes, and those that tests start, share them: one has the kernels of ops by configuration and
    source, the other has what the emulator compiled, by the text of the traced module. So each is compiled
    once.
    """
    if not hasattr(config, "workerinput"):
        paths = [str(config.rootpath / "tools"), *filter(None, [os.environ.get("PYTHONPATH")])]
        os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    if not hasattr(config, "workerinput") and not torch.cuda.is_available():
        run = contextlib.ExitStack()
        config.add_cleanup(run.close)
        for variable in ("OVERLAP_GEMM_CACHE_DIR", "CUTE_EMULATOR_COMPILES"):
            folder = run.enter_context(folder_of_this_run())
            run.enter_context(pytest.MonkeyPatch.context()).setenv(variable, folder)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Keeps Python's garbage collector off while tests are collected, where it took a fifth of 23 seconds."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Puts tests/compiled last, and side by side the longest first.

    A compile that makes host code, outside the emulator, loads the DSL's own CUDA runtime into the process
    for good. What the DSL's JIT makes in an emulator opened after that finds this one
    (cudaErrorInsufficientDriver); only TVM-FFI functions, made from object files, find the emulator's.

    Raises:
        pytest.UsageError: a test's name has an address or values in it, so processes collect others.
    """
    for item in items:
        if " at 0x" in item.nodeid or "tensor(" in item.nodeid:
            raise pytest.UsageError(f"{item.nodeid}: give this parameter an id that is no address or value")

    def place(item: pytest.Item) -> int:
        if "compiled" in item.path.parts:
            return len(FIRST_SIDE_BY_SIDE) + 1
        folders = enumerate(FIRST_SIDE_BY_SIDE) if hasattr(config, "workerinput") else ()
        return next((i for i, name in folders if name in item.path.parts), len(FIRST_SIDE_BY_SIDE))

    items.sort(key=place)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """Lets a process live (`faulthandler_timeout`) a bit longer than a mark `timeout` allows its test."""
    allowed = item.get_closest_marker("timeout")
    if allowed is not None:
        seconds = max(float(item.config.getini("faulthandler_timeout")), allowed.args[0] + 100)
        stderr = item.config.stash[fault_handler_stderr_fd_key]
        faulthandler.dump_traceback_later(seconds, file=stderr, exit=True)
    return (yield)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile`: deals files in our order, but for two folders, and survives processes that die.

    In our order, since every process must come to tests/compiled last. That one goes test by test: by files,
    one process may have most of a minute left when the others have nothing. tests/multi goes to one process,
    since its sets of ranks keep two cores busy by themselves.

    After a process has died, xdist 3.8 may wait for ever: it deals files of which no test is left, and
    single tests, and a process begins a test only when it has the next one, too. It also runs the test that
    the process died in again, until no process may be replaced any more.
    """
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class InOrder(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            match nodeid.split("/")[1]:
                case "multi":
                    return "tests/multi"
                case "compiled":
                    return nodeid
            return super()._split_scope(nodeid)

        def add_node_collection(self, node: Any, collection: Any) -> None:
            super().add_node_collection(node, collection)
            assert node in self.registered_collections, f"{node} replaces a process, but has other tests"

        def remove_node(self, node: Any) -> str | None:
            """Puts the tests back that a process has not begun, in front, and returns the one it died in."""
            files = self.assigned_work.pop(node).values()
            unfinished = [test for tests in files for test, is_done in tests.items() if not is_done]
            for test in reversed(unfinished[1:]):
                scope = self._split_scope(test)
                self.workqueue[scope] = {test: False, **self.workqueue.get(scope, {})}
                self.workqueue.move_to_end(scope, last=False)
            for other in self.assigned_work:
                self._reschedule(other)
            return unfinished[0] if unfinished else None

        def _reschedule(self, node: Any) -> None:
            """Deals two tests at least, or the end of the run, to a process that has collected its tests."""
            if node in self.registered_collections:
                super()._reschedule(node)
                while not node.shutting_down and self._pending_of(self.assigned_work[node]) < 2:
                    super()._reschedule(node)

    config.option.loadscopereorder = False
    return InOrder(config, log)


def pytest_report_header() -> str | None:
    """Says what a machine without a CUDA device does not run."""
    return None if torch.cuda.is_available() else "no CUDA device: tests/gpu does not run"
