"""Base class of the layers of `nn` (an `nn.Linear` in shards), and functions on the shards of all ranks."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from ..backends.op_call import BackendName
from ..backends.select import check_name
from ..dispatch import shard_ops
from ..runtime import agree
from ..runtime.group import GroupLike, group_name, group_rank, group_size, resolve
from ..spec.promises import Invariant, Partials, Promises, check_promises
from ..spec.sharding import Shards
from ..tuning.settings import check_reserve_sms
from .float8 import Float8, Products, products

if TYPE_CHECKING:  # typing's own is newer than Python 3.10
    from typing_extensions import Self

InitMethod = Callable[[Tensor], Any]


class OpKeywords(TypedDict):
    """Keyword arguments that a layer passes to all its ops."""

    group: str
    backend: BackendName
    reserve_sms: int | None
    partials: Partials | None
    invariant: Invariant | None


class LayerOptions(TypedDict, total=False):
    """Options that modules pass to all their linears; `nn.ColumnParallelLinear` describes them."""

    bias: bool
    init_method: InitMethod | None
    sequence_parallel: bool
    sequence_dim: int
    tp_group: GroupLike
    backend: BackendName
    reserve_sms: int | None
    partials: Partials | None
    invariant: Invariant | None
    float8: Float8 | None
    device: torch.device | str | None
    dtype: torch.dtype | None


def check_options(
    sequence_dim: int, backend: BackendName, promises: Promises, reserve_sms: int | None
) -> None:
    """Raises ValueError for an invalid option of a layer; the class of the layer describes them."""
    if sequence_dim not in (0, 1):
        raise ValueError(f"sequence_dim must be 0 ([s, b, h]) or 1 ([b, s, h]), got {sequence_dim!r}")
    check_promises(promises)
    check_name(backend, promises=promises)
    check_reserve_sms(reserve_sms)


class ShardedLinear(nn.Module):
    """`nn.Linear` whose parameters are sharded over the ranks. Arguments are those of the layers in `nn`."""

    shard_dims: ClassVar[dict[str, int]]
    """Dimension along which each parameter is sharded; parameters that are not listed are replicated."""

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        bias: bool,
        init_method: InitMethod | None,
        skip_bias_add: bool,
        sequence_parallel: bool,
        sequence_dim: int,
        tp_group: GroupLike,
        backend: BackendName,
        reserve_sms: int | None,
        partials: Partials | None,
        invariant: Invariant | None,
        float8: Float8 | None,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ):
        super().__init__()
        self.promises = Promises(partials, invariant)
        check_options(sequence_dim, backend, self.promises, reserve_sms)
        self.input_size, self.output_size = input_size, output_size
        self.init_method, self.skip_bias_add = init_method, skip_bias_add
        self.sequence_parallel, self.sequence_dim = sequence_parallel, sequence_dim
        self.backend, self.reserve_sms, self.tp_group = backend, reserve_sms, group_name(tp_group)
        self.float8 = float8
        self.register_load_state_dict_pre_hook(_shard_incoming)
        self.adopt(self._draw(bias, device, dtype))

    @property
    def op_keywords(self) -> OpKeywords:
        """Returns the keyword arguments that all ops of the layer get."""
        return {
            "group": self.tp_group,
            "backend": self.backend,
            "reserve_sms": self.reserve_sms,
            "partials": self.promises.partials,
            "invariant": self.promises.invariant,
        }

    @property
    def products(self) -> Products:
        """Returns the ops, in 8 bits if `float8` is set."""
        return products(self.float8)

    @classmethod
    def from_linear(cls, linear: nn.Linear, tp_group: GroupLike = None, **options: Any) -> "Self":
        """Returns a layer with this rank's shard of `linear`, which is the same on every rank.

        Options are the constructor's.
        """
        has_bias, dtype = linear.bias is not None, linear.weight.dtype
        layer = cls(
            linear.in_features, linear.out_features, bias=has_bias, tp_group=tp_group, device="meta",
            dtype=dtype, **options,
        )  # fmt: skip
        layer.adopt(linear)
        return layer

    def adopt(self, linear: nn.Linear) -> None:
        """Sets the layer's parameters to this rank's shards of an unsharded layer's."""
        for name in ("weight", "bias"):
            full = getattr(linear, name)
            parameter = None
            if full is not None:
                parameter = nn.Parameter(self.shard(name, full.detach()), requires_grad=full.requires_grad)
            self.register_parameter(name, parameter)

    def reset_parameters(self) -> None:
        """Initializes the parameters again as the constructor does: equal seeds give shards of one layer."""
        linear = self._draw(self.bias is not None, self.weight.device, self.weight.dtype)
        with torch.no_grad():
            for name, parameter in self.named_parameters(recurse=False):
                parameter.copy_(sharded_as(parameter, self.shard(name, getattr(linear, name))))

    def shard(self, name: str, full: Tensor) -> Tensor:
        """Returns a copy of this rank's shard of a full parameter."""
        if name not in self.shard_dims:
            return full.clone()
        dim, group = self.shard_dims[name], self.tp_group
        start, stop = Shards.even(full.shape[dim], group_size(group)).range(group_rank(group))
        return full.narrow(dim, start, stop - start).clone(memory_format=torch.contiguous_format)

    def extent(self, name: str) -> int:
        """Returns the full parameter's extent in the sharded dimension."""
        return (self.output_size, self.input_size)[self.shard_dims[name]]

    def extra_repr(self) -> str:
        """Returns the arguments for `print(module)`."""
        return (
            f"input_size={self.input_size}, output_size={self.output_size}, bias={self.bias is not None}, "
            f"tp={group_size(self.tp_group)}, sequence_parallel={self.sequence_parallel}"
            + ("" if self.float8 is None else f", float8={self.float8}")
        )

    def _draw(self, bias: bool, device: torch.device | str | None, dtype: torch.dtype | None) -> nn.Linear:
        """Returns the unsharded layer, drawn in full on every rank, so that the shards belong to one layer.

        Replicated parameters, such as the bias of a row-parallel layer, are rank 0's, whatever the ranks'
        seeds.
        """
        linear = nn.Linear(self.input_size, self.output_size, bias=bias, device=device, dtype=dtype)
        if self.init_method is not None:
            with torch.no_grad():
                self.init_method(linear.weight)
                if bias:
                    linear.bias.zero_()
        for name, parameter in linear.named_parameters():
            if name not in self.shard_dims:
                broadcast_from_rank_zero(parameter.data, self.tp_group)
        return linear


def broadcast_from_rank_zero(tensor: Tensor, group: str) -> None:
    """Copies rank 0's values to every rank, in place.

    It does nothing on the meta device and for virtual ranks.
    """
    ranks = resolve(group)
    if tensor.is_meta or ranks.size == 1 or ranks.process_group is None:
        return
    if tensor.device.type in ranks.device_types:  # no op of the layer supports other devices
        dist.broadcast(tensor, group=ranks.process_group, group_src=0)


def full_state_dict(module: nn.Module) -> dict[str, Any]:
    """Returns the state dict of the unsharded model. Collective over the layers' groups.

    Args:
        module: Module that contains tensor-parallel layers of `overlap_gemm.nn`.

    Returns:
        `module.state_dict()` with each sharded parameter gathered, also from FSDP's shards; the same on every
        rank. The layers' `load_state_dict` accepts it, as well as a state dict of shards.

    Raises:
        ValueError: The state dict lacks a layer's parameter, or contains another tensor in its place.
    """
    sharded = {id(parameter): (parameter, layer, name) for parameter, layer, name in _sharded(module)}
    state = dict(module.state_dict(keep_vars=True))  # find parameters by identity: names may be changed
    if missing := sharded.keys() - {id(value) for value in state.values()}:
        shapes = ", ".join(str(list(sharded[key][0].shape)) for key in missing)
        raise ValueError(
            f"full_state_dict: the state dict does not hold shards {shapes} of tensor-parallel layers: they "
            f"are parametrized, or a hook has replaced them, and the replacement cannot be gathered"
        )
    for key, value in state.items():
        if isinstance(value, Tensor):
            full = gather_dtensor(value)
            if id(value) in sharded:
                _, layer, name = sharded[id(value)]
                full = shard_ops.join_shards(full, layer.shard_dims[name], layer.extent(name), layer.tp_group)
            state[key] = full.detach()
    return state


@torch.no_grad()
def clip_grad_norm_(
    module: nn.Module, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Clips gradients by the unsharded model's norm. Collective over the layers' groups.

    A rank without gradients must call it, too. In contrast, `torch.nn.utils.clip_grad_norm_` on shards that
    are plain tensors uses the norm of this rank's part.

    Args:
        module: Module that contains tensor-parallel layers of `overlap_gemm.nn`, with or without FSDP.
            Gradients of its other parameters are the same on every rank of the layers' groups.
        max_norm: Maximum norm of the gradients afterwards; they are changed in place.
        norm_type: Order p of the norm: positive, or infinity.
        error_if_nonfinite: Raise on every rank if the norm is not finite.

    Returns:
        Norm before clipping, 0-d, the same on every rank.

    Raises:
        ValueError: `norm_type` is not positive. On CPUs, or with OVERLAP_GEMM_CHECK=1, also on every rank:
            the norms of a replicated parameter's gradients differ between ranks by more than 2% of the
            largest, so the gradients must be summed (`norms`).
        RuntimeError: The norm is not finite, and `error_if_nonfinite` is set.
    """
    if not norm_type > 0:
        raise ValueError(f"clip_grad_norm_: norm_type must be positive, got {norm_type}")
    groups = {id(parameter): layer.tp_group for parameter, layer, _ in _sharded(module)}
    _check_replicated(module, groups)
    # Grouped by process group and mesh. A rank without gradients takes part, too, in the same dtype.
    parts: dict[tuple[str | None, Any], list[Tensor]] = {}
    total = torch.zeros(1)
    for parameter in module.parameters():
        total = total.to(parameter.device, torch.promote_types(total.dtype, parameter.dtype))
        part = parts.setdefault((groups.get(id(parameter)), getattr(parameter, "device_mesh", None)), [])
        if parameter.grad is not None and parameter.grad.numel():
            part.append(parameter.grad)
    norms = [total]
    for (group, _), gradients in parts.items():
        norm = gather_dtensor(nn.utils.get_total_norm(gradients, norm_type)).to(total).view(1)
        norms.append(norm if group is None else shard_ops.join_shards(norm, 0, group_size(group), group))
    total = torch.linalg.vector_norm(torch.cat(norms), norm_type)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"clip_grad_norm_: the norm of order {norm_type} of the gradients is {total.item()}, and "
            f"error_if_nonfinite is set"
        )
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)  # torch's
    for gradients in parts.values():
        for gradient in gradients:
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            local.mul_(factor.to(local.device))
    return total


def _check_replicated(module: nn.Module, groups: dict[int, str]) -> None:
    """Raises on every rank if norms of a replicated parameter's gradients differ by more than 2%."""
    replicated = [(name, p) for name, p in module.named_parameters() if id(p) not in groups]
    if not replicated or not (replicated[0][1].device.type == "cpu" or agree.checking()):
        return
    parts = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for _, p in replicated]
    norms = torch.tensor([0.0 if part is None else float(part.norm()) for part in parts])
    for group in sorted(set(groups.values())):
        if group_size(group) == 1:
            continue
        everyone = shard_ops.join_shards(norms.view(1, -1), 0, group_size(group), group)
        apart = everyone.amax(0) - everyone.amin(0) > 0.02 * everyone.amax(0)
        if apart.any():
            names = ", ".join(name for (name, _), differs in zip(replicated, apart, strict=True) if differs)
            raise ValueError(
                f"gradients of {names} must be equal on the ranks of the group, since these parameters are "
                f"replicated. If they are applied to this rank's rows (sequence_parallel=True), sum their "
                f"gradients with overlap_gemm.nn.LayerNorm, RMSNorm or sum_sequence_parallel_gradients"
            )


def _sharded(module: nn.Module) -> Iterator[tuple[Tensor, ShardedLinear, str]]:
    """Yields each sharded parameter, its layer, and its name in the layer."""
    for layer in module.modules():
        if isinstance(layer, ShardedLinear):
            for name in layer.shard_dims:
                if (parameter := getattr(layer, name)) is not None:
                    yield parameter, layer, name


def gather_dtensor(tensor: Tensor) -> Tensor:
    """Returns the full tensor of a DTensor, for example of FSDP; other tensors unchanged. Collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def sharded_as(parameter: Tensor, value: Tensor) -> Tensor:
    """Returns the shard of `value`, which every rank has, by the layout of `parameter` if that is a DTensor.

    A DTensor, or any value for a plain parameter, is returned unchanged.
    """
    if not isinstance(parameter, DTensor) or isinstance(value, DTensor):
        return value
    mesh, placements = parameter.device_mesh, parameter.placements
    return distribute_tensor(value.to(parameter.device), mesh, placements, src_data_rank=None)


def _shard_incoming(layer: ShardedLinear, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Shards an unsharded layer's parameters before `load_state_dict`; shards stay unchanged."""
    for name, parameter in layer.named_parameters(recurse=False):
        value = state.get(prefix + name)
        if value is None:
            continue
        dim = layer.shard_dims.get(name)
        if dim is not None and value.ndim > dim and value.shape[dim] == layer.extent(name):
            value = layer.shard(name, value)
        state[prefix + name] = sharded_as(parameter, value)
