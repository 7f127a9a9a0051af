"""The layers equal the nn.Linear they are cut from: from a seed, from_linear, state dicts, gradients."""

import copy
from itertools import product

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import overlap_gemm
from overlap_gemm import all_gather_gemm
from overlap_gemm.epilogues import add_residual
from overlap_gemm.nn import ColumnParallelLinear, Float8, ParallelMLP, RowParallelLinear, full_state_dict
from overlap_gemm.spec.sharding import Shards
from tests.support.chosen import in_turn

DOUBLE = {"dtype": torch.float64}
SIZES = (10, 14)  # input, output: divisible by 2, not by 3 or 4


def mine(whole: torch.Tensor, dim: int, rank: int, size: int) -> torch.Tensor:
    start, stop = Shards.even(whole.shape[dim], size).range(rank)
    return whole.narrow(dim, start, stop - start)


def check_layer(rank, size, kind, backend, bias, sequence_dim, options, built_from):
    torch.manual_seed(7)
    linear = nn.Linear(*SIZES, bias=bias, **DOUBLE)
    sequence_parallel = sequence_dim is not None
    options = {
        **options, "bias": bias, "backend": backend, "sequence_parallel": sequence_parallel,
        "sequence_dim": sequence_dim or 0,
    }  # fmt: skip
    if built_from == "seed":
        torch.manual_seed(7)
        layer = kind(*SIZES, **options, **DOUBLE)
    else:
        options.pop("bias")
        layer = kind.from_linear(linear, **options)

    x = torch.randn(7, 5, SIZES[0], **DOUBLE).requires_grad_()
    column = kind is ColumnParallelLinear
    if column and sequence_parallel:
        layer.rows = x.shape[sequence_dim]
    if column:
        out_dim = None if options.get("gather_output") else 2
        in_dim = sequence_dim
    else:
        out_dim = sequence_dim
        in_dim = 2 if options.get("input_is_parallel", True) else None
    own = (x.detach() if in_dim is None else mine(x.detach(), in_dim, rank, size)).clone().requires_grad_()
    expected, got = linear(x), layer(own)
    if options.get("skip_bias_add"):
        got, left = got
        wanted = linear.bias if not column or left is None else mine(linear.bias, 0, rank, size)
        torch.testing.assert_close(left, wanted)
        expected = x @ linear.weight.t()
    grad = torch.randn_like(expected)
    torch.testing.assert_close(got, expected if out_dim is None else mine(expected, out_dim, rank, size))
    expected.backward(grad)
    got.backward(grad if out_dim is None else mine(grad, out_dim, rank, size))
    torch.testing.assert_close(own.grad, x.grad if in_dim is None else mine(x.grad, in_dim, rank, size))
    weight_dim = 0 if column else 1
    torch.testing.assert_close(layer.weight.grad, mine(linear.weight.grad, weight_dim, rank, size))
    if bias and not options.get("skip_bias_add"):
        wanted = mine(linear.bias.grad, 0, rank, size) if column else linear.bias.grad
        torch.testing.assert_close(layer.bias.grad, wanted)


VARIANTS = {
    "column": (ColumnParallelLinear, {}, (None, 0, 1)),
    "column-gather": (ColumnParallelLinear, {"gather_output": True}, (None,)),
    "column-skip": (ColumnParallelLinear, {"skip_bias_add": True}, (0,)),
    "row": (RowParallelLinear, {}, (None, 0, 1)),
    "row-whole-input": (RowParallelLinear, {"input_is_parallel": False}, (None, 0)),
    "row-skip": (RowParallelLinear, {"skip_bias_add": True}, (0,)),
}


@pytest.mark.parametrize(
    ("variant", "sequence_dim", "built_from", "world", "bias"),
    in_turn(
        [
            (name, dim, built_from)
            for name, (_, _, dims) in VARIANTS.items()
            for dim in dims
            for built_from in ("seed", "linear")
        ],
        [4, 2, 1],
        [True, False],
    ),
)
def test_layer_equals_its_linear(ranks, variant, sequence_dim, built_from, bias, world):
    kind, options, _ = VARIANTS[variant]
    ranks(world).run(check_layer, kind, "decomposed", bias, sequence_dim, options, built_from)


def check_mlp(rank, size, sequence_parallel, bias, backend):
    torch.manual_seed(3)
    gate, up, down = (nn.Linear(a, b, bias=bias, **DOUBLE) for a, b in ((6, 11), (6, 11), (11, 6)))
    torch.manual_seed(3)
    options = {"sequence_parallel": sequence_parallel, "backend": backend}
    seeded = ParallelMLP(6, 11, bias=bias, rows=9, **options, **DOUBLE)
    cut = ParallelMLP.from_linears(gate, up, down, rows="exchange", **options)
    x = torch.randn(9, 2, 6, **DOUBLE).requires_grad_()
    expected = down(nn.functional.silu(gate(x)) * up(x))
    grad = torch.randn_like(expected)
    expected.backward(grad)

    def own(whole):
        return mine(whole, 0, rank, size) if sequence_parallel else whole

    for mlp in (seeded, cut):
        part = own(x.detach()).clone().requires_grad_()
        out = mlp(part)
        torch.testing.assert_close(out, own(expected))
        out.backward(own(grad))
        torch.testing.assert_close(part.grad, own(x.grad))
        for layer, linear, dim in ((mlp.gate_proj, gate, 0), (mlp.up_proj, up, 0), (mlp.down_proj, down, 1)):
            torch.testing.assert_close(layer.weight.grad, mine(linear.weight.grad, dim, rank, size))


@pytest.mark.parametrize(
    ("sequence_parallel", "bias", "world", "backend"),
    in_turn(product([True, False], [True, False], [1, 2, 3]), ["sequential", "decomposed", "torch"]),
)
def test_mlp(ranks, sequence_parallel, bias, backend, world):
    ranks(world).run(check_mlp, sequence_parallel, bias, backend)


def check_fused_mlp(rank, size, sequence_parallel, fuse, activation, how):
    """Compares forward and gradients, with a residual, with an MLP of `nn.Linear`."""
    torch.manual_seed(3)
    gate, up, down = (nn.Linear(a, b, **DOUBLE) for a, b in ((6, 11), (6, 11), (11, 6)))
    options = {"sequence_parallel": sequence_parallel, "fuse": fuse, "activation": activation}
    mlp = ParallelMLP.from_linears(gate, up, down, rows=9, **options)
    x, residual = (torch.randn(9, 2, 6, **DOUBLE).requires_grad_() for _ in range(2))
    activate = {"silu": nn.functional.silu, "gelu": nn.functional.gelu}.get(activation) or (
        lambda gate: nn.functional.gelu(gate, approximate="tanh")
    )
    expected = residual + down(activate(gate(x)) * up(x))
    grad = torch.randn_like(expected)
    expected.backward(grad)

    def part_of(tensor):
        return mine(tensor, 0, rank, size) if sequence_parallel else tensor

    parts = [part_of(one.detach()).clone().requires_grad_() for one in (x, residual)]
    call = {
        "eager": mlp,
        "compiled": torch.compile(mlp, fullgraph=True, backend="aot_eager"),
        "recomputed": lambda *operands: checkpoint(mlp, *operands, use_reentrant=False),
        "reentrant": lambda *operands: checkpoint(mlp, *operands, use_reentrant=True),
    }[how]
    with torch.no_grad():
        torch.testing.assert_close(call(*parts), part_of(expected))
    out = call(*parts)
    torch.testing.assert_close(out, part_of(expected))
    out.backward(part_of(grad))
    for part, full in zip(parts, (x, residual), strict=True):
        torch.testing.assert_close(part.grad, part_of(full.grad))
    for layer, linear, dim in ((mlp.gate_proj, gate, 0), (mlp.up_proj, up, 0), (mlp.down_proj, down, 1)):
        torch.testing.assert_close(layer.weight.grad, mine(linear.weight.grad, dim, rank, size))
    state = full_state_dict(mlp)
    for name, linear in (("gate_proj", gate), ("up_proj", up), ("down_proj", down)):
        assert torch.equal(state[f"{name}.weight"], linear.weight)


FUSED = [
    (1, True, True, "gelu_tanh", "eager"),
    *((3, True, fuse, "silu", "eager") for fuse in (None, True, False)),
    (2, False, True, "gelu", "eager"),
    *((2, True, fuse, "silu", how) for fuse in (None, True) for how in ("compiled", "recomputed")),
    (2, True, True, "gelu", "reentrant"),
]


@pytest.mark.parametrize(("world", "sequence_parallel", "fuse", "activation", "how"), FUSED)
def test_mlp_with_epilogues(ranks, world, sequence_parallel, fuse, activation, how):
    ranks(world).run(check_fused_mlp, sequence_parallel, fuse, activation, how)


def check_types_of_residuals(rank, size):
    """Checks that a residual of a wider type than the products under autocast stays as wide."""
    mlp = ParallelMLP(6, 8, sequence_parallel=True, fuse=True)
    x, residual = torch.randn(2, 6), torch.randn(2, 6) * 1e-3 + 1
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        plain, out = mlp(x), mlp(x, residual)
    assert plain.dtype == torch.bfloat16
    assert out.dtype == torch.float32
    assert torch.equal(out, residual + plain)
    low = residual.bfloat16()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert torch.equal(mlp(x, low), low + plain)


def test_residuals_of_other_types_than_the_product(ranks):
    ranks(2).run(check_types_of_residuals)


def check_explanations(rank, size):
    model = nn.Sequential(
        ParallelMLP(6, 8, sequence_parallel=True),
        ParallelMLP(6, 8),
        ParallelMLP(6, 8, sequence_parallel=True, float8=Float8()),
        ParallelMLP(6, 8, sequence_parallel=True, invariant="batch"),
        ParallelMLP(6, 8, sequence_parallel=True, fuse=False),
        ParallelMLP(6, 8, sequence_parallel=True, invariant="batch", float8=Float8()),
    )
    lines = [str(one) for one in overlap_gemm.explain(model)]
    local = "without sequence parallelism gate and up are local products"
    gating, added = "swiglu of gate and up", "a residual"
    fused = [
        f"{gating} is an epilogue of all_gather_gemm",
        f"{added} is an epilogue of gemm_reduce_scatter",
    ]
    assert lines == [
        f"0: {fused[0]}",
        f"0.down_proj: {fused[1]}",
        f"1: {gating} follows all_gather_gemm: {local}",
        f"1.down_proj: {added} is an epilogue of gemm_all_reduce",
        f"2: {fused[0]}",
        f"2.down_proj: {fused[1]}",
        f"3: {gating} follows all_gather_gemm: invariant='batch': only add_bias, add_residual and apply_relu "
        "round once, with and without gradients",
        f"3.down_proj: {fused[1]}",
        f"4: {gating} follows all_gather_gemm: fuse=False",
        f"4.down_proj: {added} follows gemm_reduce_scatter: fuse=False",
        f"5: {gating} follows all_gather_gemm: invariant='batch': only add_bias, add_residual and apply_relu "
        "round once, with and without gradients",
        f"5.down_proj: {added} follows gemm_reduce_scatter: invariant='batch': with scales, it follows the "
        "op where inputs need gradients",
    ]
    with overlap_gemm.promising(invariant="batch"):  # which compiled layers do not see
        row = str(next(model[1].down_proj.fusions("row")))
        fused_row = str(next(RowParallelLinear(8, 6, fuse=True).fusions("row")))
    assert row == (
        "row: a residual follows gemm_all_reduce: invariant='batch': it is no argument of the layer, and "
        "compiled layers do not see others"
    )
    assert fused_row == "row: a residual is an epilogue of gemm_all_reduce"
    for name in ("2", "3", "5"):  # and they run
        mlp = model.get_submodule(name)
        x = torch.randn(3, 6)
        with torch.no_grad():
            torch.testing.assert_close(mlp(x, x), x + mlp(x))
    x, weight = torch.ones(4, 6), torch.ones(8, 6)
    choice = overlap_gemm.explain(
        "gemm_all_reduce", x, weight, epilogue=add_residual(residual=torch.ones(4, 8))
    )
    assert "epilogue add_residual: after the op, torch's products have no epilogue" in str(choice)


def test_explain_says_what_is_an_epilogue_and_why_not(ranks):
    ranks(2).run(check_explanations)


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 11), nn.LayerNorm(11), nn.Linear(11, 5)


class Sharded(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = ColumnParallelLinear(6, 11), nn.LayerNorm(11)
        self.second = RowParallelLinear(11, 5)


def check_state_dicts(rank, size):
    torch.manual_seed(1)
    whole = Whole()
    torch.manual_seed(100 + rank)  # other weights on every rank, so that nothing agrees unless it was loaded
    sharded = Sharded()
    sharded.load_state_dict(whole.state_dict())
    torch.testing.assert_close(sharded.first.weight, mine(whole.first.weight, 0, rank, size))
    torch.testing.assert_close(sharded.first.bias, mine(whole.first.bias, 0, rank, size))
    torch.testing.assert_close(sharded.second.weight, mine(whole.second.weight, 1, rank, size))
    torch.testing.assert_close(sharded.second.bias, whole.second.bias)

    back = Whole()
    back.load_state_dict(full_state_dict(sharded))
    assert all(torch.equal(a, b) for a, b in zip(back.parameters(), whole.parameters(), strict=True))

    again = Sharded()
    again.load_state_dict(sharded.state_dict())
    twin = copy.deepcopy(sharded)
    twin.load_state_dict(whole.state_dict())
    for other in (again, twin):
        assert all(torch.equal(a, b) for a, b in zip(other.parameters(), sharded.parameters(), strict=True))


def check_wrapped_state_dicts(rank, size):
    """What others do to modules renames parameters, shards them further, or puts others in their place."""
    torch.manual_seed(1)
    whole = Whole().state_dict()

    def loaded():
        sharded = Sharded()
        sharded.load_state_dict(whole)
        return sharded

    recomputed, compiled, again = loaded(), loaded(), loaded()
    recomputed.first = checkpoint_wrapper(recomputed.first)
    compiled.second = torch.compile(compiled.second)
    fully_shard(again, mesh=init_device_mesh("cpu", (1, size), mesh_dim_names=("dp", "tp"))["dp"])
    for wrapped in (recomputed, compiled, again):
        found = {key.replace("_orig_mod.", ""): value for key, value in full_state_dict(wrapped).items()}
        assert list(found) == list(whole)
        assert all(torch.equal(found[key], value) for key, value in whole.items())
        assert not any(value.requires_grad for value in found.values())

    parametrized = loaded()
    nn.utils.parametrizations.weight_norm(parametrized.first)
    with pytest.raises(ValueError, match=r"does not hold shards \[\d, 6\] of tensor-parallel layers"):
        full_state_dict(parametrized)


def test_state_dicts_of_wrapped_layers(ranks):
    ranks(2).run(check_wrapped_state_dicts)


class Adapted(nn.Module):
    """A low-rank adapter around a layer."""

    def __init__(self, layer, rank, size):
        super().__init__()
        self.layer = layer
        self.low = nn.Parameter(torch.full((11, 6), 0.3, **DOUBLE).chunk(size)[rank])

    def forward(self, x):
        return self.layer(x) + all_gather_gemm(x, self.low, rows=9)


def check_adapted_mlp(rank, size, which, how):
    """Both projections of an MLP are called as modules wherever somebody counts on that."""
    torch.manual_seed(3)
    linears = [nn.Linear(a, b, bias=False, **DOUBLE) for a, b in ((6, 11), (6, 11), (11, 6))]
    mlp = ParallelMLP.from_linears(*linears, sequence_parallel=True, rows=9)
    x = torch.randn(9, 2, 6, **DOUBLE)
    gate, up, down = linears
    products = {"gate_proj": gate(x), "up_proj": up(x)}
    layer = getattr(mlp, which)
    if how == "wrapped":
        setattr(mlp, which, Adapted(layer, rank, size))
        products[which] = products[which] + 0.3 * x.sum(-1, keepdim=True)
    elif how == "replaced":
        plain = layer.forward
        layer.forward = lambda x: 2 * plain(x)
        products[which] = 2 * products[which]
    else:
        layer.register_forward_hook(lambda _module, _given, out: 2 * out)
        products[which] = 2 * products[which]
    expected = down(nn.functional.silu(products["gate_proj"]) * products["up_proj"])
    torch.testing.assert_close(mlp(mine(x, 0, rank, size)), mine(expected, 0, rank, size))


@pytest.mark.parametrize("how", ["hooked", "replaced", "wrapped"])
@pytest.mark.parametrize("which", ["gate_proj", "up_proj"])
def test_adapted_mlp(ranks, which, how):
    ranks(2).run(check_adapted_mlp, which, how)


def check_mixed_mlp(rank, size, sequence_parallel, which, options):
    """Compares an MLP whose projections have different options, or only one bias, with calls of each."""
    torch.manual_seed(3)
    gate, up, down = (nn.Linear(a, b) for a, b in ((16, 32), (16, 32), (32, 16)))
    mlp = ParallelMLP.from_linears(gate, up, down, sequence_parallel=sequence_parallel)
    if options.pop("bias", True):
        linear = {"gate_proj": gate, "up_proj": up}[which]
        how = {"sequence_parallel": sequence_parallel, **options}
        setattr(mlp, which, ColumnParallelLinear.from_linear(linear, **how))
    else:
        getattr(mlp, which).bias = None
    x = torch.randn(3 * size, 2, 16)
    x = (mine(x, 0, rank, size) if sequence_parallel else x).requires_grad_()
    wanted = mlp.down_proj(nn.functional.silu(mlp.gate_proj(x)) * mlp.up_proj(x))
    result = mlp(x)
    torch.testing.assert_close(result, wanted)
    grads = [torch.autograd.grad(out.sin().sum(), (x, *mlp.parameters())) for out in (result, wanted)]
    torch.testing.assert_close(*grads)
    (gating,) = mlp.fusions("mlp")
    assert gating.why_not == "gate or up has hooks or is wrapped, or their options or biases differ"


@pytest.mark.parametrize(
    ("sequence_parallel", "which", "options"),
    in_turn(
        product([False, True], ["gate_proj", "up_proj"]),
        [{"float8": Float8()}, {"bias": False}, {"invariant": "batch"}],
    ),
)
def test_mlp_of_projections_with_other_options_calls_each(ranks, sequence_parallel, which, options):
    ranks(2).run(check_mixed_mlp, sequence_parallel, which, options)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_state_dicts_round_trip(ranks, world):
    ranks(world).run(check_state_dicts)


def check_constructors(rank, size):
    def init(weight):
        nn.init.normal_(weight, std=0.02)

    torch.manual_seed(5)
    linear = nn.Linear(6, 8)
    init(linear.weight)
    torch.manual_seed(5)
    layer = ColumnParallelLinear(6, 8, init_method=init)
    assert torch.equal(layer.weight, mine(linear.weight, 0, rank, size))
    assert torch.equal(layer.bias, torch.zeros(layer.bias.shape))
    with pytest.raises(ValueError, match="exclude each other"):
        ColumnParallelLinear(6, 8, gather_output=True, sequence_parallel=True)
    gate, up, down = nn.Linear(6, 8), nn.Linear(6, 8, bias=False), nn.Linear(8, 6)
    for pair in ((gate, up), (up, gate)):
        with pytest.raises(ValueError, match="gate and up must both have a bias, or none"):
            ParallelMLP.from_linears(*pair, down, sequence_parallel=True)


def test_init_method_sees_the_whole_weight_and_arguments_are_checked(ranks):
    ranks(2).run(check_constructors)
