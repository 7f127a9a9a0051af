"""Functions of complete rows (`then=`): what is refused, and their values on tensors."""

import pytest
import torch

from overlap_gemm import epilogue
from overlap_gemm.backends.epilogues import Applying


def squares(x, shift):
    return x, x * x + shift


def normed(y, square, gamma):
    return y * square * gamma


def normed_of_elements(y, square, shift, gamma):
    return y * square * gamma + shift


def normed_of_two(y, square, largest):
    return y * square * largest


def unused(y, square):
    return y * square


def no_value(y, square, gamma):
    return y, gamma


def scaled_normed(y, square, gamma):
    scale = square + square
    return y * scale * gamma, scale


def of_columns(y, square, gamma):
    return y * gamma, square * gamma


def of_elements(y, square, gamma):
    return y * gamma, square + y


def of_numbers(y, square, gamma):
    return y * square * gamma, 1.0


SCALED = {"square": "row_mean", "scale": "rows"}
OF_ROWS = {"inputs": {"shift": "element", "gamma": "columns"}, "outputs": {"square": "row_mean"}}


@pytest.mark.parametrize(
    ("then", "declared", "kind", "rule"),
    [
        (normed, {"outputs": {"square": "element"}}, ValueError, "outputs for each row .row_sum, row_mean"),
        (normed, {"outputs": {}}, ValueError, r"then= takes complete sums, .* got outputs=\(\)"),
        (normed, {"result": "e4m3", "block": 128}, ValueError, "block must be 128, .* without outputs"),
        (normed, {"outputs": SCALED}, TypeError, "must return .result, scale., that is 2 values"),
        (of_columns, {"outputs": SCALED}, TypeError, "of kind 'rows', must be .*; got one for each column"),
        (of_elements, {"outputs": SCALED}, TypeError, "of kind 'rows', must be .*; got one for each column"),
        (of_numbers, {"outputs": SCALED}, TypeError, "of kind 'rows', must be .*; got float"),
        (normed_of_elements, {}, ValueError, "shift is for each element: let the first function take it"),
        (normed_of_two, {}, TypeError, r"they take \(sum, shift\) and \(value, square, largest\)"),
        (unused, {}, TypeError, "one takes every input"),
        (no_value, {}, TypeError, r"must return .result., that is 1 values as declared; got 2"),
        (lambda y, square, gamma: y * square * gamma, {}, TypeError, "define functions with def"),
    ],
    ids=lambda one: getattr(one, "__name__", None),
)
def test_functions_of_rows_that_do_not_fit_are_refused_with_the_rule(then, declared, kind, rule):
    with pytest.raises(kind, match=rule):
        epilogue(squares, **(OF_ROWS | declared), then=then)


def test_values_of_rows_need_a_function_of_rows():
    with pytest.raises(ValueError, match=r"without it use row_sum, .* got outputs=.square, scale."):
        epilogue(squares, **(OF_ROWS | {"outputs": SCALED}))


def of_its_row(y, square):
    return square


def as_stored(y, square):
    return y


@pytest.mark.parametrize("then", [of_its_row, as_stored])
def test_a_function_of_rows_may_return_what_it_takes(then):
    @epilogue(outputs={"square": "row_sum"}, then=then)
    def squared(x):
        return x, x * x

    x = torch.randn(3, 5)
    result, stored = Applying(squared, (), x.dtype).on_sums(x, [])
    assert result.data_ptr() != stored.data_ptr()
    expected = x if then is as_stored else x.square().sum(-1, keepdim=True).expand(3, 5)
    torch.testing.assert_close(result, expected)


def its_row_twice(y, square):
    return y, square, square


def test_values_of_rows_are_tensors_of_their_own():
    @epilogue(outputs={"square": "row_sum", "one": "rows", "other": "rows"}, then=its_row_twice)
    def squared(x):
        return x, x * x

    x = torch.randn(3, 5)
    results = Applying(squared, (), x.dtype).on_sums(x, [])
    assert len({one.data_ptr() for one in results}) == 4
    assert torch.equal(results[1], results[2])


def test_a_function_of_rows_takes_stored_values_and_is_part_of_the_digest(monkeypatch):
    one = epilogue(squares, **OF_ROWS, then=normed)
    assert one.returned == (("y", "element"),)
    x, shift, gamma = torch.rand(3, 4), torch.rand(3, 4), torch.rand(4)
    result, stored = one.on_tensors(x, (shift, gamma), torch.bfloat16)
    square = (x * x + shift).mean(1, keepdim=True)
    torch.testing.assert_close(result, x.bfloat16().float() * square * gamma, rtol=1e-6, atol=0)
    assert torch.equal(stored, x)
    more = epilogue(squares, **(OF_ROWS | {"outputs": SCALED}), then=scaled_normed)
    assert more.returned == (("scale", "rows"), ("y", "element")) and more.digest != one.digest
    twice, scale, stored = more.on_tensors(x, (shift, gamma), torch.bfloat16)
    torch.testing.assert_close((twice, scale), (2 * result, 2 * square[:, 0]), rtol=1e-6, atol=0)
    with monkeypatch.context() as patch:
        patch.setattr(normed, "__defaults__", (1.0,))
        assert epilogue(squares, **OF_ROWS, then=normed).digest != one.digest
