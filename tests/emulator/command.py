"""``python -m overlap_gemm.emulator`` for tests: a process for each, forked where the imports are done.

Importing torch, CuTe DSL and the emulator takes three seconds of processor time, most of what a command of
these tests costs. A process that has imported them, and nothing else, waits for commands and forks for each.
Files that use this start one command by `subprocess`, too, as users do.
"""

import atexit
import functools
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from pathlib import Path


def emulator_command(*words, env=None, timeout=300):
    """Runs the command with these words; `env` changes its environment.

    Returns:
        A `subprocess.CompletedProcess` with text.
    """
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        asked = {
            "words": [*map(str, words)],
            "env": {**os.environ, **(env or {})},
            "cwd": str(Path.cwd()),
            "out": str(out),
            "err": str(err),
            "timeout": timeout,
        }
        server = _server()
        server.stdin.write(json.dumps(asked) + "\n")
        server.stdin.flush()
        code = int(server.stdout.readline())
        if code == -signal.SIGALRM:
            raise subprocess.TimeoutExpired(asked["words"], timeout, out.read_text(), err.read_text())
        return subprocess.CompletedProcess(asked["words"], code, out.read_text(), err.read_text())


@functools.cache
def _server():
    """Waits for commands as long as this process holds the pipe."""
    # The DSL reads this when it is imported; every command asks for it before that.
    env = {**os.environ, "CUTE_DSL_LINEINFO": "1"}
    pipe = subprocess.PIPE
    server = subprocess.Popen([sys.executable, __file__], stdin=pipe, stdout=pipe, text=True, env=env)
    atexit.register(server.communicate)  # which closes the pipe, and so ends it
    return server


def _serve():
    import cutlass.cute  # noqa: F401
    import torch  # noqa: F401

    import overlap_gemm.emulator.check_command
    import overlap_gemm.emulator.mutate_command  # noqa: F401

    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        child = os.fork()
        if not child:
            _command(json.loads(line))
        answers.write(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n")
        answers.flush()


def _command(asked):
    """What ``python -m overlap_gemm.emulator WORDS`` does, in a forked process."""
    signal.alarm(asked["timeout"])
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["env"])
    for number, (name, mode) in enumerate(((os.devnull, "r"), (asked["out"], "w"), (asked["err"], "w"))):
        with Path(name).open(mode) as file:
            os.dup2(file.fileno(), number)
    path = filter(None, asked["env"].get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:0] = [asked["cwd"], *path]
    sys.argv = ["overlap_gemm.emulator", *asked["words"]]
    runpy.run_module("overlap_gemm.emulator", run_name="__main__", alter_sys=True)
    sys.exit()


if __name__ == "__main__":
    _serve()
