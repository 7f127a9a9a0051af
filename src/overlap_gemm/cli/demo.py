"""`overlap-gemm demo`: trains a tensor-parallel Llama, checks it against the unsharded one, times its ops."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import overlap_gemm

from ..backends.op_call import BackendName
from ..parallel import parallelize
from ..runtime.bootstrap import World
from ..runtime.group import Group, find
from ..testing.cases import Case
from ..testing.workload import Workload
from ..tuning.spans import Span, record
from ..tuning.timing import Timings, measure
from .command_options import DeviceOption
from .console import rank_zero_console
from .emulated_runs import Emulated, run_emulated
from .this_machine import processor

if TYPE_CHECKING:  # transformers is slow to import, and an extra
    from transformers import LlamaForCausalLM

    from .llama import Comparison

TIMED_BACKENDS = ("auto", "torch")
"""Backends whose ops are timed."""

TIMELINE_BACKENDS = ("sequential", "decomposed")
"""Backends in the timelines of CPUs."""


@dataclass(frozen=True)
class DemoSizes:
    """Sizes that keep a device busy for some seconds.

    Attributes:
        dtype: dtype of the model and of the timed ops.
        rate: Learning rate.
        sequence: Bytes per sequence.
        heads: Minimum number of attention heads.
        head_dim: Width of a head.
        rows: M of the timed ops; a decode batch has 16.
        hidden: N or K of the timed ops: width of the hidden state.
        inner: The other one of N and K: width of an MLP.
        rounds: Samples per timing.
    """

    dtype: torch.dtype
    rate: float
    sequence: int
    heads: int
    head_dim: int
    rows: int
    hidden: int
    inner: int
    rounds: int


CPU = DemoSizes(torch.float32, 2e-3, 128, 8, 32, 1024, 1024, 4096, 7)
GPU = DemoSizes(torch.bfloat16, 3e-4, 2048, 32, 128, 8192, 8192, 28672, 7)


def demo(
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 60,
    batch: Annotated[int, typer.Option(min=1, help="Sequences per step.")] = 4,
    sequence: Annotated[int | None, typer.Option(min=1, help="Bytes per sequence. [128; GPUs: 2048]")] = None,
    layers: Annotated[int, typer.Option(min=1, help="Decoder layers.")] = 4,
    head_dim: Annotated[
        int | None, typer.Option(min=2, help="Width of an attention head, even. [32; GPUs: 128]")
    ] = None,
    rows: Annotated[
        int | None, typer.Option(min=1, help="Rows M of the timed ops. [1024; GPUs: 8192]")
    ] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Samples per timing. [7]")] = None,
    backend: Annotated[BackendName, typer.Option(help="Backend of the model's ops.")] = "auto",
    text: Annotated[Path | None, typer.Option(help="Train on this file; default: our license.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the pictures.")] = Path("out"),
    fused: Annotated[
        bool | None, typer.Option(help="Run the fused kernel in the emulator, too. [default: without GPUs]")
    ] = None,
    device: DeviceOption = None,
) -> None:
    """Trains a tensor-parallel Llama, compares it with the unsharded one, and times its ops.

    `bash launch/demo.sh` starts it with one rank per GPU, or on 2 CPU ranks. Exits with 1 if logits or
    gradients of the sharded model differ from float64 by more than 4 times the unsharded model's difference.
    Exits with 1, too, if the emulated kernel (on rank 0) has wrong results or findings. Times do not matter.
    """
    from . import llama

    world = overlap_gemm.init(device=device)
    console = rank_zero_console(world.rank)
    on_cuda = world.device.type == "cuda"
    sizes = GPU if on_cuda else CPU
    where = f"{world.size} {'GPU' if on_cuda else 'CPU'} rank{'s' * (world.size > 1)}"
    what = torch.cuda.get_device_name(world.device) if on_cuda else processor()
    console.print(f"[bold]overlap_gemm demo[/]: {where}, {what}, torch {torch.__version__}")

    text = text or llama.default_text()
    sequence = sequence or sizes.sequence
    with world.device:
        model = llama.build(world.size, layers, head_dim or sizes.head_dim, sequence, sizes.heads)
    model = model.to(sizes.dtype)
    size = f"{sum(parameter.numel() for parameter in model.parameters()) / 1e6:.1f} M parameters"
    parallelize(model, world.mesh(), backend=backend)
    console.print(
        f"1. Train a Llama ({layers} layers, hidden {model.config.hidden_size}, {size}, {sizes.dtype}) on "
        f"{text.name}, {batch} x {sequence} bytes a step"
    )
    for layer in _mlp(
        batch * sequence, model.config.hidden_size, model.config.intermediate_size, sizes.dtype
    ):
        group = find(None)
        taken = layer.taken_by(backend, layer.operands(group, world.device), group)
        console.print(f"   backend={backend!r} runs {layer.op} by {taken!r}")
    data = llama.batches(text, batch, sequence, world.device)
    losses, seconds = _train(console, model, data, steps, sizes.rate)
    prompt, written = llama.continuation(model, text, world.device)
    console.print(f"   It continues {prompt!r}\n   with         {written!r}")
    console.print("2. Compare with the unsharded model: same weights, same sequence, both against float64")
    holds = _check(console, llama.compare(model, next(data)[:1]))
    console.print("3. Time the four ops against torch's product and collective")
    speed = _time_ops(console, world, sizes, rows or sizes.rows, rounds or sizes.rounds, out)
    overlap_gemm.finalize()
    emulated = True
    fused = not on_cuda if fused is None else fused
    if world.rank == 0 and fused:
        console.print("4. Run the fused kernel, compiled for Blackwell, on 2 emulated ranks")
        emulated = _emulate(console, out / "demo-fused.png")

    passed = holds and emulated
    verdict = "[bold green]PASS[/]" if passed else "[bold red]FAIL[/]"
    fused_kernel = f"; the emulated fused kernel is {'right' if emulated else 'WRONG'}" if fused else ""
    console.print(
        f"\n{verdict}: a Llama of {size}, tensor-parallel on {where}, trained {steps} steps "
        f"in {seconds:.0f} s (loss {losses[0]:.2f} -> {losses[-1]:.2f}), "
        f"{'equals' if holds else 'DIFFERS FROM'} the unsharded model{fused_kernel}{speed}; pictures in {out}"
    )
    if not passed:
        raise typer.Exit(1)


def _emulate(console: Console, picture: Path) -> bool:
    """Runs a fused GEMM reduce-scatter: the comm warp stores a tile while the next one is multiplied."""
    case = Case("gemm_reduce_scatter", 1024, 128, 512, torch.bfloat16)
    device = Emulated("sm_100a", 2, "random", num_sms=1)
    return run_emulated(console, case, device, 1, {"mma": "1cta", "tile": (128, 128)}, picture)


def _mlp(rows: int, hidden: int, inner: int, dtype: torch.dtype) -> list[Workload]:
    """Returns the two ops of a tensor-parallel MLP."""
    return [
        Workload("MLP up", "all_gather_gemm", rows, inner, hidden, dtype),
        Workload("MLP down", "gemm_reduce_scatter", rows, hidden, inner, dtype),
    ]


def _train(
    console: Console, model: "LlamaForCausalLM", data: Iterator[torch.Tensor], steps: int, rate: float
) -> tuple[list[float], float]:
    """Trains with a progress bar; returns the losses and the seconds."""
    from . import llama

    losses: list[float] = []
    columns = [TextColumn("   {task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("loss", total=steps)

        def after_step(loss: float) -> None:
            losses.append(loss)
            progress.update(task, advance=1, description=f"loss {loss:5.3f}")
            if not console.is_terminal and len(losses) % 10 == 1:  # a file does not show the progress bar
                console.print(f"   step {len(losses):4d}  loss {loss:5.3f}")

        started = time.perf_counter()
        llama.train(model, data, steps, rate, after_step)
        return losses, time.perf_counter() - started


def _check(console: Console, comparisons: list["Comparison"]) -> bool:
    """Prints errors and their bounds; returns whether all errors are within them."""
    from .llama import ALLOWED_FACTOR

    for comparison in comparisons:
        console.print(
            f"   {comparison.what:9}  largest error {comparison.error:.1e}, allowed {comparison.allowed:.1e} "
            f"({ALLOWED_FACTOR:g} x the unsharded model's own rounding, {comparison.rounding:.1e})  "
            f"{'[green]ok[/]' if comparison.holds else '[red]TOO FAR[/]'}"
        )
    return all(comparison.holds for comparison in comparisons)


def _time_ops(console: Console, world: World, sizes: DemoSizes, rows: int, rounds: int, out: Path) -> str:
    """Times the ops and torch's calls, draws timelines on CPUs, and returns the comparison as text."""
    group = find(None)
    hidden, inner = sizes.hidden, sizes.inner
    workloads = [
        *_mlp(rows, hidden, inner, sizes.dtype),
        Workload("MLP down, decode", "gemm_all_reduce", 16, hidden, inner, sizes.dtype),
        Workload("vocabulary, decode", "gemm_all_gather", 16, inner, hidden, sizes.dtype),
    ]
    compared = ""
    shown = Table(title=f"medians of {rounds} interleaved rounds")
    for heading in ("op", "M,N,K", "taken", "ms", "torch ms"):
        shown.add_column(heading, justify="right" if "ms" in heading else "left")
    for workload in workloads:
        operands = workload.operands(group, world.device)
        calls = {name: workload.by(name, operands, group) for name in TIMED_BACKENDS}
        timings = measure(
            calls, group=group.process_group, device=world.device, rounds=rounds, burst_seconds=0.02
        )
        taken = workload.taken_by("auto", operands, group)
        times = (f"{timings.median(name) * 1e3:.3f}" for name in TIMED_BACKENDS)
        shown.add_row(workload.op, f"{workload.m},{workload.n},{workload.k}", taken, *times)
        compared += _against(workload.op, timings)
    console.print(shown)
    if world.device.type == "cpu" and world.size > 1:
        timelines = {
            workload.op: {name: _timeline(workload, name, group, world) for name in TIMELINE_BACKENDS}
            for workload in workloads[:2]
        }
        if world.rank == 0:
            from .timelines import draw_timelines  # matplotlib is slow to import

            out.mkdir(parents=True, exist_ok=True)
            draw_timelines(timelines, out / "demo-timeline.png")
    return compared


def _against(op: str, timings: Timings) -> str:
    """Returns an op's time relative to torch's calls, with quartiles, as text."""
    low, high = timings.ratio_range("auto", "torch")
    return f"; {op} takes {timings.ratio('auto', 'torch'):.2f} ({low:.2f}-{high:.2f}) of the time of torch"


def _timeline(workload: Workload, backend: str, group: Group, world: World) -> list[list[Span]]:
    """Returns the spans of one warm call on every rank. Collective."""
    call = workload.by(backend, workload.operands(group, world.device), group)
    everyone: list[Any] = [None] * world.size
    for _ in range(2):
        call()
    dist.barrier()
    with record(world.device) as spans:
        call()
    dist.all_gather_object(everyone, spans)
    return everyone
