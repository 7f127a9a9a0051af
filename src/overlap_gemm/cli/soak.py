"""`overlap-gemm soak`: random sequences of calls on this machine, each result compared with float64."""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.table import Table
from torch import Tensor

import overlap_gemm

from ..backends.scales.scale_layouts import LAYOUTS
from ..backends.scales.scaling import FLOAT8
from ..runtime.group import Group, find
from ..spec import OPS
from ..testing.workload import OpTensors, Workload
from .command_options import DeviceOption
from .console import rank_zero_console

BURST = 8
"""Calls that are issued before the results of any of them are read."""

TOLERANCE = 2.0
"""Maximum ratio of a result's error to that of the same call by `sequential` in the result's dtype.

Errors are the largest differences from float64. The second one counts as at least the dtype's epsilon times
the largest true value.
"""

LAG = 0.02
"""Seconds by which a rank may lag behind the others."""

ROWS = {"cpu": (1, 3, 16, 33), "cuda": (1, 7, 16, 100, 512, 1000, 2048)}
WIDTHS = {"cpu": (16, 64), "cuda": (256, 1024, 1600)}
"""N, or K, over all ranks; a multiple of these times the number of ranks where operands have scales."""

RESULTS = ("the result", "the gradient of x", "the gradient of the weight")

BACKENDS = ("auto", "auto", "fused", "fused", "torch", "sequential", "decomposed")
EVENTS = ("lag", "stream", "empty the cache", "close workspaces", "fail on one rank", *("none",) * 15)


@dataclass(frozen=True)
class Step:
    """One call, the same on all ranks.

    Attributes:
        workload: Op, shape and dtype.
        backend: Backend to request.
        options: Further keyword arguments of the op.
        mode: "eager", "gradient", or "captured": a CUDA graph that is replayed twice.
        event: Disturbance before the call.
        rank: Rank that an event concerns.
    """

    workload: Workload
    backend: str
    options: dict[str, Any]
    mode: str
    event: str
    rank: int

    def __str__(self) -> str:
        """Returns op, shape and all choices in one line."""
        w = self.workload
        kind = f"{str(w.dtype).removeprefix('torch.')}{f' ({w.scales})' if w.scales else ''}"
        options = "".join(f", {name}={value!r}" for name, value in self.options.items())
        return f"{w.op} {w.m}x{w.n}x{w.k} {kind}, backend={self.backend!r}{options}, {self.mode}"


@dataclass
class Record:
    """Result of a soak.

    Attributes:
        calls: By op, backend that executed it, and mode.
        refused: Steps that no backend of the request supports, by reason.
        events: Disturbances.
        failures: One line for each wrong result.
    """

    calls: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    events: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


def soak(
    minutes: Annotated[float, typer.Option(min=0.0, help="How long to call; at least one burst.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the sequence.")] = 0,
    kinds: Annotated[int, typer.Option(min=1, help="Distinct shapes; each compiles its kernels once.")] = 24,
    device: DeviceOption = None,
) -> None:
    """Runs random calls of all ops, one after another, and compares each result with float64.

    `bash launch/torchrun.sh overlap-gemm soak --minutes 5`. Ops, shapes, types, scales, backends, options,
    gradients, CUDA graphs and streams are random. Ranks lag, workspaces are closed, and some calls fail on
    one rank and are retried. A call that no backend supports is counted and skipped. If a result is wrong on
    some rank, all ranks end after this burst of calls and exit with 1. An error ends the run with its step.
    """
    world = overlap_gemm.init(device=device)
    group = find(None)
    console = rank_zero_console(world.rank)
    record = run(steps(seed, kinds, group.size, world.device), group, world.device, 60 * minutes)
    overlap_gemm.finalize()
    console.print(table(record))
    for reason, count in record.refused.most_common():
        console.print(f"refused {count} times: {reason}")
    events = ", ".join(f"{name} {count}" for name, count in sorted(record.events.items()))
    number = sum(record.calls.values())
    console.print(
        f"{number} calls on {group.size} ranks, seed {seed}: {len(record.failures)} wrong; {events}"
    )
    for failure in record.failures:
        console.print(f"wrong: {failure}")
    if record.failures:
        raise typer.Exit(1)


def steps(seed: int, kinds: int, ranks: int, device: torch.device) -> Iterator[Step]:
    """Yields the steps of a seed, without end; equal on all ranks."""
    draw = random.Random(seed)
    workloads = [_workload(draw, ranks, device.type) for _ in range(kinds)]
    modes = ["eager", "eager", "gradient", *(["captured"] if device.type == "cuda" else [])]
    while True:
        workload, mode = draw.choice(workloads), draw.choice(modes)
        if workload.scales and mode == "gradient":
            mode = "eager"
        options: dict[str, Any] = {}
        if draw.random() < 0.15:
            options["deterministic"] = True
        if workload.spec.sums and not workload.scales and draw.random() < 0.15:
            options["partials"] = "float32"
        if draw.random() < 0.1:
            options["reserve_sms"] = draw.choice((2, 8))
        backend = draw.choice(BACKENDS)
        yield Step(workload, backend, options, mode, draw.choice(EVENTS), draw.randrange(ranks))


def _workload(draw: random.Random, ranks: int, device_type: str) -> Workload:
    """Returns a random op, dtype and shape that every rank draws alike."""
    op = draw.choice(sorted(OPS))
    rows, widths = draw.choice(ROWS[device_type]), WIDTHS[device_type]
    kinds: list[tuple[torch.dtype, Any]] = [(torch.bfloat16, None), (torch.float16, None)]
    if device_type == "cpu":
        kinds = [(torch.float32, None), (torch.bfloat16, None)]
    served = ("blocks",) if OPS[op].reshards_k else ("rows", "blocks")
    kinds += [(dtype, scales) for dtype in FLOAT8 for scales in served]
    dtype, scales = draw.choice(kinds)
    n, k = draw.choice(widths), draw.choice(widths)
    if scales:
        n, k = 128 * ranks * max(n // 512, 1), 128 * ranks * max(k // 512, 1)
        rows = -(-rows // (16 * ranks)) * 16 * ranks
        dtype = next(iter(FLOAT8)) if scales == "blocks" else dtype
    return Workload("", op, rows, 8 * ranks * (n // (8 * ranks)), k, dtype, scales)


def run(program: Iterator[Step], group: Group, device: torch.device, seconds: float) -> Record:
    """Executes a program for that many seconds, in bursts. Collective.

    Raises:
        RuntimeError: A call raised; the message has the step, the cause is the error.
    """
    record, end = Record(), time.monotonic() + seconds
    while True:
        checks: list[Callable[[], str | None]] = []
        for step in (next(program) for _ in range(BURST)):
            try:
                check = _made(step, group, device, record)
            except Exception as error:
                raise RuntimeError(f"rank {group.rank}, {step}, after {step.event!r}: {error}") from error
            if check is not None:
                checks.append(check)
        wrong = [failure for check in checks if (failure := check()) is not None]
        record.failures += [line for lines in group.all_gather_object(wrong) for line in lines]
        if record.failures or any(group.all_gather_object(time.monotonic() > end)):
            return record


def _made(step: Step, group: Group, device: torch.device, record: Record) -> Callable[[], str | None] | None:
    """Executes a step; returns the comparison of its results, None where the step is refused."""
    workload = step.workload
    operands = workload.operands(group, device)
    how = {**workload.arguments, **operands.scales, **step.options, "group": group.process_group}
    op = getattr(overlap_gemm, workload.op)
    try:
        taken = overlap_gemm.explain(workload.op, *operands[:2], backend=step.backend, **how).backend.name
    except ValueError as error:  # a backend that does not support the step, on any rank
        record.refused[f"{step.backend}: {str(error).splitlines()[0].rpartition(': ')[2]}"] += 1
        return None
    if step.event != "none":
        record.events[step.event] += 1
    side = None
    if step.event == "lag" and group.rank == step.rank:
        time.sleep(LAG)
    elif step.event == "empty the cache" and device.type == "cuda":
        torch.cuda.empty_cache()
    elif step.event == "close workspaces":
        overlap_gemm.close_workspaces(group.process_group)
    elif step.event == "stream" and device.type == "cuda":
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream(device))

    def call(x: Tensor, weight: Tensor) -> Any:
        return op(x, weight, backend=step.backend, **how)

    x, weight = operands[:2]
    if step.event == "fail on one rank" and group.rank == step.rank:
        try:
            op(x, weight[None], backend=step.backend, **how)
        except ValueError as error:
            with overlap_gemm.retry(error):
                call(x, weight)
    elif step.event == "fail on one rank":
        call(x, weight)
    with nullcontext() if side is None else torch.cuda.stream(side):
        results = _results(step, call, x, weight)
    if side is not None:
        torch.cuda.current_stream(device).wait_stream(side)
    record.calls[workload.op, taken, step.mode] += 1
    return lambda: _compared(step, op, operands, how, results)


def _results(step: Step, call: Callable[..., Any], x: Tensor, weight: Tensor) -> list[Tensor]:
    """Returns the result of a call; in mode "gradient" also the gradients of x and of the weight."""
    if step.mode == "gradient":
        x, weight = x.requires_grad_(), weight.requires_grad_()
        out = call(x, weight)
        return [out.detach(), *torch.autograd.grad(out, (x, weight), _gradient_like(out))]
    if step.mode == "captured":
        call(x, weight)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            out = call(x, weight)
        graph.replay()
        graph.replay()
        return [out.clone()]
    return [call(x, weight)]


def _gradient_like(out: Tensor) -> Tensor:
    """Returns a gradient that is equal on all ranks, as it is of a replicated result."""
    generator = torch.Generator(out.device).manual_seed(out.shape[1])
    return torch.randn(out.shape, generator=generator, device=out.device, dtype=out.dtype)


def _compared(
    step: Step, op: Callable[..., Any], operands: OpTensors, how: dict[str, Any], results: list[Tensor]
) -> str | None:
    """Returns what is wrong with the results; None: nothing. Collective."""
    workload = step.workload
    plain = {name: how[name] for name in how if name not in ("scale_x", "scale_w", "block", *step.options)}
    x, weight = operands.x.detach(), operands.weight.detach()
    if workload.scales:
        assert operands.scale_x is not None and operands.scale_w is not None
        layout, flat = LAYOUTS[workload.blocks], workload.blocks is None
        x, weight = (
            layout.dequantised(matrix, scale.reshape(-1) if flat else scale)
            for matrix, scale in ((x, operands.scale_x), (weight, operands.scale_w))
        )

    def call_in(dtype: torch.dtype) -> list[Tensor]:
        def call(x: Tensor, weight: Tensor) -> Any:
            return op(x, weight, backend="sequential", **plain)

        mode = "gradient" if step.mode == "gradient" else "eager"
        return _results(replace(step, mode=mode), call, x.to(dtype), weight.to(dtype))

    truths, rounded = call_in(torch.float64), call_in(workload.out_dtype)
    epsilon = torch.finfo(workload.out_dtype).eps
    for name, result, truth, baseline in zip(RESULTS, results, truths, rounded, strict=False):
        error, usual = (_largest(each.double() - truth) for each in (result, baseline))
        allowed = TOLERANCE * max(usual, epsilon * _largest(truth))
        if not error <= allowed:
            return (
                f"{step}: {name} differs by {error:.3g} from float64, allowed is {allowed:.3g} "
                f"('sequential' differs by {usual:.3g})"
            )
    return None


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def table(record: Record) -> Table:
    """Returns the calls by op, backend and mode."""
    modes = sorted({mode for _, _, mode in record.calls})
    drawn = Table("op", "backend", *modes, box=box.SIMPLE_HEAD)
    for op, backend in sorted({(op, backend) for op, backend, _ in record.calls}):
        drawn.add_row(op, backend, *(str(record.calls[op, backend, mode]) for mode in modes))
    return drawn
