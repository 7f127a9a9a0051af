"""A decoder block of tensor-parallel layers, and its attention."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..api.functional import Length
from ..api.layer_epilogues import NORM, NORM_OF_SHARDS, NORM_ROWS, Activation, Fusion
from ..api.linears import LayerOptions
from ..api.norms import RMSNorm
from ..epilogues import add_residual_rms_norm
from ..runtime.group import group_name, group_size
from .attention import attend
from .layers import (
    ColumnParallelLinear,
    ParallelMLP,
    RowParallelLinear,
    column_products,
    is_bare,
    shared_call,
)

if TYPE_CHECKING:  # typing's own is newer than Python 3.10
    from typing_extensions import Unpack


class ParallelAttention(nn.Module):
    """Attention whose heads are divided over the ranks, plus an optional residual.

    Input and output: `[S, B, hidden_size]`, or with `sequence_dim=1` `[B, S, hidden_size]`, replicated; with
    `sequence_parallel` this rank's rows of it. The children have Llama's names. With P ranks:

    | child | weight of a rank | op with `sequence_parallel` | without |
    |---|---|---|---|
    | q_proj | `[num_heads / P * head_dim, hidden_size]` | one `all_gather_gemm` of the three | none |
    | k_proj, v_proj | `[num_kv_heads / P * head_dim, hidden_size]` | | none |
    | o_proj | `[hidden_size, num_heads / P * head_dim]` | `gemm_reduce_scatter` | `gemm_all_reduce` |

    Without `sequence_parallel` one `gemm_all_reduce` sums the gradient of x of the first three. If one of
    them has hooks or is wrapped, each is called and communicates itself. The same holds if their options
    differ, or if only some have a bias.

    Args:
        hidden_size: Width of input and output.
        num_heads: Heads of queries over all ranks.
        num_kv_heads: Heads of keys and values, which divides `num_heads`. Default: `num_heads`.
        head_dim: Columns of a head. Default: `hidden_size // num_heads`.
        qkv_bias: Add biases to queries, keys and values; `bias` is that of the output alone.
        attention: Function of q, k and v of this rank's heads and all of S, as in `UlyssesAttention`.
            Default: torch's `scaled_dot_product_attention`, without a mask.
        rows: S, if the ranks do not divide it, as in `ColumnParallelLinear`.
        fuse: Apply the residual as an epilogue, as in `RowParallelLinear`.
        **options: Options that `ColumnParallelLinear` and `RowParallelLinear` have in common, except
            `skip_bias_add`. `bias` is False by default.

    Raises:
        TypeError: There is no such option.
        ValueError: `num_kv_heads` does not divide `num_heads`, or the ranks do not divide `num_kv_heads`. Or
            an option has no such value (`sequence_dim`, `backend`, `invariant`, ...).
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        qkv_bias: bool = False,
        attention: Callable[..., Tensor] | None = None,
        rows: Length = None,
        fuse: bool | None = None,
        **options: "Unpack[LayerOptions]",
    ):
        super().__init__()
        if unknown := sorted(options.keys() - LayerOptions.__annotations__.keys()):
            raise TypeError(
                f"ParallelAttention: no option {', '.join(unknown)}; those of its linears are "
                f"{', '.join(LayerOptions.__annotations__)}"
            )
        kv_heads, world = num_kv_heads or num_heads, group_size(group_name(options.get("tp_group")))
        if num_heads % kv_heads or kv_heads % world:
            raise ValueError(
                f"ParallelAttention: num_heads={num_heads} must be a multiple of num_kv_heads={kv_heads}, "
                f"and num_kv_heads of the {world} ranks of tp_group; use fewer ranks, or other heads"
            )
        self.num_heads, self.num_kv_heads = num_heads, kv_heads
        self.head_dim, self.attention = head_dim or hidden_size // num_heads, attention
        self.sequence_dim = options.get("sequence_dim", 0)
        common: LayerOptions = {"bias": False, **options}
        of_inputs: dict[str, Any] = {**common, "bias": qkv_bias, "rows": rows}
        width, kv_width = (heads * self.head_dim for heads in (num_heads, kv_heads))
        self.q_proj = ColumnParallelLinear(hidden_size, width, **of_inputs)
        self.k_proj = ColumnParallelLinear(hidden_size, kv_width, **of_inputs)
        self.v_proj = ColumnParallelLinear(hidden_size, kv_width, **of_inputs)
        self.o_proj = RowParallelLinear(width, hidden_size, fuse=fuse, **common)

    def forward(
        self, x: Tensor, residual: Tensor | None = None, norm: nn.RMSNorm | None = None, **options: Any
    ) -> Any:
        """Computes attention, and adds a residual of the output's shape.

        Args:
            x: Input, see the class.
            residual: Tensor of the output's shape that is added to the output, or None.
            norm: Norm of the output, as in `RowParallelLinear`; returned before the output.
            **options: Options of the attention function, such as `is_causal=True`.
        """
        layers = self.q_proj, self.k_proj, self.v_proj
        projected = column_products(layers, x, shared_call(layers, x))
        out = attend(projected, self.head_dim, self.sequence_dim, self.attention, **options)
        if norm is not None:
            return self.o_proj(out, residual, norm)
        return self.o_proj(out) if residual is None else self.o_proj(out, residual)

    def extra_repr(self) -> str:
        """Returns the arguments for `print(module)`."""
        return f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}"


class ParallelBlock(nn.Module):
    """A decoder block: `x + attention(norm(x))`, then the same with a gated MLP.

    Input and output are those of `ParallelAttention`, the ops those of `ParallelAttention` and `ParallelMLP`.
    The children have Llama's names: input_layernorm, self_attn, post_attention_layernorm, mlp. So
    `load_state_dict` accepts the state of a `LlamaDecoderLayer` with biases in the same places: full tensors,
    of which each rank keeps its shards, or shards. Rotary positions belong in `attention`.

    Built from the same seed on every rank it is the shard of one block. The norms are replicated, and their
    gradients are complete on every rank.

    Args:
        hidden_size: Width of input and output.
        num_heads: Heads of queries over all ranks.
        ffn_hidden_size: Width between the products of the MLP, divided over the ranks.
        num_kv_heads: Heads of keys and values, as in `ParallelAttention`.
        head_dim: Columns of a head, as in `ParallelAttention`.
        qkv_bias: Add biases to queries, keys and values; `bias` is that of the other linears (o_proj and
            the MLP).
        attention: Function of q, k and v, as in `ParallelAttention`.
        eps: Epsilon of both norms, which are `RMSNorm`.
        activation: "silu" (SwiGLU), "gelu" or "gelu_tanh" (GeGLU), or an epilogue, as in `ParallelMLP`.
        rows: S, as in `ParallelAttention`.
        fuse: Apply residuals and activation as epilogues, as in `ParallelMLP`. Of up to 64 rows without
            `sequence_parallel`, the second norm as well, except in compiled graphs.
        **options: Other options of `ParallelMLP`.

    Raises:
        ValueError: The conditions of `ParallelAttention` and `ParallelMLP`.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        ffn_hidden_size: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        qkv_bias: bool = False,
        attention: Callable[..., Tensor] | None = None,
        eps: float = 1e-6,
        activation: Activation = "silu",
        rows: Length = None,
        fuse: bool | None = None,
        **options: "Unpack[LayerOptions]",
    ):
        super().__init__()
        shared = "sequence_parallel", "tp_group", "device", "dtype"
        of_norms: dict[str, Any] = {"eps": eps, "sequence_parallel": False}
        of_norms |= {name: value for name, value in options.items() if name in shared}
        self.input_layernorm = RMSNorm(hidden_size, **of_norms)
        self.self_attn = ParallelAttention(
            hidden_size, num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, qkv_bias=qkv_bias,
            attention=attention, rows=rows, fuse=fuse, **options,
        )  # fmt: skip
        self.post_attention_layernorm = RMSNorm(hidden_size, **of_norms)
        self.mlp = ParallelMLP(
            hidden_size, ffn_hidden_size, activation=activation, rows=rows, fuse=fuse, **options
        )

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        """Computes the block; options are passed to the attention function, such as `is_causal=True`."""
        attention, norm, hidden = self.self_attn, self.post_attention_layernorm, self.input_layernorm(x)
        if not torch.compiler.is_compiling() and is_few(x) and self._why_norm_follows() is None:
            normed, x = attention(hidden, x, norm, **options)
        else:
            x = attention(hidden, x, **options)
            normed = norm(x)
        return self.mlp(normed, x)  # type: ignore[no-any-return]

    def fusions(self, name: str) -> Iterator[Fusion]:
        """Yields whether the second norm is applied as an epilogue, for `overlap_gemm.explain`."""
        module = f"{name}.self_attn.o_proj".lstrip(".")
        yield Fusion(module, NORM, self.self_attn.o_proj.op, self._why_norm_follows())

    def _why_norm_follows(self) -> str | None:
        """Returns why the second norm is never an epilogue of the attention's last op, or None."""
        attention, norm = self.self_attn, self.post_attention_layernorm
        last = attention.o_proj
        is_known = is_bare(attention, ParallelAttention.forward) and is_bare(last, RowParallelLinear.forward)
        if not is_known or not is_bare(norm, RMSNorm.forward, nn.RMSNorm.forward):
            return "the norm, the attention or its o_proj has hooks or is wrapped"
        if last.sequence_parallel:
            return NORM_OF_SHARDS
        if last.float8 is not None or norm.weight is None or norm.eps is None:
            return "o_proj has 8-bit products, or the norm has no weight or eps"
        return last.why_not_fused(add_residual_rms_norm)


def is_few(x: Tensor) -> bool:
    """Returns whether x has so few rows that a kernel is to norm them."""
    return x.shape[:-1].numel() <= NORM_ROWS
