"""Gradients of the predefined epilogues: launches, saved bytes and errors, against torch's own operations."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

import overlap_gemm
from overlap_gemm import epilogue, epilogues
from overlap_gemm.backends.epilogues import Applying, author_gradient
from overlap_gemm.epilogues.library import TORCH_OPERATIONS

ROWS, COLUMNS, K = 6, 128, 16
gelu_tanh = partial(F.gelu, approximate="tanh")


def squared(stream):
    return stream, stream.float().square().sum(-1)


class Case(NamedTuple):
    """An epilogue, and the same by torch's operations on the op's results and the epilogue's inputs."""

    epilogue: Any
    plain: Callable[..., Any]

    def inputs(self, dtype):
        shapes = {
            "element": (ROWS, COLUMNS),
            "rows": (ROWS,),
            "gathered_rows": (ROWS,),
            "columns": (COLUMNS,),
        }
        wide = torch.promote_types(dtype, torch.float32)
        return [
            torch.randn(shapes[kind], dtype=wide if "rows" in kind else dtype, requires_grad=True)
            for _, kind in self.epilogue.inputs
        ]


CASES = {
    case.epilogue.name: case
    for case in (
        Case(epilogues.add_bias, torch.add),
        Case(epilogues.add_residual, torch.add),
        Case(epilogues.add_residual_squared, lambda x, residual: squared(x + residual)),
        Case(epilogues.scale_rows, lambda x, scale: (x * scale[:, None]).to(x.dtype)),
        Case(epilogues.scale_gathered_rows, lambda x, scale: (x * scale[:, None]).to(x.dtype)),
        Case(epilogues.apply_relu, F.relu),
        Case(epilogues.apply_silu, F.silu),
        Case(epilogues.apply_gelu, F.gelu),
        Case(epilogues.apply_gelu_tanh, gelu_tanh),
        Case(epilogues.swiglu, lambda gate, up: F.silu(gate) * up),
        Case(epilogues.geglu, lambda gate, up: F.gelu(gate) * up),
        Case(epilogues.geglu_tanh, lambda gate, up: gelu_tanh(gate) * up),
    )
}
ACTIVATIONS = [name for name, case in CASES.items() if not case.epilogue.inputs]


class Launches(TorchDispatchMode):
    """Notes the operations that compute a tensor, and the largest float32 tensor that one of them makes."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.wide = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_view = all(one.alias_info and not one.alias_info.is_write for one in func._schema.returns)
        if not is_view and func.namespace == "aten" and "empty" not in func.name():
            self.names.append(func.name())
            tensors = [result] if isinstance(result, Tensor) else result
            self.wide = max([self.wide, *(one.numel() for one in tensors if one.dtype == torch.float32)])
        return result


def backward(outputs: Any, leaves: Any, seed: int = 0) -> Any:
    outputs = list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]
    generator = torch.Generator().manual_seed(seed)
    grads = [torch.randn(one.shape, generator=generator).to(one.dtype) for one in outputs]
    return torch.autograd.grad(outputs, leaves, grads)


class Observed(NamedTuple):
    """Launches of a function and of its gradients, elements of its largest float32 tensor, bytes it saves."""

    forward: list[str]
    backward: list[str]
    wide: int
    saved: int


def observed(function: Callable[[], Any], leaves: Any) -> Observed:
    """Runs a function and its gradients."""
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if not tensor.is_leaf:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor), Launches() as launches:
        outputs = function()
    outputs = list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]
    grads, forward = [torch.randn_like(one) for one in outputs], list(launches.names)
    with launches:
        torch.autograd.grad(outputs, leaves, grads)
    return Observed(forward, launches.names[len(forward) :], launches.wide, sum(saved.values()))


def sums_of(case: Case, dtype: torch.dtype, is_banded: bool) -> tuple[list[Tensor], Any, Callable[..., Any]]:
    """Returns leaves, the op's results made of them, and the plain function of these."""
    if not case.epilogue.pairs:
        (x,) = leaves = [torch.randn(ROWS, COLUMNS, dtype=dtype, requires_grad=True)]
        return leaves, x, case.plain
    if not is_banded:
        leaves = [torch.randn(ROWS, COLUMNS, dtype=dtype, requires_grad=True) for _ in range(2)]
        return leaves, tuple(leaves), lambda sums: case.plain(*sums)
    (x,) = leaves = [torch.randn(ROWS, 2 * COLUMNS, dtype=dtype, requires_grad=True)]

    def plain(sums: Tensor) -> Tensor:
        gate, up = sums.unflatten(-1, (-1, 2, 32)).unbind(-2)
        return case.plain(gate, up).flatten(-2)

    return leaves, x, plain


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("is_banded", [False, True], ids=["two-weights", "one-weight"])
@pytest.mark.parametrize("name", [name for name in CASES if CASES[name].epilogue.key in TORCH_OPERATIONS])
def test_no_more_launches_wide_tensors_and_bytes_than_torchs_operations(name, is_banded, dtype):
    case = CASES[name]
    leaves, sums, plain = sums_of(case, dtype, is_banded)
    inputs = case.inputs(dtype)
    applying = Applying(case.epilogue, tuple(one.dtype for one in inputs), dtype)
    ours = observed(lambda: applying.on_sums(sums, inputs), [*leaves, *inputs])
    theirs = observed(lambda: plain(sums, *inputs), [*leaves, *inputs])
    assert len(ours.forward) <= len(theirs.forward), (ours, theirs)
    assert len(ours.backward) <= len(theirs.backward), (ours, theirs)
    assert ours.saved <= theirs.saved, (ours, theirs)
    if dtype.itemsize == 2 and "scale" not in name:
        assert ours.wide < ROWS * COLUMNS, ours
        assert len(theirs.forward) <= 2 and len(theirs.backward) <= 3 + is_banded, "a fair comparison"


@pytest.mark.parametrize("name", [name for name in CASES if "gathered" not in name])
def test_ops_launch_and_save_no_more_with_an_epilogue_than_with_operations_after_them(name):
    case = CASES[name]
    x = torch.randn(ROWS, K).bfloat16().requires_grad_()
    weights = [torch.randn(COLUMNS, K).bfloat16().requires_grad_() for _ in range(1 + case.epilogue.pairs)]
    inputs = case.inputs(torch.bfloat16)
    named = dict(zip([one for one, _ in case.epilogue.inputs], inputs, strict=True))

    def ours() -> Any:
        weight = weights if case.epilogue.pairs else weights[0]
        return overlap_gemm.all_gather_gemm(x, weight, epilogue=case.epilogue(**named))

    def theirs() -> Any:
        if case.epilogue.pairs:
            return case.plain(*overlap_gemm.all_gather_gemm(x, weights))
        return case.plain(overlap_gemm.all_gather_gemm(x, weights[0]), *inputs)

    leaves = [x, *weights, *inputs]
    result, wanted = observed(ours, leaves), observed(theirs, leaves)
    assert len(result.forward) <= len(wanted.forward), (result, wanted)
    assert len(result.backward) <= len(wanted.backward), (result, wanted)
    assert result.saved <= wanted.saved, (result, wanted)
    if "scale" not in name:
        assert result.wide < ROWS * COLUMNS, result


def test_a_sum_with_a_residual_saves_neither():
    """Checks that the result may be changed in place, as after torch's addition."""
    x, weight = torch.randn(ROWS, K), torch.randn(COLUMNS, K, requires_grad=True)
    residual = torch.randn(ROWS, COLUMNS)
    result = overlap_gemm.gemm_all_reduce(x, weight, epilogue=epilogues.add_residual(residual=residual))
    result.mul_(2)
    residual.zero_()
    (result,) = torch.autograd.grad(result.sum(), weight)
    torch.testing.assert_close(result, 2 * x.sum(0).expand(COLUMNS, K))


VALUES = (0.0, -0.0, 1e-30, -1e-30, 0.5, -0.5, 3.0, -3.0, 20.0, -20.0, 88.0, -88.0, 300.0, -300.0, 3e4, -3e4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_errors_are_at_most_twice_those_of_torch(name, dtype):
    """Checks each value of `VALUES` and random ones, in all pairs, against float64."""
    case = CASES[name]
    drawn = torch.cat([torch.tensor(VALUES), 4 * torch.randn(500)]).to(dtype)
    sums = torch.meshgrid(drawn, drawn[:64], indexing="ij") if case.epilogue.pairs else (drawn.expand(2, -1),)
    exact = [one.double().contiguous().requires_grad_() for one in sums]
    ours, theirs = ([one.contiguous().clone().requires_grad_() for one in sums] for _ in range(2))
    applying = Applying(case.epilogue, (), dtype)
    results = [
        [out, *backward(out, leaves)]
        for out, leaves in (
            (applying.on_sums(tuple(ours) if len(ours) > 1 else ours[0], ())[0], ours),
            (case.plain(*theirs), theirs),
            (case.plain(*exact), exact),
        )
    ]
    least = torch.finfo(dtype).tiny * torch.finfo(dtype).eps
    for result, torchs, wanted in zip(*results, strict=True):
        assert result.dtype == torchs.dtype == dtype
        usual = torchs.isfinite()
        errors = [(one.double() - wanted)[usual].abs() for one in (result, torchs)]
        rounding = torch.finfo(dtype).eps / 2 * wanted[usual].abs() + least
        assert (errors[0] <= 2 * errors[1] + 1e-2 * rounding).all()
        torch.testing.assert_close(result[~usual], torchs[~usual], equal_nan=True)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_values_that_are_not_finite_are_those_of_torch(name):
    case = CASES[name]
    drawn = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, 2.0])
    sums = torch.meshgrid(drawn, drawn, indexing="ij") if case.epilogue.pairs else (drawn.expand(5, -1),)
    grads = drawn.flip(0).expand(5, -1)
    compared = []
    for by_op in (True, False):
        leaves = [one.clone().requires_grad_() for one in sums]
        out = Applying(case.epilogue, (), torch.float32).on_sums(
            tuple(leaves) if len(leaves) > 1 else leaves[0], ()
        )[0] if by_op else case.plain(*leaves)  # fmt: skip
        if by_op and case.epilogue.gradient is not None:
            compared.append([out, author_gradient(case.epilogue, [grads], [out], [], [])[0]])
        else:
            compared.append([out, *torch.autograd.grad(out, leaves, grads)])
    for result, wanted in zip(*compared, strict=True):
        torch.testing.assert_close(result, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", [name for name in CASES if "gathered" not in name])
def test_gradients_of_calls_are_those_of_differences_twice(name):
    case = CASES[name]
    generator = torch.Generator().manual_seed(2)
    shapes = (3, 2), *[(64 // (1 + case.epilogue.pairs), 2)] * (1 + case.epilogue.pairs)
    x, *weights = (
        torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True) for shape in shapes
    )
    sizes = {"element": (3, 64), "rows": (3,), "columns": (64,)}
    inputs = [
        torch.randn(sizes[kind], generator=generator, dtype=torch.float64, requires_grad=True)
        for _, kind in case.epilogue.inputs
    ]

    def call(x: Tensor, *others: Tensor) -> Any:
        weight = list(others[: len(weights)])
        named = zip([one for one, _ in case.epilogue.inputs], others[len(weights) :], strict=True)
        return overlap_gemm.all_gather_gemm(
            x, weight if case.epilogue.pairs else weight[0], epilogue=case.epilogue(**dict(named))
        )

    leaves = (x, *weights, *inputs)
    assert torch.autograd.gradcheck(call, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, leaves, fast_mode=True)


@pytest.mark.parametrize("name", ["apply_gelu", "swiglu", "add_residual", "apply_relu"])
def test_compiled_and_under_autocast_the_same(name):
    case = CASES[name]
    x = torch.randn(ROWS, K, requires_grad=True)
    weights = [torch.randn(COLUMNS, K, requires_grad=True) for _ in range(1 + case.epilogue.pairs)]
    inputs = [one.detach().requires_grad_() for one in case.inputs(torch.bfloat16)]

    def call() -> Any:
        named = dict(zip([one for one, _ in case.epilogue.inputs], inputs, strict=True))
        weight = weights if case.epilogue.pairs else weights[0]
        with torch.autocast("cpu", torch.bfloat16):
            return overlap_gemm.all_gather_gemm(x, weight, epilogue=case.epilogue(**named))

    def plain() -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            products = overlap_gemm.all_gather_gemm(x, weights)
            return case.plain(*products, *inputs)

    leaves = [x, *weights, *inputs]
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    compared = []
    for function in (plain, call, compiled):
        made = function()
        made = list(made) if isinstance(made, (list, tuple)) else [made]
        compared.append([*made, *backward(made, leaves)])
    for others in compared[1:]:
        for result, wanted in zip(others, compared[0], strict=True):
            assert result.dtype == wanted.dtype
            torch.testing.assert_close(result, wanted, rtol=2e-2, atol=2e-2)


def test_tensors_of_parameters_with_an_underscore_are_not_passed():
    passed = []

    def of_result(gradients, outputs, _inputs):
        passed.append((len(gradients), len(outputs), len(_inputs)))
        return gradients[0], None

    def of_inputs(gradients, _, inputs):
        passed.append((len(gradients), len(_), len(inputs)))
        return gradients[0], None

    def of_all(*of):
        passed.append(tuple(map(len, of)))
        return of[0][0], None

    for gradient in (of_result, of_inputs, of_all):
        one = epilogue(epilogues.add_bias.function, inputs={"bias": "columns"}, gradient=gradient)
        x = torch.ones(2, 3, requires_grad=True)
        overlap_gemm.gemm_all_reduce(x, torch.ones(8, 3), epilogue=one(bias=torch.ones(8))).sum().backward()
    assert passed == [(1, 1, 0), (1, 0, 1), (1, 1, 1)]
