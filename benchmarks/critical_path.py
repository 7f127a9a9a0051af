"""Instructions between a wait and what it was for, counted in the emulator as the warps execute them.

What stands between the two is paid on every call, whatever else runs: arithmetic that could be done while
waiting, and look-ups in global memory, whose cache the wait has just emptied.

    python benchmarks/critical_path.py [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, astuple, dataclass, field
from pathlib import Path
from typing import Any

import torch

import overlap_gemm
from cute_emulator import Emulator
from cute_emulator.execution.scheduler import Scheduler
from cute_emulator.instructions.emit import BLOCK
from overlap_gemm.runtime.virtual import VirtualWorld
from overlap_gemm.testing.cases import LAYOUTS, Case, operands
from overlap_gemm.tuning.settings import configured

KERNELS: dict[str, dict[str, Any]] = {
    "sm_90a": {"mma": "pingpong", "tile": (128, 128), "cluster": (2, 1)},
    "sm_100a": {"mma": "1cta", "tile": (128, 128), "cluster": (2, 1)},
}
"""A kernel per architecture."""

OPS: dict[str, tuple[str, tuple[int, int, int], dict[str, Any]]] = {
    "GEMM-RS": ("gemm_reduce_scatter", (1024, 512, 64), {}),
    "GEMM-AR one-shot": ("gemm_all_reduce", (512, 512, 64), {"algorithm": "one_shot"}),
    "GEMM-AR two-shot": ("gemm_all_reduce", (512, 1024, 64), {"algorithm": "two_shot"}),
    "GEMM-AG": ("gemm_all_gather", (512, 1024, 64), {}),
    "AG-GEMM sending": ("all_gather_gemm", (1024, 512, 64), {"transport": "peer_bulk"}),
}
"""How each is called: op, (M, N, K) over all ranks, ways."""

PUBLISHED = [name for name in OPS if not name.startswith("AG-GEMM")]
"""Those whose tiles have flags."""

RANKS, SMS = 2, 4


@dataclass(frozen=True)
class Stretch:
    """From one kind of instruction to another, in a warp.

    Attributes:
        name: what it is called.
        begin: matches the opcode that begins it, anew each time.
        end: matches the opcode that ends it.
    """

    name: str
    begin: re.Pattern[str]
    end: re.Pattern[str]


WRITTEN_TO_FLAG = "stores written -> flag raised"
ARRIVED_TO_LOAD = "flag acquired -> first load"
STAGE_TO_STORE = "stage full -> store issued"

STRETCHES = (
    Stretch(
        WRITTEN_TO_FLAG,
        re.compile(r"cp\.async\.bulk\.wait_group$"),
        re.compile(r"st\.(release|relaxed)\.sys\.global"),
    ),
    Stretch(
        ARRIVED_TO_LOAD,
        re.compile(r"ld\.acquire\.sys"),
        re.compile(r"ld\.(relaxed\.sys\.)?global\.v[24]|ld\.global\.b128|cp\.async\.bulk\.tensor"),
    ),
    Stretch(
        STAGE_TO_STORE,
        re.compile(r"mbarrier\.try_wait"),
        re.compile(r"cp\.async\.bulk\.(tensor\.\dd\.)?global"),
    ),
)


@dataclass(frozen=True)
class Cost:
    """Counts of the instructions that a warp executed in a stretch.

    Attributes:
        instructions: All instructions, without the end of the stretch.
        divisions: Integer divisions and remainders among them.
        lookups: Loads of a single value from global memory among them.
    """

    instructions: int = 0
    divisions: int = 0
    lookups: int = 0

    def plus(self, opcode: str) -> Cost:
        """Returns the counts with one more instruction."""
        return Cost(
            self.instructions + 1,
            self.divisions + opcode.startswith(("div.", "rem.")),
            self.lookups + bool(re.match(r"ld\.(global|volatile\.global)(?!.*\.v[24])", opcode)),
        )


@dataclass
class CriticalPaths:
    """Stretches that were executed.

    Attributes:
        costs: Name of a stretch -> its counts, each time.
    """

    costs: dict[str, list[Cost]] = field(default_factory=dict)
    _running: dict[tuple[int, str], Cost] = field(default_factory=dict, repr=False)

    def executed(self, warp: Any, opcode: str) -> None:
        """Records an instruction that a warp has executed."""
        for stretch in STRETCHES:
            key = (id(warp), stretch.name)
            if key in self._running:
                if stretch.end.match(opcode):
                    self.costs.setdefault(stretch.name, []).append(self._running.pop(key))
                else:
                    self._running[key] = self._running[key].plus(opcode)
            if stretch.begin.match(opcode):
                self._running[key] = Cost()

    def worst(self, name: str) -> Cost:
        """Returns the maximum of each count over all times; zeros for a stretch that was never executed."""
        costs = self.costs.get(name, [Cost()])
        return Cost(*map(max, zip(*map(astuple, costs), strict=True)))


class _Listened(list[Any]):
    """A program's items, each of which tells what it executed."""

    def __init__(self, program: Any, listener: Callable[[Any, str], None]) -> None:
        super().__init__(program.code)
        self.program, self.listener = program, listener

    def __getitem__(self, item: Any) -> Any:
        run = super().__getitem__(item)

        def told(group: Any) -> Any:
            following = run(group)
            if following != BLOCK:
                for instruction in self.program._lines[item]:
                    self.listener(group.warp, instruction.opcode)
            return following

        return told


@contextmanager
def listening(listener: Callable[[Any, str], None]) -> Iterator[None]:
    """Tells ``listener`` each warp and opcode that emulators execute in the block."""
    listened, turn = [], Scheduler._turn

    def turn_told(scheduler: Any, warp: Any, quantum: int) -> None:
        program = warp.grid.program
        if not isinstance(program.code, _Listened):
            program.code = _Listened(program, listener)
            listened.append(program)
        turn(scheduler, warp, quantum)

    Scheduler._turn = turn_told  # type: ignore[method-assign]
    try:
        yield
    finally:
        Scheduler._turn = turn  # type: ignore[method-assign]
        for program in listened:
            program.code = list(list.__iter__(program.code))


def measure(arch: str, name: str) -> dict[str, dict[str, int]]:
    """Returns the worst counts of an op by stretch; each CTA has several tiles and units."""
    paths = CriticalPaths()
    call(arch, name, paths.executed)
    return {each.name: asdict(paths.worst(each.name)) for each in STRETCHES if each.name in paths.costs}


def call(
    arch: str,
    name: str,
    listener: Callable[[Any, str], None],
    ranks: int = RANKS,
) -> None:
    """Calls an op on all ranks; tells ``listener`` what they execute."""
    op, (m, n, k), options = OPS[name]
    case, layout = Case(op, m, n, k, torch.bfloat16, bias=False), LAYOUTS[op]
    tensors = operands(case)
    lengths = {"all_gather_gemm": {"rows": m}, "gemm_all_gather": {"columns": n}}.get(op, {})
    with (
        listening(listener),
        configured(**KERNELS[arch], **options),
        Emulator(arch, ranks, num_sms=SMS) as emulator,
        VirtualWorld(ranks, emulator=emulator) as world,
    ):
        for rank, group in enumerate(world.names):
            x = layout.part(tensors.x, layout.x, rank, ranks)
            weight = layout.part(tensors.weight, layout.weight, rank, ranks)
            getattr(overlap_gemm, op)(x, weight, group=group, backend="fused", **lengths)
        world.synchronize()


def main() -> None:
    """Measures all of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", type=Path, help="Write the counts to this file.")
    arguments = parser.parse_args()
    results = {}
    for arch in KERNELS:
        for name in OPS:
            results[f"{arch} {name}"] = measure(arch, name)
            for stretch, cost in results[f"{arch} {name}"].items():
                counts = ", ".join(f"{value:4} {what}" for what, value in cost.items())
                print(f"{arch:8} {name:28} {stretch:34} {counts}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
