"""Forwards and hooks of the modules of a parallelized model. Between modules all tensors are local ones."""

from typing import Any
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from ...api.functional import Length
from ...dispatch.lowering import total_extent
from ...dispatch.shard_ops import for_each_rank, join_shards, keep_shard, sum_over_ranks
from ...runtime.group import group_rank, group_size
from ...spec.promises import Invariant
from ...spec.sharding import Shards
from ..inputs import same_inputs
from .invariant import row_means
from .layouts import default_rows, local

SEQUENCE_DIM = 1
"""Dimension of the sequence in Hugging Face's hidden states `[b, s, h]`."""


class LengthFor:
    """Length of the sequence, noted by one part of a module for another part that runs later.

    A value is valid for one run of the module. A part that is recomputed alone gets none, because the last
    value may be another microbatch's.
    """

    def __init__(self) -> None:
        self.runs = False
        self.total: int | None = None

    def begin(self, _: nn.Module, args: tuple[Any, ...]) -> None:
        """Clears the value when the module begins. Pre-forward hook of the module."""
        self.runs, self.total = True, None

    def note(self, total: int) -> None:
        """Stores the length in tokens if the module is running."""
        if self.runs:
            self.total = total

    def __call__(self) -> Length:
        """Returns the stored length and clears it; without one, returns `default_rows()`."""
        total, self.runs, self.total = self.total, False, None
        return default_rows() if total is None else total


class SequenceLength:
    """Length of the sequence over all ranks, in the forward pass (or recomputation) in progress.

    Modules on sharded rows cannot compute it. Every attention can, and stores it for itself, for the MLP of
    its layer and for the norm after all layers.
    """

    def __init__(self) -> None:
        self.total = 0
        self.for_mlp, self.for_norm = LengthFor(), LengthFor()

    def __call__(self) -> int:
        """Returns the length in tokens, for an attention."""
        return self.total

    def note(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Stores the length. Pre-forward hook of every attention."""
        embeddings = kwargs["position_embeddings"]  # cosines and sines, or both as complex numbers
        angles = embeddings[0] if isinstance(embeddings, tuple) else embeddings  # [b or 1, s, ...]
        self.total = angles.shape[1]
        self.for_mlp.note(self.total)
        self.for_norm.note(self.total)


class EnterLayers:
    """Pre-forward hook of the first decoder layer: keeps this rank's rows of the hidden states."""

    def __init__(self, group: str):
        self.group = group

    def __call__(self, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Slices the hidden states. Called by torch before the layer."""
        hidden, *others = args
        return keep_shard(hidden, SEQUENCE_DIM, self.group), *others


class GradientAsContiguous:
    """Pre-forward hook of the projection after an attention: makes the gradient of its input contiguous.

    If the gradient is gathered along the sequence it is a transposed view. torch (2.11, CUDA) caches a graph
    of cuDNN's attention backward without the gradient's strides in the key. Another model with the same sizes
    and other strides then gets wrong gradients without an error (docs/design/facts.md). The copy is cheap
    compared with the attention.
    """

    def __call__(self, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Wraps the input. Called by torch before the projection."""
        x, *others = args
        return _ContiguousGradient.apply(x), *others


class _ContiguousGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.contiguous()


class RefuseRecords:
    """Pre-forward hook of a decoder: refuses to record tensors between layers, since they are sharded."""

    def __init__(self, config: Any, names: list[str]):
        self.config, self.names = config, names

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raises if records are requested. Called by torch before the decoder."""
        for name in self.names:
            if kwargs.get(name, getattr(self.config, name, False)):
                instead = "; use sequence_parallel=False" if name == "output_hidden_states" else ""
                raise ValueError(f"{name}: each rank of this model has a part of them only{instead}")


class EmbeddingForward:
    """Lookup in an embedding sharded by vocabulary; each row comes from the rank that has it."""

    def __init__(self, module: nn.Embedding, group: str):
        self.module, self.group = module, group

    def __call__(self, input: Tensor) -> Tensor:
        """Returns `[..., h]` for indices `[...]`, the same on every rank."""
        module, rows = self.module, self.module.num_embeddings
        same_inputs(self.group, "embedding", {"input": input})
        start, stop = Shards.even(rows, group_size(self.group)).range(group_rank(self.group))
        # An index that no rank has stays out of range, so that F.embedding raises as for nn.Embedding.
        elsewhere = ((input >= 0) & (input < start)) | ((input >= stop) & (input < rows))
        padding = module.padding_idx
        local_rows = F.embedding(
            (input - start).masked_fill(elsewhere, 0),
            local(module.weight, Shard(0)),
            padding - start if padding is not None and start <= padding < stop else None,
        ).masked_fill(elsewhere.unsqueeze(-1), 0)
        out = sum_over_ranks(local_rows, self.group)
        scale = getattr(module, "embed_scale", None)
        return out if scale is None else out * scale.to(out.dtype)


class ReplicatedForward:
    """Forward of a module with replicated parameters (a norm, for example): its own, on local tensors.

    Args:
        module: Module whose parameters are replicated DTensors.
        group: Process group of ranks with different rows or heads; gradients of the parameters are summed
            over it. None: all ranks have the same input.
        invariant: Bitwise invariance of the model, see `invariant.row_means`.
    """

    def __init__(self, module: nn.Module, group: str | None, invariant: Invariant | None = None):
        self.module, self.group, self.invariant = module, group, invariant

    def __call__(self, x: Tensor) -> Any:
        """Runs the module's own forward on this rank's rows or heads."""
        with row_means(self.invariant):
            return type(self.module).forward(Localized(self.module, self.group), x)


class Localized:
    """Proxy of a module with local tensors in place of DTensor parameters; the `self` of its forward.

    Args:
        module: Module.
        group: Process group over which gradients of the replicated parameters are summed; None: no sum.
    """

    def __init__(self, module: nn.Module, group: str | None):
        self._module, self._group = module, group

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        if not isinstance(value, DTensor):
            return value
        # Not by DTensor's redistribute: it treats meshes of equal ranks and names as one, whatever their
        # groups. Threads with a model each would then use one group, in any order.
        return value.to_local() if self._group is None else for_each_rank(value.to_local(), self._group)


class GatherOutput:
    """Forward hook of the last norm: gathers its output, which is sharded by rows."""

    def __init__(self, group: str, length: LengthFor):
        self.group, self.length = group, length

    def __call__(self, _: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor:
        """Gathers the output. Called by torch after the norm."""
        return gather_sequence("the last norm", out, self.length(), self.group)


def gather_sequence(op: str, rows: Tensor, total: Length, group: str) -> Tensor:
    """Returns the gathered sequence of `rows` on every rank; `total` is the length of the sequence."""
    total_rows = total_extent(op, "rows", total, rows.shape[SEQUENCE_DIM], rows, group, (("op", op),))
    return join_shards(rows, SEQUENCE_DIM, total_rows, group)


_packed: "WeakSet[PackedLinear]" = WeakSet()


def packed_parameters() -> set[int]:
    """Returns the `id` of each parameter that is a part of a packed linear, in all models."""
    return {id(parameter) for linear in _packed for parameter in linear.parameters()}


class PackedLinear(nn.Linear):
    """Several linears in place of one whose output is split by its caller: qkv_proj, gate_up_proj.

    A rank's shard of the packed weight would be several ranges of its rows, which no DTensor describes.
    Separate linears are sharded, saved and resharded like any other linear. It is an `nn.Linear` for peft's
    type check, but has no parameters itself.

    Args:
        linear: Packed linear.
        sizes: Number of rows of each part, by name.
    """

    def __new__(cls, *_: Any) -> "PackedLinear":
        """Makes a linear that `packed_parameters` includes, as a copy or a pickled one does."""
        linear = super().__new__(cls)
        _packed.add(linear)
        return linear

    def __init__(self, linear: nn.Linear, sizes: dict[str, int]):
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.sizes = linear.in_features, linear.out_features, sizes
        for name, size in sizes.items():
            self.add_module(name, nn.Linear(linear.in_features, size, bias=False, device="meta"))
        self.register_parameter("bias", None)
        for key in ("weight", "bias"):
            packed = getattr(linear, key)
            if packed is not None:
                rows = packed.detach().split(list(sizes.values()))
                for part, part_rows in zip(self.children(), rows, strict=True):
                    parameter = nn.Parameter(part_rows.clone(), requires_grad=packed.requires_grad)
                    part.register_parameter(key, parameter)
        for part in self.children():
            part._is_hf_initialized = True  # type: ignore[assignment]  # all parts are initialized as one weight

    def forward(self, x: Tensor) -> Tensor:
        """Returns the parts' outputs, concatenated along the last dimension."""
        return torch.cat([part(x) for part in self.children()], dim=-1)


class HeadsOfRank:
    """Model configuration with a rank's number of query heads, for its attentions."""

    def __init__(self, config: Any, ranks: int):
        self._config = config
        self.num_attention_heads = config.num_attention_heads // ranks

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_config":  # copy and pickle look up names before _config is set
            raise AttributeError(name)
        return getattr(self._config, name)
