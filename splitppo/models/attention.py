"""Attention over packed rows for the library's models: rows one after the other, no padding, none sees another.

Registered in transformers' table of attention functions as PACKED. Where a row begins comes with the model's inputs,
under the names that the library's flash attention has for it, so that a recomputed layer sees it, too.
"""

from inspect import signature
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

PACKED = "splitppo_packed"
WIDEST_HEAD = 256  # of the kernel
# since torch 2.12 it must be told that heads share keys
_GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}


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
    **other: Any,
) -> tuple[Tensor, None]:
    """Causal attention within each row.

    Args:
        query: `[1, heads, L, width]`; key, value: `[1, groups, L, width]`.
        sliding_window: tokens that a token sees, itself among them; None: all before it.
        cu_seq_lens_q: `[rows + 1]` int32, where each row begins, and L.
        max_length_q: the longest row, or more.

    Returns:
        `[1, L, heads, width]`, and None for the library, which asks for the weights.
    """
    if cu_seq_lens_q is None or other.get("softcap") is not None or other.get("s_aux") is not None:
        raise RuntimeError(f"{type(module).__name__} can't run packed rows; set --compute.packing off")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    window = sliding_window or 0
    if query.is_cuda and query.dtype != torch.float32:
        # left of itself, and nothing on the right
        seen = (window - 1, 0) if window else (-1, 0)
        begins, most = cu_seq_lens_q, max_length_q
        out: Any = varlen_attn(q, k, v, begins, begins, most, most, scale=scaling, window_size=seen, **_GROUPED)
        return out[None], None
    apart = cast(Any, torch.compiler.disable)(_row_by_row)  # the lengths are data to it
    return apart(q, k, v, cu_seq_lens_q, scaling, window)[None], None


def _row_by_row(query: Tensor, key: Tensor, value: Tensor, begins: Tensor, scaling: Any, window: int) -> Tensor:
    """The same where the kernel isn't: on the CPU, and in float32. `[L, heads, width]`."""
    lengths = begins.diff().tolist()
    rows = []
    for parts in zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True):
        q, k, v = (part.transpose(0, 1)[None] for part in parts)
        mask = None
        if 0 < window < q.shape[2]:
            distance = torch.arange(q.shape[2], device=q.device)[:, None] - torch.arange(q.shape[2], device=q.device)
            mask = (distance >= 0) & (distance < window)
        how: Any = {"attn_mask": mask, "is_causal": mask is None, "scale": scaling, "enable_gqa": True}
        rows.append(scaled_dot_product_attention(q, k, v, **how)[0].transpose(0, 1))
    return torch.cat(rows)


AttentionInterface.register(PACKED, packed_attention)
