"""Runs of pytest alongside changed code, each in a process forked from one that has imported torch already.

    with ForkedTests() as tests:
        tests.fail(folder, "tests/cpu/test_peers.py")   # with the package that lies in `folder`

Run as a script, this file is the process that forks: it imports nothing of the package.
"""

import contextlib
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NoReturn

CHECKOUT = Path(__file__).parents[2]
PRELOADED = ("pytest", "numpy", "torch.distributed.tensor", "torch._dynamo", "cutlass.cute")
"""What most test files import."""
ARGUMENTS = ("-q", "-p", "no:cacheprovider", "-p", "no:hypothesispytest", "-p", "no:xdist")
RECORDER = """
import sys, threading

log, seen = open({log!r}, "a", buffering=1), {{}}

def note(frame, event, argument):
    code = frame.f_code
    if event == "call" and id(code) not in seen:
        seen[id(code)] = code
        file = code.co_filename.rpartition({name!r} + "/")
        if file[0].endswith("/"):
            log.write(f"{{file[2]}}:{{code.co_firstlineno}}\\n")

threading.setprofile(note)
sys.setprofile(note)
"""
"""A `sitecustomize.py` of processes whose functions are recorded."""


class ForkedTests:
    """Test files run one after the other, each in a process of its own.

    Args:
        limit: Seconds that a file may take.
    """

    def __init__(self, limit: float = 300.0):
        self._limit = limit
        self._server = subprocess.Popen(
            [sys.executable, __file__], cwd=CHECKOUT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def fail(self, source: str | Path, test: str) -> bool:
        """Whether a test file fails, or does not end in time.

        Args:
            source: The folder in which the package lies.
            test: A path in the checkout, or an absolute one.

        Raises:
            ValueError: There is no such file.
        """
        if not (CHECKOUT / test).is_file():
            raise ValueError(f"there are no tests in {test}")
        assert self._server.stdin is not None and self._server.stdout is not None
        print(json.dumps([str(source), test, self._limit]), file=self._server.stdin, flush=True)
        return self._server.stdout.readline() != "passed\n"

    def entered(self, package: Path, test: str) -> tuple[float, list[str]]:
        """Records the functions that a test file enters, in its process and in those that it starts.

        Returns:
            Seconds that it took, infinite if it fails; and "file:line" of each function of `package`, whose
            files are relative to it.
        """
        with tempfile.TemporaryDirectory(prefix="overlap-gemm-entered-") as folder:
            log = Path(folder) / "log"
            (Path(folder) / "sitecustomize.py").write_text(RECORDER.format(log=str(log), name=package.name))
            (Path(folder) / package.name).symlink_to(package)
            start = time.monotonic()
            failed = self.fail(folder, test)
            seconds = time.monotonic() - start
            if failed and self.fail(package.parent, test):  # a test may count functions itself
                seconds = float("inf")
            return seconds, sorted(set(log.read_text().splitlines())) if log.exists() else []

    def __enter__(self) -> "ForkedTests":
        return self

    def __exit__(self, *_: object) -> None:
        self._server.communicate()


def _serve() -> None:
    for module in PRELOADED:
        importlib.import_module(module)
    for line in sys.stdin:
        source, test, limit = json.loads(line)
        child = os.fork()
        if child == 0:
            _run(source, test)
        ended, _, _ = select.select([os.pidfd_open(child)], [], [], limit)
        if not ended:
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # what the tests have started and left
        print("passed" if status == 0 else "failed", flush=True)


def _run(source: str, test: str) -> NoReturn:
    import pytest

    code: Any = 1
    try:
        os.setsid()
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(nowhere, descriptor)
        sys.path.insert(0, source)
        arguments = [*ARGUMENTS, "-x"]
        if (recorder := Path(source) / "sitecustomize.py").exists():
            arguments.pop()
            runpy.run_path(str(recorder))
        os.environ["PYTHONPATH"] = os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])
        code = pytest.main([*arguments, test])
    finally:
        os._exit(int(code))


if __name__ == "__main__":
    _serve()
