"""Epilogues in all four ops on several ranks: results, outputs, gradients, graphs, and what is refused."""

import re
from pathlib import Path

import pytest
import torch

import overlap_gemm
from overlap_gemm import epilogue, epilogues
from overlap_gemm.backends.epilogues import TensorKind, author_gradient
from overlap_gemm.runtime.agree import DisagreementError
from overlap_gemm.spec import OPS
from overlap_gemm.spec.sharding import Shards
from overlap_gemm.testing.cases import LAYOUTS
from tests.support.ops import SHARDED

OPS_WITH_EPILOGUE = list(SHARDED)
BACKENDS = "sequential", "decomposed", "torch", "auto"
M, N, K = 9, 40, 12


def gradient_of_norm(gradients, outputs, inputs):
    of_result, of_normed, of_squares = gradients
    result, _, _ = outputs
    _, gamma, rstd, shift = inputs
    of_stream = of_result + of_normed * rstd[..., None] * gamma + 2 * result * of_squares[..., None]
    of_gamma = (of_normed * rstd[..., None] * result).sum(0)
    of_rstd = (of_normed * gamma * result).sum(-1)
    return of_stream, of_stream, of_gamma, of_rstd, None


KINDS = {"residual": "element", "gamma": "columns", "rstd": "rows", "shift": "scalar"}
OUTPUTS = {"normed": "element", "squares": "row_sum"}


def norm(x, residual, gamma, rstd, shift):
    stream = x + residual - shift
    return stream, stream * rstd * gamma, stream * stream


BY_AUTOGRAD = epilogue(norm, inputs=KINDS, outputs=OUTPUTS)
BY_AUTHOR = epilogue(norm, inputs=KINDS, outputs=OUTPUTS, gradient=gradient_of_norm)


def tensors(rank, size, op, seed=0):
    """This rank's operands, its epilogue's inputs, and the sums that it gets."""
    generator = torch.Generator().manual_seed(seed)
    whole = [
        torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((M, K), (N, K), (M, N))
    ]
    gamma, rstd = (torch.rand(n, generator=generator, dtype=torch.float64) for n in (N, M))
    layout = LAYOUTS[op]

    def part(one, dim):
        return one if dim is None else one.narrow(dim, *own(one.shape[dim])).clone()

    def own(extent):
        start, end = Shards.even(extent, size).range(rank)
        return start, end - start

    given = [part(whole[0], layout.x), part(whole[1], layout.weight)]
    inputs = [part(whole[2], layout.out), gamma, rstd]
    if layout.out == 0:
        inputs[2] = part(rstd, 0)
    elif layout.out == 1:
        inputs[1] = part(gamma, 0)
    return (
        given,
        [*inputs, torch.tensor([0.25], dtype=torch.float64)],
        part(whole[0] @ whole[1].t(), layout.out),
    )


def called(op, given, inputs, one, backend):
    lengths = OPS[op].arguments(M, N, K, least=True)
    named = dict(zip(KINDS, inputs, strict=True))
    return getattr(overlap_gemm, op)(*given, epilogue=one(**named), backend=backend, **lengths)


def results(rank, size, op, backend):
    given, inputs, sums = tensors(rank, size, op)
    expected = BY_AUTHOR.on_tensors(sums, inputs)
    for one in (BY_AUTHOR, BY_AUTOGRAD):
        found = called(op, given, inputs, one, backend)
        assert isinstance(found, tuple)
        for value, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(value, wanted)


def gradients(rank, size, op, backend):
    """Those by the author of a gradient are those by autograd of the function, compiled or not."""
    found = []
    for one in (BY_AUTHOR, BY_AUTOGRAD):
        for compiled in (False, True):
            given, inputs, _ = tensors(rank, size, op)
            leaves = [tensor.requires_grad_() for tensor in (*given, *inputs[:3])]
            call = torch.compile(called, fullgraph=True, backend="aot_eager") if compiled else called
            made = call(op, given, inputs, one, backend)
            generator = torch.Generator().manual_seed(1)
            weights = [torch.randn(value.shape, generator=generator).double() for value in made]
            sum((value * w).sum() for value, w in zip(made, weights, strict=True)).backward()
            found.append([*(value.detach() for value in made), *(leaf.grad for leaf in leaves)])
    for others in found[1:]:
        for value, wanted in zip(others, found[0], strict=True):
            torch.testing.assert_close(value, wanted)


def pairs_and_dimensions(rank, size, op, backend):
    """`[b, s, K]`, gathered and scattered along the second dimension; half the columns."""
    shape = (2, 4, K)
    generator = torch.Generator().manual_seed(3)
    x, weight = torch.randn(shape, generator=generator), torch.randn(64, K, generator=generator)
    along = {"dim": 1} if op in ("all_gather_gemm", "gemm_reduce_scatter") else {}
    plain = getattr(overlap_gemm, op)(x, weight, backend=backend, **along)
    gated = getattr(overlap_gemm, op)(x, weight, backend=backend, epilogue=epilogues.swiglu(), **along)
    gate, up = plain.unflatten(-1, (-1, 2, 32)).unbind(-2)
    torch.testing.assert_close(gated, (torch.nn.functional.silu(gate) * up).flatten(-2))
    residual = torch.randn(plain.shape, generator=generator)
    given = epilogues.add_residual_squared(residual=residual)
    stream, squares = getattr(overlap_gemm, op)(x, weight, backend=backend, epilogue=given, **along)
    torch.testing.assert_close(stream, plain + residual)
    torch.testing.assert_close(squares, (plain + residual).square().sum(-1))


def bytes_of(rank, size, op, backend):
    """Compares 8-bit results, eagerly and in a graph, with rounded sums; some are too large, one is NaN."""
    (x, weight), _, sums = tensors(rank, size, op)
    lengths = OPS[op].arguments(M, N, K, least=True)
    scale = sums.abs().max() / 1000
    applied = epilogues.to_e4m3(scale=float(scale))
    x[0, 0] = torch.nan

    def call(x):
        return getattr(overlap_gemm, op)(x, weight, epilogue=applied, backend=backend, **lengths)

    for made in (call(x), torch.compile(call, fullgraph=True, backend="aot_eager")(x)):
        assert made.dtype == torch.float8_e4m3fn
        values = made.double()
        assert values.isnan().any() == (rank == 0 or op != "gemm_reduce_scatter")
        wanted = torch.where(values.isnan(), torch.nan, (sums / scale).clamp(-448, 448))
        torch.testing.assert_close(values, wanted, rtol=2**-4, atol=2**-10, equal_nan=True)
        assert (values.abs() == 448).any() or rank > 0
    x.requires_grad_()
    with pytest.raises(TypeError, match="epilogue to_e4m3 has an 8-bit result and no gradient"):
        call(x)


@pytest.mark.parametrize(("op", "backend"), list(zip(SHARDED, BACKENDS, strict=True)))
def test_results_of_8_bits(ranks, op, backend):
    ranks(2).run(bytes_of, op, backend)


@pytest.mark.parametrize("backend", ["sequential", "decomposed", "torch"])
@pytest.mark.parametrize("op", OPS_WITH_EPILOGUE)
def test_results_and_outputs(ranks, op, backend):
    ranks(2).run(results, op, backend)


@pytest.mark.parametrize("op", OPS_WITH_EPILOGUE)
def test_gradients_by_the_author_are_those_of_autograd(ranks, op):
    ranks(2).run(gradients, op, "sequential")


@pytest.mark.parametrize("op", OPS_WITH_EPILOGUE)
def test_pairs_and_more_dimensions(ranks, op):
    ranks(2).run(pairs_and_dimensions, op, "auto")


@epilogue(inputs={"row": "rows", "column": "columns", "shift": "element"}, of="partial")
def of_partial(x, row, column, shift):
    return epilogues.relu(x * row * column - shift)


def partial_sums(rank, size, op, backend):
    """Inputs differ between ranks: an epilogue of the complete sum would differ, too."""
    generator = torch.Generator().manual_seed(rank)
    shapes = (2, 4, K), (N, K), (2, 4), (N,), (2, 4, N), (N,)
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    x, weight, row, column, shift, _ = drawn
    bias = torch.arange(N, dtype=torch.float64)
    scatters = op == "gemm_reduce_scatter"
    along = {"dim": 1} if scatters else {}
    applied = of_partial(row=row, column=column, shift=shift)
    call = getattr(overlap_gemm, op)
    result = call(x, weight, bias=bias, backend=backend, epilogue=applied, **along)
    expected = torch.relu(x @ weight.t() * row[..., None] * column - shift)
    torch.distributed.all_reduce(expected)
    expected = (expected.chunk(size, 1)[rank] if scatters else expected) + bias
    torch.testing.assert_close(result, expected)
    assert "runs as 'sequential'" in str(
        overlap_gemm.explain(op, x, weight, backend=backend, epilogue=applied, **along)
    )
    with pytest.raises(TypeError, match="epilogue of_partial of partial sums has no gradient"):
        call(x.requires_grad_(), weight, epilogue=applied, **along)
    with pytest.raises(ValueError, match="backend='torch' cannot run .* needs the backend 'sequential'"):
        call(x.detach(), weight, epilogue=applied, backend="torch", **along)
    if size > 1 and scatters:
        short = of_partial(row=row[:, :2], column=column, shift=shift)
        with pytest.raises(ValueError, match=r"of this rank's product and must be \[2, 4\], got \[2, 2\]"):
            call(x.detach(), weight, epilogue=short, **along)


@pytest.mark.parametrize("backend", ["auto", "sequential"])
@pytest.mark.parametrize("op", ["gemm_reduce_scatter", "gemm_all_reduce"])
@pytest.mark.parametrize("size", [1, 2])
def test_epilogues_of_partial_sums_precede_the_sum(ranks, size, op, backend):
    ranks(size).run(partial_sums, op, backend)


def gradient_of_swiglu(gradients, outputs, inputs):
    """Returns the result's gradient for gates and zeros for ups: to see where gradients go."""
    (gradient,) = gradients
    parts = [part.unflatten(-1, (-1, 32)) for part in (gradient, torch.zeros_like(gradient))]
    return (torch.stack(parts, -2).flatten(-3),)


def pairs_of_two_weights(rank, size, compiled, bias):
    """Compares two weights of any width, with biases and gradients, with torch's operations."""
    generator = torch.Generator().manual_seed(4)
    x, *weights = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((3, 2, K), (20 + rank, K), (20 + rank, K))
    )
    biases = [torch.randn(20 + rank, generator=generator).double() for _ in weights] if bias else None
    leaves = [tensor.requires_grad_() for tensor in (x, *weights, *(biases or ()))]

    def fused(x, weights, biases):
        return overlap_gemm.all_gather_gemm(
            x, weights, bias=biases, epilogue=epilogues.geglu_tanh(), dim=1, rows=2 * size
        )

    def plain(x, weights, biases):
        gate, up = overlap_gemm.all_gather_gemm(x, weights, bias=biases, dim=1, rows=2 * size)
        return torch.nn.functional.gelu(gate, approximate="tanh") * up

    compared = []
    call = torch.compile(fused, fullgraph=True, backend="aot_eager") if compiled else fused
    for one in (call, plain):
        out = one(x, weights, biases)
        (out * torch.linspace(1, 2, out.numel()).view(out.shape)).sum().backward()
        compared.append([out.detach(), *(leaf.grad for leaf in leaves)])
        for leaf in leaves:
            leaf.grad = None
    for value, wanted in zip(*compared, strict=True):
        torch.testing.assert_close(value, wanted)
    with torch.no_grad():  # one op
        torch.testing.assert_close(call(x, weights, biases), compared[1][0])


def gradient_of_pairs_by_the_author(rank, size):
    halved = epilogue(epilogues.swiglu.function, pairs=True, gradient=gradient_of_swiglu)
    x, gate, up = (torch.ones(shape).double().requires_grad_() for shape in ((3, K), (64, K), (64, K)))
    out = overlap_gemm.all_gather_gemm(x, [gate, up], epilogue=halved())
    (out * torch.arange(64.0)).sum().backward()
    torch.testing.assert_close(gate.grad, torch.arange(64.0).double()[:, None].expand(64, K) * 3 * size)
    assert not up.grad.any()


@pytest.mark.parametrize("bias", [False, True], ids=["nobias", "bias"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_pairs_of_two_weights(ranks, compiled, bias):
    ranks(2).run(pairs_of_two_weights, compiled, bias)


def test_gradients_of_pairs_by_the_author_go_to_their_weights(ranks):
    ranks(2).run(gradient_of_pairs_by_the_author)


def normed_chain(rank, size, rows, double):
    """Checks a residual, its RMS norm and the next product, without a pass for the norm, against torch's."""
    dtype = torch.float64 if double else torch.bfloat16
    generator = torch.Generator().manual_seed(8)

    def random(*shape, scale=1.0):
        return (scale * torch.randn(shape, generator=generator)).to(dtype).double()

    batch, width, columns, eps = 2, 16, 24, 1e-6
    x, residual = random(batch, rows, K * size), random(batch, rows, width)
    residual[:, 0] = 0  # a row of zeros, and one of large values
    x[:, 0] = 0
    residual[:, -1] *= 1000
    row, gamma, column = random(width, K * size), 1 + random(width, scale=0.3), random(columns * size, width)
    leaves = [one.requires_grad_() for one in (x, residual, row, gamma, column)]
    total = residual + x @ row.t()
    wanted = torch.nn.functional.rms_norm(total, (width,), gamma, eps) @ column.t()
    grad = torch.randn(wanted.shape, generator=generator, dtype=torch.float64)
    expected = torch.autograd.grad(wanted, leaves, grad)

    start, end = Shards.even(rows, size).range(rank)
    k, n = slice(rank * K, (rank + 1) * K), slice(rank * columns, (rank + 1) * columns)
    parts = [x[..., k], residual[:, start:end], row[:, k], gamma, column[n]]
    local = [part.detach().to(dtype).clone().requires_grad_() for part in parts]

    def chain(x, residual, row, gamma, column):
        added = epilogues.add_residual_squared(residual=residual)
        stream, squares = overlap_gemm.gemm_reduce_scatter(x, row, dim=1, epilogue=added)
        rstd = torch.rsqrt(squares / width + eps)
        scaled = epilogues.scale_gathered_rows(scale=rstd)
        return overlap_gemm.all_gather_gemm(stream, column * gamma, dim=1, rows=rows, epilogue=scaled)

    for call in (chain, torch.compile(chain, fullgraph=True, backend="aot_eager", dynamic=False)):
        out = call(*local)
        if double:
            torch.testing.assert_close(out, wanted[..., n])
            gradients = torch.autograd.grad(out, local, grad[..., n])
            torch.distributed.all_reduce(gradients[3])  # of gamma, which each rank uses for its own columns
            wanted_parts = (expected[0][..., k], expected[1][:, start:end], expected[2][:, k], expected[3])
            for value, exact in zip(gradients, (*wanted_parts, expected[4][n]), strict=True):
                torch.testing.assert_close(value, exact)
    if not double:
        normed = torch.nn.functional.rms_norm(total.to(dtype).double(), (width,), gamma, eps).to(dtype)
        unfused = (normed.double() @ column.t()).to(dtype)[..., n]
        errors = [(one.double() - wanted[..., n]).square().mean((0, 2)).sqrt() for one in (out, unfused)]
        # Rounded besides: each rank's part of the stream, column * gamma, and the sum before it is scaled.
        assert (errors[0] <= 4 * errors[1] + 1e-3).all(), errors


@pytest.mark.parametrize(
    ("world", "rows", "double"), [(1, 5, True), (2, 7, True), (3, 7, True), (2, 8, False)]
)
def test_an_rms_norm_without_a_pass_of_its_own(ranks, world, rows, double):
    ranks(world).run(normed_chain, rows, double)


@epilogue(outputs={"most": "row_max"})
def largest(x):
    return x, x


def rows_that_are_not_numbers(rank, size):
    """Checks that NaN stays in its row, and that a row of zeros has the sum zero."""
    x, residual = torch.ones(4, 6), torch.zeros(4, 8)
    x[1], x[2] = torch.nan, 0
    outs = overlap_gemm.gemm_all_reduce(
        x, torch.ones(8, 6), epilogue=epilogues.add_residual_squared(residual=residual)
    )
    for value in outs:
        assert value[1].isnan().all()
        assert not value[[0, 2, 3]].isnan().any()
    assert not outs[1][2]
    assert abs(torch.rsqrt(outs[1][2] / 8 + 1e-6) - 1000) < 0.1
    _, maxima = overlap_gemm.gemm_all_reduce(x, -torch.ones(8, 6), epilogue=largest())
    assert maxima[1].isnan()
    assert torch.equal(maxima[[0, 2, 3]], torch.tensor([-6.0 * size, 0, -6.0 * size]))


def test_rows_that_are_not_numbers_and_rows_of_zeros(ranks):
    ranks(2).run(rows_that_are_not_numbers)


def another_source(rank, size):
    one = epilogues.apply_silu if rank else epilogues.apply_relu
    with pytest.raises(DisagreementError, match="epilogue"):
        overlap_gemm.gemm_all_reduce(torch.ones(4, 6), torch.ones(8, 6), epilogue=one())


def test_ranks_with_other_epilogues_are_told_so(ranks):
    ranks(2).run(another_source)


def refused(rank, size):
    x, weight = torch.ones(4, 6), torch.ones(8, 6)
    op = overlap_gemm.gemm_all_reduce
    for given, error, rule in (
        ({"epilogue": epilogues.add_bias}, TypeError, "epilogue with its inputs.*got add_bias without"),
        ({"epilogue": torch.relu}, TypeError, "must be an epilogue with its inputs"),
        ({"epilogue": epilogues.add_bias(bias=3)}, TypeError, "input bias .* must be a Tensor"),
        ({"epilogue": epilogues.add_bias(bias=torch.ones(7))}, ValueError, r"must be \[8\], got \[7\]"),
        ({"epilogue": epilogues.add_residual(residual=torch.ones(8))}, ValueError, r"must be \[4, 8\]"),
        ({"epilogue": epilogues.swiglu()}, ValueError, "N=8 of this rank must be a multiple of 64"),
        (
            {"epilogue": epilogues.apply_relu(), "scale_x": torch.ones(1), "scale_w": torch.ones(1)},
            TypeError,
            "dtype with scales must be one of",
        ),
        (
            {"epilogue": epilogues.apply_relu(), "out_dtype": torch.float8_e4m3fn},
            ValueError,
            "out_dtype=torch.float8_e4m3fn is for operands with scales",
        ),
        (
            {"epilogue": epilogues.apply_silu(), "invariant": "batch"},
            ValueError,
            "invariant='batch' allows no epilogue apply_silu: only add_bias, add_residual and apply_relu",
        ),
        (
            {"epilogue": epilogues.apply_silu(), "invariant": "ranks:2"},
            ValueError,
            "invariant='ranks:2' allows no epilogue apply_silu: only add_bias, add_residual and apply_relu",
        ),
        (
            {"epilogue": epilogues.scale_gathered_rows(scale=torch.ones(4))},
            TypeError,
            "an input of kind 'gathered_rows', which only all_gather_gemm supports",
        ),
    ):
        for local in (x, x.clone().requires_grad_()):  # torch would repeat a residual along rows
            with pytest.raises(error, match=rule):
                op(local, weight, **given)
    with (
        overlap_gemm.promising(invariant="batch"),
        pytest.raises(ValueError, match="invariant='batch' allows no epilogue"),
    ):
        op(x, weight, epilogue=epilogues.apply_silu())
    with pytest.raises(ValueError, match="explain: invariant='batch' allows no apply_silu: only add_bias"):
        overlap_gemm.explain(op, x, weight, epilogue=epilogues.apply_silu(), invariant="batch")
    with pytest.raises(ValueError, match="no epilogue apply_relu: it has been proved of all_gather_gemm, "):
        overlap_gemm.gemm_all_gather(x, weight, epilogue=epilogues.apply_relu(), invariant="batch")
    with pytest.raises(ValueError, match="no epilogue apply_relu: whether its kernel or torch applies it"):
        overlap_gemm.all_gather_gemm(x, weight, epilogue=epilogues.apply_relu(), invariant="ranks")
    how = {"invariant": "batch", "k": 6 * size}
    added = op(x, weight, epilogue=epilogues.add_residual(residual=torch.full((4, 8), 0.3)), **how)
    assert torch.equal(added, op(x, weight, **how) + 0.3)
    with pytest.raises(ValueError, match=r"is for each row of this rank's x .* must be \[4\], got \[8\]"):
        overlap_gemm.all_gather_gemm(
            x, weight, epilogue=epilogues.scale_gathered_rows(scale=torch.ones(4 * size))
        )
    several = [weight, torch.ones(9, 6)]
    with pytest.raises(ValueError, match="epilogue apply_relu needs one weight, got 2"):
        overlap_gemm.all_gather_gemm(x, several, epilogue=epilogues.apply_relu())
    with pytest.raises(ValueError, match=r"needs one weight, or two of equal shape, got 2: .*\[9, 6\]"):
        overlap_gemm.all_gather_gemm(x, several, epilogue=epilogues.swiglu())
    out, gathered = overlap_gemm.all_gather_gemm(
        x, weight, epilogue=epilogues.apply_relu(), return_gathered=True
    )
    assert out.shape == (4 * size, 8)
    assert gathered.shape == (4 * size, 6)


def test_wrong_use_is_an_error_with_the_rule(ranks):
    ranks(2).run(refused)


def test_a_gradient_of_another_shape_is_an_error():
    def of_the_sum_alone(*_):
        return (torch.ones(1),)

    one = epilogue(norm, inputs=KINDS, outputs=OUTPUTS, gradient=of_the_sum_alone)
    kinds = TensorKind.of([torch.ones(1)] * 4)
    with pytest.raises(TypeError, match=r"its gradient must return a tuple, of \(the sum, residual, gamma"):
        author_gradient(one, [torch.ones(1)], [torch.ones(1)], [torch.ones(1)] * 4, kinds)


def test_the_page_names_all_that_is_there():
    text = (Path(__file__).parents[2] / "docs/epilogues.md").read_text()
    words = set(re.findall(r"`(\w+)`", text))
    internal = {"epilogue_of", "scale_rows_and_columns"}
    functions = {name for name in epilogues.__all__ if name[0].islower()}
    assert functions - internal - {"epilogue"} <= words
