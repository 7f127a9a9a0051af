"""`overlap-gemm emulate`: a fused op on virtual ranks in the emulator, checked against float64."""

from __future__ import annotations

import time
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table

from ..testing.cases import Case
from ..tuning.space import configured
from .console import rank_zero_console


class EmulatedOp(str, Enum):
    """Ops with a fused kernel."""

    gemm_reduce_scatter = "gemm_reduce_scatter"


class Arch(str, Enum):
    """Architectures with fused kernels."""

    sm_90a = "sm_90a"
    sm_100a = "sm_100a"


class Mode(str, Enum):
    """When asynchronous operations complete, see `overlap_gemm.emulator.Emulator`."""

    immediate = "immediate"
    random = "random"
    lazy = "lazy"


class Half(str, Enum):
    """Operand types."""

    bf16 = "bf16"
    f16 = "f16"


def emulate(
    op: Annotated[EmulatedOp, typer.Argument(help="The op to run.")] = EmulatedOp.gemm_reduce_scatter,
    arch: Annotated[Arch, typer.Option(help="Architecture to compile for and to emulate.")] = Arch.sm_100a,
    world_size: Annotated[int, typer.Option(min=1, help="Virtual ranks, P.")] = 2,
    m: Annotated[int, typer.Option(min=1, help="Rows over all ranks.")] = 512,
    n: Annotated[int, typer.Option(min=1, help="Output features.")] = 256,
    k: Annotated[int, typer.Option(min=1, help="Input features over all ranks.")] = 256,
    dtype: Annotated[Half, typer.Option(help="Type of operands and result.")] = Half.bf16,
    tile: Annotated[str | None, typer.Option(help="MMA tile, as 128x128; default: chosen by shape.")] = None,
    cluster: Annotated[str | None, typer.Option(help="CTAs of a cluster, as 2x1.")] = None,
    cta_group: Annotated[int | None, typer.Option(min=1, max=2, help="sm_100: CTAs per MMA.")] = None,
    mode: Annotated[Mode, typer.Option(help="When asynchronous operations complete.")] = Mode.random,
    seed: Annotated[int, typer.Option(help="Of the emulator's choices and of the data.")] = 0,
    launches: Annotated[int, typer.Option(min=1, help="Calls on changing data, queued together.")] = 2,
    trace: Annotated[
        Path | None, typer.Option(help="Write a Perfetto trace (.json) or a timeline picture (.png).")
    ] = None,
) -> None:
    """Runs a fused op on P virtual ranks in the emulator. Exit code 0 only if it is right."""
    from ..emulator import Emulator, EmulatorError
    from ..runtime.virtual import VirtualWorld
    from ..testing.emulated import judge, run_launches

    console = rank_zero_console(0)
    fields = overrides(tile, cluster, cta_group)
    torch_dtype = {"bf16": torch.bfloat16, "f16": torch.float16}[dtype.value]
    case = Case("gemm_reduce_scatter", m, n, k, torch_dtype, seed=seed)
    start = time.perf_counter()
    judgements = []
    with Emulator(arch.value, world_size, mode.value, seed, collect=True) as emulator:
        with configured(**fields), VirtualWorld(world_size, emulator=emulator) as world:
            try:
                for given, outs in run_launches(case, world, launches):
                    judgements.append(judge(case, given, outs, torch_dtype))
            except EmulatorError as error:
                console.print(f"[red]{type(error).__name__}[/]: {error}")
                raise typer.Exit(1) from error
        report = emulator.report
    seconds = time.perf_counter() - start

    table = Table(title=f"{op.value} {m}x{n}x{k} {dtype.value} on {world_size} emulated {arch.value} ranks")
    for heading in ("launch", "largest error", "share of bound", "bit-equal to recipe", "right"):
        table.add_column(heading, justify="right")
    for number, verdict in enumerate(judgements):
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
    right = all(verdict.holds for verdict in judgements) and not report.findings
    console.print(
        f"{'right' if right else '[red]wrong[/]'}: {len(judgements)} launches, mode {mode.value}, "
        f"seed {seed}, {report.instructions:,} warp-instructions, {len(report.findings)} findings, "
        f"{seconds:.1f} s"
    )
    if not right:
        raise typer.Exit(1)


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
