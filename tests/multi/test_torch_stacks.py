"""torchtitan's own layers (`tp_gemm_backend="dist_gemm"`), from its wheel, on our ops.

It is fetched with pip, or named by OVERLAP_GEMM_TORCHTITAN_WHEEL.
"""

import importlib.util
import os
import subprocess
import sys
import types
import zipfile
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from overlap_gemm.integrations import torch_symm_mem

TORCHTITAN = "0.3.0"


@pytest.fixture(scope="module")
def layers(tmp_path_factory):
    """torchtitan/distributed/linear.py."""
    folder = tmp_path_factory.mktemp("torchtitan")
    wheel = os.environ.get("OVERLAP_GEMM_TORCHTITAN_WHEEL")
    if wheel is None:
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", str(folder)]
        subprocess.run([*command, f"torchtitan=={TORCHTITAN}"], check=True, timeout=240)
        (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        return files.extract("torchtitan/distributed/linear.py", folder)


def trains_on_our_ops(rank, size, path):
    types_of_torchtitan = types.SimpleNamespace(register_autograd_function=lambda function: function)
    with mock.patch.dict(sys.modules, {"spmd_types": types_of_torchtitan}):
        spec = importlib.util.spec_from_file_location("linear", Path(path))
        linear = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(linear)
    torch.manual_seed(0)
    group = dist.group.WORLD
    x, ups, down = torch.randn(8 * size, 12), torch.randn(2, 6 * size, 12), torch.randn(10, 6 * size)

    def part(whole, dim):
        return whole.chunk(size, dim)[rank].clone().requires_grad_()

    torch_symm_mem.install(backend="decomposed")
    try:
        own_x, own_down = part(x, 0), part(down, 1)
        own_ups = [part(up, 0) for up in ups]
        one = linear.AllGatherLinear.apply(own_x, own_ups[0], None, group, group.group_name)
        two = linear.AllGatherLinearMulti.apply(own_x, *own_ups, group, group.group_name)
        inner = one.relu() + two[0] * two[1]
        out = linear.LinearReduceScatter.apply(inner, own_down, None, group, group.group_name)
        product = torch.mm

        def mm(a, b, out_dtype=None, **options):  # with out_dtype= it is for GPUs
            return product(a.to(out_dtype or a.dtype), b.to(out_dtype or b.dtype), **options)

        with mock.patch.object(torch, "mm", mm):
            out.square().sum().backward()
    finally:
        torch_symm_mem.uninstall()
    x, ups, down = (each.requires_grad_() for each in (x, ups, down))
    first, second = x @ ups[0].t(), x @ ups[1].t()
    expected = (first.relu() + first * second) @ down.t()
    expected.square().sum().backward()
    close = {"rtol": 1e-3, "atol": 1e-3}
    torch.testing.assert_close(out, expected.chunk(size)[rank], **close)
    torch.testing.assert_close(own_x.grad, x.grad.chunk(size)[rank], **close)
    torch.testing.assert_close(own_down.grad, down.grad.chunk(size, 1)[rank], **close)
    for own, whole in zip(own_ups, ups.grad, strict=True):
        torch.testing.assert_close(own.grad, whole.chunk(size)[rank], **close)


@pytest.mark.slow
def test_torchtitans_dist_gemm(ranks, layers):
    ranks(2).run(trains_on_our_ops, layers)
