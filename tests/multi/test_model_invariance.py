"""`parallelize(..., invariant=...)`: logits and training whose bits depend on neither batch nor ranks."""

import re
from itertools import product
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from overlap_gemm import nn as layers
from overlap_gemm import promising
from overlap_gemm.api import functional
from overlap_gemm.parallel import full_state_dict, parallelize
from tests.support.chosen import in_turn
from tests.support.invariance import differing, same_bits, wholes
from tests.support.models import tiny
from tests.support.scripts import run_program

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
}


def model_of(ranks, dtype, state=None, **options):
    model = tiny("llama", 1, dtype=dtype, **SIZES)
    if state is not None:
        model.load_state_dict(state)
    return parallelize(model, DeviceMesh("cpu", ranks), **options)


def tokens():
    """As many as make whole vectors of torch's SiLU, which rounds elements after those otherwise."""
    return torch.randint(96, (4, 12), generator=torch.Generator().manual_seed(3))


def trains(rank, size, dtype, sequence_parallel, invariant):
    """The state after three steps on all ranks, and logits of it on all ranks and on one."""
    how = {"invariant": invariant, "sequence_parallel": sequence_parallel}
    model = model_of(list(range(size)), dtype, **how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    batch = tokens()
    for _ in range(3):
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        logits = model(input_ids=batch).logits
        state = {name: value.clone() for name, value in full_state_dict(model).items()}
        alone = model_of([rank], dtype, state, **how)
        one_by_one = torch.cat([alone(input_ids=row[None]).logits for row in batch])
    return state, logits, one_by_one


@pytest.mark.parametrize(
    ("dtype", "sequence_parallel"), in_turn([torch.float32, torch.bfloat16], [True, False]), ids=str
)
def test_a_model_trained_on_two_ranks_has_equal_logits_on_one(dtype, sequence_parallel, ranks):
    for _, logits, alone in ranks(2).run(trains, dtype, sequence_parallel, "ranks"):
        assert same_bits(logits, alone)


def test_without_the_promise_logits_on_one_rank_are_others(ranks):
    assert not any(
        same_bits(logits, alone) for _, logits, alone in ranks(2).run(trains, torch.float32, True, None)
    )


def test_training_is_the_same_on_one_two_and_four_ranks(ranks):
    states = [ranks(size).run(trains, torch.float32, False, "ranks")[0][0] for size in (1, 2, 4)]
    for other in states[1:]:
        assert [name for name in other if not same_bits(states[0][name], other[name])] == []


EXAMPLE = Path(__file__).parents[2] / "examples" / "same_bits.py"


@pytest.mark.parametrize(("invariant", "number"), [("ranks", "0"), ("none", r"[1-9]\d*")])
def test_the_example_shows_equal_bits_and_others_without_the_promise(invariant, number, ranks):
    printed, nothing = ranks(2).run(run_program, str(EXAMPLE), ["--invariant", invariant])
    assert len(re.findall(rf": {number} logits differ;", printed)) == 2, printed
    assert ("differ by at most 0\n" in printed) == (invariant == "ranks")
    assert not nothing


def layers_with(rank, size, float8):
    """A layer's own argument reaches its op, forward and backward."""
    torch.manual_seed(0)
    x = torch.randn(size * 6, 32)
    mlp = layers.ParallelMLP(
        32, 64, invariant="batch", partials="float32", sequence_parallel=True, float8=float8
    )
    own = x[rank * 6 : rank * 6 + 6].clone().requires_grad_()
    out = mlp(own)
    out.sum().backward()
    one = x[rank * 6 : rank * 6 + 1].clone().requires_grad_()
    first = mlp(one)
    first.sum().backward()
    return same_bits(out[:1].detach(), first.detach()) and same_bits(own.grad[:1], one.grad)


@pytest.mark.parametrize("float8", [None, layers.Float8()], ids=["plain", "float8"])
def test_layers_promise_what_they_are_told(float8, ranks):
    assert all(ranks(2).run(layers_with, float8))


def adds_residuals(rank, size, sequence_parallel, backend):
    """Compares rows of a layer with a residual: eager, compiled, without gradients, and alone."""
    torch.manual_seed(0)
    x, residual, grad = (torch.randn(8, width).bfloat16() for width in (64, 24, 24))
    layer = layers.RowParallelLinear(
        64, 24, invariant="ranks", sequence_parallel=sequence_parallel, backend=backend, dtype=torch.bfloat16
    )
    x = x.chunk(size, 1)[rank].contiguous()
    if sequence_parallel:
        residual, grad = (full.chunk(size)[rank].contiguous() for full in (residual, grad))
    leaves = [x.requires_grad_(), residual.requires_grad_()]
    out = layer(x, residual)
    of_x, of_residual, of_weight = torch.autograd.grad(out, [*leaves, layer.weight], grad)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")(x, residual)
    with torch.no_grad():
        plain = layer(x, residual)
        rows = x[:size] if sequence_parallel else x[:1]  # rank 0 has the first row
        first = layer(rows, residual[:1])
    assert same_bits(out, compiled)
    assert same_bits(out, plain)
    if rank == 0:
        assert same_bits(plain[:1], first)
    dim = 0 if sequence_parallel else None
    return [
        ("out", out.detach(), dim),
        ("residual", of_residual, dim),
        ("x", of_x, 1),
        ("weight", of_weight, 1),
    ]


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_layers_that_add_a_residual_have_the_same_bits_on_one_two_and_four_ranks(sequence_parallel, ranks):
    results = [
        wholes(ranks(size).run(adds_residuals, sequence_parallel, backend))
        for size, backend in ((1, "sequential"), (2, "decomposed"), (4, "auto"))
    ]
    for other in results[1:]:
        assert differing(results[0], other) == {}


def passes_residuals(rank, size):
    """Checks what an op of a layer gets, by the layer's promise, that of a block, and `fuse`."""
    x, residual = torch.randn(2, 8), torch.randn(2, 8)
    names = []
    for invariant, of_block, fuse in product(["batch", None], ["batch", None], [None, True, False]):
        layer = layers.RowParallelLinear(8 * size, 8, invariant=invariant, fuse=fuse)
        called = mock.Mock(wraps=functional.call_with_epilogue)
        with mock.patch.object(functional, "call_with_epilogue", called), promising(invariant=of_block):
            layer(x, residual)
        applied = called.call_args and called.call_args.args[-1]
        names.append(applied and (applied.epilogue.name, applied.otherwise is None))
        if invariant is not None or fuse is False:  # a norm follows the sum
            norm = torch.nn.RMSNorm(8, eps=1e-6)
            normed, stream = layer(x, residual, norm)
            assert torch.equal(stream, layer(x, residual)) and torch.equal(normed, norm(stream))
    always, chosen, follows = ("add_residual", True), ("add_residual", False), None
    assert names[:6] == [always, always, follows] * 2
    assert names[6:] == [follows, always, follows, chosen, always, follows]


def test_a_promise_of_a_layer_leaves_no_choice_how_a_residual_is_added(ranks):
    ranks(2).run(passes_residuals)


def test_layers_refuse_what_no_op_could_promise(ranks):
    with pytest.raises(ValueError, match="invariant='batch' and backend='torch'"):
        layers.RowParallelLinear(8, 8, invariant="batch", backend="torch")
