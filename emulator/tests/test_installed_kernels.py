"""Kernels of an installed package, quack-kernels, in the emulator against torch."""

import pytest
import torch

from cute_emulator import Emulator
from cute_emulator.host.script import one_device

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
pytest.importorskip("quack", reason="quack-kernels is not installed (it needs triton and einops, too)")

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7}


@pytest.fixture(params=["sm_90a", "sm_100a"])
def emulator(request, monkeypatch):
    """An open emulator that torch takes for one GPU; quack compiles anew, since its cache outlives it."""
    monkeypatch.setenv("QUACK_CACHE_ENABLED", "0")
    with Emulator(request.param) as emu, one_device(emu):
        torch.manual_seed(0)
        yield emu


def check(emulator, got, want, dtype):
    emulator.finish()
    assert emulator.report.instructions > 100 and not emulator.report.findings
    scale = want.float().abs().clamp_min(1)
    assert ((got.float() - want.float()).abs() <= TOLERANCE[dtype] * scale).all()


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_rmsnorm(emulator, dtype):
    from quack.rmsnorm import rmsnorm_fwd

    x, w = torch.randn(16, 512, device="cuda", dtype=dtype), torch.randn(512, device="cuda")
    out = rmsnorm_fwd(x, w, eps=1e-6)
    want = torch.nn.functional.rms_norm(x.float(), (512,), w, 1e-6)
    check(emulator, out[0] if isinstance(out, tuple) else out, want, dtype)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_softmax(emulator, dtype):
    from quack.softmax import softmax_fwd

    x = 4 * torch.randn(16, 512, device="cuda", dtype=dtype)
    check(emulator, softmax_fwd(x), torch.softmax(x.float(), -1), dtype)


def test_cross_entropy(emulator):
    from quack.cross_entropy import cross_entropy_fwd

    x = torch.randn(16, 512, device="cuda")
    target = torch.randint(0, 512, (16,), device="cuda")
    out = cross_entropy_fwd(x, target)
    want = torch.nn.functional.cross_entropy(x, target, reduction="none")
    check(emulator, out[0] if isinstance(out, tuple) else out, want, torch.float32)


def test_gemm(emulator):
    from quack.gemm_interface import gemm

    a, b = (torch.randn(*shape, device="cuda", dtype=torch.bfloat16) for shape in ((256, 128), (128, 192)))
    check(emulator, gemm(a, b, tuned=False), a.float() @ b.float(), torch.bfloat16)
