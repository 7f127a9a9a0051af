"""`overlap-gemm plan`: prints the model's prediction for a call: backends, times, and the bound."""

from dataclasses import replace
from typing import Annotated, Literal

import torch
import typer
from rich.table import Table

from ..backends.base import Problem
from ..backends.epilogues import usual_dtypes
from ..backends.fused.fused_backend import Fused, why_no_blocks
from ..backends.op_call import OpCall
from ..backends.scales.scaling import FLOAT8, OUT_DTYPES, blocks_named, why_no_scaled_mm, why_not_exchanged
from ..backends.select import BACKENDS, added_epilogue, epilogue_line, why_after_by
from ..config.arch import ARCHS
from ..spec import OPS
from ..spec.promises import NO_PROMISES, Invariant, Promises
from ..tuning.epilogue_time import epilogue_time
from ..tuning.machine import Machine, load, machine_for
from ..tuning.prediction import Facts, Prediction, predict_on
from ..tuning.settings import settings
from ..tuning.time_model import FusedTime
from .command_options import BlockOption, EpilogueOption, block_of, chosen_ops, epilogue_named
from .console import rank_zero_console
from .this_machine import this_arch

DTYPES = {"bfloat16": "bf16", "float16": "f16", "float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}


def plan(
    op: Annotated[str, typer.Argument(help=f"One of {', '.join(OPS)}.")],
    m: Annotated[int, typer.Argument(min=1, help="Rows M over all ranks.")],
    n: Annotated[int, typer.Argument(min=1, help="Output features N over all ranks.")],
    k: Annotated[int, typer.Argument(min=1, help="Input features K over all ranks.")],
    ranks: Annotated[int, typer.Option(min=1, help="Ranks P.")] = 8,
    arch: Annotated[
        str | None, typer.Option(help="sm_90a, sm_100a or sm_103a. [default: this GPU's, else sm_90a]")
    ] = None,
    sms: Annotated[
        int | None, typer.Option(min=1, help="SMs to use. [default: all of the machine's]")
    ] = None,
    dtype: Annotated[
        Literal["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"],
        typer.Option(help="Type of the operands; 8-bit ones have scales, and a bfloat16 result."),
    ] = "bfloat16",
    block: BlockOption = None,
    epilogue: EpilogueOption = None,
    invariant: Annotated[
        Invariant | None,
        typer.Option(
            help="Promise that the fused kernel keeps; shows its cost, too. The choice is then fused, or "
            "sequential if fused is refused, whatever the times."
        ),
    ] = None,
    machine: Annotated[
        str | None,
        typer.Option(help="Constants: a file of `tune`, or h200, h100, b200. [default: the arch's]"),
    ] = None,
) -> None:
    """Predicts the time of every backend for an op, and shows the choice and its bound.

    Runs on any machine: it measures nothing. The constants are those of `overlap-gemm tune` or of the
    package; without a GPU those of OVERLAP_GEMM_MACHINE, else of H200 for sm_90a.
    """
    (op,) = chosen_ops([op], "OP")
    constants, arch = _machine(arch, machine)
    console = rank_zero_console(0)
    kind = getattr(torch, dtype)
    blocks = blocks_named(block_of(block, kind), kind)
    facts = Facts(op, m, n, k, DTYPES[dtype], ranks, blocks=blocks)
    sms = sms or constants.sms
    promises = Promises(invariant=invariant)
    eager, captured, free = (
        predict_on(facts, constants, arch, sms, graph, kept)
        for graph, kept in ((False, promises), (True, promises), (True, NO_PROMISES))
    )
    call = OpCall(rows=m, columns=n, k=k, block=block_of(block, kind), invariant=invariant)
    problem = Problem(op, call, kind, "cuda", ranks)
    if kind in FLOAT8:
        problem = replace(problem, call=call._replace(out_dtype=OUT_DTYPES[0]), weight_dtypes=(kind,))
    if problem.is_scaled and (why := why_not_exchanged(problem.spec, problem.types)):
        raise typer.BadParameter(why, param_hint="--block")
    applied, times, why_after = epilogue_named(epilogue), None, None
    if applied is not None:
        if invariant:
            raise typer.BadParameter("does not support --invariant", param_hint="--epilogue")
        dtypes = usual_dtypes(applied, kind)
        problem = problem.with_epilogue(applied, dtypes)
        times = epilogue_time(applied, [one.itemsize for one in dtypes], facts, constants, arch, sms)
        why_after = why_after_by(Fused(), problem, problem.local_columns, times)
    if times is not None:
        eager, captured = (
            replace(one, seconds=added_epilogue(one.seconds, problem, times)) for one in (eager, captured)
        )
    if problem.has_partial_epilogue:  # nothing can follow the op
        for backend in BACKENDS:
            if backend.why_after(problem, problem.local_columns) is not None:
                eager, captured = (_without(prediction, backend.name) for prediction in (eager, captured))
    why_not_timed = constants.why_uncalibrated_bytes(blocks) if problem.is_scaled else None
    if problem.is_scaled:  # copy engines do not send scales
        eager, captured = (_without(prediction, "decomposed") for prediction in (eager, captured))
    why_not_torch = why_no_scaled_mm(problem, ARCHS[arch].capability) if problem.is_scaled else None
    if why_not_torch:
        eager, captured = (_without(prediction, "torch") for prediction in (eager, captured))
    if refused := Fused().why_no_kernel(problem) or why_no_blocks(arch, problem.types):
        eager, captured = (_without(prediction, "fused") for prediction in (eager, captured))
    console.print(
        f"[bold]{op}[/] M,N,K={m},{n},{k} {dtype} on {ranks} x {constants.name} ({arch}, {sms} SMs), "
        f"constants {constants.source} {constants.date}"
    )
    console.print(_table(eager, captured))
    console.print(
        f"bound: the {'product' if captured.product >= captured.link else 'link'}, product "
        f"{captured.product * 1e6:.1f} us, link {captured.link * 1e6:.1f} us for "
        f"{facts.bytes_out / 2**20:.3g} MiB out of each rank"
    )
    if invariant:  # bits depend on the backend, so no time decides
        console.print(f"choice: [bold]{'sequential' if refused else 'fused'}[/], invariant={invariant!r}")
    else:
        for what, prediction in (("captured in a CUDA graph", captured), ("eager", eager)):
            if why_not_timed:
                prediction = _without(prediction, "fused")
            console.print(f"choice, {what}: [bold]{prediction.best}[/], {_why(prediction)}")
    if applied is not None:
        console.print(f"epilogue {epilogue_line(Fused(), problem, why_after, times)}", highlight=False)
    if constants.source != "measured":
        console.print("constants not measured: on such a machine `auto` measures each call signature")
    if why_not_torch:
        console.print(f"not torch: {why_not_torch}", highlight=False)
    if why_not_timed:
        console.print(f"not fused by default: {why_not_timed}", highlight=False)
    if as_rows := constants.missing_block_timings(blocks):
        console.print(f"constants are those with scales of rows: {as_rows}", highlight=False)
    if refused or captured.fused is None or captured.config is None:
        console.print(f"fused kernel: no, {refused}", highlight=False)
        return
    expected = f"{captured.fused.total * 1e6:.1f} us expected"
    lowered = "" if captured.op == op else f" by way of {captured.op}"
    if transport := settings().transport_name(OPS[captured.op]):
        lowered += f" by transport {transport}"
    console.print(f"fused kernel: {captured.config.name}{lowered}, {expected}\n  {_parts(captured.fused)}")
    if invariant and free.fused is not None:
        ratio = captured.fused.total / free.fused.total
        console.print(
            f"invariant={invariant!r}: {ratio:.2f} of the time without, {free.fused.total * 1e6:.1f} us"
        )


def _without(prediction: Prediction, backend: str) -> Prediction:
    others = {name: seconds for name, seconds in prediction.seconds.items() if name != backend}
    return replace(prediction, seconds=others)


def _machine(arch: str | None, name: str | None) -> tuple[Machine, str]:
    """Returns constants and architecture for the options."""
    if arch is not None and arch not in ARCHS:
        raise typer.BadParameter(f"{arch!r} is not one of {', '.join(ARCHS)}", param_hint="--arch")
    if name is not None:
        try:
            constants = load(name)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--machine") from error
        if arch is not None and arch not in constants.archs:
            raise typer.BadParameter(
                f"{name} is for {', '.join(constants.archs)}, not {arch}", param_hint="--machine"
            )
        return constants, arch or constants.archs[0]
    arch = arch or this_arch() or "sm_90a"
    machine = machine_for(arch)
    if machine is None:  # of a registered architecture without devices
        raise typer.BadParameter(f"there are no constants for {arch}: name some", param_hint="--machine")
    return machine, arch


def _table(eager: Prediction, captured: Prediction) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("way")
    for heading in ("captured us", "eager us", "of the bound"):
        table.add_column(heading, justify="right")
    for name in sorted(captured.seconds, key=captured.seconds.__getitem__):
        seconds = captured.seconds[name]
        table.add_row(
            name,
            f"{seconds * 1e6:.1f}",
            f"{eager.seconds[name] * 1e6:.1f}",
            f"{seconds / captured.bound:.2f}x" if captured.bound else "-",
        )
    return table


def _why(prediction: Prediction) -> str:
    order = sorted(prediction.seconds, key=prediction.seconds.__getitem__)
    if len(order) == 1:
        return "no other backend supports it"
    best, next_best = order[0], order[1]
    return f"{prediction.seconds[best] / prediction.seconds[next_best]:.2f} of the time of {next_best}"


def _parts(fused: FusedTime) -> str:
    """Returns the parts of a fused call's predicted time, as text."""
    limits = {
        "the tensor cores": fused.waves + fused.tail,
        "the link": fused.fill + fused.link,
        "memory": fused.memory,
    }
    us = {name: f"{seconds * 1e6:.1f}" for name, seconds in vars(fused).items()}
    return (
        f"limited by {max(limits, key=limits.__getitem__)}: waves {us['waves']}, link {us['link']}, memory "
        f"{us['memory']} us; first tile {us['fill']}, last wave's bytes {us['tail']} and sum "
        f"{us['receive']}, launch {us['launch']} us"
    )
