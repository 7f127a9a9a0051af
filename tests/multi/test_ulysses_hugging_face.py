"""`attn_implementation="ulysses"`: models with split sequences against unsharded ones, in float64."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from overlap_gemm import DisagreementError
from overlap_gemm.parallel import parallelize
from overlap_gemm.runtime import agree
from tests.support.chosen import in_turn
from tests.support.models import FAMILIES, MORE_FAMILIES, VOCABULARY, tiny

ulysses = pytest.importorskip("overlap_gemm.integrations.hugging_face_attention", exc_type=ImportError)

BATCH = 2


def models(family, name, **options):
    """Returns the unsharded model and one with the same weights that calls the attention `name`."""
    return tiny(family, 2, **options), tiny(family, 2, attn_implementation=name, **options)


def batch_of(sequence, padding=None):
    torch.manual_seed(1)
    ids = torch.randint(VOCABULARY, (BATCH, sequence))
    batch = {"input_ids": ids, "labels": ids.masked_fill(torch.rand(ids.shape) < 0.2, -100)}
    if padding is not None:
        mask = torch.ones_like(ids)
        mask[1, slice(None, 3) if padding == "left" else slice(-3, None)] = 0
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        batch |= {"attention_mask": mask, "position_ids": positions}
        batch["labels"] = batch["labels"].masked_fill(mask == 0, -100)
    return batch


def check(rank, size, plain, model, batch, group=None, local_of=lambda value: value):
    """Compares logits, loss and every gradient, of ranks over which the sequence is split."""
    wanted = plain(**batch, use_cache=False)
    wanted.loss.backward()
    out = model(**ulysses.shard_inputs(batch, group), use_cache=False)
    chunk = -(-batch["input_ids"].shape[1] // size)
    place = slice(rank * chunk, (rank + 1) * chunk)
    is_token = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))[:, place].bool()
    torch.testing.assert_close(out.logits[is_token], wanted.logits[:, place][is_token])
    out.loss.backward()
    process_group = group.get_group() if group is not None else None
    loss = out.loss.detach().clone()
    dist.all_reduce(loss, group=process_group)
    torch.testing.assert_close(loss, wanted.loss.detach())
    for (name, parameter), full in zip(model.named_parameters(), plain.parameters(), strict=True):
        gradient = parameter.grad
        part = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        dist.all_reduce(part, group=process_group)
        full_gradient = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        torch.testing.assert_close(full_gradient, full.grad, msg=lambda text, name=name: f"{name}: {text}")


def installed(group=None):
    ulysses.uninstall()
    ulysses.install(group)


def equals(rank, size, family, sequence, padding, options):
    installed()
    plain, model = models(family, "ulysses", **options)
    check(rank, size, plain, model, batch_of(sequence, padding))


@pytest.mark.parametrize(
    ("world", "heads", "kv_heads", "sequence", "padding"),
    [
        (2, 4, 2, 8, None),
        (2, 6, 1, 7, "left"),
        (4, 8, 2, 11, "right"),
        pytest.param(4, 8, 4, 12, None, marks=pytest.mark.slow),
        (4, 10, 5, 11, "left"),
    ],
    ids=lambda n: str(n),
)
def test_llama_equals_the_unsharded_one_with_every_gradient(ranks, world, heads, kv_heads, sequence, padding):
    """Heads are even; of one key; replicated; one group a rank; 2, 2, 1 and 0 groups. Tokens are uneven."""
    options = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "hidden_size": 120}
    ranks(world).run(equals, "llama", sequence, padding, options)


@pytest.mark.parametrize("padding", [None, "right"])
def test_llama_whose_tokens_see_later_ones_equals_the_unsharded_one(ranks, padding):
    ranks(2).run(equals, "llama", 8, padding, {"is_causal": False})


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=[] if family in ("gemma3", "phi3", "qwen3_moe") else pytest.mark.slow)
        for family in sorted({*FAMILIES, *MORE_FAMILIES} - {"llama", "gemma2", "llama4"})
    ],
)
def test_other_families_equal_the_unsharded_ones(ranks, family):
    """Masks of sliding windows are those of all tokens."""
    ranks(2).run(equals, family, 8, None, {})


def recomputed(rank, size):
    installed()
    plain, model = models("llama", "ulysses")
    model.gradient_checkpointing_enable()
    check(rank, size, plain, model, batch_of(8))


def test_llama_with_recomputed_layers_equals_the_unsharded_one(ranks):
    ranks(2).run(recomputed)


def compiled(rank, size):
    torch._dynamo.reset()
    installed()
    plain, model = models("llama", "ulysses", num_hidden_layers=1)
    batch = batch_of(7, "left")
    check(rank, size, plain, torch.compile(model, backend="aot_eager"), batch)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 2
    with pytest.raises(torch._dynamo.exc.Unsupported, match="hugging_face_attention: .* fullgraph=False"):
        torch.compile(model, backend="aot_eager", fullgraph=True)(**ulysses.shard_inputs(batch))


def test_compiled_llama_equals_the_unsharded_one_and_one_graph_is_refused(ranks):
    ranks(2).run(compiled)


def averaged(rank, size):
    installed()
    plain, model = models("llama", "ulysses")
    batch = batch_of(8)
    plain(**batch, use_cache=False).loss.backward()
    parallel = DistributedDataParallel(model)
    (parallel(**ulysses.shard_inputs(batch), use_cache=False).loss * size).backward()
    for (name, parameter), full in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, full.grad, msg=lambda text, name=name: f"{name}: {text}")


def test_gradients_that_ddp_averages_are_those_of_the_loss_times_the_ranks(ranks):
    ranks(2).run(averaged)


def refused(rank, size):
    installed()
    with pytest.raises(RuntimeError, match="'ulysses' is registered already"):
        ulysses.install()
    _, model = models("llama", "ulysses")
    batch = batch_of(8, "left")
    mask = batch.pop("attention_mask")
    del batch["position_ids"], batch["labels"]
    local = ulysses.shard_inputs(batch)
    ids = local["input_ids"]
    positions = local["position_ids"]

    def raises(words, **inputs):
        with pytest.raises((ValueError, DisagreementError), match=words):
            model(**{**local, "use_cache": False, **inputs})

    raises("pass use_cache=False", use_cache=None)
    raises("rank 1 begins at 0 after 3. Pass each rank the positions of its own", position_ids=None)
    raises("packed sequences .position_ids that restart.", position_ids=positions % 3)
    raises("attention_mask must have this rank's 4 tokens, got 8", attention_mask=mask)
    raises("attention_mask must be passed on every rank or on none", attention_mask=[mask[:, :4], None][rank])
    raises("rank 1: ValueError: ulysses: packed", position_ids=positions % 3 if rank else positions)
    all_tokens = torch.ones(2, 1, 8, 8, dtype=torch.bool).tril()
    raises(r"must be of all tokens, got \[2, 1, 4, 4\] with 4", attention_mask=all_tokens[..., :4, :4])
    raises(r"\[B, 1, 8, 8\], got \[2, 4, 8, 8\]", attention_mask=all_tokens.expand(2, 4, 8, 8))
    raises(
        "the ranks have .* tokens",
        input_ids=ids[:, : 4 - rank * 2],
        position_ids=positions[:, : 4 - rank * 2],
    )
    raises("output_attentions= of the attention or the model is not supported", output_attentions=True)
    with pytest.raises(ValueError, match="no cache of keys and values, and no generate()"):
        model.generate(ids, max_new_tokens=2)
    with pytest.raises(ValueError, match="1 tokens on 2 ranks leave some without"):
        ulysses.shard_inputs({"input_ids": ids[:, :1]})
    with pytest.raises(ValueError, match="the inputs must be of .* got .'pixel_values'."):
        ulysses.shard_inputs({"pixel_values": ids})
    with mock.patch.object(agree, "gather", wraps=agree.gather) as gather:
        logits = model(**local, use_cache=False).logits
    assert [call.args[1] for call in gather.call_args_list] == ["the mask of ulysses", "ulysses"]
    torch.testing.assert_close(model(**local, attention_mask=all_tokens, use_cache=False).logits, logits)
    raises("rank 1 begins at 0 after 3", position_ids=positions - positions[:, :1])
    for family, words, more in (
        ("gemma2", "softcap= of the attention or the model is not supported", {}),
        ("llama4", "some models do not pass them on", {}),
        (
            "llama4",
            "attention_chunk_size=5. does not support attention_mask",
            {"attention_mask": mask[:, :4]},
        ),
    ):
        with pytest.raises(ValueError, match=words):
            models(family, "ulysses")[1](**local, **more, use_cache=False)
    ulysses.uninstall()
    with pytest.raises(KeyError, match="ulysses"):
        model(**local, use_cache=False)


def test_what_is_not_supported_is_named_on_every_rank(ranks):
    ranks(2).run(refused)


def alongside_tp(rank, size, heads, kv_heads, sequence_parallel):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("sp", "tp"))
    installed(mesh["sp"])
    options = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    plain, model = models("llama", "ulysses", **options)
    parallelize(model, mesh["tp"], sequence_parallel=sequence_parallel, backend="sequential")
    check(mesh["sp"].get_local_rank(), 2, plain, model, batch_of(11, "left"), mesh["sp"])


@pytest.mark.parametrize(
    ("heads", "kv_heads", "sequence_parallel"), in_turn([(8, 4), (8, 2), (4, 1)], [True, False])
)
def test_llama_alongside_tensor_parallelism(ranks, heads, kv_heads, sequence_parallel):
    """Keys have a head for each of the four ranks, for each pair of ranks, or one for all."""
    ranks(4).run(alongside_tp, heads, kv_heads, sequence_parallel)
