"""`overlap_gemm.quantize_rows` on one GPU: eager, compiled by Inductor, and by other installed libraries.

    python benchmarks/quantize.py OUT.json [SECONDS]

Three kinds of results, in the order in which they are wanted should the time not suffice for all:

- ``rows``, ``width``: `us` of each way, and the fraction of a copy's bandwidth: bytes read and written, over
  the time of `Tensor.copy_` of as many. `first_call_s` is that of the first call, which makes the kernels.
  "transposed" is of as many elements, with the rows along the other dimension.
- ``shape`` (M, N, K): the purpose of fp8, bfloat16 rows quantised and multiplied by
  `torch._scaled_mm`, alongside the bfloat16 product.
- ``host_us``: of one row, called as it is, which is the host's time.

All others are captured in CUDA graphs; inputs rotate so that they come from memory, not from the L2 cache;
medians of rounds in turn, in microseconds.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from overlap_gemm import quantize_rows
from overlap_gemm.api.quantization import by_torch
from overlap_gemm.tuning.timing import Replay, captured, measure

ROTATED = 256 << 20
"""Bytes of input, at least, before one comes again."""
ROUNDS = 9

Call = Callable[[torch.Tensor], Any]


def others() -> dict[str, Call]:
    """Quantisers of other libraries, by row, where they are installed."""
    quantisers: dict[str, Call] = {}
    try:
        from vllm import _custom_ops

        quantisers["vllm"] = lambda x: _custom_ops.scaled_fp8_quant(x, use_per_token_if_dynamic=True)
    except ImportError:
        pass
    try:
        from torchao.float8.config import ScalingGranularity
        from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
        from torchao.float8.float8_training_tensor import LinearMMConfig

        def torchao(x: torch.Tensor) -> Any:
            return hp_tensor_to_float8_dynamic(
                x, torch.float8_e4m3fn, LinearMMConfig(),
                scaling_granularity=ScalingGranularity.AXISWISE, axiswise_dim=-1,
            )  # fmt: skip

        quantisers["torchao compiled"] = torch.compile(torchao, dynamic=False)
    except ImportError:
        pass
    return quantisers


def medians(calls: dict[str, Call], inputs: list[torch.Tensor]) -> dict[str, float]:
    """Microseconds of a call, each on all inputs in turn."""

    def rotating(call: Call) -> Replay:
        rotation = itertools.cycle(inputs)
        return captured(lambda: call(next(rotation)), len(inputs))

    timings = measure({name: rotating(call) for name, call in calls.items()}, device="cuda", rounds=ROUNDS)
    return {name: round(timings.median(name) * 1e6, 2) for name in calls}


def torchs_operations(x: torch.Tensor) -> Any:
    """Returns the result of `quantize_rows` without a kernel, eagerly."""
    return by_torch(x, torch.float8_e4m3fn, None, False)


def quantisers(rows: int, width: int) -> dict[str, Any]:
    """Times of one shape."""
    count = max(2, min(64, -(-ROTATED // (2 * rows * width))))
    inputs = [torch.randn(rows, width, device="cuda", dtype=torch.bfloat16) for _ in range(count)]
    fused, any_shape = (torch.compile(quantize_rows, dynamic=dynamic) for dynamic in (False, True))
    calls: dict[str, Call] = {
        "eager": quantize_rows,
        "eager, torch's operations": torchs_operations,
        "compiled": fused,
        "compiled for any shape": any_shape,
        "eager 1x128": lambda x: quantize_rows(x, block=128),
        "compiled 1x128": lambda x: fused(x, block=128),
        "eager 1x128, powers of two": lambda x: quantize_rows(x, block=128, power_of_two=True),
        "eager, transposed": lambda x: quantize_rows(x.t()),
        "compiled, transposed": lambda x: fused(x.t()),
        **others(),
    }
    first = {}
    for name, call in calls.items():
        began = time.time()
        call(inputs[0])
        torch.cuda.synchronize()
        first[name] = round(time.time() - began, 3)
    for how in ({}, {"block": 128}):
        for one, other in zip(fused(inputs[0], **how), quantize_rows(inputs[0], **how), strict=True):
            error = (one.float() - other.float()).abs().max() / other.float().abs().max()
            assert error < 0.1, (how, float(error))  # its reciprocal may differ by a bit, and tip a rounding
    source = torch.empty(3 * rows * width // 2, device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    calls["copy of as many bytes"] = lambda _: target.copy_(source)
    times = medians(calls, inputs)
    copy = times["copy of as many bytes"]
    return {
        "rows": rows,
        "width": width,
        "us": times,
        "of_copy": {n: round(copy / t, 3) for n, t in times.items()},
        "first_call_s": first,
    }


def host(rows: int, width: int) -> dict[str, Any]:
    """Returns the host's time of a call that gives the GPU little to do."""
    x = torch.randn(rows, width, device="cuda", dtype=torch.bfloat16)
    fused = torch.compile(quantize_rows, dynamic=False)
    calls = {"eager": quantize_rows, "eager, torch's operations": torchs_operations, "compiled": fused}
    bound = {name: lambda call=call: call(x) for name, call in calls.items()}
    timings = measure(bound, device="cuda", rounds=ROUNDS)
    return {"host_us": {name: round(timings.median(name) * 1e6, 2) for name in calls}}


def products(m: int, n: int, k: int) -> dict[str, Any]:
    """Returns times of the product with and without quantising its left operand, and of bfloat16's."""
    inputs = [torch.randn(m, k, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    weight = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
    values, scale = quantize_rows(weight)
    ready = [quantize_rows(x) for x in inputs]
    fused = torch.compile(quantize_rows, dynamic=False)

    def multiplied(x: torch.Tensor, scale_x: torch.Tensor) -> torch.Tensor:
        return torch._scaled_mm(
            x, values.t(), scale_x, scale.t(), out_dtype=torch.bfloat16, use_fast_accum=True
        )

    index = {x.data_ptr(): one for x, one in zip(inputs, ready, strict=True)}
    calls: dict[str, Call] = {
        "bfloat16": lambda x: x @ weight.t(),
        "product alone": lambda x: multiplied(*index[x.data_ptr()]),
        "quantised compiled, and product": lambda x: multiplied(*fused(x)),
        "quantised eagerly, and product": lambda x: multiplied(*quantize_rows(x)),
    }
    return {
        "shape": [m, n, k],
        "us": medians(calls, inputs),
    }


RUNS: list[tuple[Callable[..., dict[str, Any]], tuple[int, ...]]] = [
    (quantisers, (8192, 8192)),
    (products, (8192, 8192, 8192)),
    (host, (1, 8192)),
    (quantisers, (64, 8192)),
    (quantisers, (2048, 8192)),
    (products, (2048, 8192, 7168)),
    (quantisers, (8192, 28672)),
    (quantisers, (512, 8192)),
    (products, (512, 8192, 7168)),
    (products, (8192, 8192, 3584)),
    (quantisers, (16384, 4096)),
    (quantisers, (1, 8192)),
    (products, (64, 8192, 7168)),
]


def main() -> None:
    """Measures until the seconds are over."""
    began, limit = time.time(), float(sys.argv[2]) if len(sys.argv) > 2 else 200
    torch._dynamo.config.recompile_limit = 100  # else the rest runs eagerly
    results: list[dict[str, Any]] = [{"device": torch.cuda.get_device_name(), "torch": torch.__version__}]
    for figures, shape in RUNS:
        if time.time() - began > limit:
            print("out of time before", figures.__name__, shape)
            break
        results.append(figures(*shape))
        print(results[-1], flush=True)
        Path(sys.argv[1]).write_text(json.dumps(results, indent=1))
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
