"""A fused op on virtual ranks in the emulator, with its verdicts, for the commands that run one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.table import Table

from ..spec import patterns_of
from ..testing.cases import Case
from ..tuning.settings import configured

if TYPE_CHECKING:  # slow to import, and only some commands need it
    from cute_emulator.errors import Report

    from ..testing.emulated import Judgement

Arch = Literal["sm_90a", "sm_100a"]
Mode = Literal["immediate", "random", "lazy"]


@dataclass(frozen=True)
class Emulated:
    """Emulated machine of a run.

    Attributes:
        arch: Architecture to compile for and to emulate.
        ranks: Number of ranks P.
        mode: When asynchronous operations complete.
        num_sms: SMs of the device; None: those of the real device.
        without_p2p: True: NVSHMEM puts send the tiles over an emulated network.
    """

    arch: Arch
    ranks: int
    mode: Mode
    num_sms: int | None = None
    without_p2p: bool = False


def run_emulated(
    console: Console,
    case: Case,
    device: Emulated,
    launches: int,
    fields: dict[str, Any],
    trace: Path | None = None,
) -> bool:
    """Runs a case on virtual ranks in the emulator and prints the verdicts.

    Args:
        console: Console for the output.
        case: Op, sizes and dtype; its seed is also the emulator's. Call i has the data of seed + i.
        device: Emulated machine.
        launches: Number of calls on changing data, queued together.
        fields: Arguments of `configured`.
        trace: File for a Perfetto trace (.json) or a picture.

    Returns:
        True if every result is correct and the emulator has no findings. False, after printing the reason, if
        a launch deadlocks (EmulatorError), a wait expires (CommTimeoutError), or arguments are refused
        (ValueError).
    """
    from cute_emulator import Emulator, EmulatorError
    from cute_emulator.trace import Trace

    from ..runtime.failures import CommTimeoutError
    from ..runtime.peers import local_peers
    from ..runtime.virtual import VirtualWorld
    from ..testing.emulated import judge, run_launches

    recorder = None if trace is None else Trace()
    start = time.perf_counter()
    with (
        configured(**fields),
        Emulator(
            device.arch,
            device.ranks,
            device.mode,
            case.seed,
            num_sms=device.num_sms,
            network=device.without_p2p,
            collect=True,
            trace=recorder,
        ) as emulator,
        VirtualWorld(device.ranks, emulator=emulator, without_p2p=device.without_p2p) as world,
    ):
        try:
            verdicts = [
                judge(case, inputs, outs, case.dtype) for inputs, outs in run_launches(case, world, launches)
            ]
            (peers,) = local_peers(world.names[0])
            (plan,) = peers.plans.values()  # all launches have one plan
        except (EmulatorError, CommTimeoutError, ValueError) as error:
            console.print(f"[red]{type(error).__name__}[/]: {error}")
            return False
    seconds = time.perf_counter() - start
    config = plan.products[0].config
    pattern = f" {plan.pattern}" if len(patterns_of(case.op)) > 1 else ""
    what = f"{case}{pattern} on {device.ranks} emulated {device.arch} ranks, kernel {config.name}"
    right = _show(console, what, verdicts, emulator.report, f"mode {device.mode}, seed {case.seed}", seconds)
    if recorder is not None and trace is not None:
        from ..build import warp_names

        recorder.roles = warp_names(config)
        trace.parent.mkdir(parents=True, exist_ok=True)
        recorder.save_json(trace) if trace.suffix == ".json" else recorder.save_png(trace, max_ctas=2)
        console.print(f"timeline of the warps: {trace}")
    return right


def _show(
    console: Console, what: str, verdicts: Sequence[Judgement], report: Report, how: str, seconds: float
) -> bool:
    """Prints the launches' verdicts and the emulator's findings; returns whether all is correct."""
    table = Table(title=what)
    for heading in ("launch", "largest error", "share of bound", "bit-equal to recipe", "right"):
        table.add_column(heading, justify="right")
    for number, verdict in enumerate(verdicts):
        table.add_row(
            str(number),
            f"{verdict.largest_error:.3g}",
            f"{verdict.share_of_bound:.2f}",
            f"{verdict.bit_equal:.2%}",
            "yes" if verdict.holds else "[red]NO[/]",
        )
    console.print(table)
    for finding in report.findings:
        console.print(f"[red]finding[/]: {finding}")
    right = all(verdict.holds for verdict in verdicts) and not report.findings
    console.print(
        f"{'right' if right else '[red]wrong[/]'}: {len(verdicts)} launches, {how}, "
        f"{report.instructions:,} warp-instructions, {len(report.findings)} findings, {seconds:.1f} s"
    )
    return right
