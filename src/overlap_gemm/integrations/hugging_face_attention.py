"""Ulysses for transformers' attention interface, `attn_implementation="ulysses"`: sequences split over ranks.

    from overlap_gemm.integrations import hugging_face_attention
    hugging_face_attention.install(mesh["sp"])
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="ulysses")
    loss = model(**hugging_face_attention.shard_inputs(batch, mesh["sp"]), use_cache=False).loss

Each rank calls the model with its own tokens. Around each attention heads are exchanged for tokens, and
back; between the exchanges runs transformers' "sdpa". A model calls its attention with projected q, k and
v, so no product overlaps with these exchanges. `overlap_gemm.nn.UlyssesAttention` is the layer whose products
do.

Gradients of parameters, and the loss, are each rank's share: the full ones are their sums over the group.

Not supported, with ValueError: a cache of keys and values (`generate()`), packed sequences (`position_ids`
that restart), and numbers of heads that `attention_heads` refuses. If there are fewer key and value heads
than ranks, they are replicated; their number must divide P, and P the number of query heads.
"""

import inspect
import weakref
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers import __version__ as transformers_version
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ..dispatch.head_shards import attention_heads
from ..dispatch.shard_ops import all_gather_rows
from ..nn.head_exchange import gather_heads, scatter_heads
from ..runtime import agree
from ..runtime.group import Group, GroupLike, group_name, resolve
from ..spec.sharding import Shards

if "q_offset" not in inspect.signature(sdpa_mask).parameters:
    raise ImportError(
        f"overlap_gemm.integrations.hugging_face_attention needs a transformers whose masks have a q_offset "
        f"(5.23 has it), got {transformers_version}"
    )

IGNORED = -100
"""Label without a loss, as in transformers."""

UNUSED = frozenset(
    {
        "cache_position", "labels", "logits_to_keep", "num_items_in_batch", "output_hidden_states",
        "position_ids", "return_dict", "shift_labels", "sliding_window",
    }
)  # fmt: skip
"""Keywords of a model or an attention that may have any value: the mask has their effect, or they have none.
"""

_installed: set[str] = set()

not_compiled: Any = torch.compiler.disable(
    reason="hugging_face_attention: its ranks compare their tokens on the host; pass fullgraph=False"
)
"""Decorator: calls the function between two graphs of `torch.compile`; with `fullgraph=True` torch raises."""


def install(group: GroupLike = None, *, name: str = "ulysses") -> None:
    """Registers an attention for models whose sequence is sharded over the ranks of a group.

    Args:
        group: Ranks over which sequences are sharded: ProcessGroup, 1-D DeviceMesh, or None for the world.
        name: Name for `attn_implementation=`. Models of several groups need several names.

    Raises:
        RuntimeError: The name is registered already.
    """
    if name in AttentionInterface._global_mapping:
        raise RuntimeError(f"attn_implementation={name!r} is registered already; call uninstall() first")
    ulysses = Ulysses(group_name(group), name)
    AttentionInterface.register(name, ulysses.attend)
    AttentionMaskInterface.register(name, ulysses.mask)
    _installed.add(name)


def uninstall() -> None:
    """Removes all names that `install` registered. Models with such a name raise afterwards."""
    for name in _installed:
        AttentionInterface._global_mapping.pop(name)
        AttentionMaskInterface._global_mapping.pop(name)
    _installed.clear()


def shard_inputs(batch: Mapping[str, Tensor], group: GroupLike = None) -> dict[str, Tensor]:
    """Returns this rank's share of a batch that every rank has, without communication.

    Args:
        batch: Inputs of a causal language model: `input_ids` or `inputs_embeds`, and if there are any
            `attention_mask` `[B, S]`, `position_ids` and `labels`. Default position_ids are 0 to S - 1.
        group: Ranks over which the sequence is sharded, as in `install`.

    Returns:
        Inputs of this rank's tokens, which are divided as by `torch.chunk` (10 on 4 ranks: 3, 3, 3, 1). Of
        labels: `shift_labels`, each token's next label, also across ranks; `labels`, the same tensor; and
        `num_items_in_batch`, by which transformers divides the loss. The sum of the ranks' losses is then the
        mean over the batch.

    Raises:
        ValueError: An input is not one of these, or some rank would have no token (9 on 4 ranks).
    """
    ranks = resolve(group_name(group))
    inputs = dict(batch)
    known = ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "labels")
    tokens = inputs.get("input_ids", inputs.get("inputs_embeds"))
    if tokens is None or not set(inputs) <= set(known):
        raise ValueError(f"shard_inputs: the inputs must be of {known}, got {sorted(inputs)}")
    length = tokens.shape[1]
    shards = Shards.even(length, ranks.size)
    if not all(shards.sizes):
        raise ValueError(f"shard_inputs: {length} tokens on {ranks.size} ranks leave some without a token")
    if inputs.get("position_ids") is None:
        inputs["position_ids"] = torch.arange(length, device=tokens.device)[None]
    labels = inputs.pop("labels", None)
    if labels is not None:
        inputs["labels"] = inputs["shift_labels"] = F.pad(labels[:, 1:], (0, 1), value=IGNORED)
    place = slice(*shards.range(ranks.rank))
    local = {key: value[:, place].contiguous() for key, value in inputs.items() if value is not None}
    if labels is not None:
        local["num_items_in_batch"] = (inputs["shift_labels"] != IGNORED).sum()
    return local


class Ulysses:
    """Attention and mask of one name of transformers' registries.

    Args:
        group: Name of the process group over which sequences are sharded.
        name: Name in the registries, for messages.
    """

    def __init__(self, group: str, name: str):
        self.group, self.name = group, name
        self._checked: tuple[weakref.ref[Tensor], int, int] | None = None

    @not_compiled
    def mask(self, **arguments: Any) -> Tensor | None:
        """Returns the mask of all tokens, or None. transformers passes the sizes of this rank's tokens.

        Collective.
        """
        ranks = resolve(self.group)
        padding = arguments.get("attention_mask")

        def checked() -> tuple[int, bool]:
            self._check_mask(**arguments)
            return arguments["q_length"], padding is not None

        lengths, has_padding = zip(*agree.gather(ranks, f"the mask of {self.name}", checked), strict=True)
        total = self._total(ranks, lengths)
        if len(set(has_padding)) > 1:
            raise ValueError(
                f"{self.name}: attention_mask must be passed on every rank or on none; "
                f"{agree.differences(ranks, has_padding)}"
            )
        if padding is not None:
            rows = padding.t().to(torch.uint8).contiguous()
            chunk = Shards.even(total, ranks.size).chunk
            padding = all_gather_rows(rows, total, chunk, self.group).t().bool()
        return sdpa_mask(  # type: ignore[no-any-return]
            **{**arguments, "q_length": total, "kv_length": total, "attention_mask": padding}
        )

    @not_compiled
    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        """Attends to all tokens. Called by transformers in each attention.

        Args:
            module: Attention of the model.
            query: `[B, H, S / P, D]`, this rank's tokens.
            key: `[B, H_kv, S / P, D]`.
            value: `[B, H_kv, S / P, D_v]`.
            attention_mask: Mask of all tokens, `[B or 1, 1, S, S]`, or None.
            dropout: Probability of dropout.
            scaling: Factor of the scores.
            is_causal: As in transformers' "sdpa".
            **options: Further keywords, which must not change the attention.

        Returns:
            `[B, S / P, H, D_v]`, and None for the weights.
        """
        heads, total = self._agreed(query, key, attention_mask, options)
        q, k, v = scatter_heads(
            [query, key, value], sequence_dim=2, heads_dim=1, heads=heads, rows=total, group=self.group
        )
        out = v.transpose(1, 2)
        if q.shape[1]:
            attention = OfRank(module, q.shape[1] // k.shape[1])
            out, _ = sdpa_attention_forward(
                attention, q, k, v, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal
            )
        return gather_heads(out, num_heads=query.shape[1], heads=heads[0], group=self.group), None

    def _check_mask(
        self,
        *,
        q_length: int,
        kv_length: int,
        q_offset: int = 0,
        attention_mask: Tensor | None = None,
        allow_is_causal_skip: bool = True,
        allow_is_bidirectional_skip: bool = False,
        config: Any = None,
        **_: Any,
    ) -> None:
        """Raises ValueError for a mask that is not a function of positions and padding."""
        if q_offset or (attention_mask is None and kv_length != q_length):
            raise ValueError(
                f"{self.name}: no cache of keys and values, and no generate(): {q_length} tokens after "
                f"{kv_length - q_length} cached ones. Load the model with another attn_implementation"
            )
        if kv_length != q_length:
            raise ValueError(
                f"{self.name}: attention_mask must have this rank's {q_length} tokens, got {kv_length}"
            )
        if not (allow_is_causal_skip or allow_is_bidirectional_skip):
            raise ValueError(
                f"{self.name}: packed sequences (position_ids that restart) and masks by functions of a "
                f"model are not supported: each rank has a part of them only"
            )
        if attention_mask is not None and getattr(config, "attention_chunk_size", None) is not None:
            raise ValueError(
                f"{self.name}: attention in chunks (attention_chunk_size={config.attention_chunk_size}) does "
                f"not support attention_mask: chunks would begin after this rank's padding"
            )

    def _agreed(
        self, query: Tensor, key: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> tuple[list[int], int]:
        """Returns `heads` of q, k and v, and S, after the ranks have compared them and their positions.

        Ranks communicate only if position_ids is another tensor than in the last attention, or has changed.
        So the first layer of a forward pass communicates, and the later ones do not.
        """
        ranks = resolve(self.group)
        positions: Any = options.get("position_ids")
        if self._checked is not None and positions is not None:
            known, version, total = self._checked
            is_same = known() is positions
            if is_same and version == positions._version:
                self._check(query, key, options)
                return attention_heads(query.shape[1], key.shape[1], ranks.size), total

        def local() -> tuple[int, list[int] | None, list[int], list[int]]:
            self._check(query, key, options)
            attention_heads(query.shape[1], key.shape[1], ranks.size)
            ends = self._ends(ranks, positions, mask, *query.shape[::2])
            return query.shape[2], None if mask is None else list(mask.shape), *ends

        lengths, shapes, first, last = zip(*agree.gather(ranks, self.name, local), strict=True)
        total = self._total(ranks, lengths)
        for shape in shapes:
            if shape is not None and shape[1:] != [1, total, total]:
                raise ValueError(
                    f"{self.name}: attention_mask must be [B, S / P], of this rank's tokens, or the mask "
                    f"of all tokens [B, 1, {total}, {total}], got {shape}"
                )
        for row in range(query.shape[0]):
            before = -1
            for rank in range(ranks.size):
                if last[rank][row] < 0:
                    continue
                if first[rank][row] <= before:
                    raise ValueError(
                        f"{self.name}: position_ids must increase over the tokens of all ranks: in sequence "
                        f"{row} rank {ranks.global_rank(rank)} begins at {first[rank][row]} after {before}. "
                        f"Pass each rank the positions of its own tokens (shard_inputs does); packed "
                        f"sequences, whose positions restart, are not supported"
                    )
                before = last[rank][row]
        self._checked = weakref.ref(positions), positions._version, total
        return attention_heads(query.shape[1], key.shape[1], ranks.size), total

    def _check(self, query: Tensor, key: Tensor, options: dict[str, Any]) -> None:
        """Raises ValueError for a call that cannot be sharded."""
        if options.get("use_cache") or key.shape[2] != query.shape[2]:
            raise ValueError(
                f"{self.name}: no cache of keys and values, and no generate(): pass use_cache=False, or load "
                f"the model with another attn_implementation"
            )
        for option, value in options.items():
            if option not in UNUSED and value is not None and value is not False:
                raise ValueError(f"{self.name}: {option}= of the attention or the model is not supported")

    def _ends(
        self, ranks: Group, positions: Tensor | None, mask: Tensor | None, batch: int, length: int
    ) -> tuple[list[int], list[int]]:
        """Returns the first and last position of this rank's tokens in each sequence, without padding.

        A sequence of padding alone has the last position -1.
        """
        if positions is None or positions.ndim != 2 or positions.shape[1] != length:
            shape = None if positions is None else list(positions.shape)
            raise ValueError(
                f"{self.name}: the attention must get position_ids [B, S / P] of this rank's {length} tokens "
                f"from the model, got {shape}; some models do not pass them on"
            )
        positions = positions.expand(batch, length)
        is_token = torch.ones_like(positions, dtype=torch.bool)
        if mask is not None:
            diagonal = mask[:, 0].diagonal(dim1=1, dim2=2)  # a token that is no padding attends to itself
            start, stop = Shards.even(diagonal.shape[1], ranks.size).range(ranks.rank)
            diagonal = diagonal if diagonal.dtype == torch.bool else diagonal == 0
            is_token = diagonal[:, start:stop].expand(batch, -1)
            if is_token.shape[1] != length:
                raise ValueError(
                    f"{self.name}: attention_mask must be of all tokens, got {list(mask.shape)} with "
                    f"{length} tokens on this rank"
                )
        largest = positions.where(is_token, -1).cummax(1).values
        before = F.pad(largest[:, :-1], (1, 0), value=-1)
        if not bool(((positions > before) | ~is_token).all()):
            raise ValueError(
                f"{self.name}: position_ids must increase along this rank's tokens; packed sequences, whose "
                f"positions restart, are not supported"
            )
        first = positions.where(is_token, torch.iinfo(positions.dtype).max).amin(1)
        return first.tolist(), largest[:, -1].tolist()

    def _total(self, ranks: Group, lengths: tuple[int, ...]) -> int:
        """Returns S. Raises ValueError unless tokens are divided as by `torch.chunk`, some for each rank."""
        total = sum(lengths)
        expected = Shards.even(total, ranks.size).sizes
        if list(lengths) != expected or not all(lengths):
            raise ValueError(
                f"{self.name}: the ranks have {list(lengths)} tokens; {total} must be split as by "
                f"torch.chunk, with some for each rank: {expected}"
            )
        return total


class OfRank:
    """Proxy of an attention module, with the number of query heads per key head on this rank.

    Args:
        module: Attention module.
        num_key_value_groups: Heads of queries for each head of keys.
    """

    def __init__(self, module: nn.Module, num_key_value_groups: int):
        self.module, self.num_key_value_groups = module, num_key_value_groups

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of the module."""
        return getattr(self.module, name)
