"""`overlap-gemm compile-check`: every kernel configuration, compiled and looked at, without a GPU."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import track
from rich.table import Table

from ..kernels.config import SMEM_BYTES, GemmConfig
from ..kernels.geometry import Pattern
from ..kernels.lint import (
    PtxasReport,
    count_instructions,
    find_ptxas,
    inner_loop_instructions,
    ptx_findings,
    ptxas_findings,
    run_ptxas,
)
from ..tuning.space import every_config
from .console import rank_zero_console

ARCHS = ("sm_90a", "sm_100a")

EXCHANGES: dict[str, Pattern] = {
    "GEMM-RS": "reduce_scatter",
    "GEMM-AR one-shot": "one_shot",
    "GEMM-AR two-shot": "two_shot",
    "GEMM-AG": "output_gather",
}
GATHERS = {"AG-GEMM": False, "AG-GEMM sending": True}
KERNELS = ("GEMM", *EXCHANGES, *GATHERS)
"""The kernels of a configuration, by the names under which they are reported: how each exchanges tiles, or
whether its warps send and keep shards."""


@dataclass(frozen=True)
class Checked:
    """One compiled kernel.

    Attributes:
        config: its configuration.
        op: what it carries out: a name of `KERNELS`.
        report: what ptxas says; None where there is no ptxas.
        instructions: PTX instructions of the kernel.
        inner_loop: those of the mainloop's inner loop.
        findings: what is wrong with it.
    """

    config: GemmConfig
    op: str
    report: PtxasReport | None
    instructions: int
    inner_loop: int
    findings: tuple[str, ...]


def check(config: GemmConfig, op: str) -> Checked:
    """Compiles a configuration, assembles it where ptxas is at hand, and applies the lint rules."""
    from ..kernels.build import compile_kernel, make_gather_kernel, make_kernel
    from ..transports import PeerBulk, PeerWords

    # The DSL names its dump file without the configuration: a folder per compile keeps them apart.
    with tempfile.TemporaryDirectory() as folder:
        if op in GATHERS:
            kernel = make_gather_kernel(config, PeerBulk(), push=GATHERS[op], keep=GATHERS[op])
        elif op in EXCHANGES:
            # As `backends.plans.sends_words` has it where nobody asks for other ways.
            transport = PeerWords() if config.sends_words else PeerBulk()
            kernel = make_kernel(config, transport, pattern=EXCHANGES[op])
        else:
            kernel = make_kernel(config)
        ptx = compile_kernel(kernel, f"--keep-ptx --dump-dir={folder}").__ptx__
    findings = ptx_findings(ptx, op != "GEMM")
    report = run_ptxas(ptx, config.arch) if find_ptxas() else None
    if report is not None:
        findings += ptxas_findings(report)
    return Checked(config, op, report, count_instructions(ptx), inner_loop_instructions(ptx), tuple(findings))


def smem_bytes(config: GemmConfig) -> int:
    """Dynamic shared memory of a CTA that its stages fill; barriers and padding come on top."""
    return config.ab_stages * config.ab_stage_bytes + config.ring_stages * config.stage_bytes


def figures_of(checked: Checked) -> dict[str, int]:
    """What must not grow unseen: registers, spills, barriers, shared memory, the inner loop."""
    assert checked.report is not None, "figures need ptxas"
    return {
        "registers": checked.report.registers,
        "barriers": checked.report.barriers,
        "spilled_bytes": checked.report.spill_bytes,
        "instructions": checked.instructions,
        "inner_loop_instructions": checked.inner_loop,
        "smem_bytes": smem_bytes(checked.config),
    }


def compile_check(
    arch: Annotated[list[str] | None, typer.Option(help="Architectures; default: all.")] = None,
    match: Annotated[str, typer.Option(help="Only configurations whose name contains this.")] = "",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
) -> None:
    """Compiles every kernel; fails on spills, C75xx warnings, and synchronisation too weak for a peer."""
    console = rank_zero_console(0)
    archs = arch or list(ARCHS)
    for name in archs:
        if name not in ARCHS:
            raise typer.BadParameter(f"--arch must be one of {', '.join(ARCHS)}, got {name}")
    configs = [config for name in archs for config in every_config(name) if match in config.name]
    if not configs:
        raise typer.BadParameter(f"no configuration's name contains {match!r}")
    if find_ptxas() is None:
        console.print("[yellow]ptxas is not on PATH[/]: registers, spills and C75xx warnings are not checked")
    table = Table(title="kernels as ptxas sees them")
    for heading in (
        "configuration",
        "op",
        "registers",
        "barriers",
        "spilled B",
        "inner loop",
        "stages",
        "smem KiB",
    ):
        table.add_column(
            heading, justify="left" if heading in ("configuration", "op") else "right", no_wrap=True
        )
    wrong: list[Checked] = []
    figures: dict[str, dict[str, int]] = {}
    jobs = [(config, op) for config in configs for op in KERNELS]
    for config, op in track(jobs, "compiling"):
        checked = check(config, op)
        assert smem_bytes(config) <= SMEM_BYTES
        if checked.findings:
            wrong.append(checked)
        facts = checked.report
        if facts is not None:
            figures[f"{config.name} {op}"] = figures_of(checked)
        table.add_row(
            config.name,
            op,
            *(
                ("?",) * 3
                if facts is None
                else map(str, (facts.registers, facts.barriers, facts.spill_bytes))
            ),
            str(checked.inner_loop),
            str(config.ab_stages),
            f"{smem_bytes(config) / 1024:.0f}",
        )
    console.print(table)
    for checked in wrong:
        for finding in checked.findings:
            console.print(f"[red]{checked.config.name} {checked.op}[/]: {finding}")
    if json_file is not None:
        json_file.write_text(json.dumps(figures, indent=1) + "\n")
    console.print(f"{len(jobs)} kernels compiled, {len(wrong)} with findings")
    if wrong:
        raise typer.Exit(1)
