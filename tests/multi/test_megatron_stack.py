"""Our linears under Megatron's schedules, data parallelism, recomputation and checkpoints, beside its own."""

import copy
import multiprocessing
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that Apex and Transformer Engine are not here
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_layer_local_spec,
    )
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel import layers as megatron_layers
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_config import TransformerConfig

    from overlap_gemm.integrations import megatron

VOCABULARY, LENGTHS = 64, (8, 16, 4, 12)


class Stream:
    """What Megatron does with a CUDA stream, on the one there is."""

    def __init__(self, *_, **__):
        self.wait_stream = self.wait_event = lambda *_: None
        self.record_event = mock.MagicMock()


def on_the_cpu(make):
    """`make`, a factory of tensors, where Megatron writes device="cuda"."""

    def made(*sizes, **options):
        if options.get("device") == "cuda":
            options["device"] = "cpu"
        return make(*sizes, **options)

    return made


@contextmanager
def cpu_for_cuda() -> Iterator[None]:
    """Megatron's calls of CUDA, answered by the CPU."""
    replaced = [
        (torch.cuda, "current_device", lambda: "cpu"),
        (torch.cuda, "synchronize", lambda *_: None),
        (torch.cuda, "Stream", Stream),
        (torch.cuda, "Event", mock.MagicMock()),
        (torch.cuda, "stream", lambda _: nullcontext()),
        (torch.cuda, "current_stream", Stream),
        (torch.Tensor, "cuda", lambda x, *_, **__: x),
        (torch.Tensor, "record_stream", lambda *_: None),
        (torch, "zeros", on_the_cpu(torch.zeros)),
        (megatron_random.CudaRNGStatesTracker, "fork", lambda *_: nullcontext()),
        (megatron_random, "_get_all_rng_states", lambda: (torch.get_rng_state(),)),
        (megatron_random, "_set_all_rng_states", torch.set_rng_state),
        (megatron_random, "_fork_rng", nullcontext),
    ]
    with ExitStack() as stack:
        for owner, name, stand_in in replaced:
            stack.enter_context(mock.patch.object(owner, name, stand_in))
        # Without Transformer Engine the name is missing where Megatron asks whether it is None.
        stack.enter_context(mock.patch.object(moe_utils, "te_general_gemm", None, create=True))
        yield


def config_of(**options):
    defaults = {
        "num_layers": 4, "hidden_size": 32, "num_attention_heads": 8, "num_query_groups": 4,
        "ffn_hidden_size": 48, "tensor_model_parallel_size": 2, "sequence_parallel": True,
        "use_cpu_initialization": True, "params_dtype": torch.float32, "pipeline_dtype": torch.float32,
        "hidden_dropout": 0.0, "attention_dropout": 0.0, "gradient_accumulation_fusion": False,
        "bias_dropout_fusion": False, "masked_softmax_fusion": False, "persist_layer_norm": False,
        "variable_seq_lengths": True, "moe_token_dispatcher_type": "alltoall", "batch_p2p_comm": False,
        "deallocate_pipeline_outputs": True,
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return TransformerConfig(**{**defaults, **options})


def chunks_of(config, spec):
    """This rank's part of a GPT, in as many pieces as its pipeline is interleaved."""

    def norm(_, config, hidden_size, **__):
        made = nn.LayerNorm(hidden_size, dtype=config.params_dtype)
        for parameter in made.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return made

    stage, stages = (
        parallel_state.get_pipeline_model_parallel_rank(),
        config.pipeline_model_parallel_size,
    )
    pieces = config.virtual_pipeline_model_parallel_size
    torch.manual_seed(3)
    with mock.patch.object(WrappedTorchNorm, "__new__", norm):
        return [
            GPTModel(
                config, spec, vocab_size=VOCABULARY, max_sequence_length=16, position_embedding_type="rope",
                pre_process=stage == 0 and piece == 0,
                post_process=stage == stages - 1 and piece == (pieces or 1) - 1,
                vp_stage=piece if pieces else None,
            )
            for piece in range(pieces or 1)
        ]  # fmt: skip


def train_step(config, spec, ddp, weights):
    """Losses and gradients of one step of several microbatches."""
    pieces = chunks_of(config, spec)
    for piece, state in zip(pieces, weights, strict=True):
        piece.load_state_dict(state)
    if ddp is not None:
        pieces = [
            DistributedDataParallel(config, DistributedDataParallelConfig(**ddp), piece) for piece in pieces
        ]
        no_sync = [piece.no_sync for piece in pieces]
        config.no_sync_func = no_sync if len(pieces) > 1 else no_sync[0]
        config.finalize_model_grads_func = finalize_model_grads
        for piece in pieces:
            piece.zero_grad_buffer()
    draw = torch.Generator().manual_seed(11 + parallel_state.get_data_parallel_rank())
    lengths = LENGTHS if config.variable_seq_lengths else (8, 8, 8, 8)
    batches = [torch.randint(VOCABULARY, (2, length), generator=draw) for length in lengths]

    def forward(batches, model):
        ids = next(batches)
        length = ids.shape[1]
        mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
        losses = model(ids, torch.arange(length).expand_as(ids), mask, labels=ids.roll(-1, 1))
        return losses, lambda losses: (losses.mean(), losses.detach().mean())

    interleaved = len(pieces) > 1
    losses = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=[iter(batches) for _ in pieces] if interleaved else iter(batches),
        model=pieces if interleaved else pieces[0],
        num_microbatches=len(batches), seq_length=max(lengths), micro_batch_size=2, forward_only=False,
    )  # fmt: skip
    gradients = {
        f"{number}.{name}": parameter.grad if ddp is None else parameter.main_grad
        for number, piece in enumerate(pieces)
        for name, parameter in piece.named_parameters()
    }
    return losses, gradients


def equals_megatrons_own(rank, size, options, ddp, experts):
    groups = {
        name: options.get(name)
        for name in ("pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size")
        if options.get(name)
    }
    with cpu_for_cuda():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=2, **groups)
        try:
            spec = get_gpt_layer_local_spec(num_experts=experts)
            weights = [copy.deepcopy(piece.state_dict()) for piece in chunks_of(config_of(**options), spec)]
            for name, tensor in (item for state in weights for item in state.items()):
                if name.endswith("bias") and tensor is not None:
                    tensor.copy_(torch.linspace(-1, 1, tensor.numel()))  # Megatron's are zero at first
            expected = train_step(config_of(**options), spec, ddp, weights)
            with warnings.catch_warnings():
                found = train_step(config_of(**options), megatron.with_overlap(spec), ddp, weights)
        finally:
            parallel_state.destroy_model_parallel()
    torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-4)
    assert any(gradient.abs().max() > 1e-5 for gradient in expected[1].values())
    for name, gradient in expected[1].items():
        torch.testing.assert_close(
            found[1][name], gradient, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )
    dist.barrier()


FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
IN_FP32 = {"grad_reduce_in_fp32": True}
BUCKETS = {**IN_FP32, "overlap_grad_reduce": True, "bucket_size": 2000}
PIPELINE = {"pipeline_model_parallel_size": 2}
INTERLEAVED = {
    **PIPELINE,
    "virtual_pipeline_model_parallel_size": 2,
    "variable_seq_lengths": False,  # gloo confuses the two directions of what Megatron sends of shapes then
}
EXPERTS = {
    "num_moe_experts": 4, "moe_shared_expert_intermediate_size": 32, "add_bias_linear": False,
    "moe_router_load_balancing_type": "none", "moe_ffn_hidden_size": 48, "num_layers": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("world", "options", "ddp", "experts"),
    [
        pytest.param(2, {}, IN_FP32, None, id="accumulation"),
        pytest.param(2, {"sequence_parallel": False}, IN_FP32, None, id="accumulation, whole sequences"),
        pytest.param(2, FULL, IN_FP32, None, id="full recomputation"),
        pytest.param(
            2, {**FULL, "sequence_parallel": False, "distribute_saved_activations": True}, None, None,
            id="full recomputation of distributed activations",
        ),
        pytest.param(
            2,
            {"recompute_granularity": "selective", "recompute_modules": ["mlp", "core_attn"],
             "add_bias_linear": False},  # with a bias, Megatron's recomputation of an MLP never ends
            IN_FP32, None, id="selective recomputation",
        ),
        pytest.param(4, {}, BUCKETS, None, id="data parallel", marks=pytest.mark.slow),
        pytest.param(4, {}, {**BUCKETS, "use_distributed_optimizer": True}, None, id="gradients sharded"),
        pytest.param(4, PIPELINE, IN_FP32, None, id="pipeline"),
        pytest.param(4, {**PIPELINE, **FULL, "sequence_parallel": False}, IN_FP32, None, id="pipeline, full"),
        pytest.param(4, INTERLEAVED, BUCKETS, None, id="interleaved", marks=pytest.mark.slow),
        pytest.param(4, {**INTERLEAVED, **FULL}, IN_FP32, None, id="interleaved, full recomputation"),
        pytest.param(2, EXPERTS, IN_FP32, 4, id="shared experts", marks=pytest.mark.slow),
        pytest.param(2, {**EXPERTS, "moe_shared_expert_overlap": True}, IN_FP32, 4, id="shared, overlapping"),
    ],
)  # fmt: skip
def test_equals_megatrons_own(ranks, world, options, ddp, experts):
    ranks(world).run(equals_megatrons_own, options, ddp, experts)


def recomputes_what_was_discarded(rank, size):
    """The input of our linear is taken from under it in the forward pass, and made again for the backward."""
    with cpu_for_cuda():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
        try:
            for sequence_parallel in (True, False):
                config = config_of(sequence_parallel=sequence_parallel)
                found, expected = (gradients_of_a_block(rank, config, discard) for discard in (True, False))
                for one, other in zip(found, expected, strict=True):
                    torch.testing.assert_close(one, other)
        finally:
            parallel_state.destroy_model_parallel()


def gradients_of_a_block(rank, config, discard):
    torch.manual_seed(1)
    norm = nn.LayerNorm(32)
    common = {"config": config, "init_method": nn.init.normal_, "bias": True}
    up = megatron.ColumnParallelLinear(32, 48, **common)
    down = megatron.RowParallelLinear(48, 32, **common, input_is_parallel=True, skip_bias_add=True)
    torch.manual_seed(5 + rank * config.sequence_parallel)
    x = torch.randn(4, 2, 32, requires_grad=True)
    checkpoint = megatron_random.CheckpointWithoutOutput()
    checkpoint.fp8 = False  # Megatron takes any value but None for fp8
    normed = checkpoint.checkpoint(norm, x) if discard else norm(x)
    out, bias = down(torch.tanh(up(normed)[0]))
    if discard:
        checkpoint.discard_output_and_register_recompute(out)
        assert normed.untyped_storage().size() == 0
    (out + bias).square().sum().backward()
    return [x.grad, *(parameter.grad for each in (norm, up, down) for parameter in each.parameters())]


def test_recomputes_what_was_discarded(ranks):
    ranks(2).run(recomputes_what_was_discarded)


def checkpoints_both_ways(rank, size, directory):
    with cpu_for_cuda():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
        try:
            spec = get_gpt_layer_local_spec()
            specs = (spec, megatron.with_overlap(spec))
            for way, (writes, reads) in enumerate((specs, specs[::-1])):
                (written,) = chunks_of(config_of(num_layers=2), writes)
                (read,) = chunks_of(config_of(num_layers=2), reads)
                for parameter in written.parameters():
                    nn.init.normal_(parameter)
                path = directory / str(way)
                if rank == 0:
                    path.mkdir()
                dist.barrier()
                metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
                sharded = [each.sharded_state_dict(metadata=metadata) for each in (written, read)]
                # It writes in a process of its own, which ranks of tests may not start.
                may_start = mock.patch.dict(multiprocessing.current_process()._config, daemon=False)
                with warnings.catch_warnings(), may_start:
                    warnings.simplefilter("ignore")
                    dist_checkpointing.save(sharded[0], str(path))
                    read.load_state_dict(dist_checkpointing.load(sharded[1], str(path)))
                for name, parameter in written.named_parameters():
                    assert torch.equal(read.get_parameter(name), parameter), name
        finally:
            parallel_state.destroy_model_parallel()


def test_checkpoints_both_ways(ranks, tmp_path):
    ranks(2).run(checkpoints_both_ways, tmp_path)


def errors(rank, size):
    """In bfloat16: no further from float32 than twice what Megatron's own is, gradients, too."""
    with cpu_for_cuda():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
        try:
            for sequence_parallel in (True, False):
                spec = get_gpt_layer_local_spec()
                options = {"sequence_parallel": sequence_parallel, "num_layers": 2}
                half = {**options, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}
                weights = [copy.deepcopy(chunks_of(config_of(**half), spec)[0].state_dict())]
                exact = train_step(config_of(**options), spec, IN_FP32, weights)
                theirs = train_step(config_of(**half), spec, IN_FP32, weights)
                ours = train_step(config_of(**half), megatron.with_overlap(spec), IN_FP32, weights)
                for name, gradient in exact[1].items():
                    mine, others = ((each[1][name] - gradient).norm() for each in (ours, theirs))
                    assert mine <= 2 * others + 1e-6 * gradient.norm(), (name, mine, others)
        finally:
            parallel_state.destroy_model_parallel()


def test_errors_in_bfloat16(ranks):
    ranks(2).run(errors)


def test_specifications_of_whole_blocks():
    """What `pretrain_gpt` builds for mixtures of experts holds its layers in a list."""
    with mock.patch.object(parallel_state, "get_pipeline_model_parallel_rank", return_value=0):
        block = get_gpt_decoder_block_spec(config_of(num_layers=2), use_transformer_engine=False)
    changed = megatron.with_overlap(block)

    def first_linears(block):
        mlps = [layer.submodules.mlp for layer in block.layer_specs]  # partials, since Megatron 0.19
        return [getattr(mlp, "keywords", vars(mlp))["submodules"].linear_fc1 for mlp in mlps]

    assert first_linears(changed) == [megatron.ColumnParallelLinear] * 2
    assert first_linears(block) == [megatron_layers.ColumnParallelLinear] * 2
    assert first_linears(megatron.with_overlap(changed)) == first_linears(changed)


def test_latent_attention_keeps_what_it_compares():
    """Megatron's own builds its down projections only of classes it lists."""
    spec = get_gpt_layer_local_spec(multi_latent_attention=True)
    before, changed = (
        each.submodules.self_attention.submodules for each in (spec, megatron.with_overlap(spec))
    )
    for name in megatron.CHECKED_BY_MLA:
        assert getattr(changed, name) is getattr(before, name) is megatron_layers.ColumnParallelLinear
    assert changed.linear_q_up_proj is megatron.ColumnParallelLinear
    assert changed.linear_proj is megatron.RowParallelLinear


def test_a_specification_without_megatrons_linears_is_refused():
    with pytest.raises(ValueError, match="must contain Megatron's own linears"):
        megatron.with_overlap(SimpleNamespace)
