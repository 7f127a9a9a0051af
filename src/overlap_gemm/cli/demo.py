"""`overlap-gemm demo`: a tensor-parallel Llama trained, checked against the unsharded one, its ops timed."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import overlap_gemm

from ..backends.base import Problem
from ..backends.select import choose
from ..parallel import llama_plan
from ..runtime.bootstrap import World
from ..runtime.group import Group, group_name, resolve
from ..runtime.spans import Span, record
from ..testing.cases import Case
from ..tuning.timing import FourTimes
from .bench import run
from .console import rank_zero_console
from .emulate import run_emulated
from .machine import processor
from .workload import Workload

if TYPE_CHECKING:  # transformers is slow to import, and an extra
    from .llama import Comparison, LlamaForCausalLM

BACKENDS = ("sequential", "decomposed")


def demo(
    steps: Annotated[int, typer.Option(min=1, help="Training steps.")] = 60,
    batch: Annotated[int, typer.Option(min=1, help="Sequences per step.")] = 4,
    sequence: Annotated[int, typer.Option(min=1, help="Bytes per sequence, rounded up to the ranks.")] = 128,
    layers: Annotated[int, typer.Option(min=1, help="Decoder layers.")] = 4,
    head_dim: Annotated[int, typer.Option(min=2, help="Width of an attention head (even).")] = 32,
    rows: Annotated[int, typer.Option(min=1, help="Rows M of the timed ops.")] = 1024,
    rounds: Annotated[int, typer.Option(min=1, help="Samples per timing.")] = 11,
    backend: Annotated[str, typer.Option(help="How the model's ops are carried out.")] = "auto",
    text: Annotated[Path | None, typer.Option(help="Train on this file; default: our license.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the timeline picture.")] = Path("out"),
    fused: Annotated[bool, typer.Option(help="Run the fused kernel in the emulator, too.")] = True,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: cuda where there is one.")] = None,
) -> None:
    """Train a tensor-parallel Llama, compare it with the unsharded one, time its ops.

    `bash launch/demo.sh` starts it with one rank per GPU, or on 2 CPU ranks. Exits with 1 if the sharded
    model's logits or gradients are further from the truth than the stated tolerance, or the emulated kernel's
    results are wrong.
    """
    from . import llama

    world = overlap_gemm.init(device=device)
    console = rank_zero_console(world.rank)
    on_cuda = world.device.type == "cuda"
    where = f"{world.size} {'GPU' if on_cuda else 'CPU'} rank{'s' * (world.size > 1)}"
    what = torch.cuda.get_device_name(world.device) if on_cuda else processor()
    console.print(f"[bold]overlap_gemm demo[/]: {where}, {what}, torch {torch.__version__}")

    text = text or llama.default_text()
    sequence = -(-sequence // world.size) * world.size
    model = llama.build(world.size, layers, head_dim, sequence).to(world.device)
    size = f"{sum(parameter.numel() for parameter in model.parameters()) / 1e6:.1f} M parameters"
    parallelize_module(model, _mesh(world), llama_plan(rows=sequence, backend=backend))
    console.print(
        f"1. Train a Llama ({layers} layers, hidden {model.config.hidden_size}, {size}) on {text.name}, "
        f"{batch} x {sequence} bytes a step"
    )
    problem = Problem(
        "all_gather_gemm",
        batch * sequence,
        model.config.hidden_size,
        torch.float32,
        world.device.type,
        world.size,
    )
    console.print(f"   backend={backend!r} carries its ops out as {choose(problem, backend).backend.name!r}")
    data = llama.batches(text, batch, sequence, world.device)
    losses, seconds = _train(console, model, data, steps)
    console.print("2. Compare with the unsharded model: same weights, same batch, both against float64")
    holds = _check(console, llama.compare(model, next(data)))
    console.print("3. Time an MLP's two ops, one after the other and decomposed")
    picture = out / "demo-timeline.png"
    speed = _time_ops(console, world, rows, rounds, picture)
    overlap_gemm.finalize()
    if dist.is_initialized():  # the group that _mesh made
        dist.destroy_process_group()
    emulated = True
    if world.rank == 0 and fused:
        console.print("4. Run the fused kernel, compiled for Blackwell, on 2 emulated ranks")
        emulated = _emulate(console, out / "demo-fused.png")

    passed = holds and emulated
    verdict = "[bold green]PASS[/]" if passed else "[bold red]FAIL[/]"
    fused_kernel = f"; the emulated fused kernel is {'right' if emulated else 'WRONG'}" if fused else ""
    console.print(
        f"\n{verdict}: a Llama of {size}, tensor-parallel on {where}, trained {steps} steps "
        f"in {seconds:.0f} s (loss {losses[0]:.2f} -> {losses[-1]:.2f}), "
        f"{'equals' if holds else 'DIFFERS FROM'} the unsharded model{fused_kernel}; "
        f"decomposed against sequential: {speed}; timelines in {out}"
    )
    if not passed:
        raise typer.Exit(1)


def _emulate(console: Console, picture: Path) -> bool:
    """GEMM reduce-scatter in one kernel: the comm warp stores a tile while the next one is multiplied."""
    case = Case("gemm_reduce_scatter", 1024, 128, 512, torch.bfloat16)
    return run_emulated(
        console, case, "sm_100a", 2, "random", 1, {"mma": "1cta", "tile": (128, 128)}, picture, num_sms=1
    )


def _mesh(world: World) -> DeviceMesh:
    if not dist.is_initialized():  # DTensor wants a process group in a world of one, too
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return init_device_mesh(world.device.type, (world.size,), mesh_dim_names=("tp",))


def _train(
    console: Console, model: "LlamaForCausalLM", data: Iterator[torch.Tensor], steps: int
) -> tuple[list[float], float]:
    """Trains under a progress bar; returns the losses and the seconds."""
    from . import llama

    losses: list[float] = []
    columns = [TextColumn("   {task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("loss", total=steps)

        def after_step(loss: float) -> None:
            losses.append(loss)
            progress.update(task, advance=1, description=f"loss {loss:5.3f}")
            if not console.is_terminal and len(losses) % 10 == 1:  # a file does not show a bar that moves
                console.print(f"   step {len(losses):4d}  loss {loss:5.3f}")

        started = time.perf_counter()
        llama.train(model, data, steps, after_step)
        return losses, time.perf_counter() - started


def _check(console: Console, comparisons: list["Comparison"]) -> bool:
    from .llama import ALLOWED_FACTOR

    for found in comparisons:
        console.print(
            f"   {found.what:9}  largest error {found.error:.1e}, allowed {found.allowed:.1e} "
            f"({ALLOWED_FACTOR:g} x the unsharded model's own rounding, {found.rounding:.1e})  "
            f"{'[green]ok[/]' if found.holds else '[red]TOO FAR[/]'}"
        )
    return all(found.holds for found in comparisons)


def _time_ops(console: Console, world: World, rows: int, rounds: int, picture: Path) -> str:
    """Times the ops and draws their timelines; returns the ratios in words."""
    from .plots import draw_timelines  # matplotlib is slow to import

    group = resolve(group_name(None))
    speed: list[str] = []
    timelines: dict[str, dict[str, list[list[Span]]]] = {}
    for workload in (
        Workload("MLP up", "all_gather_gemm", rows, 4096, 1024, torch.float32),
        Workload("MLP down", "gemm_reduce_scatter", rows, 1024, 4096, torch.float32),
    ):
        timings = run(workload, list(BACKENDS), group, world.device, rounds)
        times = FourTimes.of(timings, "decomposed")
        low, high = timings.ratio_range("sequential", "decomposed")
        speed.append(f"{times.speedup:.2f}x {workload.op}")
        console.print(
            f"   {workload.op} M,N,K={workload.m},{workload.n},{workload.k}: "
            f"decomposed is {times.speedup:.2f}x as fast as sequential (quartiles {low:.2f}-{high:.2f})\n"
            f"      T_gemm {times.gemm * 1e3:.3g} ms, T_comm {times.comm * 1e3:.3g} ms, "
            f"T_seq {times.sequential * 1e3:.3g} ms, T_overlap {times.overlapped * 1e3:.3g} ms"
        )
        timelines[workload.op] = {name: _timeline(workload, name, group, world) for name in BACKENDS}
    if world.rank == 0:
        picture.parent.mkdir(parents=True, exist_ok=True)
        draw_timelines(timelines, picture)
    return ", ".join(speed)


def _timeline(workload: Workload, backend: str, group: Group, world: World) -> list[list[Span]]:
    """The spans of one warm call on every rank. Collective."""
    call = workload.variants([backend], group, world.device)[backend]
    everyone: list[Any] = [None] * world.size
    for _ in range(2):
        call()
    dist.barrier()
    with record(world.device) as spans:
        call()
    dist.all_gather_object(everyone, spans)
    return everyone
