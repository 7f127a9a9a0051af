"""The ParallelStyle classes on a Hugging Face Llama: same logits, same gradients as the unsharded model."""

import copy
import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import PrepareModuleInput, SequenceParallel, parallelize_module
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from overlap_gemm.parallel import OverlapColwiseParallel, OverlapRowwiseParallel, OverlapSharedGather
from tests.support.chosen import in_turn
from tests.support.counting import counted_ops


def llama_plan(sequence_parallel: bool, backend: str) -> dict[str, object]:
    colwise = OverlapColwiseParallel(backend=backend)
    if not sequence_parallel:
        return {
            "model.layers.*.self_attn.[qkv]_proj": colwise,
            "model.layers.*.self_attn.o_proj": OverlapRowwiseParallel(backend=backend),
            "model.layers.*.mlp.gate_proj": colwise,
            "model.layers.*.mlp.up_proj": colwise,
            "model.layers.*.mlp.down_proj": OverlapRowwiseParallel(backend=backend),
            "lm_head": OverlapColwiseParallel(output_layouts=Replicate(), backend=backend),
        }
    rowwise = OverlapRowwiseParallel(output_layouts=Shard(1), backend=backend)
    return {
        "model.layers.0": relayout(Replicate(), Shard(1)),
        "model.layers.*.input_layernorm": SequenceParallel(use_local_output=True),
        "model.layers.*.self_attn": OverlapSharedGather("q_proj", "k_proj", "v_proj", backend=backend),
        "model.layers.*.self_attn.[qkv]_proj": colwise,
        "model.layers.*.self_attn.o_proj": rowwise,
        "model.layers.*.post_attention_layernorm": SequenceParallel(use_local_output=True),
        "model.layers.*.mlp": OverlapSharedGather("gate_proj", "up_proj", backend=backend),
        "model.layers.*.mlp.gate_proj": colwise,
        "model.layers.*.mlp.up_proj": colwise,
        "model.layers.*.mlp.down_proj": rowwise,
        "model.norm": relayout(Shard(1), Replicate()),
        "lm_head": OverlapColwiseParallel(output_layouts=Replicate(), backend=backend),
    }


def relayout(found: Placement, desired: Placement) -> PrepareModuleInput:
    return PrepareModuleInput(input_layouts=(found,), desired_input_layouts=(desired,), use_local_output=True)


def llama_matches(rank, size, sequence_parallel, batch, bias, backend):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96, hidden_size=48, intermediate_size=80, num_hidden_layers=2,
        num_attention_heads=12, num_key_value_heads=6, max_position_embeddings=64,
        attention_bias=bias, mlp_bias=bias,
    )  # fmt: skip
    whole = LlamaForCausalLM(config).double()
    for name, parameter in whole.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    sharded = copy.deepcopy(whole)
    mesh = init_device_mesh("cpu", (size,))
    parallelize_module(sharded, mesh, llama_plan(sequence_parallel, backend))
    tokens = torch.randint(96, (batch, 12))
    expected, got = whole(tokens).logits, sharded(tokens).logits
    torch.testing.assert_close(got, expected)
    grad = torch.randn_like(expected)
    expected.backward(grad)
    got.backward(grad)
    parameters = dict(sharded.named_parameters())
    for name, parameter in whole.named_parameters():
        found = parameters[name].grad
        found = found.full_tensor() if isinstance(found, DTensor) else found
        torch.testing.assert_close(found, parameter.grad, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(
    ("world", "sequence_parallel", "batch", "bias", "backend"),
    in_turn(itertools.product([3, 1], [False, True], [1, 2]), [False, True], ["sequential", "decomposed"]),
)
def test_llama(ranks, world, sequence_parallel, batch, bias, backend):
    ranks(world).run(llama_matches, sequence_parallel, batch, bias, backend)


def dtensors_are_whole(rank, size):
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (size,))
    column, row, x = nn.Linear(6, 7), nn.Linear(7, 5), torch.randn(5, 2, 6)
    expected = column(x), row(column(x))
    styled = nn.ModuleDict({"column": copy.deepcopy(column), "row": copy.deepcopy(row)})
    plan = {
        "column": OverlapColwiseParallel(use_local_output=False),
        "row": OverlapRowwiseParallel(output_layouts=Shard(0), use_local_output=False),
    }
    parallelize_module(styled, mesh, plan)
    hidden = styled["column"](x)
    out = styled["row"](hidden)
    for found, whole in zip((hidden, out), expected, strict=True):
        assert found.shape == whole.shape
        torch.testing.assert_close(found.full_tensor(), whole)


@pytest.mark.parametrize("world", [2, 3])
def test_uneven_shards_make_whole_dtensors(ranks, world):
    ranks(world).run(dtensors_are_whole)


class Skips(nn.Module):
    """Gathers for its projection, but calls it only on request; and reads its input's values."""

    def __init__(self):
        super().__init__()
        self.proj, self.other = nn.Linear(6, 8), nn.Linear(6, 8)

    def forward(self, hidden_states, call):
        return (self.proj(hidden_states) if call else None), hidden_states


def shared_gather_is_for_its_own_call(rank, size):
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (size,))
    module = Skips()
    weight, bias = (p.detach().chunk(size)[rank] for p in module.proj.parameters())
    parallelize_module(module.proj, mesh, OverlapColwiseParallel())
    parallelize_module(module, mesh, OverlapSharedGather("proj"))
    x = torch.randn(2, 3 * size, 6)
    out, seen = module(x.chunk(size, 1)[rank], call=True)
    torch.testing.assert_close(out, x @ weight.t() + bias)
    assert seen.shape == x.shape
    assert seen.isnan().all(), "the stand-in holds values that somebody could mistake for the input"
    module(hidden_states=x.chunk(size, 1)[rank], call=False)
    # The product that the call left unused is not this input's.
    torch.testing.assert_close(module.proj(x + 1), (x + 1) @ weight.t() + bias)
    parallelize_module(module, mesh, OverlapSharedGather("other"))
    with pytest.raises(TypeError, match="other must be styled OverlapColwiseParallel"):
        module(x.chunk(size, 1)[rank], call=True)


def test_shared_gather_is_for_its_own_call(ranks):
    ranks(2).run(shared_gather_is_for_its_own_call)


class Twice(nn.Module):
    """Calls its projection several times, with the input it got or with another."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(6, 8)

    def forward(self, x, *factors):
        return tuple(self.proj(x if factor == 1 else x * factor) for factor in factors)


def hooks_see_the_input(rank, size):
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (size,))
    module, seen = Twice(), []
    weight, bias = (p.detach().chunk(size)[rank] for p in module.proj.parameters())
    parallelize_module(module.proj, mesh, OverlapColwiseParallel())
    parallelize_module(module, mesh, OverlapSharedGather("proj", argument="x"))
    x = torch.randn(2, 3 * size, 6)
    own = x.chunk(size, 1)[rank].clone().requires_grad_()
    for factors in ((1, 1), (2,)):
        with pytest.raises(RuntimeError, match=r"Linear\(.*\) shares the gather"):
            module(own, *factors)
    torch.testing.assert_close(module.proj(x), x @ weight.t() + bias)  # the calls that failed left nothing
    module.register_forward_pre_hook(lambda _module, args: (args[0] * 3, *args[1:]))
    module.register_full_backward_hook(lambda _module, found, _out: seen.append(found[0]))
    (out,) = module(own, 1)
    torch.testing.assert_close(out, 3 * x @ weight.t() + bias)
    out.sum().backward()
    torch.testing.assert_close(3 * seen[0], own.grad)


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x


def replicated_input_is_shared(rank, size):
    """Counts sums: one is shared; a child with another input, or called again, has one of its own."""
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (size,))
    plain = Twice().double()
    sharded = copy.deepcopy(plain)
    parallelize_module(sharded.proj, mesh, OverlapColwiseParallel(use_local_output=False))
    shared = OverlapSharedGather("proj", input_layouts=Replicate(), argument="x")
    parallelize_module(sharded, mesh, shared)
    for factors, sums in (((1,), 1), ((1, 1), 2), ((2,), 1), ((3, 1), 2)):
        grads = []
        for module in (plain, sharded):
            x = torch.linspace(-1, 1, 2 * 5 * 6, dtype=torch.float64).view(2, 5, 6).requires_grad_()
            with counted_ops() as ops:
                outs = module(x, *factors)
                full = [out.full_tensor() if isinstance(out, DTensor) else out for out in outs]
                sum(out.square().sum() for out in full).backward()
            weight = module.proj.weight.grad
            grads.append((x.grad, weight.full_tensor() if isinstance(weight, DTensor) else weight))
            module.zero_grad()
        torch.testing.assert_close(grads[1], grads[0])
        assert ops == {"gemm_all_reduce": sums}
    with torch.no_grad():
        torch.testing.assert_close(sharded(x, 1)[0].full_tensor(), plain(x, 1)[0])
    for forward in (lambda x: 2 * x, Doubled().forward):  # by someone who wraps forwards
        sharded.proj.forward = forward
        torch.testing.assert_close(sharded(x, 1)[0], 2 * x)


def test_a_replicated_input_is_shared(ranks):
    ranks(2).run(replicated_input_is_shared)


class Frozen(Twice):
    @torch.no_grad()
    def forward(self, *args):
        return super().forward(*args)


def without_gradients(rank, size, how):
    mesh, module = init_device_mesh("cpu", (size,)), Frozen() if how == "frozen" else Twice()
    parallelize_module(module.proj, mesh, OverlapColwiseParallel())
    parallelize_module(module, mesh, OverlapSharedGather("proj", argument="x"))
    weight, bias = (p.to_local() for p in module.proj.parameters())
    x = torch.randn(2, 3, 6)
    if how == "recomputed":
        module.proj = checkpoint_wrapper(module.proj, CheckpointImpl.REENTRANT)
    with pytest.raises(RuntimeError, match=r"Linear\(.*\) is called without gradients"):
        module(x, 1)
    with torch.no_grad():
        (out,) = module(x, 1)
    gathered = torch.empty(size * 2, 3, 6)
    dist.all_gather_into_tensor(gathered, x)
    gathered = torch.cat(gathered.chunk(size), 1)
    torch.testing.assert_close(out, gathered @ weight.t() + bias)


@pytest.mark.parametrize("how", ["recomputed", "frozen"])
def test_a_child_of_a_shared_gather_without_gradients(ranks, how):
    """The gather has them, and nobody would take the child's."""
    ranks(2).run(without_gradients, how)


def without_gradients_of_replicated_input(rank, size, how):
    torch.manual_seed(0)
    mesh, module = init_device_mesh("cpu", (size,)), Frozen() if how == "frozen" else Twice()
    weight, bias = (p.detach().chunk(size)[rank] for p in module.proj.parameters())
    full = module.proj.weight.detach().clone()
    parallelize_module(module.proj, mesh, OverlapColwiseParallel())
    shared = OverlapSharedGather("proj", input_layouts=Replicate(), argument="x")
    parallelize_module(module, mesh, shared)
    if how == "recomputed":
        module.proj = checkpoint_wrapper(module.proj, CheckpointImpl.REENTRANT)
    x = torch.randn(2, 3, 6).requires_grad_()
    (out,) = module(x, 1)
    torch.testing.assert_close(out, x @ weight.t() + bias)
    assert out.requires_grad == (how == "recomputed")
    if how == "recomputed":
        out.sum().backward()
        torch.testing.assert_close(x.grad, full.sum(0).expand_as(x))


@pytest.mark.parametrize("how", ["recomputed", "frozen"])
def test_a_child_without_gradients_multiplies_a_replicated_input_itself(ranks, how):
    ranks(2).run(without_gradients_of_replicated_input, how)


class With(nn.Module):
    """Calls its projection as the caller of the module says."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(6, 12)

    def forward(self, mask, x, call):
        return call(self.proj, x)


def in_place(proj, x):
    return proj(x.add_(1))


def recomputed(proj, x):
    """Saves one tensor, which has the shape and dtype of x on two ranks."""
    return checkpoint(lambda x: proj(x).sin(), x, use_reentrant=False)


def with_gradients(proj, x):
    with torch.enable_grad():
        return proj(x)


def in_bfloat16(proj, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return proj(x)


def calls_of_replicated_input(rank, size):
    """Compares children that are called in another way than the module around them, whose product differs."""
    torch.manual_seed(0)
    mesh, plain = init_device_mesh("cpu", (size,)), With()
    sharded = copy.deepcopy(plain)
    parallelize_module(sharded.proj, mesh, OverlapColwiseParallel(use_local_output=False))
    parallelize_module(sharded, mesh, OverlapSharedGather("proj", input_layouts=Replicate(), argument="x"))
    calls = [in_place, recomputed, with_gradients, in_bfloat16]
    for call, records in itertools.product(calls, [True, False]):
        results = []
        for module in (plain, sharded):
            module.zero_grad()
            leaf = torch.linspace(-1, 1, 5 * 6).view(5, 6).requires_grad_(records)
            with torch.set_grad_enabled(records):
                out = module(None, x=leaf * 1, call=call)
            assert out.requires_grad == (records or call is with_gradients)
            if out.requires_grad:
                out.sum().backward()
            tensors = [out, module.proj.weight.grad, module.proj.bias.grad, leaf.grad]
            tensors = [t for t in tensors if t is not None]
            results.append([t.full_tensor() if isinstance(t, DTensor) else t for t in tensors])
        assert results[0][0].dtype == (torch.bfloat16 if call is in_bfloat16 else torch.float32)
        close = {"rtol": 0.02, "atol": 0.01} if call is in_bfloat16 else {}  # each rank rounds its part
        message = lambda text, of=call: f"{of.__name__}: {text}"  # noqa: E731
        torch.testing.assert_close(results[1], results[0], msg=message, **close)


def test_a_child_of_a_replicated_input_is_called_in_another_way(ranks):
    ranks(2).run(calls_of_replicated_input)


def calls_of_a_shared_gather(rank, size):
    mesh, module = init_device_mesh("cpu", (size,)), With()
    parallelize_module(module.proj, mesh, OverlapColwiseParallel())
    parallelize_module(module, mesh, OverlapSharedGather("proj", input_layouts=Shard(0), argument="x"))
    x = torch.randn(3, 6)
    with torch.no_grad(), pytest.raises(RuntimeError, match="is called with gradients"):
        module(None, x=x, call=with_gradients)
    with pytest.raises(RuntimeError, match=r"is called for a product in torch.bfloat16"):
        module(None, x=x, call=in_bfloat16)
    module.requires_grad_(False)
    with torch.no_grad():
        out = module(None, x=x, call=with_gradients)
    torch.testing.assert_close(out, module(None, x=x, call=lambda proj, x: proj(x)))


def test_a_child_of_a_shared_gather_is_called_in_another_way(ranks):
    ranks(2).run(calls_of_a_shared_gather)


def calls_within_calls(rank, size, layout):
    torch.manual_seed(0)
    mesh, plain = init_device_mesh("cpu", (size,)), With()
    sharded, x = copy.deepcopy(plain), torch.randn(3 * size, 6)
    parallelize_module(sharded.proj, mesh, OverlapColwiseParallel())
    parallelize_module(sharded, mesh, OverlapSharedGather("proj", input_layouts=layout, argument="x"))
    outs = []
    for module, rows in ((plain, x), (sharded, x if layout == Replicate() else x.chunk(size)[rank])):

        def twice(proj, x, module=module, rows=rows):
            inner = module(None, x=3 * rows, call=lambda proj, x: proj(x))
            return proj(x) + 2 * inner

        outs.append(module(None, x=rows, call=twice))
    torch.testing.assert_close(outs[1], outs[0].chunk(size, -1)[rank])


@pytest.mark.parametrize("layout", [Replicate(), Shard(0)], ids=str)
def test_calls_of_a_shared_gather_within_a_call(ranks, layout):
    ranks(2).run(calls_within_calls, layout)


def test_hooks_see_the_input_of_a_shared_gather(ranks):
    ranks(2).run(hooks_see_the_input)


def layouts_that_are_not_served(rank, size):
    for style in (
        lambda: OverlapColwiseParallel(input_layouts=Shard(0), output_layouts=Replicate()),
        lambda: OverlapRowwiseParallel(input_layouts=Replicate()),
        lambda: OverlapSharedGather("q", input_layouts=Partial()),
    ):
        with pytest.raises(ValueError, match="Overlap(Colwise|Rowwise|Shared).* got"):
            style()
    with pytest.raises(TypeError, match=r"need an nn.Linear, got LayerNorm"):
        parallelize_module(nn.LayerNorm(3), init_device_mesh("cpu", (size,)), OverlapRowwiseParallel())


def test_layouts_that_are_not_served(ranks):
    ranks(1).run(layouts_that_are_not_served)


class LowRank(nn.Module):
    """Of a weight [n, k]: W + 2 BA. As DTensors W, B and A lie in any way, and so does what comes out."""

    def __init__(self, n, k, mesh=None, layouts=()):
        super().__init__()
        torch.manual_seed(5)
        factors = torch.randn(2, k), torch.randn(n, 2)
        if mesh is not None:
            factors = [distribute_tensor(f, mesh, [at]) for f, at in zip(factors, layouts, strict=True)]
        self.a, self.b = (nn.Parameter(factor) for factor in factors)

    def forward(self, weight):
        return self.b @ self.a * 2 + weight


def parametrized_weights(rank, size, which, layouts):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 8, bias=False), nn.Linear(8, 4, bias=False))
    sharded, x, mesh = copy.deepcopy(plain), torch.randn(5, 6), init_device_mesh("cpu", (size,))
    parallelize_module(sharded, mesh, {"0": OverlapColwiseParallel(), "1": OverlapRowwiseParallel()})
    n, k = plain[which].weight.shape
    parametrize.register_parametrization(plain[which], "weight", LowRank(n, k))
    parametrize.register_parametrization(sharded[which], "weight", LowRank(n, k, mesh, layouts))
    for model in (plain, sharded):
        out = model(x)
        out.square().sum().backward()
        torch.testing.assert_close(out, plain(x))
    for (name, parameter), found in zip(plain.named_parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(
            found.grad.full_tensor(), parameter.grad, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize(
    ("layouts", "which"),
    in_turn([(pair,) for pair in itertools.product([Shard(0), Shard(1), Replicate()], repeat=2)], [0, 1]),
    ids=str,
)
@pytest.mark.filterwarnings("ignore:CPU process group does not support alltoall")
def test_parametrized_weights(ranks, which, layouts):
    """What a parametrization returns need not lie as the weight that it was given."""
    ranks(2).run(parametrized_weights, which, layouts)
