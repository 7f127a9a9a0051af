"""Time of one kernel next to several: lists of weights, gradients of lists, epilogues of 8-bit operands.

    torchrun --standalone --nproc-per-node 2 benchmarks/one_kernel.py lists --json lists.json
    torchrun --standalone --nproc-per-node 2 benchmarks/one_kernel.py gradients --json gradients.json
    torchrun --standalone --nproc-per-node 2 benchmarks/one_kernel.py epilogues --json epilogues.json

Variants are interleaved, with operands in turn, as CUDA graphs; ratios are to the first variant.
"""

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
import typer
from torch import Tensor

import overlap_gemm
from overlap_gemm import epilogues
from overlap_gemm.cli.this_machine import describe
from overlap_gemm.testing.workload import OpTensors, in_turn
from overlap_gemm.tuning.timing import captured, measure

K, SETS = 8192, 3
"""Input features, and sets of operands."""

Variants = dict[str, Callable[[int], Callable[[], object]]]
"""Name of a variant -> function that returns the call with a set of operands."""


def random(*shape: int) -> Tensor:
    """Returns bfloat16 values."""
    return torch.randn(shape, device="cuda").div(8).bfloat16()


def lists() -> Iterator[tuple[dict[str, Any], Variants]]:
    """Yields lists of weights, in one kernel and torch's way, next to another way of the fused kernels.

    For `gemm_all_to_all` that is a kernel for each weight, for `all_gather_gemm` one weight of all rows.
    """
    exchange = overlap_gemm.gemm_all_to_all
    fused = partial(exchange, backend="fused")
    for widths in ((8192, 1024, 1024), (4096, 4096, 4096)):
        for rows in (128, 2048, 8192, 32768):
            xs = [random(rows // dist.get_world_size(), K) for _ in range(SETS)]
            weights = [[random(width, K) for width in widths] for _ in range(SETS)]
            yield {"op": "gemm_all_to_all", "m": rows, "n": widths, "k": K}, {
                "three": lambda i, x=xs, w=weights: lambda: [fused(x[i], v) for v in w[i]],
                "list": lambda i, x=xs, w=weights: lambda: fused(x[i], w[i]),
                "torch": lambda i, x=xs, w=weights: lambda: exchange(x[i], w[i], backend="torch"),
            }  # fmt: skip
    gather = overlap_gemm.all_gather_gemm
    for widths in ((8192, 1024, 1024), (28672, 28672)):
        for rows in (128, 512, 2048, 8192):
            xs = [random(rows // dist.get_world_size(), K) for _ in range(SETS)]
            weights = [[random(width // dist.get_world_size(), K) for width in widths] for _ in range(SETS)]
            joined = [torch.cat(of_set) for of_set in weights]
            yield {"op": "all_gather_gemm", "m": rows, "n": widths, "k": K}, {
                "joined": lambda i, x=xs, w=joined: lambda: gather(x[i], w[i], backend="fused"),
                "list": lambda i, x=xs, w=weights: lambda: gather(x[i], w[i], backend="fused"),
                "torch": lambda i, x=xs, w=weights: lambda: gather(x[i], w[i], backend="torch"),
            }  # fmt: skip


def gradients() -> Iterator[tuple[dict[str, Any], Variants]]:
    """Yields the cases of `gradients_of` for q, k, v, and for gate and up."""
    qkv = 8192, 1024, 1024
    yield from gradients_of(overlap_gemm.gemm_all_to_all, "three", qkv)
    yield from gradients_of(overlap_gemm.all_gather_gemm, "joined", qkv, (28672, 28672))


def gradients_of(
    op: Callable[..., Any], before: str, *lists: tuple[int, ...]
) -> Iterator[tuple[dict[str, Any], Variants]]:
    """Yields calls of several weights and x's gradient: none, by one kernel, as before, by torch.

    Before, `gemm_all_to_all` exchanged the gradient of each weight ("three"), and `all_gather_gemm` copied
    gradients and weights side by side ("joined"); with ``create_graph`` they still do.
    """

    def step(
        x: Tensor, weights: list[Tensor], upstream: list[Tensor], backend: str = "fused", **options: Any
    ):
        def run() -> object:
            outs = op(x, weights, backend=backend)
            return torch.autograd.grad(outs, x, upstream, **options)

        return run

    ranks = dist.get_world_size()
    for widths in lists:
        for rows in (128, 2048, 8192, 32768):
            xs = [random(rows // ranks, K).requires_grad_() for _ in range(SETS)]
            local = [width // ranks for width in widths]
            passed = local if before == "joined" else widths
            weights = [[random(width, K) for width in passed] for _ in range(SETS)]
            upstream = [[random(rows, width) for width in local] for _ in range(SETS)]
            yield {"op": op.__name__, "m": rows, "n": widths, "k": K}, {
                "forward": lambda i, x=xs, w=weights: lambda: op(x[i].detach(), w[i], backend="fused"),
                "one": lambda i, x=xs, w=weights, g=upstream: step(x[i], w[i], g[i]),
                before: lambda i, x=xs, w=weights, g=upstream: step(x[i], w[i], g[i], create_graph=True),
                "torch": lambda i, x=xs, w=weights, g=upstream: step(x[i], w[i], g[i], backend="torch"),
            }  # fmt: skip


def in_8_bits(x: Tensor, weight: Tensor) -> OpTensors:
    """Returns operands with scales of rows."""
    (values, scale_x), (weights, scale_w) = map(overlap_gemm.quantize_rows, (x, weight))
    return OpTensors(values, weights, scale_x, scale_w)


def call(op: Callable[..., Any], operands: OpTensors, **options: Any) -> Any:
    """Calls an op by its fused kernel."""
    return op(operands.x, operands.weight, **operands.scales, backend="fused", **options)


@torch.compile(dynamic=False)
def gated(both: list[Tensor]) -> Tensor:
    """Returns SwiGLU of gate and up."""
    return F.silu(both[0].float()).mul(both[1].float()).bfloat16()


@torch.compile(dynamic=False)
def gated_in_blocks(both: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Returns SwiGLU of gate and up in 8 bits, and its scales of 1 x 128 elements."""
    blocks = (F.silu(both[0].float()) * both[1].float()).unflatten(-1, (-1, 128))
    scales = blocks.abs().amax(-1, keepdim=True) / 448
    return (blocks / scales).to(torch.float8_e4m3fn).flatten(-2), scales.squeeze(-1)


def scaled_epilogues() -> Iterator[tuple[dict[str, Any], Variants]]:
    """Yields ops of 8-bit operands: alone, with epilogues, and with compiled operations after them."""
    ranks, inner = dist.get_world_size(), 14336

    gather, scatter = (
        partial(call, op) for op in (overlap_gemm.all_gather_gemm, overlap_gemm.gemm_reduce_scatter)
    )
    for rows in (8192, 2048, 512):
        sets = []
        for _ in range(SETS):
            one, other = (in_8_bits(random(rows // ranks, K), random(inner, K)) for _ in range(2))
            pair: Any = [one.weight, other.weight], [one.scale_w, other.scale_w]
            sets.append(one._replace(weight=pair[0], scale_w=pair[1]))
        in_kernel = {"swiglu": epilogues.swiglu, "swiglu_e4m3_blocks": epilogues.swiglu_e4m3_blocks}
        yield (
            {"op": "all_gather_gemm", "m": rows, "n": 2 * inner * ranks, "k": K},
            {
                "alone": lambda i, s=sets: lambda: gather(s[i]),
                **{
                    name: lambda i, s=sets, e=one: lambda: gather(s[i], epilogue=e())
                    for name, one in in_kernel.items()
                },
                "compiled swiglu": lambda i, s=sets: lambda: gated(gather(s[i])),
                "compiled swiglu_e4m3_blocks": lambda i, s=sets: lambda: gated_in_blocks(gather(s[i])),
            },
        )
        sums = [in_8_bits(random(rows, K // ranks), random(K, K // ranks)) for _ in range(SETS)]
        residual = random(rows // ranks, K)
        yield (
            {"op": "gemm_reduce_scatter", "m": rows, "n": K, "k": K},
            {
                "alone": lambda i, s=sums: lambda: scatter(s[i]),
                "add_residual": lambda i, s=sums, r=residual: (
                    lambda: scatter(s[i], epilogue=epilogues.add_residual(residual=r))
                ),
                "add_residual_squared": lambda i, s=sums, r=residual: (
                    lambda: scatter(s[i], epilogue=epilogues.add_residual_squared(residual=r))
                ),
            },
        )


def ratios(variants: Variants, device: torch.device, rounds: int) -> dict[str, Any]:
    """Returns times of the variants, and their ratios to the first; their graphs end with this call.

    NCCL's groups cannot be destroyed while a graph holds their collectives.
    """
    graphs = {
        name: captured(in_turn([variant(i) for i in range(SETS)])) for name, variant in variants.items()
    }
    return measure(graphs, device=device, rounds=rounds).summary(next(iter(variants)))


def main(
    what: Annotated[Literal["lists", "gradients", "epilogues"], typer.Argument(help="Cases to measure.")],
    rounds: Annotated[int, typer.Option(min=1, help="Samples per variant.")] = 7,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the results here.")] = None,
) -> None:
    """Measures times of calls on two or more GPUs, and prints them."""
    world = overlap_gemm.init()
    torch.manual_seed(0)
    results = []
    cases = {"lists": lists, "gradients": gradients, "epilogues": scaled_epilogues}
    for case, variants in cases[what]():
        case |= {"graph": ratios(variants, world.device, rounds)}
        results.append(case)
        if world.rank == 0:
            print(json.dumps(case))
    report = {
        "machine": describe(world),
        "protocol": f"medians of {rounds} interleaved rounds, maximum over {world.size} ranks, graphs",
        "results": results,
    }
    overlap_gemm.finalize()
    if json_file is not None and world.rank == 0:
        json_file.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
