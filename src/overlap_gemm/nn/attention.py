"""Attention between two all-to-all ops."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..api.all_to_all import all_to_all_gemm, gemm_all_to_all
from ..api.functional import Length
from ..api.linears import (
    InitMethod,
    ShardedLinear,
    broadcast_from_rank_zero,
    check_options,
)
from ..backends.op_call import BackendName
from ..dispatch import shard_ops
from ..dispatch.head_shards import attention_heads
from ..runtime.group import GroupLike, group_name, group_size
from ..spec.promises import Invariant, Partials, Promises
from .layers import ColumnParallelLinear, RowParallelLinear, is_bare


class UlyssesAttention(nn.Module):
    """Attention (Ulysses): input and output are sharded by sequence, the attention function by heads.

    Queries, keys and values are projected and exchanged by one call of `gemm_all_to_all` (fused: one kernel);
    the result is sent back by `all_to_all_gemm`. Every rank of `group` has all of each weight; gradients of
    weights and biases are summed over these ranks. The constructor is collective: it broadcasts the weights
    of `group`'s rank 0, so the ranks' seeds may differ. With `tp_group` the seeds of its ranks must be equal,
    as for `ColumnParallelLinear`. The children have Llama's names: q_proj, k_proj, v_proj, o_proj.

    Input and output: this rank's rows of `[S, B, hidden_size]`, or with `sequence_dim=1` of `[B, S,
    hidden_size]`.

    Division of heads over the P ranks of `group` (with `tp_group`: of the heads of one of its ranks):

    - P or more key and value heads: a rank gets ceil(num_kv_heads / P) of them, as `torch.chunk` divides
      them, with all their query heads. The last ranks may get none.
    - Fewer than P: key and value heads are replicated. Rank r gets head `r * num_kv_heads // P`, and
      `num_heads / P` query heads.

    Args:
        hidden_size: Width of input and output.
        num_heads: Heads of queries over all ranks.
        num_kv_heads: Heads of keys and values, which divides `num_heads`. Default: `num_heads`.
        head_dim: Columns of a head. Default: `hidden_size // num_heads`.
        bias: Add biases to queries, keys and values.
        out_bias: Add a bias to the output.
        attention: Function of `q [B, heads of this rank, S, head_dim]`, k and v, which returns a tensor of
            q's shape. k and v have this rank's key and value heads, which are not repeated. The function may
            rotate or normalize q and k first. Default: torch's `scaled_dot_product_attention` with
            `enable_gqa=True`. It is not called on a rank without heads.
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

    Raises:
        ValueError: `num_kv_heads` does not divide `num_heads`, or the ranks of `tp_group` do not divide both.
            With fewer than P key and value heads: they do not divide P, or P does not divide the query heads.
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
        check_options(sequence_dim, backend, Promises(partials, invariant), reserve_sms)
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
        """Attends. The class describes the shapes; options are passed to the attention function.

        Raises:
            TypeError: A child has a hook, a wrapper or another forward, which would not be called.
        """
        for name, layer in self.named_children():
            if not is_bare(layer):
                raise TypeError(f"UlyssesAttention: {name} must have no hooks and no other forward: {layer}")
        projections = self.q_proj, self.k_proj, self.v_proj
        if self.tp_group is not None:
            x = shard_ops.for_each_rank(x, self.tp_group)
        how: dict[str, Any] = {"dim": self.sequence_dim, **self.op_keywords}
        projected = gemm_all_to_all(
            x,
            [layer.weight for layer in projections],
            bias=None if self.q_proj.bias is None else [layer.bias for layer in projections],
            heads=self.heads,
            rows=self.rows,
            **how,
        )
        out = attend(projected, self.head_dim, self.sequence_dim, self.attention, **options)
        bias = self.o_proj.bias
        operands = out, self.o_proj.weight
        if self.tp_group is None:
            return all_to_all_gemm(*operands, bias=bias, heads=self.heads[0], **how)  # type: ignore[no-any-return]
        total = shard_ops.sum_over_ranks(
            all_to_all_gemm(*operands, heads=self.heads[0], **how), self.tp_group
        )
        return total if bias is None else total + shard_ops.for_each_rank(bias, self.group)  # type: ignore[no-any-return]

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
        return attention_heads(heads // tp, kv_heads // tp, world)

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


def attend(
    projected: Sequence[Tensor],
    head_dim: int,
    sequence_dim: int,
    attention: Callable[..., Tensor] | None,
    **options: Any,
) -> Tensor:
    """Returns the heads' attention, in the shape of the projected queries; empty on a rank without heads.

    Args:
        projected: Queries, keys and values `[S, B, heads * head_dim]`, or `[B, S, ...]`.
        head_dim: Columns of a head.
        sequence_dim: Dimension of S, 0 or 1.
        attention: Function as in `UlyssesAttention`, or None.
        **options: Options of the function.
    """
    q, k, v = (one.unflatten(-1, (-1, head_dim)).transpose(-3, -2) for one in projected)
    if sequence_dim == 0:  # [s, heads, b, d]
        q, k, v = (one.permute(2, 1, 0, 3) for one in (q, k, v))
    out = q
    if q.shape[1]:
        if attention is not None:
            out = attention(q, k, v, **options)
        else:
            out = F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options)
    out = out.permute(2, 0, 1, 3) if sequence_dim == 0 else out.transpose(1, 2)
    return out.flatten(2)
