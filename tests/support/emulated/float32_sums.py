"""The float32 sums of kernels, also of those that store 16 bits only, to be compared bit for bit."""

import torch

from cute_emulator import Emulator
from overlap_gemm.config.gemm_config import GemmConfig
from overlap_gemm.config.visitors import SCALES, Visitor
from overlap_gemm.epilogues import add_residual
from tests.support.emulated.kernel_cases import TORCH, KernelCase, compiled_kernel

RESIDUAL = Visitor(add_residual, ("f32",))
EXPONENTS = {"bf16": 4, "e4m3": 4, "e5m2": 8}
"""Largest exponent of operands by type, the smallest is its negative: far apart, but in range."""


def spread(rows, depth, seed, dtype="bf16"):
    """Exponents far apart, and halves that cancel each other, so that the order of a sum shows."""
    generator = torch.Generator().manual_seed(seed)
    values, most = torch.randn(rows, depth, generator=generator), EXPONENTS[dtype]
    values *= (4.0 if dtype == "bf16" else 2.0) ** torch.randint(
        -most, most + 1, values.shape, generator=generator
    )
    half = depth // 2
    values[:, half : 2 * half] = -values[:, :half] * (1 + (2.0**-7 if dtype == "bf16" else 2.0**-3))
    return values.to(TORCH[dtype])


def float32_sums(kernel, rows, columns, depth, **fields):
    """Returns what a kernel sums for the first rows of the same x and weight, before it rounds.

    The first launch stores the sums rounded to bfloat16, each later one what is left of them: 8 bits a
    launch. Scales of rows are multiplied and the residual is added in one instruction, in every kernel.

    Args:
        kernel: Architecture, MMA kind, tile and cluster.
        rows: Rows of A.
        columns: Rows of B.
        depth: K.
        **fields: Further fields of the configuration.
    """
    arch, mma, tile, cluster = kernel
    dtype, blocks = fields.get("in_dtype", "bf16"), fields.get("blocks")
    is_scaled = dtype != "bf16" and blocks is None
    fields["epilogue"] = (*([SCALES] if is_scaled else []), RESIDUAL)
    config = GemmConfig(arch=arch, mma=mma, tile=tile, cluster=cluster, **fields)
    most = 200
    of_all = KernelCase(config, rows=most, cols=columns, depth=depth)
    case = KernelCase(config, rows=rows, cols=columns, depth=depth)
    case.a, case.b = [spread(most, depth, 1, dtype)[:rows].contiguous()], [spread(columns, depth, 2, dtype)]
    if is_scaled:
        of_rows, of_columns = of_all.extras[0][0]
        case.extras[0][0] = [of_rows[:rows].clone(), of_columns]
    if blocks is not None:
        of_rows, of_columns = of_all.scales[0]
        case.scales = [[of_rows[:rows].contiguous(), of_columns]]
    sums = torch.zeros(rows, columns)
    with Emulator(arch, sums="bitwise") as emulator:
        compiled = compiled_kernel(config)
        for _ in range(3):
            case.extras[0][-1] = [-sums]
            case.launch(emulator, compiled)
            sums = sums + case.outs[0].float()
    assert sums.isfinite().all()
    assert sums.any()
    return sums
