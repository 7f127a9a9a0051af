"""Operators and functions of epilogues in a kernel: the same values as on tensors."""

import cutlass
import pytest
import torch
from cutlass import cute
from cutlass.cute.runtime import from_dlpack

from cute_emulator import Emulator
from overlap_gemm import epilogues
from overlap_gemm.device.values import Register

FUNCTIONS = {
    "exp": epilogues.exp,
    "sqrt": lambda x: epilogues.sqrt(abs(x)),
    "rsqrt": lambda x: epilogues.rsqrt(abs(x) + 1e-6),
    "reciprocal": lambda x: epilogues.reciprocal(x + 100),
    "tanh": epilogues.tanh,
    "erf": epilogues.erf,
    "sigmoid": epilogues.sigmoid,
    "maximum": lambda x: epilogues.maximum(x, 0.5 * x + 1),
    "minimum": lambda x: epilogues.minimum(x, -x),
    "relu": epilogues.relu,
    "silu": epilogues.silu,
    "gelu": epilogues.gelu,
    "gelu_tanh": epilogues.gelu_tanh,
    "operators": lambda x: (1 - x) / (x * x + 2) - 3 / (abs(x) + 1) + (-x) * 0.25 + (2 + x) - (x - 1),
}

LOOSE = {"tanh": 2**-11}
"""Relative error of ``tanh.approx`` (PTX ISA)."""


@cute.kernel
def apply_all(x: cute.Tensor, out: cute.Tensor, functions: cutlass.Constexpr):
    thread, _, _ = cute.arch.thread_idx()
    if thread < cute.size(x):
        for i, function in enumerate(functions):
            out[(i, thread)] = function(Register(x[thread])).raw


@cute.jit
def launch(x: cute.Tensor, out: cute.Tensor, functions: cutlass.Constexpr):
    apply_all(x, out, functions).launch(grid=(1, 1, 1), block=(128, 1, 1))


def run(x, functions, arch):
    """Returns the values of functions in a kernel, a row for each function."""
    out = torch.zeros(len(functions), len(x))
    arguments = from_dlpack(x), from_dlpack(out)
    with Emulator(arch) as emulator, emulator.rank(0):
        compiled = cute.compile(launch, *arguments, functions, options=f"--gpu-arch {arch}")
        compiled(*arguments)
        emulator.run()
    return out


@pytest.mark.parametrize("arch", ["sm_90a", pytest.param("sm_100a", marks=pytest.mark.slow)])
def test_functions_in_a_kernel_are_those_on_tensors(arch):
    special = torch.tensor([0.0, -0.0, torch.nan, torch.inf, -torch.inf, 1e-30, 100.0, -100.0])
    x = torch.cat([torch.linspace(-12, 12, 115), special])
    for (name, function), found in zip(
        FUNCTIONS.items(), run(x, tuple(FUNCTIONS.values()), arch), strict=True
    ):
        wanted = function(x.double()).float()
        torch.testing.assert_close(
            found,
            wanted,
            rtol=LOOSE.get(name, 4e-6),
            atol=4e-7,
            equal_nan=True,
            msg=lambda m, n=name: f"{n}: {m}",
        )


def test_exponentials_err_by_two_units_and_one_for_each_of_x():
    x = torch.linspace(-80, 80, 127)
    functions = epilogues.exp, epilogues.sigmoid
    for function, found in zip(functions, run(x, functions, "sm_90a"), strict=True):
        wanted = function(x.double())
        unit = torch.nextafter(wanted.float(), torch.tensor(torch.inf)).double() - wanted.float().double()
        assert ((found.double() - wanted).abs() <= (2 + x.abs()) * unit).all()
