"""`overlap-gemm emulate`: runs a fused op on virtual ranks in the emulator and compares it with float64."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from overlap_gemm.backends.fused.plan_cache import DTYPES
from overlap_gemm.cli.console import rank_zero_console
from overlap_gemm.cli.emulated_runs import Arch, Emulated, Mode, run_emulated
from overlap_gemm.spec import GEMM_REDUCE_SCATTER, OPS, TRANSPORTS, transports_of
from overlap_gemm.testing.cases import Case
from overlap_gemm.tuning.settings import Algorithm

HALVES = {name: dtype for dtype, name in DTYPES.items()}
"""Operand types of torch, by their names in `GemmConfig`."""

if TYPE_CHECKING:
    Op = str
    Transport = str
    Half = str
else:  # names in the registries, for the command line
    Op, Transport, Half = Literal[tuple(OPS)], Literal[tuple(TRANSPORTS)], Literal[tuple(HALVES)]


def emulate(
    op: Annotated[Op, typer.Argument(help="Op to run.")] = GEMM_REDUCE_SCATTER.name,
    arch: Annotated[Arch, typer.Option(help="Architecture to compile for and to emulate.")] = "sm_100a",
    world_size: Annotated[int, typer.Option(min=1, help="Virtual ranks, P.")] = 2,
    m: Annotated[int, typer.Option(min=1, help="Rows over all ranks.")] = 512,
    n: Annotated[int, typer.Option(min=1, help="Output features.")] = 256,
    k: Annotated[int, typer.Option(min=1, help="Input features over all ranks.")] = 256,
    dtype: Annotated[Half, typer.Option(help="Type of operands and result.")] = "bf16",
    tile: Annotated[str | None, typer.Option(help="MMA tile, as 128x128; default: chosen by shape.")] = None,
    cluster: Annotated[str | None, typer.Option(help="CTAs of a cluster, as 2x1.")] = None,
    cta_group: Annotated[int | None, typer.Option(min=1, max=2, help="sm_100: CTAs per MMA.")] = None,
    transport: Annotated[
        Transport | None,
        typer.Option(help="Transport, as in `configured`; default: the one that a call selects."),
    ] = None,
    without_p2p: Annotated[
        bool, typer.Option("--without-p2p", help="No peer is P2P-accessible: NVSHMEM puts over a network.")
    ] = False,
    algorithm: Annotated[
        Algorithm | None, typer.Option(help="Algorithm of gemm_all_reduce; default: selected by the model.")
    ] = None,
    mode: Annotated[Mode, typer.Option(help="When asynchronous operations complete.")] = "random",
    seed: Annotated[int, typer.Option(help="Seed of the data and of the emulator's random choices.")] = 0,
    launches: Annotated[
        int, typer.Option(min=1, help="Number of calls, on different data, queued together.")
    ] = 2,
    num_sms: Annotated[
        int | None, typer.Option(min=1, help="SMs of the device; few make each CTA compute many tiles.")
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write a Perfetto trace (.json) or a timeline picture (.png).")
    ] = None,
) -> None:
    """Runs a fused op on P virtual ranks in the emulator. The exit code is 0 only if the result is right."""
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
    device = Emulated(arch, world_size, mode, num_sms, without_p2p)
    if not run_emulated(console, case, device, launches, fields, trace):
        raise typer.Exit(1)


def overrides(tile: str | None, cluster: str | None, cta_group: int | None) -> dict[str, Any]:
    """Returns the fields of `GemmConfig` that the options set."""
    fields: dict[str, Any] = {}
    if tile is not None:
        fields["tile"] = pair("--tile", tile)
    if cluster is not None:
        fields["cluster"] = pair("--cluster", cluster)
    if cta_group is not None:
        fields["mma"] = f"{cta_group}cta"
    return fields


def pair(option: str, text: str) -> tuple[int, int]:
    """Returns the two numbers of an option's value: (128, 64) for ``"128x64"``.

    Raises:
        BadParameter: The value does not have this form.
    """
    parts = text.lower().split("x")
    if len(parts) != 2 or not all(part.isdigit() for part in parts):
        raise typer.BadParameter(f"{option} must look like 128x128, got {text!r}")
    return int(parts[0]), int(parts[1])
