"""`nn.ParallelBlock` against transformers' LlamaDecoderLayer, whose state it loads, with gradients."""

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaDecoderLayer,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

import overlap_gemm
from overlap_gemm.dispatch import shard_ops
from overlap_gemm.nn import ParallelAttention, ParallelBlock, full_state_dict, layers
from overlap_gemm.spec.sharding import Shards
from tests.support.counting import counted_ops

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, BATCH = 8, 8, 4, 2, 2


def make_llama(bias, dtype=torch.float64):
    """Returns a decoder layer, and a function that computes it for x `[B, S, hidden]`."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=12, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM, attention_bias=bias, mlp_bias=bias, attn_implementation="sdpa",
    )  # fmt: skip
    layer = LlamaDecoderLayer(config, 0).to(dtype)
    for name in ("input_layernorm", "post_attention_layernorm"):  # Llama's own compute in float32
        setattr(layer, name, torch.nn.RMSNorm(HIDDEN, eps=config.rms_norm_eps, dtype=dtype))
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.5)

    rotary = LlamaRotaryEmbedding(config)

    def call(x):
        out = layer(x, position_embeddings=positions(x))
        return out[0] if isinstance(out, tuple) else out

    def positions(x):
        return rotary(x, torch.arange(x.shape[1])[None])

    def attention(q, k, v):
        rotated = apply_rotary_pos_emb(q, k, *positions(q.transpose(1, 2)))
        return F.scaled_dot_product_attention(*rotated, v, is_causal=True, enable_gqa=True)

    return layer, call, attention


def make_block(layer, attention, bias, **options):
    dtype = layer.input_layernorm.weight.dtype
    block = ParallelBlock(
        HIDDEN, HEADS, 12, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, bias=bias, qkv_bias=bias,
        attention=attention, dtype=dtype, **options,
    )  # fmt: skip
    block.load_state_dict(layer.state_dict())
    return block


def check_block(rank, size, rows, sequence_parallel, dim, fuse, how):
    """Compares the result and the gradients of the input and of every parameter."""
    torch._dynamo.reset()
    bias = dim == 1
    layer, llama, attention = make_llama(bias)
    options = {"sequence_parallel": sequence_parallel, "sequence_dim": dim, "fuse": fuse}
    block = make_block(layer, attention, bias, rows=rows, **options)
    x = torch.randn(BATCH, rows, HIDDEN, dtype=torch.float64, requires_grad=True)
    expected, grad = llama(x), torch.randn_like(x)
    expected.backward(grad)

    def part_of(tensor):
        tensor = tensor.detach().transpose(0, 1 - dim)  # [S, B, hidden] or [B, S, hidden]
        start, stop = Shards.even(rows, size).range(rank) if sequence_parallel else (0, rows)
        return tensor.narrow(dim, start, stop - start).clone()

    call = {
        "eager": block,
        "compiled": torch.compile(block, fullgraph=True, backend="aot_eager"),
        "recomputed": lambda x: checkpoint(block, x, use_reentrant=False),
    }[how]
    with torch.no_grad():
        torch.testing.assert_close(call(part_of(x)), part_of(expected))
    local = part_of(x).requires_grad_()
    out = call(local)
    torch.testing.assert_close(out, part_of(expected))
    out.backward(part_of(grad))
    torch.testing.assert_close(local.grad, part_of(x.grad))
    owners = {name: module for name, module in block.named_modules() if hasattr(module, "shard")}
    gradients = dict(block.named_parameters())
    for name, parameter in layer.named_parameters():
        module, _, kind = name.rpartition(".")
        full = parameter.grad
        wanted = owners[module].shard(kind, full) if module in owners else full
        torch.testing.assert_close(gradients.pop(name).grad, wanted, msg=name)
    assert not gradients
    assert all(torch.equal(full, layer.state_dict()[name]) for name, full in full_state_dict(block).items())


@pytest.mark.parametrize(
    ("world", "rows", "sequence_parallel", "dim", "fuse", "how"),
    [
        (1, 5, True, 0, None, "eager"),
        (2, 7, True, 1, True, "eager"),
        (2, 6, True, 1, True, "compiled"),
        pytest.param(2, 6, True, 0, None, "compiled", marks=pytest.mark.slow),
        pytest.param(2, 6, False, 1, True, "compiled", marks=pytest.mark.slow),
        (2, 7, True, 0, True, "recomputed"),
        (4, 9, True, 0, None, "eager"),  # the last rank has no rows
        (4, 6, False, 0, None, "eager"),
        (2, 6, False, 1, True, "eager"),
    ],
)
def test_block_equals_llamas_decoder_layer(ranks, world, rows, sequence_parallel, dim, fuse, how):
    ranks(world).run(check_block, rows, sequence_parallel, dim, fuse, how)


def check_sums(rank, size, options, sums):
    """Counts the ops: each part of a block sums one gradient of its input."""
    layer, _, attention = make_llama(bias=False)
    block = make_block(layer, attention, bias=False, **options)
    x = torch.randn(6, 2, HIDDEN, dtype=torch.float64).requires_grad_()
    with counted_ops() as ops:
        block(x).sum().backward()
    assert ops == sums


@pytest.mark.parametrize(
    ("options", "sums"),
    [
        ({}, {"gemm_all_reduce": 4}),
        (
            {"sequence_parallel": True},
            {"all_gather_gemm": 4, "gemm_reduce_scatter": 4},
        ),
    ],
)
def test_each_part_of_a_block_exchanges_twice_forward_and_twice_backward(ranks, options, sums):
    ranks(2).run(check_sums, options, sums)


def check_autocast(rank, size):
    layer, llama, attention = make_llama(bias=False, dtype=torch.float32)
    block = make_block(layer, attention, bias=False, sequence_parallel=True)
    x = torch.randn(BATCH, 6, HIDDEN)
    local = x.transpose(0, 1).chunk(size)[rank]
    exact = llama(x)
    with torch.autocast("cpu", torch.bfloat16):
        out, wanted = block(local), llama(x)
    assert out.dtype == wanted.dtype == torch.float32
    wanted, exact = (one.transpose(0, 1).chunk(size)[rank] for one in (wanted, exact))
    assert (out - exact).norm() < 1.5 * (wanted - exact).norm()


def test_block_under_autocast_errs_as_much_as_the_unsharded_one(ranks):
    ranks(2).run(check_autocast)


def check_rest(rank, size):
    torch.manual_seed(1)
    block = ParallelBlock(8, 4, 6, sequence_parallel=True, dtype=torch.float64)
    torch.manual_seed(1)
    unsharded = ParallelBlock(8, 4, 6, tp_group=alone(rank, size), dtype=torch.float64)
    x = torch.randn(6, 2, 8, dtype=torch.float64)
    wanted = unsharded(x, is_causal=True)
    torch.testing.assert_close(block(x.chunk(size)[rank], is_causal=True), wanted.chunk(size)[rank])
    assert not torch.allclose(unsharded(x), wanted)
    ops = ["mlp", "mlp.down_proj", "self_attn.o_proj"]
    fusions = overlap_gemm.explain(block)
    assert sorted(one.module for one in fusions if one.why_not is None) == ops
    block = ParallelBlock(8, 4, 6, dtype=torch.float64)
    norm = "self_attn.o_proj: the norm of a result of up to 64 rows"
    assert f"{norm} is an epilogue of gemm_all_reduce" in map(str, overlap_gemm.explain(block))
    with mock.patch.object(layers, "plus_residual_normed", side_effect=ZeroDivisionError):
        block(torch.randn(65, 1, 8, dtype=torch.float64))  # more rows are normed after the op
        with pytest.raises(ZeroDivisionError):
            block(torch.randn(64, 1, 8, dtype=torch.float64))
    results, seen = [block(x)], []
    block.post_attention_layernorm.register_forward_hook(lambda *_: seen.append(1))
    results.append(block(x))
    torch.testing.assert_close(*results)
    assert seen == [1]
    assert any(str(one).startswith(f"{norm} follows") for one in overlap_gemm.explain(block))
    with pytest.raises(ValueError, match="num_heads=6 must be a multiple of num_kv_heads=3.* 2 ranks"):
        ParallelBlock(12, 6, 8, num_kv_heads=3)
    with pytest.raises(
        TypeError, match="no option skip_bias_add; those of its linears are bias, init_method"
    ):
        ParallelAttention(12, 6, skip_bias_add=True)


def infers(rank, size):
    layer, _, attention = make_llama(False)
    block = make_block(layer, attention, False, sequence_parallel=True)
    x = torch.randn(4, BATCH, HIDDEN, dtype=torch.float64)
    expected = block(x).detach()
    never = mock.Mock(side_effect=AssertionError("copied"))
    with mock.patch.object(shard_ops, "copy_to_ranks", never), torch.no_grad():
        torch.testing.assert_close(block(x), expected)


def test_inference_copies_no_parameter(ranks):
    ranks(2).run(infers)


def alone(rank, size):
    """Returns a group of this rank."""
    groups = [torch.distributed.new_group([one]) for one in range(size)]
    return groups[rank]


def test_block_drawn_from_a_seed_with_torchs_attention(ranks):
    ranks(2).run(check_rest)
