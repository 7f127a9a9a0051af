"""Cases and worlds of ops whose tiles are put by NVSHMEM."""

import torch

from overlap_gemm.testing.cases import Case

OPS = {
    "reduce-scatter": ("gemm_reduce_scatter", None),
    "one-shot": ("gemm_all_reduce", "one_shot"),
    "two-shot": ("gemm_all_reduce", "two_shot"),
    "output-gather": ("gemm_all_gather", None),
    "all-gather": ("all_gather_gemm", None),
}


def case_of(op, *sizes):
    return Case(OPS[op][0], *sizes, torch.bfloat16)


def ragged(op, ranks):
    """No extent is a multiple of a tile's, and the last shard of rows is shorter than the others."""
    return case_of(op, 200, 72 * ranks if op == "output-gather" else 136, 72)


def one_row(op, ranks):
    """Of which only rank 0 owns any."""
    return case_of(op, 1, 64 * ranks, 64)
