"""`overlap-gemm emulate`: a fused op on virtual ranks in the emulator, checked against float64."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.table import Table

from ..backends.plans import DTYPES
from ..config.rules import InDtype
from ..spec import GEMM_REDUCE_SCATTER, OPS, TRANSPORTS, patterns_of, transports_of
from ..testing.cases import Case
from ..tuning.settings import Algorithm, configured
from .console import rank_zero_console

if TYPE_CHECKING:  # a device that is slow to import, and only some commands' need
    from cute_emulator.errors import Report

    from ..testing.emulated import Judgement

    Op = str
    Transport = str
else:  # the registries' names, for the command line
    Op, Transport = Literal[tuple(OPS)], Literal[tuple(TRANSPORTS)]

Arch = Literal["sm_90a", "sm_100a"]
Mode = Literal["immediate", "random", "lazy"]

HALVES = {name: dtype for dtype, name in DTYPES.items()}
"""Operand types by the names of `GemmConfig`."""


def emulate(
    op: Annotated[Op, typer.Argument(help="The op to run.")] = GEMM_REDUCE_SCATTER.name,
    arch: Annotated[Arch, typer.Option(help="Architecture to compile for and to emulate.")] = "sm_100a",
    world_size: Annotated[int, typer.Option(min=1, help="Virtual ranks, P.")] = 2,
    m: Annotated[int, typer.Option(min=1, help="Rows over all ranks.")] = 512,
    n: Annotated[int, typer.Option(min=1, help="Output features.")] = 256,
    k: Annotated[int, typer.Option(min=1, help="Input features over all ranks.")] = 256,
    dtype: Annotated[InDtype, typer.Option(help="Type of operands and result.")] = "bf16",
    tile: Annotated[str | None, typer.Option(help="MMA tile, as 128x128; default: chosen by shape.")] = None,
    cluster: Annotated[str | None, typer.Option(help="CTAs of a cluster, as 2x1.")] = None,
    cta_group: Annotated[int | None, typer.Option(min=1, max=2, help="sm_100: CTAs per MMA.")] = None,
    transport: Annotated[
        Transport | None,
        typer.Option(help="As for `configured`: nvshmem puts; default: as a call takes it."),
    ] = None,
    beyond_reach: Annotated[
        bool, typer.Option("--beyond-reach", help="No peer is P2P-accessible: NVSHMEM puts over a network.")
    ] = False,
    algorithm: Annotated[
        Algorithm | None, typer.Option(help="Of gemm_all_reduce; default: by the model.")
    ] = None,
    mode: Annotated[Mode, typer.Option(help="When asynchronous operations complete.")] = "random",
    seed: Annotated[int, typer.Option(help="Of the emulator's choices and of the data.")] = 0,
    launches: Annotated[int, typer.Option(min=1, help="Calls on changing data, queued together.")] = 2,
    num_sms: Annotated[
        int | None, typer.Option(min=1, help="SMs of the device; few make each CTA compute many tiles.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write a Perfetto trace (.json) or a timeline picture (.png).")
    ] = None,
) -> None:
    """Runs a fused op on P virtual ranks in the emulator. Exit code 0 only if it is right."""
    case = Case(op, m, n, k, HALVES[dtype], seed=seed)
    fields = overrides(tile, cluster, cta_group)
    if algorithm is not None:
        fields["algorithm"] = algorithm
    console = rank_zero_console(0)
    if transport not in (None, *transports_of(OPS[op])):
        those = ", ".join(transports_of(OPS[op]))
        raise typer.BadParameter(f"{op} has no {transport}; it has {those}", param_hint="--transport")
    if transport is not None:
        fields["transport"] = transport
    device = Emulated(arch, world_size, mode, num_sms, beyond_reach)
    if not run_emulated(console, case, device, launches, fields, trace):
        raise typer.Exit(1)


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

    from ..runtime.peers import sides
    from ..runtime.virtual import VirtualWorld
    from ..runtime.workspace import CommTimeoutError
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
            (side,) = sides(world.names[0])
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


def overrides(tile: str | None, cluster: str | None, cta_group: int | None) -> dict[str, Any]:
    """Fields of `GemmConfig` that the options name."""
    fields: dict[str, Any] = {}
    if tile is not None:
        fields["tile"] = pair("--tile", tile)
    if cluster is not None:
        fields["cluster"] = pair("--cluster", cluster)
    if cta_group is not None:
        fields["mma"] = f"{cta_group}cta"
    return fields


def pair(option: str, text: str) -> tuple[int, int]:
    """``"128x64"`` -> (128, 64).

    Raises:
        BadParameter: anything else.
    """
    parts = text.lower().split("x")
    if len(parts) != 2 or not all(part.isdigit() for part in parts):
        raise typer.BadParameter(f"{option} must look like 128x128, got {text!r}")
    return int(parts[0]), int(parts[1])
