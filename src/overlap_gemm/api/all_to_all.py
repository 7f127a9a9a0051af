"""`gemm_all_to_all` and its dual, `all_to_all_gemm`: registered ops (`registration.register`).

Sequence-parallel attention (Ulysses) exchanges rows of a sequence for columns of heads before attention, and
back after it. The tiles' exchange inside the fused kernel is `exchange.all_to_all`.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..spec import ALL_TO_ALL_GEMM, GEMM_ALL_TO_ALL, PatternSpec
from .registration import register

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .keywords import AllToAllOptions, DealOptions

__all__ = ["all_to_all_gemm", "gemm_all_to_all"]

_gemm_all_to_all = register(
    GEMM_ALL_TO_ALL,
    PatternSpec(
        "column_exchange", GEMM_ALL_TO_ALL.name, cut="columns", to_all=False, returns=False,
        kernel="overlap_gemm.exchange.all_to_all:AllToAll",
    ),
)  # fmt: skip
_all_to_all_gemm = register(ALL_TO_ALL_GEMM)


def gemm_all_to_all(x: Tensor, weight: Tensor | Sequence[Tensor], **options: "Unpack[DealOptions]") -> Any:
    """Multiplies this rank's rows and exchanges them: this rank gets its columns of every rank's rows.

    The projection before attention whose heads are divided over the ranks, where its sequence was.

    Args:
        x: This rank's rows `[S_local, ..., K]`, as for `all_gather_gemm`.
        weight: `[N, K]`, the same on every rank; or a list of weights (q, k, v), whose products the portable
            backends exchange at once. Its gradient is summed over the ranks, and complete on every rank.
        **options: `bias`, `[N]` or a list, the same on every rank; `rows`, `dim` as for `all_gather_gemm`;
            `group`, `backend`, `deterministic`, `reserve_sms`, `scale_x`, `scale_w`, `out_dtype`, `block`,
            `partials`, `invariant`, `epilogue` as for `gemm_reduce_scatter`.

    Returns:
        `[S, ..., N_local]`, or a list of such tensors. N_local is this rank's share of N as `torch.chunk`
        cuts it: whole heads where the number of ranks divides that of the heads.

    Raises:
        ValueError, TypeError, RuntimeError: As `all_gather_gemm`.
    """
    return _gemm_all_to_all(x, weight, **options)


def all_to_all_gemm(
    x: Tensor, weight: Tensor | Sequence[Tensor], **options: "Unpack[AllToAllOptions]"
) -> Any:
    """Exchanges this rank's columns for its rows, of every rank's columns, and multiplies these.

    The projection after attention: the inverse of the exchange of `gemm_all_to_all`.

    Args:
        x: This rank's columns of all rows, `[S, ..., K_local]`; K_local is its share of K as `torch.chunk`
            cuts it. Scales are not exchanged: operands of 8 bits are refused.
        weight: `[N, K]` or a list, as for `gemm_all_to_all`.
        **options: Options of `gemm_all_to_all` except `rows`, which x has, and scales.

    Returns:
        `[S_local, ..., N]`, or a list of such tensors; S_local is this rank's share of S.

    Raises:
        ValueError, TypeError, RuntimeError: As `all_gather_gemm`.
    """
    return _all_to_all_gemm(x, weight, **options)
