"""A fused op on virtual ranks in the emulator, and how it went, for the commands that run one."""

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

if TYPE_CHECKING:  # a device that is slow to import, and only some commands' need
    from cute_emulator.errors import Report

    from ..testing.emulated import Judgement

Arch = Literal["sm_90a", "sm_100a"]
Mode = Literal["immediate", "random", "lazy"]


@dataclass(frozen=True)
class Emulated:
    """What a case runs on.

    Attributes:
        arch: To compile for and to emulate.
        ranks: P.
        mode: When asynchronous operations complete.
        num_sms: SMs that the device claims; default: those of the real one.
        beyond_reach: Whether NVSHMEM puts carry the tiles, over an emulated network.
    """

    arch: Arch
    ranks: int
    mode: Mode
    num_sms: int | None = None
    beyond_reach: bool = False


def run_emulated(
    console: Console,
    case: Case,
    device: Emulated,
    launches: int,
    fields: dict[str, Any],
    trace: Path | None = None,
) -> bool:
    """Runs a case on virtual ranks in the emulator and prints how it went.

    Args:
        console: where to.
        case: op, sizes, dtype; its seed is the emulator's, too.
        device: ranks to run it on.
        launches: calls on changing data, queued together.
        fields: what `configured` takes, instead of the default's.
        trace: file for a Perfetto trace (.json) or a picture.

    Returns:
        Whether every result is right and the emulator found nothing.
    """
    from cute_emulator import Emulator, EmulatorError
    from cute_emulator.trace import Trace

    from ..runtime.memory.workspace import CommTimeoutError
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
            network=device.beyond_reach,
            collect=True,
            trace=recorder,
        ) as emulator,
        VirtualWorld(device.ranks, emulator=emulator, beyond_reach=device.beyond_reach) as world,
    ):
        try:
            verdicts = [
                judge(case, given, outs, case.dtype) for given, outs in run_launches(case, world, launches)
            ]
            (side,) = local_peers(world.names[0])
            (plan,) = side.plans.values()  # the launches are alike
        except (EmulatorError, CommTimeoutError, ValueError) as error:
            console.print(f"[red]{type(error).__name__}[/]: {error}")
            return False
    seconds = time.perf_counter() - start
    config = plan.products[0].config
    way = f" {plan.pattern}" if len(patterns_of(case.op)) > 1 else ""
    what = f"{case}{way} on {device.ranks} emulated {device.arch} ranks, kernel {config.name}"
    right = _show(console, what, verdicts, emulator.report, f"mode {device.mode}, seed {case.seed}", seconds)
    if recorder is not None and trace is not None:
        from ..build import warp_names

        recorder.roles = warp_names(config)
        trace.parent.mkdir(parents=True, exist_ok=True)
        recorder.save_json(trace) if trace.suffix == ".json" else recorder.save_png(trace, max_ctas=2)
        console.print(f"what each warp did when: {trace}")
    return right


def _show(
    console: Console, what: str, verdicts: Sequence[Judgement], report: Report, how: str, seconds: float
) -> bool:
    """Prints the launches' verdicts and the emulator's findings; whether there is nothing wrong."""
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
