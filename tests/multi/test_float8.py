"""Linear layers in 8 bits: results and gradients are those of the quantised operands; a model trains."""

import copy
from itertools import product

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from overlap_gemm import quantize_rows
from overlap_gemm.nn import Float8, ParallelMLP, RowParallelLinear, full_state_dict
from overlap_gemm.parallel import OverlapRowwiseParallel, parallelize
from overlap_gemm.runtime.group import Group
from overlap_gemm.spec import OPS
from overlap_gemm.testing.cases import LAYOUTS, Case, Layout, operands
from tests.support.chosen import in_turn
from tests.support.models import VOCABULARY, tiny
from tests.support.ops import SHARDED

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
PRODUCTS = {**{op: LAYOUTS[op] for op in SHARDED}, "column_parallel_gemm": Layout(None, 0, 0, 1)}
BACKENDS = ("sequential", "decomposed", "torch")


def rounded(matrix, dtype=E4M3):
    """What 8 bits make of the rows of a matrix, in float64."""
    values, scale = quantize_rows(matrix, dtype)
    return values.double() * scale.double()


def exact(op, whole, ranks, types):
    """(result, gradients of x, weight and bias) of all ranks, in float64, by the rules of `float8`."""
    layout, dtype, grad_dtype, wgrad = PRODUCTS[op], *types, *((False,) * (3 - len(types)))
    cut = layout.weight  # of the product N is cut, or K: the ranks' parts are quantised each by itself

    def parts(matrix, dim):
        return [matrix] if dim is None else [layout.part(matrix, dim, r, ranks) for r in range(ranks)]

    by_columns = cut == 0
    xs = parts(whole.x, None if by_columns else 1)
    weights = parts(whole.weight, cut)
    grads = parts(whole.grad, 1 if by_columns else None)
    products = [
        rounded(x, dtype) @ rounded(w, dtype).t()
        for x, w in zip(xs * ranks if by_columns else xs, weights, strict=True)
    ]
    out = torch.cat(products, 1) if by_columns else sum(products)
    grad_xs = [
        rounded(g, grad_dtype) @ rounded(w.t(), dtype).t()
        for g, w in zip(grads if by_columns else grads * ranks, weights, strict=True)
    ]
    grad_x = sum(grad_xs) if by_columns else torch.cat(grad_xs, 1)
    grad_w = whole.grad.double().t() @ whole.x.double()
    if wgrad:  # whole columns: a rank's part of x and of the gradient has all tokens
        grad_w = rounded(whole.grad.t(), grad_dtype) @ rounded(whole.x.t(), dtype).t()
    return out + whole.bias.double(), grad_x, grad_w, whole.grad.double().sum(0)


def call(rank, ranks, op, rows, backend, types, dtype, features=(96, 192), **how):
    layout, whole = PRODUCTS[op], operands(Case(op, rows, *features, dtype))
    own = [
        layout.part(getattr(whole, name), getattr(layout, name), rank, ranks).requires_grad_()
        for name in ("x", "weight", "bias")
    ]
    product = getattr(Float8(*types), op)
    if op == "column_parallel_gemm":  # a list, as of one weight
        x, *lists = own[0], *(list(parameter.chunk(2)) for parameter in own[1:])
        out = torch.cat(product(x, *lists, None, backend), -1)
    else:
        how |= OPS[op].arguments(rows, *features, least=True)
        out = product(own[0], own[1], bias=own[2], backend=backend, **how)
    (out,) = out if isinstance(out, list) else (out,)
    found = out, *torch.autograd.grad(out, own, layout.part(whole.grad, layout.out, rank, ranks))
    cuts = layout.out, layout.x, layout.weight, layout.bias
    wanted = [
        layout.part(value, dim, rank, ranks)
        for value, dim in zip(exact(op, whole, ranks, types), cuts, strict=True)
    ]
    return found, wanted


def check(rank, ranks, op, rows, backend, types=(E4M3, E4M3), dtype=torch.float32, tolerance=2e-5, **how):
    found, wanted = call(rank, ranks, op, rows, backend, types, dtype, **how)
    size = 20.0  # of the largest elements, of which results of order one have some thousand
    for name, one, other in zip(("out", "x", "weight", "bias"), found, wanted, strict=True):
        assert one.dtype == dtype and one.shape == other.shape, name
        assert bool(((one.double() - other).abs() <= tolerance * size).all()), name


@pytest.mark.parametrize(("rows", "op", "world"), in_turn(product([24, 7, 2], PRODUCTS), [1, 2, 3]))
def test_results_and_gradients_are_those_of_the_rounded_operands(ranks, op, rows, world):
    ranks(world).run(check, op, rows, "sequential")


def any_features(rank, ranks, op):
    """No multiples of 16, and fewer than ranks."""
    for features in ((45, 77), (2, 19), (19, 2)):
        for types in ((E4M3, E4M3), (E4M3, E5M2, True)):
            check(rank, ranks, op, 7, "auto", types, features=features)


@pytest.mark.parametrize("op", PRODUCTS)
def test_features_may_be_any(ranks, op):
    ranks(3).run(any_features, op)


def other_ways(rank, ranks, op):
    for backend in BACKENDS[1:]:
        check(rank, ranks, op, 24, backend)
    check(rank, ranks, op, 24, "auto", (E4M3, E5M2))
    for rows in (24, 32):
        check(rank, ranks, op, rows, "auto", (E4M3, E5M2, True))
    check(rank, ranks, op, 24, "torch", (E4M3, E4M3), torch.bfloat16, 2.0**-6)


@pytest.mark.parametrize("op", PRODUCTS)
def test_on_every_backend_and_of_every_type(ranks, op):
    ranks(2).run(other_ways, op)


def several(rank, ranks, dim):
    """Two weights share a gather of `[b, s, h]` or `[s, b, h]`: their gradients have one scale."""
    torch.manual_seed(0)
    whole, weights = torch.randn(6, 6, 64), [torch.randn(n, 64) for n in (32, 48)]
    x = PRODUCTS["all_gather_gemm"].part(whole, dim, rank, ranks).requires_grad_()
    weights = [weight.requires_grad_() for weight in weights]
    outs = Float8().all_gather_gemm(x, weights, dim=dim, rows=6)
    assert [list(out.shape) for out in outs] == [[6, 6, 32], [6, 6, 48]]
    grads = [torch.randn_like(out) for out in outs]
    found = torch.autograd.grad(outs, [x, *weights], grads)
    joined, stacked = torch.cat(grads, -1), torch.cat(weights).detach()
    grad_x = ranks * rounded(joined) @ rounded(stacked.t()).t()
    wanted = [PRODUCTS["all_gather_gemm"].part(grad_x, dim, rank, ranks)]
    wanted += [grad.flatten(0, 1).double().t() @ whole.flatten(0, 1).double() for grad in grads]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)
    frozen = Float8().all_gather_gemm(x, [weight.detach() for weight in weights], dim=dim, rows=6)
    torch.testing.assert_close(torch.autograd.grad(frozen, x, grads)[0], found[0])
    with pytest.raises(RuntimeError, match="no gradients of its gradients"):
        out = Float8().all_gather_gemm(x, weights[0], dim=dim, rows=6)
        torch.autograd.grad(out.sum(), x, create_graph=True)


@pytest.mark.parametrize("dim", [0, 1])
def test_weights_that_share_a_gather(ranks, dim):
    ranks(2).run(several, dim)


def travels(rank, ranks):
    """Bytes that this rank sends to gather x in forward, and the result's gradient in backward."""
    sent, gather = [], Group.all_gather

    def spy(self, out, own):
        sent.append((own.dtype, own.numel() * own.itemsize))
        gather(self, out, own)

    Group.all_gather = spy
    try:
        x = torch.randn(8, 64, dtype=torch.bfloat16)
        weight = torch.randn(32, 64, dtype=torch.bfloat16)
        Float8().all_gather_gemm(x, weight, backend="torch", rows=16)
        assert sent == [(torch.uint8, 8 * 64), (torch.float32, 8 * 4)]
        sent.clear()
        out = Float8().gemm_reduce_scatter(x.requires_grad_(), weight, backend="torch")
        out.sum().backward()
        assert sent == [(torch.uint8, 4 * 32), (torch.float32, 4 * 4)]
    finally:
        Group.all_gather = gather


def test_what_is_gathered_is_8_bits_wide(ranks):
    ranks(2).run(travels)


CONFIG = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "dtype": torch.float32}


def curve(model, steps=40):
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    given = torch.Generator().manual_seed(5)
    ids = torch.randint(VOCABULARY, (4, 16), generator=given)
    losses = []
    for _ in range(steps):
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    return torch.tensor(losses)


def trains(rank, ranks, sequence_parallel, float8):
    mesh = init_device_mesh("cpu", (ranks,))
    model = tiny("llama", 2, **CONFIG, attention_bias=False, mlp_bias=False)
    half, eight = (copy.deepcopy(model) for _ in range(2))
    parallelize(half.to(torch.bfloat16), mesh, sequence_parallel=sequence_parallel)
    parallelize(eight.to(torch.bfloat16), mesh, sequence_parallel=sequence_parallel, float8=float8)
    exact, half, eight = (curve(one) for one in (model, half, eight))
    assert exact[-1] < 0.3 * exact[0]
    # Of bfloat16 the curve strays by its rounding; of 8 bits by no more than 3 % of where training began.
    assert float((half - exact).abs().max()) < 0.03 * exact[0]
    assert float((eight - half).abs().max()) < 0.03 * exact[0]
    assert not torch.equal(half, eight)


@pytest.mark.parametrize(
    ("sequence_parallel", "float8"),
    [
        pytest.param(True, Float8(), marks=pytest.mark.slow),
        pytest.param(False, Float8(), marks=pytest.mark.slow),
        (True, Float8(grad_dtype=E5M2, wgrad=True)),
    ],
    ids=str,
)
def test_a_llama_trains_as_in_bfloat16(ranks, sequence_parallel, float8):
    ranks(2).run(trains, sequence_parallel, float8)


def gradients(module):
    return [parameter.grad.clone() for parameter in module.parameters()]


def composed(rank, ranks):
    """Recomputation, autocast, compiling, copies and state dicts change nothing of a layer's result."""
    torch.manual_seed(0)
    mlp = ParallelMLP(64, 96, sequence_parallel=True, float8=Float8(), bias=True)
    x = torch.randn(4, 3, 64)

    def run(module, how=lambda module, x: module(x)):
        module.zero_grad()
        out = how(module, x)
        out.square().sum().backward()
        return out.detach(), gradients(module)

    out, wanted = run(mlp)
    recomputed, found = run(mlp, lambda module, x: checkpoint(module, x, use_reentrant=False))
    assert torch.equal(recomputed, out)
    torch.testing.assert_close(found, wanted)

    plain = ParallelMLP(64, 96, sequence_parallel=True, bias=True)
    plain.load_state_dict(full_state_dict(mlp))
    assert all(map(torch.equal, plain.parameters(), mlp.parameters()))
    assert not torch.equal(plain(x), out) and torch.allclose(plain(x), out, atol=0.1)

    twin = copy.deepcopy(mlp)
    assert torch.equal(twin(x), out) and "float8=Float8(" in repr(twin.down_proj)

    with torch.autocast("cpu", torch.bfloat16):
        half, found = run(mlp)
    assert half.dtype == torch.bfloat16 and all(g.dtype == torch.float32 for g in found)
    torch.testing.assert_close(half.float(), out, rtol=0.05, atol=0.05)

    known = ParallelMLP(64, 96, sequence_parallel=True, float8=Float8(), bias=True, rows=4 * ranks)
    known.load_state_dict(mlp.state_dict())
    compiled, found = run(known, torch.compile(lambda m, x: m(x), fullgraph=True, backend="aot_eager"))
    torch.testing.assert_close(compiled, out)
    torch.testing.assert_close(found, wanted)

    alone = torch.distributed.new_group([rank], use_local_synchronization=True)
    replica = DistributedDataParallel(copy.deepcopy(mlp), process_group=alone)
    replica.zero_grad()
    replica(x).square().sum().backward()
    torch.testing.assert_close(gradients(replica), wanted)


def test_compositions(ranks):
    ranks(2).run(composed)


def beside_fsdp(rank, ranks):
    mesh = init_device_mesh("cpu", (1, ranks), mesh_dim_names=("dp", "tp"))
    models = [tiny("llama", 2, **CONFIG) for _ in range(2)]
    for model in models:
        parallelize(model, mesh["tp"], float8=Float8())
    fully_shard(models[1], mesh=mesh["dp"])
    ids = torch.randint(VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(1))
    losses = [model(ids, labels=ids).loss for model in models]
    torch.testing.assert_close(*losses)
    losses[1].backward()


def test_under_fsdp(ranks):
    ranks(2).run(beside_fsdp)


@pytest.mark.slow
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_a_model_in_one_graph(ranks, sequence_parallel):
    ranks(2).run(whole_graph, sequence_parallel)


def whole_graph(rank, ranks, sequence_parallel):
    model = tiny("llama", 2, **CONFIG)
    parallelize(
        model, init_device_mesh("cpu", (ranks,)), float8=Float8(), sequence_parallel=sequence_parallel
    )
    ids = torch.randint(VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(1))
    results = []
    for one in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        model.zero_grad()
        out = one(ids, labels=ids, use_cache=False)
        out.loss.backward()
        results.append([out.loss, *(p.grad.to_local().clone() for p in model.parameters())])
    for eager, found in zip(*results, strict=True):
        torch.testing.assert_close(found, eager)


def any_sizes(rank, ranks):
    """Of rank 0 other features than of rank 1, all of a rank's no multiples of 16."""
    mesh = init_device_mesh("cpu", (ranks,))
    ids = torch.randint(VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(1))
    for sizes in ({"intermediate_size": 83}, {"head_dim": 4}, {"hidden_size": 72}):
        losses, norms = [], []
        for how in ({}, {"float8": Float8()}):
            model = tiny("llama", 2, **{**CONFIG, **sizes})
            parallelize(model, mesh, **how)
            loss = model(ids, labels=ids).loss
            loss.backward()
            losses.append(loss.item())
            grad = model.get_submodule("model.layers.0.mlp.down_proj").weight.grad
            norms.append(grad.full_tensor().norm().item())
        assert losses[0] != losses[1] and abs(losses[1] / losses[0] - 1) < 0.02, losses
        assert abs(norms[1] / norms[0] - 1) < 0.1, norms


def test_a_model_of_any_sizes(ranks):
    ranks(2).run(any_sizes)


def refused(rank, ranks):
    with pytest.raises(TypeError, match="weight must have x's dtype, torch.float32, got torch.bfloat16"):
        Float8().gemm_all_reduce(torch.ones(2, 16), torch.ones(16, 16, dtype=torch.bfloat16))
    with pytest.raises(TypeError, match="x must be float32, bfloat16 or float16, got torch.float64"):
        Float8().gemm_all_reduce(*torch.ones(2, 16, 16).double())
    assert Float8().gemm_all_reduce(torch.ones(2, 16), torch.ones(8, 16)).tolist() == [[32.0] * 8] * 2
    with pytest.raises(TypeError, match="Float8: grad_dtype must be one of torch.float8_e4m3fn"):
        Float8(grad_dtype=torch.bfloat16)
    with pytest.raises(TypeError, match="Float8: wgrad must be True or False, got torch.float8_e4m3fn"):
        Float8(wgrad=E4M3)


def test_what_is_refused(ranks):
    ranks(2).run(refused)


def adapted(rank, ranks):
    """The adapters' own halves, which are narrow, stay in their own type."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(
        tiny("llama", 2, **CONFIG),
        LoraConfig(r=3, target_modules=["q_proj", "down_proj"], init_lora_weights=False),
    )
    parallelize(model, init_device_mesh("cpu", (ranks,)), float8=Float8())
    ids = torch.randint(VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(1))
    model(ids, labels=ids).loss.backward()
    grads = [p.grad for name, p in model.named_parameters() if "lora" in name]
    assert grads and all(grad is not None and bool(grad.to_local().isfinite().all()) for grad in grads)


def test_adapters(ranks):
    ranks(2).run(adapted)


def styled(rank, ranks):
    torch.manual_seed(0)
    linear = nn.Linear(64, 32)
    x = torch.randn(4, 64)
    layer = RowParallelLinear.from_linear(linear, float8=Float8())
    own = PRODUCTS["gemm_all_reduce"].part(x, 1, rank, ranks)
    expected = layer(own)
    from torch.distributed.tensor.parallel import parallelize_module

    parallelize_module(linear, init_device_mesh("cpu", (ranks,)), OverlapRowwiseParallel(float8=Float8()))
    assert torch.equal(linear(own), expected)


def test_a_style_and_a_layer_are_one(ranks):
    ranks(2).run(styled)


def test_every_op_has_its_product():
    assert {*SHARDED} < set(PRODUCTS)
    assert all(callable(getattr(Float8(), op)) for op in PRODUCTS)
