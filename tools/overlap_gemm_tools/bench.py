"""`overlap-gemm bench`: times ops and their baselines; prints a table, writes JSON and a picture."""

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import Progress

import overlap_gemm
from overlap_gemm.backends.scales.scaling import FLOAT8
from overlap_gemm.backends.select import Choice, check_name
from overlap_gemm.cli.command_options import (
    DeviceOption,
    DTypeOption,
    EpilogueOption,
    chosen_ops,
    epilogue_named,
)
from overlap_gemm.cli.console import rank_zero_console
from overlap_gemm.cli.link_rates import link_rates
from overlap_gemm.cli.this_machine import describe, this_arch
from overlap_gemm.epilogues import Applied, Epilogue
from overlap_gemm.runtime.bootstrap import World
from overlap_gemm.runtime.group import Group, find
from overlap_gemm.testing.workload import Call, OpTensors, Scales, Workload, in_turn
from overlap_gemm.tuning.driver import Load, load, power_limit
from overlap_gemm.tuning.prediction import predict
from overlap_gemm.tuning.timing import captured, measure

from .baselines import baselines
from .epilogue_calls import EpilogueCalls, backend_of, why_no_calls
from .results import EAGER, GRAPH, OTHERS, Measured, Mode, Skipped, row, summary, table


def bench(
    op: Annotated[list[str] | None, typer.Option(help="Op to run; repeat for several; all if none.")] = None,
    m: Annotated[
        list[int] | None, typer.Option(min=1, help="Rows M over all ranks; repeat for several.")
    ] = None,
    n: Annotated[int, typer.Option(min=1, help="Output features N over all ranks.")] = 4096,
    k: Annotated[int, typer.Option(min=1, help="Input features K over all ranks.")] = 4096,
    shapes: Annotated[
        Path | None, typer.Option(help="JSON file of named shapes instead, such as benchmarks/shapes.json.")
    ] = None,
    only: Annotated[str, typer.Option(help="Only shapes of the file whose name contains this.")] = "",
    dtype: DTypeOption = None,
    scales: Annotated[
        Scales | None,
        typer.Option(help="Scales of 8-bit operands: one per tensor, row or block. [default: rows]"),
    ] = None,
    epilogue: EpilogueOption = None,
    backends: Annotated[
        str | None,
        typer.Option(help="Backends, comma-separated. [default: auto,fused on GPUs, else auto,decomposed]"),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Samples per variant.")] = 7,
    graph: Annotated[
        bool, typer.Option("--graph/--no-graph", help="On GPUs also time CUDA graphs of eight calls.")
    ] = True,
    device: DeviceOption = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the results here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the results here (PNG, SVG, PDF).")] = None,
) -> None:
    """Times ops, torch's product, collective and fused ops, and prints the times with the model's prediction.

    Run it under a launcher: `bash launch/torchrun.sh -n 2 overlap-gemm bench`, or with mpirun.sh. Shapes are
    those of the unsharded product [M, K] x [N, K]^T. The bound is max(product, bytes out / link rate). The
    link rate is measured by copies at the start; without symmetric memory the collective's time is used
    instead. 8-bit operands are quantised before the timing. For MX types, and where torch has no product with
    scales of blocks (Hopper has one), torch's product has scales of rows: it has as many operations.

    With --epilogue each backend is timed with it, alone, and with torch's operations after it, eager and
    compiled; the baselines with the compiled ones after them. On GPUs with liger-kernel, each backend is also
    followed by Liger's equal kernels. With add_residual_squared the RMS norm of the result is timed, too,
    with scale_gathered_rows that of x.
    """
    ops, wanted = chosen_ops(op or []), chosen_backends(backends)
    if only and shapes is None:
        raise typer.BadParameter("selects shapes of a file: pass --shapes", param_hint="--only")
    world = overlap_gemm.init(device=device)
    on_cuda = world.device.type == "cuda"
    operand = getattr(torch, dtype or ("bfloat16" if on_cuda else "float32"))
    if operand in FLOAT8:
        scales = scales or "rows"
    elif scales is not None:
        raise typer.BadParameter(f"are for 8-bit operands, not {operand}", param_hint="--scales")
    if shapes is None:
        workloads = [Workload("", o, rows, n, k, operand, scales) for o in ops for rows in m or [1024]]
    else:
        workloads = [w for w in read_shapes(shapes, m, operand, scales) if only in w.name and w.op in ops]
    if not workloads:
        raise typer.BadParameter("no shape is left to run", param_hint="--only")
    applied = epilogue_named(epilogue)
    if applied is not None:
        whys = [why_no_calls(applied, workload) for workload in workloads]
        if why := next(filter(None, whys), None):
            raise typer.BadParameter(why, param_hint="--epilogue")

    group = find(None)
    names = wanted or (["auto", "fused"] if on_cuda else ["auto", "decomposed"])
    modes = (EAGER, GRAPH) if on_cuda and graph else (EAGER,)
    console = rank_zero_console(world.rank)

    for file in (json_file, plot):
        if file is not None and world.rank == 0:
            file.parent.mkdir(parents=True, exist_ok=True)

    def keep(report: dict[str, Any]) -> None:
        if json_file is not None and world.rank == 0:
            json_file.write_text(json.dumps(report, indent=1) + "\n")

    report = measure_all(workloads, names, group, world, rounds, modes, console, keep, applied)
    overlap_gemm.finalize()
    if world.rank != 0:
        return
    console.print(table(report))
    for line in summary(report):
        console.print(line)
    for line in report["skipped"]:
        console.print(f"skipped: {line}")
    if plot is not None:
        from .plots import draw_bounds  # matplotlib is slow to import

        draw_bounds(report, plot)


def chosen_backends(names: str | None) -> list[str]:
    """Returns the backends of a comma-separated list.

    Raises:
        BadParameter: A name is that of a baseline.
        ValueError: A name is not that of a backend.
    """
    wanted = names.split(",") if names else []
    for name in wanted:
        check_name(name)
    if torchs := set(wanted) & set(OTHERS):
        what = f"{', '.join(torchs)} is a baseline, which is always timed: leave it out"
        raise typer.BadParameter(what, param_hint="--backends")
    return wanted


def read_shapes(
    file: Path, m: list[int] | None, dtype: torch.dtype, scales: Scales | None = None
) -> Iterator[Workload]:
    """Yields the workloads of a JSON list of objects with name, op, m (a list), n and k; `m` overrides it."""
    for shape in json.loads(file.read_text()):
        for rows in m or shape["m"]:
            yield Workload(shape["name"], shape["op"], rows, shape["n"], shape["k"], dtype, scales)


def measure_all(
    workloads: Sequence[Workload],
    backends: Sequence[str],
    group: Group,
    world: World,
    rounds: int,
    modes: Sequence[Mode],
    console: Console,
    keep: Callable[[dict[str, Any]], object] = lambda report: None,
    epilogue: Epilogue | None = None,
) -> dict[str, Any]:
    """Times workloads (`run`) under a progress bar; returns the report as plain data. Collective.

    Args:
        workloads: Workloads, in the order of the report.
        backends: Names of backends.
        group: Ranks of the ops.
        world: This process among all ranks.
        rounds: Samples per variant.
        modes: Modes to time.
        console: Console of rank 0.
        keep: Called with the report after each workload, so that a later failure loses no measurement.
        epilogue: Epilogue of the calls, or None.
    """
    try:
        rates = link_rates(group, world.device)
    except RuntimeError as error:  # no peer access: raised on every rank
        console.print(f"no link rate; the collective's time is used instead: {str(error).splitlines()[0]}")
        rates = {}
    report: dict[str, Any] = {
        "command": " ".join(["overlap-gemm", *map(_without_folder, sys.argv[1:])]),
        "machine": describe(world) | {"power_limit_w": _power_limit(world.device)},
        "link_rates": rates,
        "protocol": f"medians of {rounds} interleaved rounds, each the maximum over {group.size} ranks",
        "results": [],
        "skipped": [],
    }
    skipped: dict[tuple[str, str], list[Skipped]] = {}
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("", total=len(workloads))
        for workload in workloads:
            progress.update(task, description=f"{workload.op} {workload.name} {workload.m}")
            measured = run(workload, backends, group, world.device, rounds, modes, rates, epilogue)
            report["results"].append(row(workload, measured, group.size))
            for one in measured.skipped:
                skipped.setdefault((one.name, workload.op), []).append(one)
            report["skipped"] = [
                f"{name} of {op} {every[0].shape} ({len(every)} shapes): {every[0].why}"
                for (name, op), every in skipped.items()
            ]
            keep(report)
            progress.advance(task)
    return report


def run(
    workload: Workload,
    backends: Sequence[str],
    group: Group,
    device: torch.device,
    rounds: int,
    modes: Sequence[Mode] = (EAGER,),
    rates: Mapping[str, float] | None = None,
    epilogue: Epilogue | None = None,
) -> Measured:
    """Times every variant of a workload in every mode. Collective over the group.

    Args:
        workload: Op, shape and types.
        backends: Names of backends.
        group: Ranks of the op.
        device: Device of this rank's tensors.
        rounds: Samples per variant.
        modes: Modes to time: calls, or replays of CUDA graphs of calls.
        rates: Result of `link_rates`; None if not measured.
        epilogue: Epilogue, which adds the calls of `epilogue_calls`; None without one.

    Raises:
        RuntimeError: Torch cannot compute the product, which the bound needs.
    """
    sets = [workload.operands(group, device) for _ in range(workload.num_sets(group, device))]
    operands = sets[0]
    if "auto" in backends and device.type == "cuda":  # as in a program that warms up and passes all extents
        workload.warm_up(group, device)

    def taking_turns(made: Callable[[OpTensors], Mapping[str, Call]]) -> dict[str, Call]:
        each = [made(of_set) for of_set in sets]
        return {name: in_turn([calls[name] for calls in each]) for name in each[0]}

    others = taking_turns(lambda of_set: baselines(workload, of_set, group))
    made = None if epilogue is None else EpilogueCalls(epilogue, workload)

    def by(names: Sequence[str], of_set: OpTensors) -> dict[str, Call]:
        if made is not None:
            return made.by(of_set, group, names)
        return {name: workload.by(name, of_set, group) for name in names}

    if made is not None:
        others |= {name: made.followed(others[name], operands, group) for name in OTHERS if name in others}
    ours = taking_turns(lambda of_set: by(backends, of_set))
    calls = others | ours
    usable, skipped = _those_that_work(workload, calls, group)
    if "product" not in usable:
        raise RuntimeError(f"{workload.op}: the bound needs torch's product, which failed: {skipped[0].why}")
    link = workload.facts(group.size).bytes_out / max(rates.values()) if rates else None
    measured = Measured([name for name in ours if name in usable], link=link, skipped=skipped)
    measured.epilogue = None if epilogue is None else epilogue.name
    for mode in modes:
        variants, taken, places = usable, {}, {}
        for name in measured.backends:
            applied = made.inputs(made.epilogue, operands, group) if made and name in backends else None
            choice = _choice(workload, backend_of(name), operands, group, mode, applied)
            taken[name] = choice.backend.name
            if choice.epilogue is not None:
                places[name] = choice.epilogue
        if mode == GRAPH:
            # Under capture `auto` may select another backend, whose kernels must be compiled before.
            first = by(list(dict.fromkeys(taken.values())), operands)
            _those_that_work(workload, first, group)
            variants, failed = _those_that_work(workload, usable, group, captured)
            measured.skipped += [Skipped(f"{one.name}, captured,", one.shape, one.why) for one in failed]
        measured.taken[mode], measured.places[mode] = taken, places
        loads = measured.loads[mode] = []
        timings = measure(
            variants,
            group=group.process_group,
            device=device,
            rounds=rounds,
            burst_seconds=0.004 if device.type == "cuda" else 0.05,
            after_round=partial(_note_load, loads, device) if device.type == "cuda" else None,
        )
        if link is None and "collective" in usable:
            link = measured.link = timings.median("collective")
        measured.timings[mode] = timings.with_bound(link or 0.0)
        facts = workload.facts(group.size)
        is_predicted = device.type == "cuda" and facts.dtype != "f32" and epilogue is None
        if is_predicted and (arch := this_arch()) is not None:
            sms = torch.cuda.get_device_properties(device).multi_processor_count
            measured.predicted[mode] = predict(facts, arch, sms, mode == GRAPH)
    return measured


def _without_folder(argument: str) -> str:
    """Returns an argument; for an absolute path its last component, because folders name a machine."""
    return Path(argument).name if Path(argument).is_absolute() else argument


def _power_limit(device: torch.device) -> int | None:
    return power_limit(device.index or 0) if device.type == "cuda" else None


def _note_load(loads: list[Load], device: torch.device) -> None:
    if (now := load(device.index or 0)) is not None:
        loads.append(now)


def _choice(
    workload: Workload, name: str, operands: OpTensors, group: Group, mode: Mode, epilogue: Applied | None
) -> Choice:
    """Returns the choice of a backend; for "auto" it may depend on whether the call is captured."""
    if mode == EAGER:
        return workload.explained(name, operands, group, epilogue)
    with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
        torch.zeros(1, device=operands.x.device)  # torch warns about an empty graph
        return workload.explained(name, operands, group, epilogue)


def _those_that_work(
    workload: Workload, calls: Mapping[str, Call], group: Group, prepare: Callable[[Call], Call] | None = None
) -> tuple[dict[str, Call], list[Skipped]]:
    """Runs each call once, after `prepare`; returns those that work on every rank, and the failures."""
    usable: dict[str, Call] = {}
    skipped = []
    for name, call in calls.items():
        failure = None
        try:
            ready = prepare(call) if prepare is not None else call
            ready()
        except (RuntimeError, ValueError, TypeError, AttributeError, ImportError) as error:
            failure = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        failures = [other for other in group.all_gather_object(failure) if other is not None]
        if failures:
            skipped.append(Skipped(name, f"{workload.m},{workload.n},{workload.k}", failures[0]))
        else:
            usable[name] = ready
    return usable, skipped
