"""Runs of pytest alongside changed code, each in a process forked from one that has imported torch already.

    with ForkedTests() as tests:
        tests.fail(folder, "tests/cpu/test_peers.py")   # with the package that lies in `folder`

Run as a script, this file is the process that forks: it imports nothing of the package.
"""

import contextlib
import importlib
import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

CHECKOUT = Path(__file__).parents[2]
PRELOADED = ("pytest", "numpy", "torch.distributed.tensor", "torch._dynamo", "cutlass.cute")
"""What most test files import."""
ARGUMENTS = ("-q", "-x", "-p", "no:cacheprovider", "-p", "no:hypothesispytest", "-p", "no:xdist")


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
        os.environ["PYTHONPATH"] = os.pathsep.join([source, os.environ.get("PYTHONPATH", "")])
        code = pytest.main([*ARGUMENTS, test])
    finally:
        os._exit(int(code))


if __name__ == "__main__":
    _serve()
