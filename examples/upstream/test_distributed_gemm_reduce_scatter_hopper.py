# Copyright (c) 2026 The overlap_gemm authors. All rights reserved.
# SPDX-License-Identifier: BSD-3-Clause

# Redistribution and use in source and binary forms, with or without
# modification, are permitted provided that the following conditions are met:

# 1. Redistributions of source code must retain the above copyright notice, this
# list of conditions and the following disclaimer.

# 2. Redistributions in binary form must reproduce the above copyright notice,
# this list of conditions and the following disclaimer in the documentation
# and/or other materials provided with the distribution.

# 3. Neither the name of the copyright holder nor the names of its
# contributors may be used to endorse or promote products derived from
# this software without specific prior written permission.

# THIS SOFTWARE IS PROVIDED BY THE COPYRIGHT HOLDERS AND CONTRIBUTORS "AS IS"
# AND ANY EXPRESS OR IMPLIED WARRANTIES, INCLUDING, BUT NOT LIMITED TO, THE
# IMPLIED WARRANTIES OF MERCHANTABILITY AND FITNESS FOR A PARTICULAR PURPOSE ARE
# DISCLAIMED. IN NO EVENT SHALL THE COPYRIGHT HOLDER OR CONTRIBUTORS BE LIABLE
# FOR ANY DIRECT, INDIRECT, INCIDENTAL, SPECIAL, EXEMPLARY, OR CONSEQUENTIAL
# DAMAGES (INCLUDING, BUT NOT LIMITED TO, PROCUREMENT OF SUBSTITUTE GOODS OR
# SERVICES; LOSS OF USE, DATA, OR PROFITS; OR BUSINESS INTERRUPTION) HOWEVER
# CAUSED AND ON ANY THEORY OF LIABILITY, WHETHER IN CONTRACT, STRICT LIABILITY,
# OR TORT (INCLUDING NEGLIGENCE OR OTHERWISE) ARISING IN ANY WAY OUT OF THE USE
# OF THIS SOFTWARE, EVEN IF ADVISED OF THE POSSIBILITY OF SUCH DAMAGE.

"""Tests of distributed_gemm_reduce_scatter_hopper.py, on one GPU by virtual ranks and on two by torchrun.

In this folder: ``pytest -c /dev/null --rootdir . -v``.
"""

import subprocess
import sys
from pathlib import Path

import cutlass
import pytest
import torch

EXAMPLE = Path(__file__).with_name("distributed_gemm_reduce_scatter_hopper.py")

F16, BF16 = cutlass.Float16, cutlass.BFloat16
NAMES = "virtual_ranks, mnkl, tile_shape_mn, cluster_shape_mn, ab_dtype, c_dtype"

SMALL = [
    pytest.param(1, (256, 128, 64, 1), (64, 64), (1, 1), BF16, BF16, id="1rank-tile64x64"),
    pytest.param(2, (512, 256, 128, 1), (64, 128), (1, 1), BF16, BF16, id="2ranks-tile64x128"),
    pytest.param(2, (512, 512, 128, 1), (128, 256), (1, 1), BF16, BF16, id="2ranks-tile128x256"),
    pytest.param(2, (512, 256, 128, 1), (128, 128), (2, 1), F16, F16, id="2ranks-cluster2x1-fp16"),
    pytest.param(2, (512, 256, 128, 1), (128, 64), (1, 2), F16, BF16, id="2ranks-cluster1x2-fp16-bf16"),
    pytest.param(2, (2, 8, 8, 1), (128, 256), (2, 1), BF16, BF16, id="2ranks-one-row-each"),
    pytest.param(2, (606, 328, 200, 1), (128, 128), (1, 1), BF16, BF16, id="2ranks-ragged"),
    pytest.param(3, (216, 264, 72, 1), (64, 128), (1, 2), BF16, F16, id="3ranks-ragged-cluster1x2"),
    pytest.param(4, (544, 264, 72, 1), (128, 256), (2, 1), BF16, BF16, id="4ranks-ragged-cluster2x1"),
]

# M, N, K of one of two ranks: projections of Llama models with 8B and 70B parameters.
TARGETS = [
    pytest.param((8192, 8192, 4096, 1), id="70B-attention-8192-tokens"),
    pytest.param((8192, 8192, 14336, 1), id="70B-mlp-8192-tokens"),
    pytest.param((8192, 4096, 2048, 1), id="8B-attention-8192-tokens"),
    pytest.param((2048, 8192, 14336, 1), id="70B-mlp-2048-tokens"),
    pytest.param((2048, 4096, 7168, 1), id="8B-mlp-2048-tokens"),
]

needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)
needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@needs_hopper
@pytest.mark.parametrize(NAMES, SMALL)
def test_virtual_ranks(virtual_ranks, mnkl, tile_shape_mn, cluster_shape_mn, ab_dtype, c_dtype, monkeypatch):
    """Compares every rank's output bit by bit with the reference, in three launches."""
    monkeypatch.syspath_prepend(EXAMPLE.parent)
    from distributed_gemm_reduce_scatter_hopper import run

    run(mnkl, ab_dtype, c_dtype, tile_shape_mn, cluster_shape_mn, virtual_ranks, iterations=0)


@needs_hopper
@needs_two_gpus
@pytest.mark.parametrize("mnkl", TARGETS)
def test_two_gpus(mnkl, capsys):
    """Compares the bits with the reference; prints times of the product, the collective and the kernel."""
    shape = ",".join(map(str, mnkl))
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", EXAMPLE, "--mnkl", shape]
        + ["--warmup_iterations", "10", "--iterations", "50"],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASS") == 2
    with capsys.disabled():
        print(f"\n{done.stdout}")
