"""`nn.UlyssesAttention` against the unsharded attention, with gradients, alone and alongside TP."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from overlap_gemm.nn import UlyssesAttention, full_state_dict
from tests.support.chosen import in_turn

SIZE = 6


def linears(hidden, heads, kv_heads, bias):
    torch.manual_seed(0)
    kinds = (
        (hidden, heads * SIZE),
        (hidden, kv_heads * SIZE),
        (hidden, kv_heads * SIZE),
        (heads * SIZE, hidden),
    )
    return nn.ModuleList(nn.Linear(*kind, bias=bias, dtype=torch.float64) for kind in kinds)


def attended(x, layers):
    """Computes attention of x [S, B, hidden] in one process."""
    q, k, v = (layer(x).unflatten(-1, (-1, SIZE)).permute(1, 2, 0, 3) for layer in layers[:3])
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return layers[3](out.permute(2, 0, 1, 3).flatten(2))


def check(rank, size, tp_rank, tp, heads, kv_heads, sequence, dim, **options):
    """Checks output and gradients of one rank, of as many sequence ranks as `size`."""
    hidden, batch = 10, 2
    unsharded = linears(hidden, heads, kv_heads, bias=True)
    layer = UlyssesAttention.from_linears(
        *unsharded, heads, sequence_dim=dim, rows=sequence, backend="sequential", **options
    )
    x = torch.randn(sequence, batch, hidden, dtype=torch.float64, requires_grad=True)
    factor = torch.randn(sequence, batch, hidden, dtype=torch.float64)
    wanted = attended(x, unsharded)
    (wanted * factor).sum().backward()

    chunk = -(-sequence // size)
    place = slice(rank * chunk, (rank + 1) * chunk)
    local_x = x.detach()[place].requires_grad_()
    out = layer(local_x.transpose(0, dim), is_causal=True).transpose(0, dim)
    torch.testing.assert_close(out, wanted.detach()[place])
    (out * factor[place]).sum().backward()
    torch.testing.assert_close(local_x.grad, x.grad[place])
    for name, sharded, full in zip("qkvo", layer.children(), unsharded, strict=True):
        weight, bias = full.weight.grad, full.bias.grad
        if tp > 1:
            weight = weight.chunk(tp, 1 if name == "o" else 0)[tp_rank]
            bias = bias if name == "o" else bias.chunk(tp)[tp_rank]
        torch.testing.assert_close(sharded.weight.grad, weight)
        torch.testing.assert_close(sharded.bias.grad, bias)
    return layer


def alone(rank, size, *how):
    check(rank, size, 0, 1, *how)


@pytest.mark.parametrize(
    ("world", "heads", "kv_heads", "sequence", "dim"),
    in_turn([(2, 4, 2, 8), (4, 8, 2, 11), (4, 4, 1, 8), (4, 10, 5, 8), (1, 2, 1, 3)], [0, 1]),
)
def test_attention_equals_the_unsharded_one_with_its_gradients(ranks, world, heads, kv_heads, sequence, dim):
    """Heads are even; replicated; of one key; 2, 2, 1 and 0 groups a rank, the rank without heads last."""
    ranks(world).run(alone, heads, kv_heads, sequence, dim)


def alongside_tp(rank, size, heads, kv_heads):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("sp", "tp"))
    layer = check(
        mesh["sp"].get_local_rank(), 2, mesh["tp"].get_local_rank(), 2, heads, kv_heads, 7, 1,
        group=mesh["sp"], tp_group=mesh["tp"],
    )  # fmt: skip
    unsharded = linears(10, heads, kv_heads, bias=True)
    for (name, value), full in zip(full_state_dict(layer).items(), unsharded.parameters(), strict=True):
        torch.testing.assert_close(value, full.detach(), msg=name)


@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 4), (4, 2)])
def test_heads_are_divided_over_a_second_mesh_dimension(ranks, heads, kv_heads):
    ranks(4).run(alongside_tp, heads, kv_heads)


def constructed(rank, size):
    torch.manual_seed(rank)
    layer = UlyssesAttention(
        12, 4, num_kv_heads=2, bias=True, init_method=lambda weight: weight.normal_(), dtype=torch.float64,
        attention=lambda q, k, v, scale: q * scale + v.repeat_interleave(2, 1),
    )  # fmt: skip
    assert not layer.q_proj.bias.any()
    torch.manual_seed(5)
    x = torch.randn(4, 1, 12, dtype=torch.float64)
    local = x[2 * rank : 2 * rank + 2]
    values = layer.v_proj(x).unflatten(-1, (2, 3)).repeat_interleave(2, -2).flatten(-2)
    wanted = layer.o_proj(layer.q_proj(x) * 3 + values)
    torch.testing.assert_close(layer(local, scale=3), wanted[2 * rank : 2 * rank + 2])
    assert "num_heads=4, num_kv_heads=2, head_dim=3, ranks=2" in repr(layer)
    layer.k_proj.register_forward_hook(lambda *_: None)
    with pytest.raises(TypeError, match="k_proj must have no hooks"):
        layer(local, scale=3)
    return layer.q_proj.weight


def test_weights_are_those_of_the_first_rank_and_attention_is_a_function(ranks):
    one, other = ranks(2).run(constructed)
    assert torch.equal(one, other)


def refused(rank, size):
    with pytest.raises(ValueError, match="num_heads=4 must be a multiple of num_kv_heads=3"):
        UlyssesAttention(12, 4, num_kv_heads=3)
    with pytest.raises(ValueError, match="1 key and value heads are fewer than the 2 ranks.* the 3 heads"):
        UlyssesAttention(12, 3, num_kv_heads=1)
    with pytest.raises(ValueError, match="sequence_dim must be 0 .* got 2"):
        UlyssesAttention(12, 4, sequence_dim=2)
    with pytest.raises(ValueError, match="must all have a bias, or none"):
        UlyssesAttention.from_linears(nn.Linear(4, 4), *[nn.Linear(4, 4, bias=False)] * 3, 2)


def test_heads_that_do_not_fit_are_named(ranks):
    ranks(2).run(refused)
