"""`overlap-gemm bench`: the four times of each op on each shape, as a table, as data and as a picture."""

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from rich.progress import Progress
from rich.table import Table

import overlap_gemm

from ..backends.base import OPS
from ..runtime.group import Group, group_name, resolve
from ..tuning.timing import FourTimes, Timings, measure
from .console import rank_zero_console
from .machine import describe
from .workload import Workload

DType = Literal["float32", "bfloat16", "float16"]


def bench(
    op: Annotated[list[str] | None, typer.Option(help="Op to run; repeat for several; all if none.")] = None,
    m: Annotated[list[int] | None, typer.Option(help="Rows M over all ranks; repeat for several.")] = None,
    n: Annotated[int, typer.Option(help="Output features N over all ranks.")] = 4096,
    k: Annotated[int, typer.Option(help="Input features K over all ranks.")] = 4096,
    shapes: Annotated[
        Path | None, typer.Option(help="JSON file of named shapes instead, such as benchmarks/shapes.json.")
    ] = None,
    only: Annotated[str, typer.Option(help="Of the file, the shapes whose name contains this.")] = "",
    dtype: Annotated[DType, typer.Option(help="Of operands and result.")] = "float32",
    backends: Annotated[
        str,
        typer.Option(help="Compared with sequential, separated by commas; torch: its own mm and collective."),
    ] = "decomposed",
    rounds: Annotated[int, typer.Option(min=1, help="Samples per variant.")] = 11,
    graph: Annotated[
        bool, typer.Option("--graph", help="Time replays of CUDA graphs: without the host's time per call.")
    ] = False,
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda. [default: cuda where there is one]")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the results here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the results here (PNG, SVG, PDF).")] = None,
) -> None:
    """Time ops against the collective and the product they consist of.

    Run it under a launcher: `bash launch/torchrun.sh -n 2 overlap-gemm bench`, or with mpirun.sh. T_gemm is
    the product alone, T_comm the transfer alone, T_seq one after the other, T_overlap the backend. Shapes are
    those of the unsharded product [M, K] x [N, K]^T.
    """
    if unknown := set(op or ()) - set(OPS):
        raise typer.BadParameter(f"{sorted(unknown)} not among {', '.join(OPS)}", param_hint="--op")
    ops = [o for o in OPS if not op or o in op]
    operand = getattr(torch, dtype)
    if shapes is None:
        workloads = [Workload("", o, rows, n, k, operand) for o in ops for rows in m or [1024]]
    else:
        workloads = [w for w in read_shapes(shapes, m, operand) if only in w.name and w.op in ops]
    if not workloads:
        raise typer.BadParameter("no shape is left to run", param_hint="--only")

    world = overlap_gemm.init(device=device)
    group = resolve(group_name(None))
    if graph and world.device.type != "cuda":
        raise typer.BadParameter(f"CUDA graphs need a CUDA device, not {world.device}", param_hint="--graph")
    names = backends.split(",")
    console = rank_zero_console(world.rank)
    results = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("", total=len(workloads) * rounds)
        for workload in workloads:
            progress.update(task, description=f"{workload.op} {workload.name}")
            timings = run(workload, names, group, world.device, rounds, graph, lambda: progress.advance(task))
            results += [row(workload, backend, timings, group.size) for backend in names]
    report = {
        "machine": describe(world),
        "protocol": f"medians of {rounds} interleaved rounds, each the maximum over {group.size} ranks"
        + (", CUDA graph replays" if graph else ""),
        "results": results,
    }
    overlap_gemm.finalize()
    if world.rank != 0:
        return
    console.print(table(report))
    if json_file is not None:
        json_file.write_text(json.dumps(report, indent=1) + "\n")
    if plot is not None:
        from .plots import draw_four_times  # matplotlib is slow to import

        draw_four_times(report, plot)


def read_shapes(file: Path, m: list[int] | None, dtype: torch.dtype) -> Iterator[Workload]:
    """The workloads of a list of objects with name, op, m (a list), n and k; `m` overrides theirs."""
    for shape in json.loads(file.read_text()):
        for rows in m or shape["m"]:
            yield Workload(shape["name"], shape["op"], rows, shape["n"], shape["k"], dtype)


def run(
    workload: Workload,
    backends: list[str],
    group: Group,
    device: torch.device,
    rounds: int,
    graph: bool = False,
    after_round: Any = None,
) -> Timings:
    """Times every variant of a workload, or its replays as a CUDA graph. Collective over the group."""
    variants = workload.variants(["sequential", *(b for b in backends if b != "sequential")], group, device)
    if graph:
        variants = {name: captured(call) for name, call in variants.items()}
    return measure(variants, group=group.process_group, device=device, rounds=rounds, after_round=after_round)


def captured(call: Callable[[], object]) -> Callable[[], object]:
    """The replay of a CUDA graph of one call, after two calls that make what graphs cannot make."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        call()
    return graph.replay


def row(workload: Workload, backend: str, timings: Timings, ranks: int) -> dict[str, Any]:
    """One result as plain data; times in seconds, rates per rank."""
    times = FourTimes.of(timings, backend)
    low, high = timings.ratio_range("sequential", backend)
    return {
        **asdict(workload),
        "dtype": str(workload.dtype).removeprefix("torch."),
        "ranks": ranks,
        "backend": backend,
        "seconds": {
            "gemm": times.gemm,
            "comm": times.comm,
            "sequential": times.sequential,
            "overlapped": times.overlapped,
        },
        "speedup": times.speedup,
        "speedup_quartiles": [low, high],
        "hidden": times.hidden,
        "roof": times.roof,
        "tflops": workload.flops(ranks) / times.overlapped / 1e12,
    }


def table(report: dict[str, Any]) -> Table:
    """The results with times as a part of T_seq, which compare across machines better than seconds do."""
    machine = report["machine"]
    title = f"{machine['ranks']} ranks, {machine['processor']}; {report['protocol']}; times as parts of T_seq"
    drawn = Table(title=title, title_justify="left", show_lines=True)
    drawn.add_column("op, shape M,N,K, backend")
    for heading in ("T_seq ms", "T_gemm", "T_comm", "T_overlap", "speed-up\n(quartiles)", "hidden E", "roof"):
        drawn.add_column(heading, justify="right")
    for result in report["results"]:
        seconds = result["seconds"]
        part = {name: f"{value / seconds['sequential']:.2f}" for name, value in seconds.items()}
        low, high = result["speedup_quartiles"]
        drawn.add_row(
            f"{result['op']} {result['name']}\n"
            f"{result['m']},{result['n']},{result['k']} {result['dtype']} {result['backend']}",
            f"{seconds['sequential'] * 1e3:.3g}",
            part["gemm"],
            part["comm"],
            part["overlapped"],
            f"{result['speedup']:.2f}x\n({low:.2f}-{high:.2f})",
            "-" if result["hidden"] is None else f"{result['hidden']:.0%}",
            f"{result['roof']:.0%}",
        )
    return drawn
