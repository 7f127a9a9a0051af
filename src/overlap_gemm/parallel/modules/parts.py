"""The forwards that the modules of a parallelized model get. Between modules all tensors are local ones."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from ...api.functional import Length
from ...dispatch.lowering import total_extent
from ...dispatch.moves import for_each_rank, join_shards, keep_shard, sum_over_ranks
from ...runtime.group import group_rank, group_size
from ...spec.sharding import Shards
from ..inputs import same_inputs
from .layouts import local, unsaid

SEQUENCE_DIM = 1
"""Of Hugging Face's hidden states `[b, s, h]`."""


class LengthFor:
    """The length of the sequence, said for one part of a module by another that runs before it there.

    Said once for each time that the module runs: a part that is recomputed by itself finds nothing, since
    what was said last may be another microbatch's.
    """

    def __init__(self) -> None:
        self.runs = False
        self.total: int | None = None

    def begin(self, _: nn.Module, args: tuple[Any, ...]) -> None:
        """Pre-forward hook of the module."""
        self.runs, self.total = True, None

    def note(self, total: int) -> None:
        """Says the length in tokens, if the module runs."""
        if self.runs:
            self.total = total

    def __call__(self) -> Length:
        """What was said, once."""
        total, self.runs, self.total = self.total, False, None
        return unsaid() if total is None else total


class SequenceLength:
    """The length of the sequence in the forward pass (or recomputation) in progress, over all ranks.

    A module between sharded rows cannot see it. Every attention can, and says it: for itself, for the MLP of
    its layer, and for the norm after all layers.
    """

    def __init__(self) -> None:
        self.total = 0
        self.for_mlp, self.for_norm = LengthFor(), LengthFor()

    def __call__(self) -> int:
        """The length in tokens, for an attention."""
        return self.total

    def note(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Pre-forward hook of every attention."""
        embeddings = kwargs["position_embeddings"]  # cosines and sines, or both as complex numbers
        angles = embeddings[0] if isinstance(embeddings, tuple) else embeddings  # [b or 1, s, ...]
        self.total = angles.shape[1]
        self.for_mlp.note(self.total)
        self.for_norm.note(self.total)


class EnterLayers:
    """Pre-forward hook of the first decoder layer: of the hidden states it keeps its rank's rows."""

    def __init__(self, group: str):
        self.group = group

    def __call__(self, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Called by torch before the layer."""
        hidden, *others = args
        return keep_shard(hidden, SEQUENCE_DIM, self.group), *others


class GradientAsContiguous:
    """Pre-forward hook of the projection after an attention: its input's gradient comes back contiguous.

    Where it is gathered along the sequence it would be a transposed view. torch (2.11, CUDA) keeps a graph of
    cuDNN's attention for the backward of all calls alike, and does not ask whether this gradient's strides
    are: another model of these sizes, whose gradients lie otherwise, then gets wrong ones, silently
    (docs/design/facts.md). The copy is small compared with the attention.
    """

    def __call__(self, _: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Called by torch before the projection."""
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
    """Pre-forward hook of a decoder: what it would record between its layers is sharded over the ranks."""

    def __init__(self, config: Any, names: list[str]):
        self.config, self.names = config, names

    def __call__(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Called by torch before the decoder."""
        for name in self.names:
            if kwargs.get(name, getattr(self.config, name, False)):
                instead = "; sequence_parallel=False has them" if name == "output_hidden_states" else ""
                raise ValueError(f"{name}: each rank of this model has a part of them only{instead}")


class EmbeddingForward:
    """Lookup in an embedding sharded by vocabulary: each row comes from the rank that has it."""

    def __init__(self, module: nn.Embedding, group: str):
        self.module, self.group = module, group

    def __call__(self, input: Tensor) -> Tensor:
        """Looks up `[...]` indices; `[..., h]`, the same on every rank."""
        module, rows = self.module, self.module.num_embeddings
        same_inputs(self.group, "embedding", {"input": input})
        start, stop = Shards.even(rows, group_size(self.group)).range(group_rank(self.group))
        # An index that no rank has stays out of range, and is refused as nn.Embedding refuses it.
        elsewhere = ((input >= 0) & (input < start)) | ((input >= stop) & (input < rows))
        padding = module.padding_idx
        own = F.embedding(
            (input - start).masked_fill(elsewhere, 0),
            local(module.weight, Shard(0)),
            padding - start if padding is not None and start <= padding < stop else None,
        ).masked_fill(elsewhere.unsqueeze(-1), 0)
        out = sum_over_ranks(own, self.group)
        scale = getattr(module, "embed_scale", None)
        return out if scale is None else out * scale.to(out.dtype)


class ReplicatedForward:
    """The own forward of a module whose parameters all ranks have, a norm for example, on local tensors.

    Args:
        module: The module, its parameters replicated DTensors.
        group: Of the ranks each of which sees its own rows or heads only, so that gradients of the parameters
            are summed; None: all see the same.
    """

    def __init__(self, module: nn.Module, group: str | None):
        self.module, self.group = module, group

    def __call__(self, x: Tensor) -> Any:
        """Runs on this rank's rows or heads."""
        return type(self.module).forward(Localized(self.module, self.group), x)


class Localized:
    """A module with local tensors in place of its DTensor parameters: `self` for its forward.

    Args:
        module: The module.
        group: Of the ranks over which gradients of the parameters, which are replicated, are summed.
    """

    def __init__(self, module: nn.Module, group: str | None):
        self._module, self._group = module, group

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._module, name)
        if not isinstance(value, DTensor):
            return value
        # Not by a redistribution of DTensor's: it takes meshes of equal ranks and names for one, whatever
        # their groups, and threads with a model each would meet in one group, in any order.
        return value.to_local() if self._group is None else for_each_rank(value.to_local(), self._group)


class GatherOutput:
    """Forward hook of the last norm: its output, sharded by rows, becomes whole on every rank."""

    def __init__(self, group: str, length: LengthFor):
        self.group, self.length = group, length

    def __call__(self, _: nn.Module, args: tuple[Any, ...], out: Tensor) -> Tensor:
        """Called by torch after the norm."""
        return whole_sequence("the last norm", out, self.length(), self.group)


def whole_sequence(op: str, own: Tensor, total: Length, group: str) -> Tensor:
    """What is sharded by rows, whole on every rank; `total`: of the sequence."""
    total_rows = total_extent(op, "rows", total, own.shape[SEQUENCE_DIM], own, group, (("op", op),))
    return join_shards(own, SEQUENCE_DIM, total_rows, group)


class PackedLinear(nn.Linear):
    """Linears behind the name of one, for code that cuts its output apart: qkv_proj, gate_up_proj.

    A rank's shard of the packed weight would be several ranges of its rows, which no DTensor describes; as
    linears of their own they are sharded, saved and resharded like any other. It is a linear to peft, which
    asks, and has no parameters itself.

    Args:
        linear: The packed linear.
        sizes: Rows of each part, by its name.
    """

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
                for part, own in zip(self.children(), rows, strict=True):
                    parameter = nn.Parameter(own.clone(), requires_grad=packed.requires_grad)
                    part.register_parameter(key, parameter)
        for part in self.children():
            part._is_hf_initialized = True  # type: ignore[assignment]  # it is drawn with the others, in one

    def forward(self, x: Tensor) -> Tensor:
        """Multiplies; the parts' outputs side by side."""
        return torch.cat([part(x) for part in self.children()], dim=-1)


class HeadsOfRank:
    """A model's configuration as a rank's attention sees it: with the rank's share of the query heads."""

    def __init__(self, config: Any, ranks: int):
        self._config = config
        self.num_attention_heads = config.num_attention_heads // ranks

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_config":  # copy and pickle ask before there is a _config
            raise AttributeError(name)
        return getattr(self._config, name)
