"""Execution of a script that was written for GPUs, unchanged: once, or once per rank."""

from __future__ import annotations

import contextlib
import functools
import os
import runpy
import sys
import threading
import types
from collections.abc import Callable, Iterator, MutableMapping
from pathlib import Path
from typing import Any

import torch

from cute_emulator.host.emulator import Emulator
from cute_emulator.host.launch_files import SUFFIXES, run_file
from cute_emulator.host.replace import replaced
from cute_emulator.host.torch import cuda_device, distributed
from cute_emulator.host.torch.torch_mode import CudaOnCpu
from cute_emulator.host.torch.turns import Turns


def run_script(emulator: Emulator, script: str, arguments: list[str], poison_symmetric: bool = False) -> None:
    """Runs a script in an open emulator, as ``python script arguments`` does on a machine with GPUs.

    With several ranks it runs once per rank, each in a thread with a separate `__main__` module, ``RANK``,
    ``LOCAL_RANK`` and ``WORLD_SIZE``, as under torchrun. The host is recorded (`host.timeline`). A file named
    .ptx or .cu is a kernel, and its one argument is the file of its launch (`launch_files`).

    Args:
        emulator: Open emulator.
        script: Path of the script.
        arguments: Arguments of the script.
        poison_symmetric: Whether symmetric memory stays poisoned; on a device it is zero when first
            allocated.

    Raises:
        FileNotFoundError: There is no such script.
        ValueError: A kernel has no launch, a launch that cannot run, or several ranks.
        BaseException: The script raised it, `SystemExit` included.
    """
    if not Path(script).is_file():
        raise FileNotFoundError(f"no script {script}")
    if script.endswith(SUFFIXES):
        if len(arguments) != 1 or emulator.ranks > 1:
            raise ValueError(
                f"{script} takes one argument, its launch in JSON, and one rank: got {arguments}"
            )
        run_file(emulator, script, *arguments)
        return
    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(sys, "argv", [script, *arguments]))
        stack.enter_context(replaced(sys, "path", [str(Path(script).resolve().parent), *sys.path]))
        if emulator.ranks == 1:
            stack.enter_context(one_device(emulator))
            runpy.run_path(script, run_name="__main__")
        else:
            _run_ranks(emulator, script, stack, poison_symmetric)


@contextlib.contextmanager
def one_device(emulator: Emulator) -> Iterator[None]:
    """Provides, inside, one GPU to torch and the CUDA bindings: the device of an open emulator."""
    with contextlib.ExitStack() as stack:
        devices = cuda_device.CudaDevices(emulator, lambda: 0, emulator.finish)
        for change in cuda_device.changes(devices):
            stack.enter_context(change)
        mode = CudaOnCpu(emulator, 0, devices.synchronize)
        stack.enter_context(_python_gradients(lambda: mode))
        stack.enter_context(mode)
        stack.callback(emulator.timelines.close)
        yield
        emulator.finish()


def _python_gradients(mode: Callable[[], CudaOnCpu]) -> contextlib.AbstractContextManager[None]:
    """Provides autograd nodes written in Python with gradients on the device of their results."""
    node = torch.autograd.function.BackwardCFunction
    real_apply = node.apply

    def apply(self: Any, *gradients: Any) -> Any:
        return mode().backward(real_apply, self, *gradients)

    return replaced(node, "apply", apply)


def _run_ranks(emulator: Emulator, script: str, stack: contextlib.ExitStack, poison_symmetric: bool) -> None:
    turns = Turns(emulator.ranks, emulator.run)

    def current() -> int:
        return turns.rank if threading.current_thread() is not threading.main_thread() else 0

    def synchronize() -> None:
        turns.wait_for_device(lambda rank=turns.rank: not emulator.has_pending(rank))  # type: ignore[misc]

    modes = [CudaOnCpu(emulator, rank, synchronize) for rank in range(emulator.ranks)]
    devices = cuda_device.CudaDevices(emulator, current, synchronize)
    environ = _RankEnvironment(os.environ, turns, emulator.ranks)
    for change in (
        *cuda_device.changes(devices),
        *distributed.changes(emulator, turns, devices.host_waits, poison_symmetric),
        _python_gradients(lambda: modes[turns.rank]),
        replaced(os, "environ", environ),
        replaced(sys, "excepthook", sys.excepthook),  # init_process_group puts its rank in front of errors
    ):
        stack.enter_context(change)
    stack.callback(emulator.timelines.close)
    # This file's __future__ imports do not apply to the script.
    code = compile(Path(script).read_bytes(), script, "exec", dont_inherit=True)

    def body(rank: int) -> None:
        module = types.ModuleType("__main__")
        module.__file__ = script
        with emulator.rank(rank), modes[rank]:
            exec(code, vars(module))
            synchronize()

    turns.run([functools.partial(body, rank) for rank in range(emulator.ranks)])


class _RankEnvironment(MutableMapping[str, str]):
    """Replacement of `os.environ`, as under torchrun: each rank's thread reads its rank.

    The variables are ``RANK``, ``LOCAL_RANK``, ``WORLD_SIZE``, ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR`` and
    ``MASTER_PORT``. All others are shared by the ranks, and so are changes of them.
    """

    def __init__(self, base: Any, turns: Turns, ranks: int) -> None:
        self._base = base
        self._turns = turns
        self._ranks = ranks

    def _own_variables(self) -> dict[str, str]:
        try:
            rank = self._turns.rank
        except AttributeError:  # the thread belongs to no rank
            return {}
        size = str(self._ranks)
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": size,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29500",
        }

    def __getitem__(self, key: str) -> str:
        separate = self._own_variables()
        return separate[key] if key in separate else self._base[key]

    def __setitem__(self, key: str, value: str) -> None:
        self._base[key] = value

    def __delitem__(self, key: str) -> None:
        del self._base[key]

    def __iter__(self) -> Iterator[str]:
        return iter({**self._base, **self._own_variables()})

    def __len__(self) -> int:
        return len({**self._base, **self._own_variables()})

    def copy(self) -> dict[str, str]:
        """Returns a dict, as `os.environ.copy` does."""
        return dict(self)
