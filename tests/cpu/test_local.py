"""A world of one needs no torch.distributed; arguments are checked; explain explains."""

import pytest
import torch
import torch.distributed as dist

import overlap_gemm
from overlap_gemm.nn import ColumnParallelLinear, ParallelMLP, RowParallelLinear, column_parallel_gemm
from overlap_gemm.spec import OPS
from overlap_gemm.testing.cases import Case, operands
from tests.support.references import reference
from tests.support.tolerances import assert_as_good_as, tolerance

X, W, B = torch.ones(4, 3), torch.ones(5, 3), torch.ones(5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("backend", ["auto", "decomposed", "sequential"])
@pytest.mark.parametrize("op", OPS)
def test_world_of_one(op, backend, dtype):
    assert not dist.is_initialized()
    case = Case(op, 6, 5, 4, dtype)
    given = operands(case)
    given.x.requires_grad_()
    out = getattr(overlap_gemm, op)(given.x, given.weight, bias=given.bias, backend=backend)
    out.backward(given.grad)
    exact, baseline = reference(given), reference(given, dtype)
    assert_as_good_as(out.detach(), baseline.out, exact.out, roundings=1)
    assert_as_good_as(given.x.grad, baseline.x, exact.x, roundings=1)


def test_gathered_is_not_the_input():
    _, gathered = overlap_gemm.all_gather_gemm(X, W, return_gathered=True)
    assert torch.equal(gathered, X)
    assert gathered.data_ptr() != X.data_ptr()


def test_layers_in_a_world_of_one():
    torch.manual_seed(0)
    x, linear = torch.randn(4, 3), torch.nn.functional.linear
    column, row = ColumnParallelLinear(3, 4), RowParallelLinear(3, 4, sequence_parallel=True)
    torch.testing.assert_close(column(x), linear(x, column.weight, column.bias))
    torch.testing.assert_close(row(x), linear(x, row.weight, row.bias))
    for sequence_parallel in (False, True):
        mlp = ParallelMLP(3, 8, sequence_parallel=sequence_parallel, bias=True)
        for projection in (mlp.gate_proj, mlp.up_proj, mlp.down_proj):
            torch.nn.init.normal_(projection.bias)
        gate, up = (linear(x, each.weight, each.bias) for each in (mlp.gate_proj, mlp.up_proj))
        between = torch.nn.functional.silu(gate) * up
        torch.testing.assert_close(mlp(x), linear(between, mlp.down_proj.weight, mlp.down_proj.bias))
    assert "tp=1" in repr(column)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((torch.ones(3), W), ValueError, r"x must be \[M, ..., K\], got \[3\]"),
        ((X, torch.ones(3, 5)), ValueError, r"weight must be \[N, K\] .* K=3 of x \[4, 3\], got \[3, 5\]"),
        ((X, W[0]), ValueError, r"weight must be .*, got \[3\]"),
        (
            (X, W.double()),
            TypeError,
            r"operands must share dtype and device, .* torch.float32 .* weight torch.float64",
        ),
        (
            (X, W.to("meta")),
            TypeError,
            r"operands must share dtype and device, .* on cpu and weight .* on meta",
        ),
        ((X.int(), W.int()), TypeError, r"dtype must be one of .*, got torch.int32"),
        ((X, "weight"), TypeError, r"weight must be a Tensor, got str"),
        ((X, None), TypeError, r"weight must be a Tensor, got NoneType"),
        ((None, W), TypeError, r"x must be a Tensor, got NoneType"),
        ((X.to_mkldnn(), W), TypeError, r"x must be a strided tensor, got one of layout torch._mkldnn"),
        ((X, W.to_mkldnn()), TypeError, r"weight must be a strided tensor, got one of layout torch._mkldnn"),
        ((X.to_sparse(), W), TypeError, r"x must be a strided tensor, got one of layout torch.sparse_coo"),
        ((torch.tensor(1.0), W), ValueError, r"x must be \[M, ..., K\], got \[\]"),
    ],
)
@pytest.mark.parametrize("op", [*OPS, "column_parallel_gemm"])
def test_operands_that_do_not_fit(op, arguments, error, words):
    if op in OPS and OPS[op].reshards_k and "of x" in words:
        words = r"of K=5 of weight \[3, 5\] rank 0 of 1 owns 5 .* but x has 3"
    with pytest.raises(error, match=f"{op}: {words}"):
        if op in OPS:
            getattr(overlap_gemm, op)(*arguments)
        else:
            column_parallel_gemm(*arguments, None, None)


def test_options_of_a_column_parallel_product_are_refused_before_its_gradient_needs_them():
    for backend, reserve, words in (
        ("fast", None, "backend='fast' is not available"),
        ("auto", -1, "reserve_sms=-1 must be a number of SMs"),
    ):
        with pytest.raises(ValueError, match=words):
            column_parallel_gemm(X, W, None, None, backend, reserve)


@pytest.mark.parametrize("op", OPS)
def test_bias_that_does_not_fit(op):
    with pytest.raises(ValueError, match=rf"{op}: bias must be \[5\] for weight \[5, 3\], got \[4\]"):
        getattr(overlap_gemm, op)(X, W, bias=torch.ones(4))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("op", OPS)
def test_nested_tensors_are_refused(op):
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)])
    for name, arguments in (("x", (nested, W)), ("weight", (X, nested))):
        with pytest.raises(TypeError, match=f"{op}: {name} must be a strided tensor, got a nested one"):
            getattr(overlap_gemm, op)(*arguments)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"backend": "fast"},
            r"backend='fast' is not available; choose one of auto, fused, decomposed, torch, sequential",
        ),
        ({"rows": 5}, r"of rows=5 rank 0 of 1 owns 5 .* its operand has 4"),
        ({"rows": "even"}, r"rows must be a number, 'equal' or 'exchange', or None; got 'even'"),
        ({"rows": [2, 2]}, r"rows must be a number, 'equal' or 'exchange', or None; got \[2, 2\]"),
        ({"columns": "exchange"}, r"columns must be a number, 'equal', or None; got 'exchange'"),
        ({"dim": 1}, r"dim must name one of the 1 row dimensions of x \[4, 3\], got 1"),
        ({"dim": -1}, r"dim must name one of"),
        ({"dim": -3}, r"dim must name one of"),
        ({"dim": "0"}, r"dim must name one of"),
        ({"dim": False}, r"dim must name one of .* got False"),
        ({"deterministic": "yes"}, r"deterministic must be True, False or None, got 'yes'"),
        ({"backend": None}, r"backend=None is not available; choose one of auto"),
        ({"backend": ["auto"]}, r"backend=\['auto'\] is not available; choose one of auto"),
        ({"bias": [B, B]}, r"1 weights need as many biases or none, got 2"),
        ({"group": "no such group"}, r"^there is no process group 'no such group' in .*overlap_gemm.init"),
    ],
)
def test_options_that_do_not_fit(options, words):
    with pytest.raises((ValueError, RuntimeError), match=words):
        overlap_gemm.all_gather_gemm(X, W, **options)


def test_dimensions_may_be_counted_from_behind():
    x, weight = torch.randn(2, 3, 4, 5), torch.randn(6, 5)
    for dim in range(3):
        for same in (dim, dim - 4):
            out = overlap_gemm.gemm_reduce_scatter(x, weight, dim=same)
            torch.testing.assert_close(out, x @ weight.t())
            # One rank has all rows of any dimension; what it says of a wrong number tells which one is meant.
            with pytest.raises(ValueError, match=rf"owns 9 .* its operand has {x.shape[dim]}$"):
                overlap_gemm.all_gather_gemm(x, weight, dim=same, rows=9)


def test_no_weights():
    with pytest.raises(ValueError, match="empty list"):
        overlap_gemm.all_gather_gemm(X, [])


@pytest.mark.parametrize("op", OPS)
def test_explain(op):
    for which in (op, getattr(overlap_gemm, op)):
        choice = overlap_gemm.explain(which, X, W)
        assert choice.backend.name == "torch"
        text = str(choice)
        assert text.startswith(f"{op} runs as 'torch' (backend='auto')\n  M=4, ")
        assert "decomposed: no, one rank has nothing to transfer" in text
        assert "torch: chosen" in text
    assert overlap_gemm.explain(op, X, W, backend="decomposed").backend.name == "decomposed"
    with pytest.raises(ValueError, match="op must be one of all_gather_gemm"):
        overlap_gemm.explain("gemm", X, W)
    with pytest.raises(TypeError, match=f"{op} has no argument backened; it has x"):
        overlap_gemm.explain(op, X, W, bias=None, backened="torch")
    with pytest.raises(ValueError, match=f"{op}: .*weight"):
        overlap_gemm.explain(op, X, W.t())


def test_the_tolerance_is_the_baselines_own_error_twice():
    exact = torch.tensor([1.0, -2.0], dtype=torch.float64)
    baseline = torch.tensor([1.25, -2.0])
    assert tolerance(baseline, exact) == 0.5
    assert_as_good_as(torch.tensor([1.5, -2.0]), baseline, exact)
    with pytest.raises(AssertionError, match="out: largest error 0.501"):
        assert_as_good_as(torch.tensor([1.501, -2.0]), baseline, exact, what="out")
    with pytest.raises(AssertionError, match="shape"):
        assert_as_good_as(torch.zeros(3), baseline, exact)
    assert tolerance(exact.bfloat16(), exact) == 2 * 2 * torch.finfo(torch.bfloat16).eps
