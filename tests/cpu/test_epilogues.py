"""`epilogue`: declarations, digests, and the functions on tensors."""

import math

import pytest
import torch
import torch.nn.functional as F

from overlap_gemm import epilogue, epilogues, gemm_all_reduce
from overlap_gemm.backends import epilogues as of_backends
from overlap_gemm.backends.epilogues import Applying, number_of, tensor_of
from overlap_gemm.epilogues import arithmetic

ALPHA = 0.25


def _scaled(x):
    return ALPHA * x


@epilogue(inputs={"residual": "element", "gamma": "columns", "rstd": "rows", "shift": "scalar"},
          outputs={"squares": "row_sum", "largest": "row_max", "normed": "element"})  # fmt: skip
def everything(x, residual, gamma, rstd, shift):
    y = _scaled(x) + residual - shift
    return y, y * y, abs(y), y * rstd * gamma


def inputs_of(rows, columns, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    shapes = (rows, columns), (columns,), (rows,), (1,)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def test_an_epilogue_on_tensors_is_its_function_in_float32():
    x = torch.randn(5, 64).bfloat16()
    residual, gamma, rstd, shift = inputs_of(5, 64, torch.bfloat16)
    result, squares, largest, normed = everything.on_tensors(x, (residual, gamma, rstd, shift))
    expected = 0.25 * x.float() + residual.float() - shift.float()
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(squares, expected.square().sum(1))
    torch.testing.assert_close(largest, expected.abs().amax(1))
    torch.testing.assert_close(normed, expected * rstd.float()[:, None] * gamma.float())


@epilogue(inputs={"rows": "rows", "columns": "columns", "scalar": "scalar", "all": "element"},
          outputs={"sum": "row_sum", "mean": "row_mean", "most": "row_max", "given": "element",
                   "again": "element", "of_rows": "element"})  # fmt: skip
def narrow(x, rows, columns, scalar, all):
    return scalar, rows, columns * scalar, scalar, all, all, rows * scalar


def test_values_that_differ_by_row_or_column_only_have_the_shape_of_the_result():
    x, all = torch.randn(3, 5), torch.randn(5, 3).t()
    rows, columns, scalar = torch.randn(3), torch.randn(5), torch.randn(1)
    made = narrow.on_tensors(x, [rows, columns, scalar, all])
    full = scalar.expand(3, 5)
    expected = (
        full, rows * 5, (columns * scalar).mean().expand(3), scalar.expand(3), all, all,
        (rows * scalar).unsqueeze(-1).expand(3, 5),
    )  # fmt: skip
    for one, other in zip(made, expected, strict=True):
        torch.testing.assert_close(one, other)
        assert one.is_contiguous()


def test_rows_without_columns_have_values_of_zero_and_gradients():
    sums = torch.randn(3, 0, requires_grad=True)
    _, squares, largest, _ = everything.on_tensors(sums, inputs_of(3, 0))
    assert torch.equal(squares, torch.zeros(3)) and torch.equal(largest, torch.zeros(3))
    (squares + largest).sum().backward()
    assert sums.grad is not None


@pytest.mark.parametrize("sums", [torch.bfloat16, torch.float32, torch.float64])
def test_sums_determine_the_dtype_in_which_inputs_are_taken(sums):
    wide = torch.promote_types(sums, torch.float32)
    inputs = [torch.randn(shape) for shape in ((3,), (5,), (1,), (3, 5))]
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        made = narrow.on_tensors(torch.randn(3, 5).to(sums), [one.to(dtype) for one in inputs])
        assert {one.dtype for one in made} == {wide}
        torch.testing.assert_close(made[1], inputs[0].to(dtype).to(wide) * 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_share_no_memory_with_inputs_and_each_other(dtype):
    inputs = [torch.randn(shape).to(dtype) for shape in ((3,), (1,), (1,), (3, 1))]
    results = Applying(narrow, (dtype,) * 4, dtype).on_sums(torch.randn(3, 1).to(dtype), inputs)
    places = [one.untyped_storage().data_ptr() for one in (*results, *inputs)]
    assert len(set(places)) == len(places)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (epilogues.apply_relu, F.relu),
        (epilogues.apply_silu, F.silu),
        (epilogues.apply_gelu, F.gelu),
        (epilogues.apply_gelu_tanh, lambda x: F.gelu(x, approximate="tanh")),
    ],
    ids=["relu", "silu", "gelu", "gelu_tanh"],
)
def test_activations_are_those_of_torch(ours, theirs):
    x = torch.cat([torch.linspace(-30, 30, 601, dtype=torch.float64), torch.tensor([torch.nan, 0.0])])[None]
    torch.testing.assert_close(ours.on_tensors(x, ())[0], theirs(x), equal_nan=True)


def test_pairs_are_of_32_columns_and_as_many_after_them():
    x = torch.randn(3, 192, dtype=torch.float64)
    gate = torch.cat([x[:, 64 * i : 64 * i + 32] for i in range(3)], 1)
    up = torch.cat([x[:, 64 * i + 32 : 64 * i + 64] for i in range(3)], 1)
    torch.testing.assert_close(epilogues.swiglu.on_tensors(x, ())[0], F.silu(gate) * up)
    torch.testing.assert_close(epilogues.geglu.on_tensors(x, ())[0], F.gelu(gate) * up)


@pytest.mark.parametrize(
    "one",
    [
        epilogues.add_bias, epilogues.add_residual, epilogues.add_residual_squared,
        epilogues.add_residual_rms_norm, epilogues.apply_relu,
    ],
)  # fmt: skip
def test_gradients_of_the_library_are_those_of_autograd(one):
    shapes = {"element": (5, 8), "rows": (5,), "columns": (8,), "scalar": (1,)}
    x = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    inputs = [torch.rand(shapes[kind], dtype=torch.float64, requires_grad=True) for _, kind in one.inputs]
    outputs = one.on_tensors(x, inputs)
    gradients = [torch.randn_like(output) for output in outputs]
    expected = torch.autograd.grad(outputs, (x, *inputs), gradients)
    for found, wanted in zip(one.gradient(gradients, outputs, inputs), expected, strict=True):
        if found is not None:  # of eps
            torch.testing.assert_close(found, wanted)


def test_the_digest_follows_the_source_and_what_it_refers_to(monkeypatch):
    def made():
        return epilogue(everything.function, inputs=dict(everything.inputs), outputs=dict(everything.outputs))

    assert made() == everything
    assert hash(made()) == hash(everything)
    assert epilogues.epilogue_of(everything.key) is everything
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "ALPHA", 0.5)
        assert made().digest != everything.digest
    with monkeypatch.context() as patch:
        patch.setitem(globals(), "_scaled", arithmetic.silu)
        assert made().digest != everything.digest
    with monkeypatch.context() as patch:
        before = epilogue(of_a_default).digest
        patch.setattr(_by_default, "__defaults__", (0.5,))
        assert epilogue(of_a_default).digest != before
    assert epilogue(_scaled).digest != epilogue(_scaled, of="partial").digest
    with pytest.raises(ValueError, match="no epilogue nothing:0 has been made in this process"):
        epilogues.epilogue_of("nothing:0")


def branching(x):
    return x if x else -x


def comparing(x):
    return x if x > 0 else -x


def equal(x):
    return x + (x == 0)


def unequal(x):
    return x * (x != x)


def adding_in_place(x, bias):
    bias += x
    return bias


def scaling_in_place(x):
    y = x
    y *= 2.0
    return y + x


def a_number(x):
    return 1.0


def a_number_as_output(x):
    return x, 1


def a_list(x):
    return [x]


def nothing(x):
    x * 2.0


def of_torch(x):
    return torch.exp(x)


TABLE = torch.ones(3)


def of_a_tensor(x):
    return x * TABLE


twice = lambda x: x * 2  # noqa: E731


def of_a_lambda(x):
    return twice(x)


def _by_default(x, factor=ALPHA):
    return x * factor


UNWRITTEN: dict = {}
exec("def gradient(gradients, outputs, inputs): return gradients", UNWRITTEN)


def of_a_default(x):
    return _by_default(x)


def doubled(x):
    return x, x


def with_bias(x, bias):
    return x + bias


@pytest.mark.parametrize(
    ("function", "declared", "rule"),
    [
        (branching, {}, "cannot branch on one"),
        (comparing, {}, "'>' not supported"),
        (equal, {}, "values, which do not compare"),
        (unequal, {}, "values, which do not compare"),
        (adding_in_place, {"inputs": {"bias": "rows"}}, r"write y = y \+ x"),
        (scaling_in_place, {}, r"write y = y \+ x"),
        (a_number, {}, "must return values, not numbers or others; got float"),
        (a_number_as_output, {"outputs": {"o": "row_sum"}}, "must return values, .* got int"),
        (a_list, {}, "must return values, .* got list"),
        (nothing, {}, "must return values, .* got NoneType"),
        (of_torch, {}, "functions of overlap_gemm.epilogues"),
        (of_a_tensor, {}, "declare everything else that it reads as an input"),
        (lambda x: x * 2, {}, "define functions with def, not with lambda"),
        (of_a_lambda, {}, "define functions with def, not with lambda"),
        (doubled, {"gradient": lambda *_: None}, "define functions with def, not with lambda"),
        (
            doubled,
            {"outputs": {"a": "element"}, "gradient": UNWRITTEN["gradient"]},
            "in a file or a notebook",
        ),
        (doubled, {}, r"must return \(result\)"),
        (doubled, {"outputs": {"a": "element", "b": "element"}}, r"must return \(result, a, b\)"),
        (with_bias, {}, r"must take the inputs \(\), in this order; it takes \(x, bias\)"),
        (with_bias, {"inputs": {"gamma": "columns"}}, r"must take the inputs \(gamma\)"),
        (with_bias, {"pairs": True, "inputs": {"bias": "columns"}}, "after a pair of sums"),
    ],
    ids=lambda given: given.__name__ if callable(given) else None,
)
def test_functions_that_are_no_epilogues_are_refused_with_the_rule(function, declared, rule):
    with pytest.raises(TypeError, match=rule):
        epilogue(function, **declared)


@pytest.mark.parametrize(
    ("declared", "rule"),
    [
        ({"inputs": {"bias": "column"}}, "input bias must be one of element, rows, gathered_rows, columns"),
        ({"outputs": {"a": "columns"}}, "output a must be one of element, row_sum, row_mean, row_max, rows"),
        ({"of": "all"}, "of must be one of partial, complete"),
        ({"of": "partial", "pairs": True}, "added up over the ranks"),
        ({"of": "partial", "outputs": {"a": "element"}}, "added up over the ranks"),
        ({"result": "e5m2"}, "result must be one of e4m3; got 'e5m2'"),
        ({"result": "e4m3", "of": "partial"}, "result='e4m3' allows no gradient, and complete sums only"),
        ({"result": "e4m3", "gradient": with_bias}, "result='e4m3' allows no gradient"),
    ],
)
def test_declarations_that_do_not_exist_are_refused_with_the_rule(declared, rule):
    with pytest.raises(ValueError, match=rule):
        epilogue(with_bias, **declared)


def test_a_number_is_one_tensor_which_is_known_by_its_value(monkeypatch):
    kept = tensor_of(0.125, torch.device("cpu"), keep=True)
    assert tensor_of(0.125, torch.device("cpu"), keep=True) is kept
    assert number_of(kept) == 0.125 == kept.item()
    other = tensor_of(0.125, torch.device("cpu"), keep=False)
    assert other is not kept and number_of(other) is None
    monkeypatch.setattr(of_backends, "is_capturing", lambda _: True)
    assert tensor_of(0.125, torch.device("cpu"), keep=True) is kept
    first, second = (tensor_of(0.0625, torch.device("cpu"), keep=True) for _ in range(2))
    assert first is not second, "a captured graph's memory is its own"


def test_numbers_that_are_equal_or_not_to_themselves_are_kept_by_their_bits(monkeypatch):
    monkeypatch.setattr(of_backends, "_of_numbers", {})
    zero, below = (tensor_of(value, torch.device("cpu"), keep=True) for value in (0.0, -0.0))
    assert math.copysign(1, zero.item()) == 1 and math.copysign(1, below.item()) == -1
    assert tensor_of(-0.0, torch.device("cpu"), keep=True) is below
    before = len(of_backends._of_numbers)
    assert tensor_of(float("nan"), torch.device("cpu"), keep=True).isnan().all()
    assert len(of_backends._of_numbers) == before

    @epilogue(inputs={"divisor": "scalar"})
    def divided(x, divisor):
        return x / divisor

    x, weight = torch.ones(2, 8), torch.ones(4, 8)
    for divisor in (0.0, -0.0):
        out = gemm_all_reduce(x, weight, epilogue=divided(divisor=divisor))
        assert torch.equal(out, torch.full((2, 4), math.copysign(math.inf, divisor)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_norm_after_an_op_is_torchs_if_eps_is_a_number(dtype):
    x, residual, weight = (torch.randn(shape).to(dtype) for shape in ((5, 64), (5, 64), (64,)))
    eps = tensor_of(1e-5, torch.device("cpu"), keep=True)
    applying = Applying(epilogues.add_residual_rms_norm, (dtype, dtype, torch.float32), dtype)
    results = applying.on_sums(x, (residual, weight, eps))
    assert torch.equal(results[0], F.rms_norm(x + residual, (64,), weight, 1e-5))
    assert torch.equal(results[1], x + residual)
    for value, general in zip(results, applying.on_sums(x, (residual, weight, eps.clone())), strict=True):
        assert value.dtype == general.dtype == dtype
        torch.testing.assert_close(value, general)


def test_inputs_are_passed_by_name():
    bias = torch.ones(3)
    assert epilogues.add_bias(bias=bias) == (epilogues.add_bias, (bias,), None)
    with pytest.raises(TypeError, match=r"takes the inputs \(bias\), by name; got \(gamma\)"):
        epilogues.add_bias(gamma=bias)
    with pytest.raises(TypeError, match=r"takes the inputs \(bias\), by name; got \(\)"):
        epilogues.add_bias()
