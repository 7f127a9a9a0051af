"""Tensor-parallel layers with Megatron's names. Each equals the unsharded `nn.Linear` of which it is a shard.

Parameters are plain tensors, this rank's shards. Code that is not aware of that treats them as full tensors:

- torch's distributed checkpoints would store them as copies of one tensor: use `full_state_dict`.
- torch's `clip_grad_norm_` would use one rank's norm: use `clip_grad_norm_` of this module.
- `torch.amp.GradScaler` would skip a step only on ranks with an infinity: use `ShardedGradScaler` of
  `torch.distributed.fsdp.sharded_grad_scaler`, with the group.

`overlap_gemm.parallel` has styles that make DTensors.
"""

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .api.ahead import LayerOp
from .api.all_to_all import all_to_all_gemm, gemm_all_to_all
from .api.float8 import Float8
from .api.functional import Length, column_parallel_gemm
from .api.layer_epilogues import (
    GATINGS,
    LOCAL_PRODUCTS,
    RESIDUAL,
    Activation,
    Fusion,
    gated,
    gating_of,
    plus_residual,
    why_not_fused,
)
from .api.linears import (
    InitMethod,
    ShardedLinear,
    broadcast_from_rank_zero,
    clip_grad_norm_,
    full_state_dict,
)
from .api.norms import (
    LayerNorm,
    RMSNorm,
    SequenceParallelWarning,
    sequence_parallel_parameters,
    sum_sequence_parallel_gradients,
    warn_unmarked_parameters,
)
from .api.random_numbers import Dropout, per_rank_random
from .backends.op_call import BackendName
from .backends.select import check_name
from .dispatch import moves
from .runtime.group import GroupLike, group_name, group_size
from .spec import ALL_GATHER_GEMM, GEMM_ALL_GATHER, GEMM_ALL_REDUCE, GEMM_REDUCE_SCATTER
from .spec.promises import Invariant, Partials, Promises, check_promises
from .tuning.settings import check_reserve_sms

__all__ = [
    "ColumnParallelLinear",
    "Dropout",
    "Float8",
    "LayerNorm",
    "ParallelMLP",
    "RMSNorm",
    "RowParallelLinear",
    "SequenceParallelWarning",
    "UlyssesAttention",
    "clip_grad_norm_",
    "column_parallel_gemm",
    "full_state_dict",
    "per_rank_random",
    "sequence_parallel_parameters",
    "sum_sequence_parallel_gradients",
]


class ColumnParallelLinear(ShardedLinear):
    """`nn.Linear` whose output features are divided over the ranks.

    Built from the same seed on every rank it is the shard of the `nn.Linear` built from that seed.

    Input: `[..., input_size]`, replicated; with `sequence_parallel` this rank's rows of it. Output: `[...,
    output_size of this rank]`; with `gather_output` `[..., output_size]`. With `skip_bias_add` the output is
    a pair: the product without bias, and the bias.

    Args:
        input_size: K.
        output_size: N over all ranks; rank r has the rows of the weight that `torch.chunk` assigns to it.
        bias: Add a bias, divided like the output.
        gather_output: Gather the output features; not together with `sequence_parallel`.
        init_method: Function that fills the full weight `[N, K]`; the bias is then zero. Default:
            `nn.Linear`'s initialisation of both.
        skip_bias_add: Return the bias instead of adding it.
        sequence_parallel: The input is sharded along `sequence_dim`.
        sequence_dim: 0 for Megatron's `[s, b, h]`, 1 for `[b, s, h]`.
        tp_group: ProcessGroup, 1-D DeviceMesh, or None for the world.
        rows: Total number of rows, as in `overlap_gemm.all_gather_gemm`. Sequences that the ranks do not
            divide need the total length, or "exchange".
        backend: Backend of the ops, as in `overlap_gemm.all_gather_gemm`.
        reserve_sms: SMs that kernels leave free, as in `overlap_gemm.all_gather_gemm`.
        partials: Type of partial sums, as in `overlap_gemm.gemm_reduce_scatter`.
        invariant: Bitwise invariance, as in `overlap_gemm.gemm_reduce_scatter`.
        float8: 8-bit settings of the products; parameters keep their dtype.
        device: Device of the parameters.
        dtype: dtype of the parameters.
    """

    shard_dims: ClassVar[dict[str, int]] = {"weight": 0, "bias": 0}

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        bias: bool = True,
        gather_output: bool = False,
        init_method: InitMethod | None = None,
        skip_bias_add: bool = False,
        sequence_parallel: bool = False,
        sequence_dim: int = 0,
        tp_group: GroupLike = None,
        rows: Length = None,
        backend: BackendName = "auto",
        reserve_sms: int | None = None,
        partials: Partials | None = None,
        invariant: Invariant | None = None,
        float8: Float8 | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        if gather_output and sequence_parallel:
            raise ValueError(
                "gather_output=True and sequence_parallel=True exclude each other: set one of them"
            )
        super().__init__(
            input_size, output_size, bias=bias, init_method=init_method, skip_bias_add=skip_bias_add,
            sequence_parallel=sequence_parallel, sequence_dim=sequence_dim, tp_group=tp_group,
            backend=backend, reserve_sms=reserve_sms, partials=partials, invariant=invariant, float8=float8,
            device=device, dtype=dtype,
        )  # fmt: skip
        self.gather_output, self.rows = gather_output, rows

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor | None]:
        """Multiplies. The class describes the shapes."""
        bias = None if self.skip_bias_add else self.bias
        if self.sequence_parallel:
            warn_unmarked_parameters(self, x)
            dim, rows, columns = self.sequence_dim, self.rows, self.output_size
            out = self.products.all_gather_gemm(
                x, self.weight, bias=bias, dim=dim, rows=rows, columns=columns, **self.op_keywords
            )
        elif self.gather_output:
            columns = self.output_size
            out = self.products.gemm_all_gather(
                x, self.weight, bias=bias, columns=columns, **self.op_keywords
            )
        else:
            out = self.products.column_parallel_gemm(x, self.weight, bias, **self.op_keywords)
        return (out, self.bias) if self.skip_bias_add else out

    def layer_ops(self, name: str) -> Iterator[LayerOp]:
        """Yields the op, if it has one; see `overlap_gemm.explain`."""
        if self.sequence_parallel:
            yield LayerOp(name, ALL_GATHER_GEMM.name, self.input_size, self.weight, self.tp_group)
        elif self.gather_output:
            yield LayerOp(name, GEMM_ALL_GATHER.name, self.output_size, self.weight, self.tp_group)


class RowParallelLinear(ShardedLinear):
    """`nn.Linear` whose input features are divided over the ranks; the ranks' partial results are summed.

    Built from the same seed on every rank it is the shard of the `nn.Linear` built from that seed.

    Input: `[..., input_size of this rank]`, or all of it on every rank if not `input_is_parallel`. Output:
    `[..., output_size]`, replicated; with `sequence_parallel` this rank's rows of it. With `skip_bias_add`
    the output is a pair: the sum without bias, and the bias.

    Args:
        input_size: K over all ranks; rank r has the columns of the weight that `torch.chunk` assigns to it.
        output_size: N.
        bias: Add a bias, the same on every rank, once after the sum.
        input_is_parallel: The input is already sharded along its features.
        init_method: Function that fills the full weight `[N, K]`, as in `ColumnParallelLinear`.
        skip_bias_add: Return the bias instead of adding it.
        sequence_parallel: Shard the output along `sequence_dim`.
        sequence_dim: 0 for Megatron's `[s, b, h]`, 1 for `[b, s, h]`.
        tp_group: ProcessGroup, 1-D DeviceMesh, or None for the world.
        backend: Backend of the ops, as in `overlap_gemm.all_gather_gemm`.
        reserve_sms: SMs that kernels leave free, as in `overlap_gemm.all_gather_gemm`.
        partials: Type of partial sums, as in `overlap_gemm.gemm_reduce_scatter`.
        invariant: Bitwise invariance, as in `overlap_gemm.gemm_reduce_scatter`.
        float8: 8-bit settings of the products; parameters keep their dtype.
        fuse: Apply a residual as an epilogue of the op (`api.layer_epilogues`). None: if the kernel supports
            epilogues; True: always; False: never.
        device: Device of the parameters.
        dtype: dtype of the parameters.
    """

    shard_dims: ClassVar[dict[str, int]] = {"weight": 1}

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        bias: bool = True,
        input_is_parallel: bool = True,
        init_method: InitMethod | None = None,
        skip_bias_add: bool = False,
        sequence_parallel: bool = False,
        sequence_dim: int = 0,
        tp_group: GroupLike = None,
        backend: BackendName = "auto",
        reserve_sms: int | None = None,
        partials: Partials | None = None,
        invariant: Invariant | None = None,
        float8: Float8 | None = None,
        fuse: bool | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__(
            input_size, output_size, bias=bias, init_method=init_method, skip_bias_add=skip_bias_add,
            sequence_parallel=sequence_parallel, sequence_dim=sequence_dim, tp_group=tp_group,
            backend=backend, reserve_sms=reserve_sms, partials=partials, invariant=invariant, float8=float8,
            device=device, dtype=dtype,
        )  # fmt: skip
        self.input_is_parallel, self.fuse = input_is_parallel, fuse

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor | None]:
        """Multiplies and sums, and adds a residual of the output's shape. The class describes the shapes."""
        if not self.input_is_parallel:
            x = moves.keep_shard(x, x.ndim - 1, self.tp_group)
        how: dict[str, Any] = {"bias": None if self.skip_bias_add else self.bias, "k": self.input_size}
        how |= {"dim": self.sequence_dim} if self.sequence_parallel else {}
        operands = x, self.weight, residual
        out = plus_residual(self.products, self.op, *operands, self.fuse, **how, **self.op_keywords)
        return (out, self.bias) if self.skip_bias_add else out

    @property
    def op(self) -> str:
        """Returns the name of the op."""
        return (GEMM_REDUCE_SCATTER if self.sequence_parallel else GEMM_ALL_REDUCE).name

    def fusions(self, name: str) -> Iterator[Fusion]:
        """Yields whether a residual is applied as an epilogue, for `overlap_gemm.explain`."""
        yield Fusion(name, RESIDUAL, self.op, why_not_fused(self.products, self.fuse, *self.promises))

    def layer_ops(self, name: str) -> Iterator[LayerOp]:
        """Yields the op; see `overlap_gemm.explain`."""
        yield LayerOp(name, self.op, self.output_size, self.weight, self.tp_group)


class ParallelMLP(nn.Module):
    """A gated MLP: `down(silu(gate(x)) * up(x))`, with a residual added to it.

    Gate and up share one gather of x, unless one of them has hooks or is wrapped.

    Input and output: `[..., hidden_size]`, replicated; with `sequence_parallel` this rank's rows of it. The
    children have Llama's names: gate_proj, up_proj, down_proj.

    Args:
        hidden_size: Width of input and output.
        ffn_hidden_size: Width between the products, divided over the ranks.
        bias: Add biases.
        init_method: Function that fills a full weight `[N, K]`, as in `ColumnParallelLinear`.
        sequence_parallel: Input and output are sharded along `sequence_dim`.
        sequence_dim: 0 for Megatron's `[s, b, h]`, 1 for `[b, s, h]`.
        tp_group: ProcessGroup, 1-D DeviceMesh, or None for the world.
        rows: Total number of rows, as in `overlap_gemm.all_gather_gemm`. Sequences that the ranks do not
            divide need the total length, or "exchange".
        backend: Backend of the ops, as in `overlap_gemm.all_gather_gemm`.
        reserve_sms: SMs that kernels leave free, as in `overlap_gemm.all_gather_gemm`.
        partials: Type of partial sums, as in `overlap_gemm.gemm_reduce_scatter`.
        invariant: Bitwise invariance, as in `overlap_gemm.gemm_reduce_scatter`.
        float8: 8-bit settings of the products; parameters keep their dtype.
        activation: "silu" (SwiGLU), "gelu" or "gelu_tanh" (GeGLU).
        fuse: Apply activation and residual as epilogues of the ops, as in `RowParallelLinear`.
        device: Device of the parameters.
        dtype: dtype of the parameters.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        *,
        bias: bool = False,
        init_method: InitMethod | None = None,
        sequence_parallel: bool = False,
        sequence_dim: int = 0,
        tp_group: GroupLike = None,
        rows: Length = None,
        backend: BackendName = "auto",
        reserve_sms: int | None = None,
        partials: Partials | None = None,
        invariant: Invariant | None = None,
        float8: Float8 | None = None,
        activation: Activation = "silu",
        fuse: bool | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        if activation not in GATINGS:
            raise ValueError(f"activation must be one of {', '.join(GATINGS)}, got {activation!r}")
        self.activation, self.fuse = activation, fuse
        common: dict[str, Any] = {
            "bias": bias, "init_method": init_method, "sequence_parallel": sequence_parallel,
            "sequence_dim": sequence_dim, "tp_group": tp_group, "backend": backend,
            "reserve_sms": reserve_sms, "partials": partials, "invariant": invariant, "float8": float8,
            "device": device, "dtype": dtype,
        }  # fmt: skip
        self.gate_proj = ColumnParallelLinear(hidden_size, ffn_hidden_size, rows=rows, **common)
        self.up_proj = ColumnParallelLinear(hidden_size, ffn_hidden_size, rows=rows, **common)
        self.down_proj = RowParallelLinear(ffn_hidden_size, hidden_size, fuse=fuse, **common)

    @classmethod
    def from_linears(
        cls, gate: nn.Linear, up: nn.Linear, down: nn.Linear, tp_group: GroupLike = None, **options: Any
    ) -> "ParallelMLP":
        """Returns the MLP with this rank's shards of three `nn.Linear`, which are the same on every rank."""
        mlp = cls(
            gate.in_features,
            gate.out_features,
            bias=gate.bias is not None,
            tp_group=tp_group,
            device="meta",
            dtype=gate.weight.dtype,
            **options,
        )
        for layer, linear in ((mlp.gate_proj, gate), (mlp.up_proj, up), (mlp.down_proj, down)):
            layer.adopt(linear)
        return mlp

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Multiplies, and adds a residual of the output's shape. The class describes the shapes."""
        first, second, gating = self.gate_proj, self.up_proj, GATINGS[self.activation]
        if _is_bare(first) and _is_bare(second) and first.sequence_parallel:
            warn_unmarked_parameters(first, x)
            biases = None if first.bias is None else [first.bias, second.bias]
            operands, columns = (x, [first.weight, second.weight]), first.output_size + second.output_size
            how: dict[str, Any] = {"dim": first.sequence_dim, "rows": first.rows, "columns": columns}
            if why_not_fused(first.products, self.fuse, *first.promises) is None:
                hidden = gated(*operands, biases, *gating, self.fuse, **how, **first.op_keywords)
            else:
                gate, up = first.products.all_gather_gemm(*operands, bias=biases, **how, **first.op_keywords)
                hidden = gating.on_tensors(gate) * up
        else:
            hidden = gating.on_tensors(first(x)) * second(x)
        return self.down_proj(hidden) if residual is None else self.down_proj(hidden, residual)

    def fusions(self, name: str) -> Iterator[Fusion]:
        """Yields whether the activation is applied as an epilogue, for `overlap_gemm.explain`."""
        gate = self.gate_proj
        if not (_is_bare(gate) and _is_bare(self.up_proj)):
            why: str | None = "gate or up has hooks or is wrapped"
        elif not gate.sequence_parallel:
            why = LOCAL_PRODUCTS
        else:
            why = why_not_fused(gate.products, self.fuse, *gate.promises)
        yield Fusion(name, gating_of(self.activation), ALL_GATHER_GEMM.name, why)


def _is_bare(layer: nn.Module) -> bool:
    """Returns whether calling the layer only calls its op: it has no hooks, no wrapper, no other forward."""
    hooks = (layer._forward_pre_hooks, layer._forward_hooks, layer._backward_pre_hooks, layer._backward_hooks)
    is_replaced = "forward" in layer.__dict__ or type(layer).forward not in _FORWARDS
    return not is_replaced and not any(hooks)


_FORWARDS = (ColumnParallelLinear.forward, RowParallelLinear.forward, nn.Linear.forward)


class UlyssesAttention(nn.Module):
    """Attention whose sequence is sharded outside, and whose heads are sharded inside.

    Queries, keys and values are projected and exchanged by one call of `gemm_all_to_all`; the result returns
    by `all_to_all_gemm`. Every rank of `group` has all of each weight; gradients of weights and biases are
    summed over these ranks. The children have Llama's names: q_proj, k_proj, v_proj, o_proj.

    Input and output: this rank's rows of `[S, B, hidden_size]`, or with `sequence_dim=1` of `[B, S,
    hidden_size]`.

    Heads of queries that share a key stay on one rank: a rank gets ceil(num_kv_heads / P) of these groups, as
    `torch.chunk` divides them. Fewer key and value heads than ranks are replicated: rank r gets head
    `r * num_kv_heads // P`.

    Args:
        hidden_size: Width of input and output.
        num_heads: Heads of queries over all ranks.
        num_kv_heads: Heads of keys and values, which divides `num_heads`. Default: `num_heads`.
        head_dim: Columns of a head. Default: `hidden_size // num_heads`.
        bias: Add biases to queries, keys and values.
        out_bias: Add a bias to the output.
        attention: Function of `q [B, heads of this rank, S, head_dim]`, k and v, which returns a tensor of
            q's shape; it may rotate or normalise q and k first. Default: torch's
            `scaled_dot_product_attention`. It is not called on a rank without heads.
        init_method: Function that fills a full weight, as in `ColumnParallelLinear`.
        sequence_dim: 0 for `[s, b, h]`, 1 for `[b, s, h]`.
        group: Ranks over which the sequence is sharded: ProcessGroup, 1-D DeviceMesh, or None for the world.
        tp_group: Ranks over which heads are divided in addition, which have the same rows of the input; the
            weights are then shards. Default: none.
        rows: S, as in `overlap_gemm.gemm_all_to_all`, if the ranks do not divide it.
        backend: Backend of the ops, as in `overlap_gemm.all_gather_gemm`.
        reserve_sms: SMs that kernels leave free, as in `overlap_gemm.all_gather_gemm`.
        partials: Type of partial sums, as in `overlap_gemm.gemm_reduce_scatter`.
        invariant: Bitwise invariance, as in `overlap_gemm.gemm_reduce_scatter`.
        device: Device of the parameters.
        dtype: dtype of the parameters.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = False,
        out_bias: bool = False,
        attention: Callable[..., Tensor] | None = None,
        init_method: InitMethod | None = None,
        sequence_dim: int = 0,
        group: GroupLike = None,
        tp_group: GroupLike = None,
        rows: Length = None,
        backend: BackendName = "auto",
        reserve_sms: int | None = None,
        partials: Partials | None = None,
        invariant: Invariant | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        if sequence_dim not in (0, 1):
            raise ValueError(f"sequence_dim must be 0 ([s, b, h]) or 1 ([b, s, h]), got {sequence_dim!r}")
        check_promises(Promises(partials, invariant))
        check_name(backend, promises=Promises(partials, invariant))
        check_reserve_sms(reserve_sms)
        self.group = group_name(group)
        self.tp_group = None if tp_group is None else group_name(tp_group)
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads or num_heads
        self.head_dim = head_dim or hidden_size // num_heads
        self.sequence_dim, self.rows, self.attention = sequence_dim, rows, attention
        self.heads = self._heads()
        self.op_keywords: dict[str, Any] = {
            "group": self.group, "backend": backend, "reserve_sms": reserve_sms, "partials": partials,
            "invariant": invariant,
        }  # fmt: skip
        widths = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        self.q_proj = self._linear(hidden_size, widths[0], True, init_method, bias=bias, **where)
        self.k_proj = self._linear(hidden_size, widths[1], True, init_method, bias=bias, **where)
        self.v_proj = self._linear(hidden_size, widths[1], True, init_method, bias=bias, **where)
        self.o_proj = self._linear(widths[0], hidden_size, False, init_method, bias=out_bias, **where)
        for parameter in self.parameters():
            broadcast_from_rank_zero(parameter.data, self.group)

    @classmethod
    def from_linears(
        cls, q: nn.Linear, k: nn.Linear, v: nn.Linear, o: nn.Linear, num_heads: int, **options: Any
    ) -> "UlyssesAttention":
        """Returns the layer with the parameters of four `nn.Linear`, which are the same on every rank.

        Options are the constructor's, `group` among them. The width of k determines `num_kv_heads`.
        """
        if len({linear.bias is None for linear in (q, k, v)}) > 1:
            raise ValueError("q, k and v must all have a bias, or none")
        head_dim = q.out_features // num_heads
        attention = cls(
            q.in_features,
            num_heads,
            num_kv_heads=k.out_features // head_dim,
            head_dim=head_dim,
            bias=q.bias is not None,
            out_bias=o.bias is not None,
            device="meta",
            dtype=q.weight.dtype,
            **options,
        )
        for layer, linear in zip(attention.children(), (q, k, v, o), strict=True):
            if isinstance(layer, ShardedLinear):
                layer.adopt(linear)
            else:
                for name, full in linear.named_parameters(recurse=False):
                    copy = nn.Parameter(full.detach().clone(), requires_grad=full.requires_grad)
                    layer.register_parameter(name, copy)
        return attention

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        """Attends. The class describes the shapes; options are passed to the attention function."""
        for name, layer in self.named_children():
            if not _is_bare(layer):
                raise TypeError(f"UlyssesAttention: {name} must have no hooks and no other forward: {layer}")
        projections = self.q_proj, self.k_proj, self.v_proj
        if self.tp_group is not None:
            x = moves.for_each_rank(x, self.tp_group)
        how: dict[str, Any] = {"dim": self.sequence_dim, **self.op_keywords}
        projected = gemm_all_to_all(
            x,
            [layer.weight for layer in projections],
            bias=None if self.q_proj.bias is None else [layer.bias for layer in projections],
            heads=self.heads,
            rows=self.rows,
            **how,
        )
        q, k, v = (one.unflatten(-1, (-1, self.head_dim)).transpose(-3, -2) for one in projected)
        if self.sequence_dim == 0:  # [s, heads, b, d]
            q, k, v = (one.permute(2, 1, 0, 3) for one in (q, k, v))
        out = q
        if q.shape[1]:
            if self.attention is not None:
                out = self.attention(q, k, v, **options)
            else:
                out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)
        out = out.permute(2, 0, 1, 3) if self.sequence_dim == 0 else out.transpose(1, 2)
        bias = self.o_proj.bias
        operands = out.flatten(2), self.o_proj.weight
        if self.tp_group is None:
            return all_to_all_gemm(*operands, bias=bias, heads=self.heads[0], **how)  # type: ignore[no-any-return]
        total = moves.sum_over_ranks(all_to_all_gemm(*operands, heads=self.heads[0], **how), self.tp_group)
        return total if bias is None else total + moves.for_each_rank(bias, self.group)  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        """Returns the arguments for `print(module)`."""
        return (
            f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}, "
            f"ranks={group_size(self.group)}, sequence_dim={self.sequence_dim}"
        )

    def _heads(self) -> list[int]:
        """Returns `heads` of q, k and v in `gemm_all_to_all`."""
        world = group_size(self.group)
        tp = 1 if self.tp_group is None else group_size(self.tp_group)
        heads, kv_heads = self.num_heads, self.num_kv_heads
        if heads % kv_heads or heads % tp or kv_heads % tp:
            raise ValueError(
                f"num_heads={heads} must be a multiple of num_kv_heads={kv_heads}, and both multiples of the "
                f"{tp} ranks of tp_group"
            )
        heads, kv_heads = heads // tp, kv_heads // tp
        if kv_heads >= world:
            return [kv_heads] * 3
        if heads % world or world % kv_heads:
            raise ValueError(
                f"{kv_heads} key and value heads are fewer than the {world} ranks: they must divide the "
                f"number of ranks, which must divide the {heads} heads of queries"
            )
        return [heads, kv_heads, kv_heads]

    def _linear(
        self, width: int, columns: int, by_columns: bool, init_method: InitMethod | None, **options: Any
    ) -> nn.Module:
        """Returns the layer that holds a weight and a bias: all of them, or the shards of `tp_group`."""
        if self.tp_group is not None:
            kind = ColumnParallelLinear if by_columns else RowParallelLinear
            return kind(width, columns, init_method=init_method, tp_group=self.tp_group, **options)
        linear = nn.Linear(width, columns, **options)
        if init_method is not None:
            with torch.no_grad():
                init_method(linear.weight)
                if linear.bias is not None:
                    linear.bias.zero_()
        return linear
