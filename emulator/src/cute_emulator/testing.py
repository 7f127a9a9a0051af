"""``python -m cute_emulator`` for tests: one forked process for each command.

Importing torch, CuTe DSL and the emulator takes three seconds of processor time, most of the time of a test's
command. A server process that has imported them, and nothing else, forks for each command.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def emulator_command(
    *words: object, env: Mapping[str, str] | None = None, timeout: int = 300
) -> subprocess.CompletedProcess[str]:
    """Runs the command in the current directory.

    Args:
        *words: Arguments after ``python -m cute_emulator``.
        env: Changes of the command's environment.
        timeout: Time limit in seconds.

    Raises:
        subprocess.TimeoutExpired: The command exceeded the time limit.
    """
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        request = {
            "words": [*map(str, words)],
            "env": {**os.environ, **(env or {})},
            "cwd": str(Path.cwd()),
            "out": str(out),
            "err": str(err),
            "timeout": timeout,
        }
        server = _server()
        assert server.stdin is not None and server.stdout is not None
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        try:
            code = int(server.stdout.readline())
        except (
            BaseException
        ):  # such as a test's time limit: a late answer would be read as the next command's
            _end(server)
            _server.cache_clear()
            raise
        if code == -signal.SIGALRM:
            raise subprocess.TimeoutExpired(list(map(str, words)), timeout, out.read_text(), err.read_text())
        return subprocess.CompletedProcess(list(map(str, words)), code, out.read_text(), err.read_text())


@functools.cache
def _server() -> subprocess.Popen[str]:
    """Returns a process that waits for commands until this process closes the pipe."""
    # The DSL reads this variable at its import; every command sets it before.
    env = {**os.environ, "CUTE_DSL_LINEINFO": "1"}
    pipe = subprocess.PIPE
    server = subprocess.Popen([sys.executable, "-m", __name__], stdin=pipe, stdout=pipe, text=True, env=env)
    atexit.register(_end, server)
    return server


def _end(server: subprocess.Popen[str]) -> None:
    """Kills the server at once; a command that it waits for ends by its time limit."""
    with server:
        server.kill()


def _serve() -> None:
    import cutlass.cute  # noqa: F401
    import torch  # noqa: F401

    import cute_emulator.check_command
    import cute_emulator.mutate_command  # noqa: F401

    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        child = os.fork()
        if not child:
            _command(json.loads(line))
        answers.write(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n")
        answers.flush()


def _command(request: dict[str, Any]) -> None:
    """Executes ``python -m cute_emulator WORDS`` in a forked process."""
    signal.alarm(request["timeout"])
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    for number, (name, mode) in enumerate(((os.devnull, "r"), (request["out"], "w"), (request["err"], "w"))):
        with Path(name).open(mode) as file:
            os.dup2(file.fileno(), number)
    path = filter(None, request["env"].get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:0] = [request["cwd"], *path]
    sys.argv = ["cute_emulator", *request["words"]]
    runpy.run_module("cute_emulator", run_name="__main__", alter_sys=True)
    sys.exit()


if __name__ == "__main__":
    _serve()
