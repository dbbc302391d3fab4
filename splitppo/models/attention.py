"""Attention over packed rows: one row follows another without padding, and no row sees another. The
boundaries of the rows are the model's inputs, named as for transformers' flash attention, so
recomputed layers get them, too."""

from inspect import signature
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from splitppo.models.sequence import SequenceSet

PACKED = "splitppo_packed"
WIDEST_HEAD = 256  # of the kernel
# since torch 2.12 the kernel has a flag for query heads that have a key head in common
_GROUPED: dict[str, Any] = (
    {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
)


def is_packed(model: nn.Module) -> bool:
    return cast(Any, model).config._attn_implementation == PACKED


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int = 0,
    sequence: SequenceSet | None = None,
    **other: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each row: `[1, L, heads, width]`, and None in place of the attention
    weights.

    Args:
        query: `[1, heads, L, width]`; key, value: `[1, groups, L, width]`.
        sliding_window: how many tokens a token sees, itself included; None: all before it.
        cu_seq_lens_q: `[rows + 1]` int32, where each row begins, and L.
        max_length_q: length of the longest row, or more.
        sequence: the ranks over which the rows are cut: query, key and value are of this rank's
            tokens, the boundaries of all.
    """
    if cu_seq_lens_q is None or other.get("softcap") is not None or other.get("s_aux") is not None:
        raise RuntimeError(
            f"{type(module).__name__} can't run packed rows; set --compute.packing off"
        )
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    if sequence:
        q, k, v = (sequence.to_heads(x) for x in (q, k, v))
    window = sliding_window or 0
    if query.is_cuda and query.dtype != torch.float32:
        out: Any = varlen_attn(
            q,
            k,
            v,
            cu_seq_lens_q,
            cu_seq_lens_q,
            max_length_q,
            max_length_q,
            scale=scaling,
            # tokens seen on the left and on the right; -1: all
            window_size=(window - 1, 0) if window else (-1, 0),
            **_GROUPED,
        )
    else:
        out = cast(Any, _row_by_row)(q, k, v, cu_seq_lens_q, scaling, window)
    return (sequence.to_tokens(out) if sequence else out)[None], None


@torch.compiler.disable  # shapes depend on the lengths, which are data
def _row_by_row(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, scaling: Any, window: int
) -> Tensor:
    """`[L, heads, width]`, without the kernel: on CPUs and in float32."""
    lengths = starts.diff().tolist()
    rows = []
    for parts in zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True):
        q, k, v = (part.transpose(0, 1)[None] for part in parts)
        mask = None
        if 0 < window < q.shape[2]:
            at = torch.arange(q.shape[2], device=q.device)
            distance = at[:, None] - at
            mask = (distance >= 0) & (distance < window)
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=True
        )
        rows.append(out[0].transpose(0, 1))
    return torch.cat(rows)


AttentionInterface.register(PACKED, packed_attention)
