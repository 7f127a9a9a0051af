"""Epilogues as users write them from docs/epilogues.md: in every op, in layers and in parallelized models."""

import copy
import pickle

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import overlap_gemm
from overlap_gemm import epilogue
from overlap_gemm.epilogues import add_residual, maximum, relu, silu, swiglu
from overlap_gemm.nn import ParallelBlock, ParallelMLP
from overlap_gemm.parallel import parallelize
from overlap_gemm.spec import OPS
from overlap_gemm.testing.cases import LAYOUTS
from tests.support.applied import assert_applied
from tests.support.models import VOCABULARY, tiny


@epilogue(inputs={"gamma": "columns", "residual": "element"}, outputs={"largest": "row_max"})
def gated(x, gamma, residual):
    y = silu(x) * gamma + residual
    return y, abs(y)


def gated_by_torch(x, residual, gamma):
    y = torch.nn.functional.silu(x) * gamma + residual
    return y, y.abs().amax(-1)


@epilogue(pairs=True)
def reglu(gate, up):
    return relu(gate) * up


@epilogue(pairs=True)
def leaky(gate, up):
    return maximum(gate, 0.125 * gate) * up


def every_op(rank, size, op):
    def ours(residual, gamma):
        return gated(gamma=gamma, residual=residual)

    assert_applied(op, (9, 24, 20), rank, size, ours, gated_by_torch)


@pytest.mark.parametrize("op", [name for name in LAYOUTS if OPS[name].weight is not None])
def test_every_op_applies_an_epilogue_of_a_users_own(ranks, op):
    ranks(2).run(every_op, op)


def in_an_mlp(rank, size, sequence_parallel):
    torch.manual_seed(0)
    part = LAYOUTS["gemm_all_reduce"].part  # of any tensor
    gate, up, down = (
        torch.nn.Linear(*widths, bias=False, dtype=torch.float64) for widths in ((16, 24), (16, 24), (24, 16))
    )
    x, grad = torch.randn(2, 4 * size, 3, 16, dtype=torch.float64).unbind()
    x.requires_grad_()
    wanted = down(torch.nn.functional.leaky_relu(gate(x), 0.125) * up(x))
    weights = gate.weight, up.weight, down.weight
    of_x, *expected = torch.autograd.grad(wanted, (x, *weights), grad)
    rows = part(torch.arange(4 * size), 0 if sequence_parallel else None, rank, size)
    for fuse in (None, True, False):
        options = {"sequence_parallel": sequence_parallel, "activation": leaky, "fuse": fuse}
        made = ParallelMLP.from_linears(gate, up, down, **options)
        for mlp in (made, copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
            local = x.detach()[rows].clone().requires_grad_()
            call = torch.compile(mlp, fullgraph=True, backend="aot_eager") if mlp is made else mlp
            out = call(local)
            torch.testing.assert_close(out, wanted[rows])
            out.backward(grad[rows])
            torch.testing.assert_close(local.grad, of_x[rows])
            layers = mlp.gate_proj, mlp.up_proj, mlp.down_proj
            for layer, exact, dim in zip(layers, expected, (0, 0, 1), strict=True):
                torch.testing.assert_close(layer.weight.grad, part(exact, dim, rank, size))
            with torch.no_grad():
                torch.testing.assert_close(mlp(local), wanted[rows])


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["replicated", "sharded"])
def test_a_gated_mlp_applies_an_epilogue_of_a_users_own(ranks, sequence_parallel):
    ranks(2).run(in_an_mlp, sequence_parallel)


def in_a_model(rank, size, family, sequence_parallel):
    plain = tiny(family, size, num_hidden_layers=2, hidden_act="relu")
    ids = torch.randint(VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(1))
    wanted = plain(ids, labels=ids)
    wanted.loss.backward()
    mesh = init_device_mesh("cpu", (size,))
    untouched = copy.deepcopy(plain)
    with pytest.raises(ValueError, match="activation=leaky: .*layers.0.mlp: leaky does not compute"):
        parallelize(untouched, mesh, activation=leaky)
    assert all(type(one) is torch.nn.Parameter for one in untouched.parameters())
    for fuse in (True, None, False):
        model = parallelize(
            copy.deepcopy(plain), mesh, activation=reglu, fuse=fuse, sequence_parallel=sequence_parallel
        )
        model.zero_grad()
        with torch.no_grad():
            torch.testing.assert_close(model(ids).logits, wanted.logits, rtol=3e-5, atol=3e-6)
        out = model(ids, labels=ids)
        out.loss.backward()
        torch.testing.assert_close(out.loss, wanted.loss)
        of_ids, exact = (one.get_input_embeddings().weight.grad for one in (model, plain))
        torch.testing.assert_close(of_ids.full_tensor(), exact, rtol=3e-5, atol=3e-6)
        text = str(overlap_gemm.explain(model))
        is_fused = sequence_parallel and fuse is not False
        assert ("mlp: reglu of gate and up is an epilogue" in text) == is_fused


@pytest.mark.parametrize(("family", "sequence_parallel"), [("llama", True), ("phi3", False)])
def test_a_parallelized_model_applies_an_epilogue_of_a_users_own(ranks, family, sequence_parallel):
    ranks(2).run(in_a_model, family, sequence_parallel)


@pytest.mark.parametrize("layer", [ParallelMLP, ParallelBlock])
def test_other_epilogues_are_no_activations(layer):
    sizes = (16, 24) if layer is ParallelMLP else (16, 2, 24)
    for wrong, rule in ((add_residual, "pairs=False"), ("relu", "one of silu, gelu, gelu_tanh, got 'relu'")):
        with pytest.raises(ValueError, match=rule):
            layer(*sizes, activation=wrong)
    assert layer(*sizes, activation=swiglu) is not None
