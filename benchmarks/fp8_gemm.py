"""Plain products of e4m3 operands with scales of rows and columns, and torch's, on one GPU.

    python benchmarks/fp8_gemm.py OUT.json [SECONDS]

Each of our kernels is compiled, checked against float32, captured in a CUDA graph, and timed in turn with

- `torch._scaled_mm`, with scales of rows or of a tensor, and both settings of `use_fast_accum`
- `F.scaled_mm`, with scales of blocks
- DeepGEMM's product, with scales of blocks, if `deep_gemm` can be imported

Operands rotate between two copies.
DeepGEMM's wheels of 2026 are made for torch 2.13 and later, whose tensors lie otherwise in memory: with torch
2.11 build it from its source.
Figures are medians of a call in microseconds, and the median ratio to torch's row-wise fast product.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from cuda.bindings.driver import CUstream
from cutlass.cute.runtime import from_dlpack
from torch.nn.functional import ScalingType, scaled_mm

from overlap_gemm.backends.scales.scale_layouts import LAYOUTS
from overlap_gemm.build import compile_kernel, make_kernel
from overlap_gemm.config.gemm_config import GemmConfig
from overlap_gemm.config.visitors import SCALES
from overlap_gemm.exchange.geometry import ExchangeShape
from overlap_gemm.tuning.space import every_config
from overlap_gemm.tuning.timing import Replay, captured, measure

try:
    import deep_gemm  # type: ignore[import-not-found]
except ImportError:
    deep_gemm = None

SHAPES = [
    (8192, 8192, 8192),
    (8192, 8192, 7168),
    (4096, 7168, 16384),
    (8192, 8192, 2048),
    (2048, 8192, 7168),
    (512, 8192, 7168),
    (512, 8192, 2048),
    (64, 8192, 7168),
]
BLOCKS = 1, 128, 128
BLOCKED = every_config("sm_90a", "e4m3", blocks=BLOCKS)
"""With scales of blocks, of their own; their ratios are to torch's row-wise product, too."""

KERNELS = [
    ("cooperative", (128, 256), (2, 1), False),
    ("cooperative", (128, 256), (1, 2), False),
    ("cooperative", (128, 128), (2, 1), False),
    ("cooperative", (128, 128), (1, 1), False),
    ("pingpong", (64, 128), (2, 1), False),
    ("cooperative", (128, 256), (2, 1), True),
    ("pingpong", (128, 128), (2, 1), True),
    ("pingpong", (64, 256), (2, 1), True),
    ("swap_ab", (64, 64), (1, 1), False),
]
CALLS = 8
TURNS = 5


def config_of(mma: Any, tile: tuple[int, int], cluster: tuple[int, int], fast: bool) -> GemmConfig:
    """Returns the configuration of an e4m3 kernel with scales of rows and columns."""
    scaled = (SCALES,)
    return GemmConfig("sm_90a", tile, cluster, mma, in_dtype="e4m3", epilogue=scaled, fast_accum=fast)


def tensor(x: torch.Tensor) -> Any:
    """Returns a tensor as an argument of the DSL's kernels."""
    argument = from_dlpack(x, assumed_align=16)
    return argument.mark_layout_dynamic() if x.ndim == 1 else argument.mark_layout_dynamic(1)


def main() -> None:
    """Times every shape until the seconds are over."""
    began, limit = time.time(), float(sys.argv[2]) if len(sys.argv) > 2 else 200
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    kernels = {}
    for mma, tile, cluster, fast in KERNELS:
        config = config_of(mma, tile, cluster, fast)
        kernels[config.name] = (config, compile_kernel(make_kernel(config)))
    blocked = [compile_kernel(make_kernel(config)) for config in BLOCKED]
    print(f"{len(blocked) + len(kernels)} kernels compiled in {time.time() - began:.0f} s", flush=True)
    results, layout = [], LAYOUTS[BLOCKS]
    for m, n, k in SHAPES:
        if time.time() - began > limit:
            print("out of time before", (m, n, k))
            break
        torch.manual_seed(0)
        pairs = []
        for _ in range(2):
            a, b = (torch.randn(rows, k, device="cuda").to(torch.float8_e4m3fn) for rows in (m, n))
            pairs.append((a, b, torch.rand(m, 1, device="cuda") + 0.5, torch.rand(1, n, device="cuda") + 0.5))
        a, b, rows, columns = pairs[0]
        exact = (a[:256].float() @ b.float().t()) * rows[:256] * columns
        out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
        graphs: dict[str, Replay] = {}
        errors: dict[str, float] = {}

        def capture(name: str, call: Any, exact: torch.Tensor = exact) -> None:
            call(0)
            error = (out[:256].float() - exact).norm() / exact.norm()  # noqa: B023
            errors[name] = round(float(error), 6)  # noqa: B023
            assert error < 5e-3, (name, float(error))
            numbers = itertools.count(1)
            graphs[name] = captured(lambda: call(next(numbers)), CALLS)  # noqa: B023

        def scaled(fast: bool) -> Any:
            def call(i: int) -> None:
                a, b, rows, columns = pairs[i % 2]  # noqa: B023
                product = torch._scaled_mm(
                    a, b.t(), rows, columns, out_dtype=torch.bfloat16, use_fast_accum=fast
                )
                if i == 0:
                    out.copy_(product)  # noqa: B023

            return call

        def one_scale(fast: bool) -> Any:
            one = torch.ones((), device="cuda")

            def call(i: int) -> None:
                a, b, _, _ = pairs[i % 2]  # noqa: B023
                product = torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=fast)
                if i == 0:
                    out.copy_(product)  # noqa: B023

            return call

        plain = a[:256].float() @ b.float().t()
        capture("torch row-wise", scaled(False))
        capture("torch row-wise fast", scaled(True))
        capture("torch tensor-wise", one_scale(False), plain)
        capture("torch tensor-wise fast", one_scale(True), plain)
        for name, (config, compiled) in kernels.items():
            clusters = min(sms // config.cluster_size, ExchangeShape.even(m, n, 1).num_clusters(config))

            def ours(i: int, compiled: Any = compiled, clusters: int = clusters) -> None:
                a, b, rows, columns = pairs[i % 2]  # noqa: B023
                extras = (tensor(rows.flatten()), tensor(columns.flatten()))
                stream = CUstream(torch.cuda.current_stream().cuda_stream)
                compiled(tensor(a), tensor(b), tensor(out), extras, None, clusters, stream)  # noqa: B023

            capture(name, ours)
        scales = [torch.rand(rows, k // 128, device="cuda") + 0.5 for rows in (m, n // 128)]
        lines = layout.of_a(scales[0], a.shape), layout.of_b(scales[1], b.shape)
        wide_a = scales[0][:256].repeat_interleave(128, 1)
        wide_b = scales[1].repeat_interleave(128, 0).repeat_interleave(128, 1)
        of_blocks = (a[:256].float() * wide_a) @ (b.float() * wide_b).t()
        torchs = scales[0].t().contiguous().t(), torch.nn.functional.pad(scales[1], (0, -k // 128 % 4)).t()

        def torch_blocks(i: int, torchs: Any = torchs) -> None:
            a, b, _, _ = pairs[i % 2]  # noqa: B023
            kinds = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
            product = scaled_mm(
                a,
                b.t(),
                torchs[0],
                kinds[0],
                torchs[1],
                kinds[1],
                output_dtype=torch.bfloat16,
            )
            if i == 0:
                out.copy_(product)  # noqa: B023

        capture("torch blocks", torch_blocks, of_blocks)
        if deep_gemm is not None:

            def deep(i: int, aligned: torch.Tensor = torchs[0]) -> None:
                a, b, _, _ = pairs[i % 2]  # noqa: B023
                deep_gemm.fp8_gemm_nt((a, aligned), (b, scales[1]), out)  # noqa: B023

            capture("DeepGEMM", deep, of_blocks)
        for config, compiled in zip(BLOCKED, blocked, strict=True):
            clusters = min(sms // config.cluster_size, ExchangeShape.even(m, n, 1).num_clusters(config))

            def with_blocks(i: int, compiled: Any = compiled, clusters: int = clusters) -> None:
                a, b, _, _ = pairs[i % 2]  # noqa: B023
                extras = tuple(map(tensor, lines))  # noqa: B023
                stream = CUstream(torch.cuda.current_stream().cuda_stream)
                compiled(tensor(a), tensor(b), tensor(out), extras, None, clusters, stream)  # noqa: B023

            capture(config.name, with_blocks, of_blocks)
        timings = []
        for turn in range(
            TURNS
        ):  # in another order each time: what a kernel draws is in the next one's clock
            names = sorted(graphs)
            random.Random(turn).shuffle(names)
            timings.append(
                measure({n: graphs[n] for n in names}, device="cuda", rounds=3, burst_seconds=0.015)
            )
        median = {name: statistics.median(t.median(name) for t in timings) * 1e6 for name in graphs}
        ratio = {
            name: statistics.median(t.ratio(name, "torch row-wise fast") for t in timings) for name in graphs
        }
        results.append(
            {"shape": [m, n, k], "us": {x: round(t, 2) for x, t in median.items()},
             "ratio": {x: round(r, 4) for x, r in ratio.items()}, "error": errors}
        )  # fmt: skip
        print(m, n, k, {x: (round(t, 1), round(ratio[x], 3)) for x, t in median.items()}, flush=True)
        Path(sys.argv[1]).write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
