"""The projections of one Llama layer, forward and backward: ours and torch's tensor-parallel styles.

    bash launch/torchrun.sh -n 4 python benchmarks/layer.py --json benchmarks/results/h200x4-layer.json

The same module each time: norm, qkv, o, residual, norm, gate and up, SiLU, down, residual, with the rows
sharded in front of and after it (sequence parallel). Attention is left out: it is the same for all. Ways:

- ``ours``: overlap_gemm.parallel's styles with ``backend="auto"``
- ``torch``: torch.distributed.tensor.parallel's ColwiseParallel and RowwiseParallel
- ``ours, compiled``: ours by torch.compile, on GPUs
- ``block``, ``block, compiled``: `overlap_gemm.nn.ParallelBlock`, with epilogues
- ``async-tp``: torch's, compiled with Inductor's asynchronous tensor parallelism, where torch has it

No CUDA graphs; interleaved rounds, slowest rank, medians (`overlap_gemm.tuning.timing`). Every way's output
is compared with the first one's, so that no time is that of something else.
"""

import copy
import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import typer
from rich import box
from rich.table import Table
from timeline import record
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import overlap_gemm
from overlap_gemm.cli.console import rank_zero_console
from overlap_gemm.cli.this_machine import describe
from overlap_gemm.nn import ParallelBlock
from overlap_gemm.parallel import OverlapColwiseParallel, OverlapRowwiseParallel
from overlap_gemm.tuning.timing import Timings, measure

MODELS = {"70B": (8192, 10240, 28672), "8B": (4096, 6144, 14336), "tiny": (16, 32, 64)}
"""Name -> width of the hidden state, of q, k and v together, and of the MLP."""

KV_HEADS = 8
"""Heads of keys and values of every model."""

PASSES = ("forward", "forward+backward")


class Projections(nn.Module):
    """The linears of a Llama layer and what is between them, on `[rows, hidden]`."""

    def __init__(self, hidden: int, qkv: int, inner: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.qkv = nn.Linear(hidden, qkv, bias=False)
        self.o = nn.Linear(hidden, hidden, bias=False)
        self.gate_up = nn.Linear(hidden, 2 * inner, bias=False)
        self.down = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """This rank's rows in, this rank's rows out."""
        q = self.qkv(self.norm1(x))[:, : self.o.weight.shape[1] // dist.get_world_size()]
        x = x + self.o(q)
        gate, up = self.gate_up(self.norm2(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class BlockOfRows(ParallelBlock):
    """A block on `[rows, hidden]`."""

    def forward(self, x: Tensor) -> Tensor:
        """This rank's rows in, this rank's rows out."""
        return super().forward(x[:, None])[:, 0]


def ours(module: nn.Module, mesh: DeviceMesh, rows: int) -> Callable[[Tensor], Tensor]:
    """Applies overlapping styles."""
    column, row = (
        OverlapColwiseParallel(input_layouts=Shard(0), rows=rows),
        OverlapRowwiseParallel(output_layouts=Shard(0)),
    )
    return parallelize_module(module, mesh, {"qkv": column, "gate_up": column, "o": row, "down": row})


def ours_compiled(module: nn.Module, mesh: DeviceMesh, rows: int) -> Callable[[Tensor], Tensor]:
    """Applies them and compiles, which fuses operations between projections as for `async_tp`."""
    return compiled(ours(module, mesh, rows), mesh)


def compiled(layer: Callable[[Tensor], Tensor], mesh: DeviceMesh) -> Callable[[Tensor], Tensor]:
    """Compiles a layer, on GPUs."""
    if mesh.device_type != "cuda":
        raise RuntimeError("compiled layers are timed on GPUs")
    return torch.compile(layer, dynamic=False)


def block(module: nn.Module, mesh: DeviceMesh, rows: int) -> Callable[[Tensor], Tensor]:
    """Returns the block with the module's values, whose attention is a pass-through of q."""
    state = module.state_dict()
    (width, hidden), inner, ranks = state["qkv.weight"].shape, state["down.weight"].shape[1], mesh.size()
    size = (width - hidden) // (2 * KV_HEADS)
    layer = BlockOfRows(
        hidden, hidden // size, inner, num_kv_heads=KV_HEADS, head_dim=size, attention=lambda q, k, v: q,
        eps=torch.finfo(torch.bfloat16).eps, rows=rows, sequence_parallel=True, dtype=torch.bfloat16,
        device=state["qkv.weight"].device,
    )  # fmt: skip

    def of_ranks(name: str, *widths: int) -> list[Tensor]:
        """Returns the parts of every rank's shard, as the styles cut it, each joined over the ranks."""
        shards = [shard.split([w // ranks for w in widths]) for shard in state[name].chunk(ranks)]
        return [torch.cat(part) for part in zip(*shards, strict=True)]

    parts = of_ranks("qkv.weight", hidden, *2 * [(width - hidden) // 2])
    parts += of_ranks("gate_up.weight", inner, inner)
    names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    values = {f"{name}.weight": part for name, part in zip(names, parts, strict=True)}
    values |= {
        "input_layernorm.weight": state["norm1.weight"],
        "post_attention_layernorm.weight": state["norm2.weight"],
        "self_attn.o_proj.weight": state["o.weight"],
        "mlp.down_proj.weight": state["down.weight"],
    }
    layer.load_state_dict(values)
    return layer


def block_compiled(module: nn.Module, mesh: DeviceMesh, rows: int) -> Callable[[Tensor], Tensor]:
    """Compiles the block."""
    return compiled(block(module, mesh, rows), mesh)


def torchs(module: nn.Module, mesh: DeviceMesh, rows: int) -> Callable[[Tensor], Tensor]:
    """Applies torch's styles."""
    column, row = ColwiseParallel(input_layouts=Shard(0)), RowwiseParallel(output_layouts=Shard(0))
    return parallelize_module(module, mesh, {"qkv": column, "gate_up": column, "o": row, "down": row})


def async_tp(module: nn.Module, mesh: DeviceMesh, rows: int) -> Callable[[Tensor], Tensor]:
    """Applies torch's styles, compiled into its fused ops on symmetric memory."""
    if mesh.device_type != "cuda":
        raise RuntimeError("asynchronous tensor parallelism needs GPUs")
    import torch._inductor.config as inductor
    import torch.distributed._symmetric_memory as symm_mem

    if not hasattr(inductor, "_micro_pipeline_tp"):
        raise RuntimeError(f"torch {torch.__version__} has no asynchronous tensor parallelism")
    inductor._micro_pipeline_tp = True
    if hasattr(symm_mem, "enable_symm_mem_for_group"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            symm_mem.enable_symm_mem_for_group(mesh.get_group().group_name)
    return torch.compile(torchs(module, mesh, rows), dynamic=False)


WAYS = {
    "ours": ours,
    "torch": torchs,
    "ours, compiled": ours_compiled,
    "block": block,
    "block, compiled": block_compiled,
    "async-tp": async_tp,
}


def main(
    model: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(MODELS)}; [70B and 8B].")] = None,
    rows: Annotated[list[int] | None, typer.Option(help="Tokens over all ranks; [8192 and 2048].")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Samples per way.")] = 7,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the results here.")] = None,
    timeline: Annotated[
        Path | None, typer.Option(help="What rank 0's streams do in each last pass, for timeline.py.")
    ] = None,
) -> None:
    """Measures times of the projections of Llama layers, tokens per second and memory."""
    world = overlap_gemm.init()
    console = rank_zero_console(world.rank)
    mesh = init_device_mesh(world.device.type, (world.size,))
    if timeline is not None and world.device.type != "cuda":
        raise typer.BadParameter("only GPUs have streams", param_hint="--timeline")
    traces: dict[str, Any] | None = None if timeline is None else {}
    results = [
        result
        for name in model or ("70B", "8B")
        for count in rows or (8192, 2048)
        for result in run(name, count, mesh, world.device, rounds, traces)
    ]
    if timeline is not None and world.rank == 0:
        timeline.write_text(json.dumps(traces) + "\n")
    report = {
        "machine": describe(world),
        "protocol": f"no graphs, medians of {rounds} interleaved rounds, the maximum over {world.size} ranks",
        "results": results,
    }
    overlap_gemm.finalize()
    if world.rank == 0:
        console.print(table(report))
        for why in {f"{name}: {why}" for result in results for name, why in result["skipped"].items()}:
            console.print(f"skipped: {why}")
        if json_file is not None:
            json_file.write_text(json.dumps(report, indent=1) + "\n")


def run(
    model: str, rows: int, mesh: DeviceMesh, device: torch.device, rounds: int, traces: dict[str, Any] | None
) -> Iterator[dict[str, Any]]:
    """Yields one result per pass; the spans of the last one are added to `traces`."""
    if rows % mesh.size():
        raise typer.BadParameter(
            f"{rows} rows are not divisible by {mesh.size()} ranks, as torch's styles want"
        )
    torch.manual_seed(0)
    with device:
        module = Projections(*MODELS[model]).to(torch.bfloat16)
        x = torch.randn(rows // mesh.size(), MODELS[model][0], dtype=torch.bfloat16)
    skipped, layers, reference = {}, {}, None
    for name, way in WAYS.items():
        try:
            layer = way(copy.deepcopy(module), mesh, rows)
            with torch.no_grad():
                out = layer(x)
        except (RuntimeError, NotImplementedError) as error:
            skipped[name] = str(error).splitlines()[0]
            continue
        reference = out if reference is None else reference
        error = ((out - reference).abs().max() / reference.abs().max()).item()
        if not error < 0.05:
            raise RuntimeError(f"{name} differs from the first way by {error:.2g} of the largest value")
        layers[name] = layer
    for passes in PASSES:
        calls = {name: step(layer, x, passes == "forward") for name, layer in layers.items()}
        memory = {name: peak_memory(call, device) for name, call in calls.items()}
        timings = measure(calls, device=device, rounds=rounds, burst_seconds=0.02)
        yield row(model, rows, passes, timings, memory, skipped)
    if traces is not None:
        spans = {name: [vars(span) for span in record(call)] for name, call in calls.items()}
        traces[f"Llama-{model}, projections of a layer, {passes}, {rows} tokens, {mesh.size()} GPUs"] = spans


def step(layer: Callable[[Tensor], Tensor], x: Tensor, forward_only: bool) -> Callable[[], object]:
    """Returns a function that passes over a layer."""

    def forward() -> object:
        with torch.no_grad():
            return layer(x)

    def both() -> None:
        source = x.detach().requires_grad_()
        layer(source).sum().backward()
        for parameter in layer.parameters():  # type: ignore[attr-defined]
            parameter.grad = None

    return forward if forward_only else both


def peak_memory(call: Callable[[], object], device: torch.device) -> float:
    """Returns the peak of GiB that a call allocates in addition; 0 on a CPU."""
    if device.type != "cuda":
        return 0.0
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def row(
    model: str,
    rows: int,
    passes: str,
    timings: Timings,
    memory: dict[str, float],
    skipped: dict[str, str],
) -> dict[str, Any]:
    """Returns one result as plain data."""
    others = [name for name in timings.seconds if name != "ours"]
    return {
        "model": model,
        "rows": rows,
        "passes": passes,
        "skipped": skipped,
        "ways": {
            name: {
                "seconds": timings.median(name),
                "tokens_per_second": rows / timings.median(name),
                "memory_gib": memory[name],
            }
            for name in timings.seconds
        },
        "ours_against": {
            name: {"ratio": timings.ratio("ours", name), "quartiles": timings.ratio_range("ours", name)}
            for name in others
        },
    }


def table(report: dict[str, Any]) -> Table:
    """Returns a table of the results, a line for each implementation."""
    machine = report["machine"]
    drawn = Table(
        title=f"{machine['ranks']} x {machine['processor']}; {report['protocol']}",
        title_justify="left",
        box=box.SIMPLE_HEAD,
    )
    for heading in ("layer, tokens, pass", "way"):
        drawn.add_column(heading, no_wrap=True)
    for heading in ("ms", "tokens/s", "GiB", "ours / it (quartiles)"):
        drawn.add_column(heading, justify="right", no_wrap=True)
    for result in report["results"]:
        title = f"{result['model']}, {result['rows']}, {result['passes']}"
        for name, measured in result["ways"].items():
            against = result["ours_against"].get(name)
            low, high = against["quartiles"] if against else (0, 0)
            drawn.add_row(
                title,
                name,
                f"{measured['seconds'] * 1e3:.3g}",
                f"{measured['tokens_per_second']:,.0f}",
                f"{measured['memory_gib']:.2f}",
                f"{against['ratio']:.2f} ({low:.2f}-{high:.2f})" if against else "",
            )
            title = ""
    return drawn


if __name__ == "__main__":
    typer.run(main)
