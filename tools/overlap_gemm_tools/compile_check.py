"""`overlap-gemm compile-check`: compiles kernel configurations and checks PTX and SASS, without a GPU."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import track
from rich.table import Table

from overlap_gemm.api import all_to_all as _  # noqa: F401 (registers its ops)
from overlap_gemm.cli.console import rank_zero_console
from overlap_gemm.config.gemm_config import GemmConfig
from overlap_gemm.config.orders import joins_shards
from overlap_gemm.config.scale_blocks import BLOCKS
from overlap_gemm.config.visitors import SCALES
from overlap_gemm.spec import ALL_GATHER_GEMM, ALL_TO_ALL_GEMM, PATTERNS, OpSpec
from overlap_gemm.tuning.space import every_config

from .lint import PtxasReport, count_instructions, inner_loop_instructions, inspect

ARCHS = ("sm_90a", "sm_100a")

EXCHANGES = {p.label: name for name, p in PATTERNS.items() if not p.spec.operand_is_sent}
GATHERS = {
    f"{op.label}{' sending' * sends}": (op, sends, False)
    for op in (ALL_GATHER_GEMM, ALL_TO_ALL_GEMM)
    for sends in (False, True)
}
GATHERS[f"{ALL_GATHER_GEMM.label} sending few rows"] = (ALL_GATHER_GEMM, True, True)
KERNELS = ("GEMM", *EXCHANGES, *GATHERS)
"""Names of the kernels of a configuration: the plain GEMM, one for each pattern, one for each gather.

A name with "sending" is that of a kernel whose warps send the local shard, and copy what is gathered. With
"few rows" tiles have rows of several shards (`gather.few_rows`).
"""


def kernels_of(config: GemmConfig) -> list[str]:
    """Returns the kernels that a configuration has."""
    in_slices = not (config.k_split > 1 or config.loads_weights_early)
    in_slices &= not config.has_bytes or config.blocks is not None

    def has(op: OpSpec, sends: bool, joins: bool) -> bool:
        return joins_shards(config, 2, 1) if joins else in_slices or op.gathers_operand

    return [name for name in KERNELS if name not in GATHERS or has(*GATHERS[name])]


@dataclass(frozen=True)
class Checked:
    """One compiled kernel.

    Attributes:
        config: Configuration of the kernel.
        op: Name in `KERNELS`.
        report: Report of the ptxas in the DSL.
        instructions: Number of PTX instructions.
        inner_loop: Number of PTX instructions in the mainloop's inner loop.
        findings: Descriptions of defects.
    """

    config: GemmConfig
    op: str
    report: PtxasReport
    instructions: int
    inner_loop: int
    findings: tuple[str, ...]


def check(config: GemmConfig, op: str) -> Checked:
    """Compiles a kernel and applies the lint rules to its PTX, SASS and ptxas report."""
    from overlap_gemm.build import compile_kernel, make_gather_kernel, make_kernel
    from overlap_gemm.transports import LL, PeerBulk

    if op in GATHERS:
        spec, sends, joins = GATHERS[op]  # what sends also keeps
        kernel = make_gather_kernel(config, PeerBulk(), push=sends, keep=sends, op=spec, joins=joins)
    elif op in EXCHANGES:
        # The transport that calls use by default.
        transport = LL() if config.sends_ll else PeerBulk()
        kernel = make_kernel(config, transport, pattern=EXCHANGES[op])
    else:
        kernel = make_kernel(config)
    seen = inspect(partial(compile_kernel, kernel))
    ptx, findings = seen.ptx, tuple(seen.findings(exchanges=op != "GEMM"))
    return Checked(config, op, seen.report, count_instructions(ptx), inner_loop_instructions(ptx), findings)


def figures_of(checked: Checked) -> dict[str, int]:
    """Returns the figures that tests/compiled compares with recorded ones, so that growth is noticed."""
    return {
        "registers": checked.report.registers,
        "barriers": checked.report.barriers,
        "spilled_bytes": checked.report.spill_bytes,
        "instructions": checked.instructions,
        "inner_loop_instructions": checked.inner_loop,
        "smem_bytes": checked.config.smem_bytes,
    }


def representative(configs: Sequence[GemmConfig]) -> list[GemmConfig]:
    """Returns one configuration for each MMA, operand width and kind of block scales.

    It has the largest tile, in the smallest cluster, because that needs the most registers. Those of 16-bit
    operands are repeated as dependent launches (`kernel.dependent_launch`).
    """

    def size(config: GemmConfig) -> tuple[int, int]:
        return prod(config.tile), -config.cluster_ctas

    def kind(config: GemmConfig) -> tuple[Any, ...]:
        return config.arch, config.mma, config.has_bytes, config.blocks

    largest = [
        max((c for c in configs if kind(c) == one), key=size) for one in dict.fromkeys(map(kind, configs))
    ]
    return largest + [
        replace(c, launch="dependent_weights" if c.is_swap_ab else "dependent")
        for c in largest
        if not c.has_bytes
    ]


def checked_configs(arch: str) -> list[GemmConfig]:
    """Returns every configuration of an architecture for bfloat16 and for e4m3.

    Configurations of e4m3 have scales of rows and columns, or scales of blocks if there are such kernels.
    """
    scaled = [replace(config, epilogue=(SCALES,)) for config in every_config(arch, "e4m3")]
    blocked = [config for blocks in BLOCKS for config in every_config(arch, "e4m3", blocks=blocks)]
    return [*every_config(arch), *scaled, *blocked]


def compile_check(
    arch: Annotated[list[str] | None, typer.Option(help="Architectures; default: all.")] = None,
    match: Annotated[
        str, typer.Option(help="Only configurations whose name contains this, all of them.")
    ] = "",
    every: Annotated[bool, typer.Option("--all", help="Check all configurations; takes minutes.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
) -> None:
    """Compiles kernels of each kind, and fails if one has a defect.

    Defects are spills, C75xx warnings of ptxas, synchronisation too weak for a peer, and warps that use
    registers they have released. The report and the code are those of the ptxas in the installed DSL. The
    code for sm_90a is read by nvdisasm (wheel nvidia-cuda-nvdisasm).
    """
    console = rank_zero_console(0)
    archs = arch or list(ARCHS)
    for name in archs:
        if name not in ARCHS:
            raise typer.BadParameter(f"--arch must be one of {', '.join(ARCHS)}, got {name}")
    configs = [config for name in archs for config in checked_configs(name) if match in config.name]
    if not configs:
        raise typer.BadParameter(f"no configuration's name contains {match!r}")
    if not (every or match):
        configs = representative(configs)
    table = Table(title="kernels as compiled by ptxas")
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
    jobs = [(config, op) for config in configs for op in kernels_of(config)]
    for config, op in track(jobs, "compiling"):
        checked = check(config, op)
        if checked.findings:
            wrong.append(checked)
        facts = checked.report
        figures[f"{config.name} {op}"] = figures_of(checked)
        table.add_row(
            config.name,
            op,
            *map(str, (facts.registers, facts.barriers, facts.spill_bytes)),
            str(checked.inner_loop),
            str(config.ab_stages),
            f"{config.smem_bytes / 1024:.0f}",
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
