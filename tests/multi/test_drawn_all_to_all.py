"""Drawn calls of `gemm_all_to_all` and `all_to_all_gemm` against the unsharded product.

    OVERLAP_GEMM_DRAWS=200 OVERLAP_GEMM_DRAW_SEED=7 pytest tests/multi/test_drawn_all_to_all.py

Results and all gradients are compared. Layouts, heads, uneven shards, lists of weights, biases, epilogues,
autocast and gradient checkpointing are drawn independently of each other.
"""

import os
import random
from contextlib import nullcontext

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import overlap_gemm
from overlap_gemm.epilogues import library
from overlap_gemm.spec.sharding import Shards

DRAWS = int(os.environ.get("OVERLAP_GEMM_DRAWS", "24"))
SEED = int(os.environ.get("OVERLAP_GEMM_DRAW_SEED", "0"))
EPILOGUES = {"relu": torch.relu, "silu": torch.nn.functional.silu}


def drawn(seed, world):
    """Returns a call that is the same on every rank."""
    dice = random.Random(seed * 8 + world)
    op = dice.choice(["gemm_all_to_all", "all_to_all_gemm"])
    chunk = dice.randint(1, 3)
    rows = chunk * world - dice.randint(0, min(chunk - 1, world))  # every rank has some
    if Shards.even(rows, world).size(world - 1) == 0:
        rows = chunk * world
    inner = dice.choice([(), (1,), (2,), (3, 2)])
    count = dice.choice([1, 1, 2, 3])
    fewer = [n for n in range(1, world) if world % n == 0] if op == "gemm_all_to_all" else []
    heads = [dice.choice([*fewer, world, world + 1, 2 * world, 2 * world + 1]) for _ in range(count)]
    size = dice.choice([1, 2, 5, 8])
    with_heads = dice.random() < 0.6
    cut = [size * n for n in heads] if with_heads else [dice.randint(world, 19) for _ in range(count)]
    exact = not with_heads or heads[0] % world == 0
    if op == "all_to_all_gemm":  # all weights have the heads of x
        depth, widths, heads = cut[0], [dice.randint(1, 9) for _ in range(count)], heads[:1]
    else:
        depth, widths = dice.choice([1, 6, 8]), cut
    epilogue = dice.choice(["none", "residual", *EPILOGUES]) if count == 1 and exact else "none"
    return {
        "op": op, "rows": rows, "inner": inner, "dim": dice.choice([0, 1]) if inner else 0, "depth": depth,
        "widths": widths, "heads": heads if with_heads else None, "epilogue": epilogue,
        "bias": dice.random() < 0.5, "strided": dice.random() < 0.5, "transposed": dice.random() < 0.3,
        "dtype": dice.choice(["float64", "float64", "float32", "autocast"]),
        "recompute": dice.choice([None, None, False, True]),
        "backend": dice.choice(["auto", "torch", "sequential", "decomposed"]),
    }  # fmt: skip


def columns_of(rank, world, columns, heads):
    """Returns a rank's columns."""
    if heads is None:
        return list(range(columns))[slice(*Shards.even(columns, world).range(rank))]
    if heads < world:
        mine = [rank * heads // world]
    else:
        mine = range(heads)[slice(*Shards.even(heads, world).range(rank))]
    size = columns // heads
    return [head * size + i for head in mine for i in range(size)]


def leaf(tensor, strided=False, transposed=False):
    """Returns a leaf of the values: every second element of other rows, or a transposed matrix."""
    copy = tensor.detach().clone()
    if strided:
        copy = torch.stack([copy, copy], -1)[..., 0]
    if transposed:
        copy = copy.t().contiguous().t()
    return copy.requires_grad_()


def is_unsharded_call(rank, size, seed):
    case = drawn(seed, size)
    torch.manual_seed(seed)
    op, rows, inner, dim, heads = (case[name] for name in ("op", "rows", "inner", "dim", "heads"))
    scatters = op == "gemm_all_to_all"
    dtype = torch.float64 if case["dtype"] == "float64" else torch.float32
    close = {"rtol": 0.1, "atol": 0.1 * case["depth"] ** 0.5} if case["dtype"] == "autocast" else {}
    x = torch.randn(rows, *inner, case["depth"], dtype=dtype, requires_grad=True)
    weights = [torch.randn(n, case["depth"], dtype=dtype, requires_grad=True) for n in case["widths"]]
    biases = [torch.randn(n, dtype=dtype, requires_grad=True) for n in case["widths"]]
    residual = torch.randn(rows, *inner, case["widths"][0], dtype=dtype, requires_grad=True)
    factors = [[torch.randn(rows, *inner, n, dtype=dtype) for n in case["widths"]] for _ in range(size)]

    def part(tensor, of, number):
        """Returns the part of a full result that rank `of` gets of weight `number`."""
        if not scatters:
            return tensor[slice(*Shards.even(rows, size).range(of))]
        each = None if heads is None else heads[number]
        return tensor[..., columns_of(of, size, case["widths"][number], each)]

    products = [
        x @ weight.t() + (bias if case["bias"] else 0) for weight, bias in zip(weights, biases, strict=True)
    ]
    if case["epilogue"] == "residual":
        products[0] = products[0] + residual
    elif case["epilogue"] != "none":
        products[0] = EPILOGUES[case["epilogue"]](products[0])
    sum(
        (part(product * factors[of][number], of, number)).sum()
        for number, product in enumerate(products)
        for of in range(size)
    ).backward()

    place = slice(*Shards.even(rows, size).range(rank))
    of_x = (place,) if scatters else (..., columns_of(rank, size, case["depth"], heads and heads[0]))
    own_x = leaf(x[of_x].movedim(0, dim), case["strided"])
    own_weights = [leaf(weight, transposed=case["transposed"]) for weight in weights]
    own_biases, own_residual = [leaf(bias) for bias in biases], leaf(part(residual, rank, 0).movedim(0, dim))
    options = {"backend": case["backend"], "dim": dim}
    if scatters:
        options["rows"] = rows
    if heads is not None:
        options["heads"] = heads if scatters else heads[0]

    def call(local, extra, *parameters):
        how = dict(options)
        if case["bias"]:
            how["bias"] = list(parameters[len(weights) :])
        if case["epilogue"] == "residual":
            how["epilogue"] = library.add_residual(residual=extra)
        elif case["epilogue"] != "none":
            how["epilogue"] = getattr(library, f"apply_{case['epilogue']}")()
        outs = getattr(overlap_gemm, op)(local, list(parameters[: len(weights)]), **how)
        return tuple(outs) if isinstance(outs, (list, tuple)) else (outs,)

    arguments = own_x, own_residual, *own_weights, *own_biases
    autocast = case["dtype"] == "autocast"
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        if case["recompute"] is None:
            outs = call(*arguments)
        else:
            outs = checkpoint(call, *arguments, use_reentrant=case["recompute"])
    outs = [out.movedim(dim, 0) for out in outs]
    for number, (out, product) in enumerate(zip(outs, products, strict=True)):
        torch.testing.assert_close(out.to(dtype), part(product.detach(), rank, number), **close)
    sum((out * part(factors[rank][number], rank, number)).sum() for number, out in enumerate(outs)).backward()
    torch.testing.assert_close(own_x.grad.movedim(dim, 0), x.grad[of_x], **close)
    for mine, full in zip(own_weights, weights, strict=True):
        torch.testing.assert_close(mine.grad, full.grad, **close)
    if case["bias"]:
        for mine, full in zip(own_biases, biases, strict=True):
            torch.testing.assert_close(mine.grad, full.grad, **close)
    if case["epilogue"] == "residual":
        torch.testing.assert_close(own_residual.grad.movedim(dim, 0), part(residual.grad, rank, 0), **close)


@pytest.mark.parametrize("seed", range(SEED, SEED + DRAWS))
def test_a_drawn_call_is_the_unsharded_one(ranks, seed):
    world = (2, 3, 4)[seed % 3]
    try:
        ranks(world).run(is_unsharded_call, seed)
    except AssertionError as error:
        raise AssertionError(f"{drawn(seed, world)}: {error}") from None
