"""`parallelize`: tensor and sequence parallelism for Hugging Face's causal language models."""

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal, TypeAlias, TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

from ..api.float8 import Float8
from ..api.layer_epilogues import Gating
from ..backends.op_call import BackendName, with_fallback
from ..backends.select import check_name
from ..epilogues import Epilogue
from ..spec.promises import Invariant, Partials, Promises, check_promises
from .adapters import bases, forbid_weighted_adapters, inject_or_restore, is_lora
from .assignment import Role, head_dim, is_carried_dropout, kv_heads, plan
from .checkpoints.initialization import initialize_in_shards
from .checkpoints.state import save_adapters, save_pretrained, shard_incoming
from .inputs import Labels, SameInputs
from .modules.dropouts import AttentionForward, DropoutForward
from .modules.experts import (
    ExpertsForward,
    GatherTokens,
    KeepTokens,
    RouterForward,
    placements,
    split_gates_and_ups,
)
from .modules.fusing import LayerForward, gating_of_mlp
from .modules.generation import generate, stopping_criteria
from .modules.heads import SharedHeadForward, SpreadNormForward
from .modules.layouts import Rows, check_mesh, distribute_parameters
from .modules.parts import (
    SEQUENCE_DIM,
    EmbeddingForward,
    EnterLayers,
    GatherOutput,
    GradientAsContiguous,
    HeadsOfRank,
    PackedLinear,
    RefuseRecords,
    ReplicatedForward,
    SequenceLength,
)
from .modules.styles import OverlapColwiseParallel, OverlapRowwiseParallel, OverlapSharedGather
from .parameters import WatchParameters, record_parameters, watch_prompts
from .places import Sharding, Watch, give_places
from .stacks import describe

Logits: TypeAlias = Literal["replicated", "sharded"]
Model = TypeVar("Model", bound=nn.Module)


def parallelize(
    model: Model,
    mesh: DeviceMesh,
    *,
    sequence_parallel: bool = True,
    logits: Logits = "replicated",
    backend: BackendName = "auto",
    float8: Float8 | None = None,
    partials: Partials | None = None,
    invariant: Invariant | None = None,
    fuse: bool | None = None,
    activation: Epilogue | None = None,
) -> Model:
    """Makes a causal language model of Hugging Face's transformers tensor-parallel, in place.

    Supported families: Llama, Mistral, Qwen2, Qwen3, Gemma2, Gemma3 (text), Phi3, OLMo2, Granite, Mixtral,
    Qwen3-MoE and Llama 4 (text). Each may be a `...ForCausalLM` or its decoder alone. A module without a rule
    is refused.

    Every rank calls `parallelize` with the same model. It is collective: rank 0's weights are sent, whatever
    those of the others are. (On the meta device nothing is sent; see `materialize`.) Afterwards every
    parameter is a DTensor. Every rank passes the same inputs to the model and gets the same outputs: those of
    the unsharded model.

    Attention is sharded by heads, the MLP by features, embedding and head by vocabulary (tied weights stay
    tied). With P ranks:

    - P must divide the number of query heads.
    - P must divide the number of key/value heads or be a multiple of it; in the second case ranks share
      heads.
    - P must divide the features of an expert.
    - Sequences, batches, other features and the vocabulary may have any size.

    Args:
        model: Model on its device, not yet compiled, wrapped by FSDP or passed to an optimizer.
        mesh: 1-D DeviceMesh of the ranks, such as `mesh["tp"]`.
        sequence_parallel: Shard the activations between attention and MLP by sequence, too. These then take
            1/P of the memory, and communication overlaps with the products. Set it to False for serving
            single tokens.
        logits: "replicated": full logits on every rank. "sharded": a DTensor sharded by vocabulary; `labels=`
            then needs torch's `loss_parallel()`. `generate` replicates the logits itself.
        backend: "auto", or the name of the backend of all ops that it supports. Other ops use "auto"; the
            logger `overlap_gemm.backends.select` reports each of these choices once, with the reason.
        float8: 8-bit settings for the projections of attention and MLP, a `nn.Float8`. Head, routers, experts
            and adapters compute in their parameters' dtype; parameters keep their dtype everywhere.
        partials: Type of the partial sums of all sharded linears, as in `overlap_gemm.gemm_reduce_scatter`.
        invariant: Bitwise invariance of all sharded linears, as in `overlap_gemm.gemm_reduce_scatter`. Norms
            and attention are torch's, in the forms of `modules.invariant`; the loss has no promise.
        fuse: Whether residuals and activations of MLPs are epilogues of the products, in families where no
            other operation is between (`overlap_gemm.explain(model)` names them). None: where kernels apply
            epilogues, activations only where no gradients are needed and not under torch.compile. True:
            always; False: never. Residuals are never epilogues under torch.compile, with `invariant`,
            with a hook on the projection or its attention or MLP, or with active dropout.
        activation: Epilogue of gate and up in the model's MLPs, as in `nn.ParallelMLP`. None: SwiGLU or
            GeGLU; other activations are not epilogues.

    Returns:
        `model`.

    Raises:
        UnknownModuleError: A ValueError: the model or the named module has no rule, or no 8-bit rule. The
            model is unchanged.
        ValueError: An argument has a value that is not listed above. Or `activation` does not compute what
            an MLP of the model does; the model is unchanged.
    """
    if logits not in ("replicated", "sharded"):
        raise ValueError(f"parallelize: logits must be 'replicated' or 'sharded', got {logits!r}")
    check_mesh(mesh)
    check_promises(promises := Promises(partials, invariant))
    check_name(backend, promises=promises)
    outermost = model
    if hasattr(model, "get_base_model"):  # peft's
        model = model.get_base_model()
    roles = plan(model, mesh.size())
    if activation is not None:
        _check_activation(model, roles, activation)
    if outermost is not model:
        forbid_weighted_adapters(outermost.base_model)
        inject_or_restore(outermost.base_model, model)
        outermost.save_pretrained = partial(save_adapters, outermost)
        watch_prompts(outermost)
    names = {role: name for name, role in roles.items()}
    embedding: Any = bases(model.get_submodule(names["embedding"]))[0]
    head: Any = bases(model.get_submodule(names["head"]))[0] if "head" in names else None
    tied = head is not None and head.weight is embedding.weight
    sharding = Sharding(mesh, sequence_parallel, logits == "sharded", model=model)
    labels = Labels(sharding)
    how: dict[str, Any] = {"backend": with_fallback(backend), **promises._asdict()}
    builder = _Builder(model.config, sharding, labels, logits, float8, how, fuse, activation)
    for name, role in roles.items():
        for base in bases(model.get_submodule(name)):
            builder.apply(base, role)
    builder.fuse_layers()
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout) and is_carried_dropout(name, module, roles):
            module.forward = DropoutForward(module, sharding, sequence_parallel and ".layers." in f".{name}")
    give_places(model, roles, sharding)
    for layer in [module for module in model.modules() if is_lora(module)]:
        from .modules.lora import take_over

        take_over(layer, layer.base_layer)
    if head is not None and tied:
        head.weight = embedding.weight
        head.forward.source = embedding  # right even if a wrapper replaces one of the two names only
        model._ddp_params_and_buffers_to_ignore = [f"{names['head']}.weight"]
        sharding.are_tied = True
    describe(model, mesh)
    model.register_load_state_dict_pre_hook(shard_incoming)
    model.register_forward_pre_hook(labels, with_kwargs=True, prepend=True)
    decoder = model.get_submodule(names["decoder"])
    if decoder is not model:
        model.register_forward_pre_hook(Watch(sharding, decoder))
        model.register_forward_pre_hook(WatchParameters(sharding, decoder))
    # Partials of module-level functions can be pickled, unlike local closures.
    if hasattr(model, "generate"):
        model.generate = partial(generate, model, sharding.group)
        model._get_stopping_criteria = partial(stopping_criteria, model, sharding.group)
    record_parameters(model)
    initialize_in_shards(model, sharding)
    model.save_pretrained = partial(save_pretrained, model)
    model.resize_token_embeddings = partial(_resize_token_embeddings, model)
    return outermost


def _check_activation(model: nn.Module, roles: Mapping[str, Role], activation: Epilogue) -> None:
    """Raises ValueError for an epilogue that is not what every MLP of a model does with gate and up."""
    Gating.of(activation)
    reasons = {
        name: gating_of_mlp(bases(model.get_submodule(name))[0], None, activation)
        for name, role in roles.items()
        if role == "mlp"
    }
    if wrong := [f"{name}: {why}" for name, why in reasons.items() if isinstance(why, str)]:
        raise ValueError(f"parallelize: activation={activation.name}: {wrong[0]}")
    if not reasons:
        raise ValueError(f"parallelize: activation={activation.name}, and the model has no MLP but experts")


LAST = {"self_attn": "o_proj", "mlp": "down_proj", "feed_forward": "down_proj"}
"""Last projection of each part of a decoder layer."""


class _Builder:
    """Assigns to each module the parameters and the forward of its role."""

    def __init__(
        self,
        config: Any,
        sharding: Sharding,
        labels: Labels,
        logits: Logits,
        float8: Float8 | None,
        how: dict[str, Any],
        fuse: bool | None,
        activation: Epilogue | None,
    ):
        self.config, self.sharding, self.labels = config, sharding, labels
        self.how, self.fuse, self.activation = {**how, "float8": float8}, fuse, activation
        self.invariant: Invariant | None = how["invariant"]
        self.layers: list[nn.Module] = []
        self.mesh, self.group = sharding.mesh, sharding.group
        self.sequence_parallel = sequence_parallel = sharding.sequence_parallel
        self.length = SequenceLength()
        self.column = OverlapColwiseParallel(**self.how)
        between = Shard(SEQUENCE_DIM) if sequence_parallel else Replicate()
        self.row = OverlapRowwiseParallel(output_layouts=between, **self.how)
        if logits == "sharded":
            self.head = OverlapColwiseParallel(use_local_output=False, **how)
        else:
            self.head = OverlapColwiseParallel(output_layouts=Replicate(), **how)
        self.entered = False

    def apply(self, module: Any, role: Role) -> None:
        """Shards `module` by `role`. Modules come in the model's order, parents first."""
        match role:
            case "decoder":
                heads = max(kv_heads(self.config) // self.mesh.size(), 1)
                module.register_forward_pre_hook(Watch(self.sharding))
                module.register_forward_pre_hook(WatchParameters(self.sharding))
                module.register_forward_pre_hook(
                    SameInputs(self.sharding, self.labels, heads), with_kwargs=True
                )
                records = ["output_attentions"] + ["output_hidden_states"] * self.sequence_parallel
                module.register_forward_pre_hook(RefuseRecords(self.config, records), with_kwargs=True)
                if self.sequence_parallel:
                    module.register_forward_pre_hook(self.length.for_norm.begin)
            case "embedding":
                distribute_parameters(module, self.mesh, {"weight": Shard(0)})
                module.forward = EmbeddingForward(module, self.group)
            case "layer":
                if self.sequence_parallel:
                    module.register_forward_pre_hook(self.length.for_mlp.begin)
                if self.sequence_parallel and not self.entered:
                    module.register_forward_pre_hook(EnterLayers(self.group))
                self.entered = True
                self.layers.append(module)
            case "attention":
                self._attention(module)
            case "mlp":
                self._mlp(module)
            case "norm" | "head norm" | "final norm":
                distribute_parameters(module, self.mesh)
                is_partial = self.sequence_parallel or role == "head norm"
                module.forward = ReplicatedForward(module, self.group if is_partial else None, self.invariant)
                if role == "final norm" and self.sequence_parallel:
                    module.register_forward_hook(GatherOutput(self.group, self.length.for_norm))
            case "spread norm":
                distribute_parameters(module, self.mesh, {"weight": Shard(0)})
                width = module.weight.numel()
                module.forward = SpreadNormForward(module, self.group, width)
            case "mixture" if self.sequence_parallel:
                module.register_forward_pre_hook(GatherTokens(self.group, self.length.for_mlp))
                module.register_forward_hook(KeepTokens(self.group))
            case "router":  # every rank routes all tokens
                distribute_parameters(module, self.mesh)
                module.forward = RouterForward(module)
            case "experts":
                split_gates_and_ups(module)
                distribute_parameters(module, self.mesh, placements(module))
                module.forward = ExpertsForward(module, self.group)
            case "shared head":
                distribute_parameters(module, self.mesh)
                module.forward = SharedHeadForward(module, self.mesh, self.column, kv_heads(self.config))
            case "shared expert":  # of all tokens
                self._share_gather(module, ["gate_proj", "up_proj"], "x")
            case "column" | "shared column":
                parallelize_module(module, self.mesh, self.column)
            case "packed":  # `_attention` or `_mlp` has made it a PackedLinear
                for part in module.children():
                    parallelize_module(part, self.mesh, self.column)
            case "row":
                parallelize_module(module, self.mesh, self.row)
            case "shared row":
                style = OverlapRowwiseParallel(**self.how)
                parallelize_module(module, self.mesh, style)
            case "head":
                parallelize_module(module, self.mesh, self.head)

    def _attention(self, module: Any) -> None:
        module.forward = AttentionForward(module, self.group, self.invariant)
        if self.sequence_parallel:
            module.register_forward_pre_hook(self.length.note, with_kwargs=True)
            bases(module.o_proj)[0].register_forward_pre_hook(GradientAsContiguous())
        if kv_heads(self.config) < self.mesh.size():
            module.num_key_value_groups = self.config.num_attention_heads // self.mesh.size()
        if not hasattr(module, "qkv_proj"):
            self._share_gather(module, ["q_proj", "k_proj", "v_proj"], "hidden_states", self.length)
            return
        config = self.config
        queries, keys = (
            heads * head_dim(config) for heads in (config.num_attention_heads, config.num_key_value_heads)
        )
        parts = _pack(module, "qkv_proj", {"q": queries, "k": keys, "v": keys})
        self._share_gather(module, parts, "hidden_states", self.length)
        module.config = HeadsOfRank(config, self.mesh.size())
        module.num_key_value_heads //= self.mesh.size()

    def _mlp(self, module: Any) -> None:
        rows = self.length.for_mlp
        if hasattr(module, "gate_up_proj"):
            half = module.gate_up_proj.out_features // 2
            parts = _pack(module, "gate_up_proj", {"gate": half, "up": half})
            self._share_gather(module, parts, "hidden_states", rows)
        else:
            self._share_gather(module, ["gate_proj", "up_proj"], "x", rows)
        module.forward.gating = gating_of_mlp(module, self.fuse, self.activation)

    def fuse_layers(self) -> None:
        """Gives decoder layers the forward that has residuals added by the projections before them."""
        for layer in self.layers:
            rows = {part: row for part, row in LAST.items() if hasattr(getattr(layer, part, None), row)}
            layer.forward = LayerForward(layer, rows, self.fuse)  # type: ignore[method-assign,assignment]

    def _share_gather(self, module: nn.Module, linears: list[str], argument: str, rows: Rows = None) -> None:
        adapted = [is_lora(module.get_submodule(name)) for name in linears]
        linears = [f"{name}.base_layer" if has else name for name, has in zip(linears, adapted, strict=True)]
        rows = rows if self.sequence_parallel else None
        layout = Replicate() if rows is None else Shard(SEQUENCE_DIM)
        style = OverlapSharedGather(*linears, input_layouts=layout, argument=argument, rows=rows, **self.how)
        parallelize_module(module, self.mesh, style)


def _pack(module: nn.Module, name: str, sizes: dict[str, int]) -> list[str]:
    """Replaces a linear, adapted or not, by a `PackedLinear`; returns the paths of its parts."""
    linear: Any = getattr(module, name)
    if is_lora(linear):
        linear.base_layer = PackedLinear(linear.base_layer, sizes)
        name = f"{name}.base_layer"
    else:
        setattr(module, name, PackedLinear(linear, sizes))
    return [f"{name}.{part}" for part in sizes]


def _resize_token_embeddings(model: Any, new_num_tokens: int | None = None, *args: Any, **kwargs: Any) -> Any:
    """Runs `resize_token_embeddings` where it changes nothing.

    transformers would resize to a multiple of one rank's number of rows.
    """
    rows = model.get_input_embeddings().num_embeddings
    if new_num_tokens not in (None, rows) or args or kwargs.get("pad_to_multiple_of"):
        raise ValueError(
            f"resize_token_embeddings({new_num_tokens}): the rows of the embedding are sharded; resize it "
            f"({rows} rows now) before parallelize"
        )
    return type(model).resize_token_embeddings(model, new_num_tokens, **kwargs)
