"""Portable calls over NCCL that differ between ranks: named on every rank about a second later."""

import time

import pytest
import torch

import overlap_gemm
from overlap_gemm.runtime.agree import DisagreementError
from tests.support.ranks import Ranks

PATIENCE = 5.0


def another_order(rank, size):
    x, weight = (torch.ones(64, 64, device="cuda") for _ in range(2))
    ops = [overlap_gemm.gemm_all_reduce, overlap_gemm.gemm_reduce_scatter]
    for op in ops:
        op(x, weight, backend="torch")
    torch.cuda.synchronize()
    for op in ops if rank == 0 else ops[::-1]:
        op(x, weight, backend="torch")
    time.sleep(PATIENCE)  # not for the device, which may wait for ever
    with pytest.raises(DisagreementError, match="disagree on call 3: rank"):
        ops[0](x, weight, backend="torch")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs")
def test_another_order_is_named_on_every_rank():
    with Ranks(2, device="cuda", timeout=30, limit=120) as ranks:
        ranks.run(another_order)
