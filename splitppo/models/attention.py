"""Attention over packed rows: one row follows another without padding, and no row sees another. The
boundaries of the rows are the model's inputs, named as for transformers' flash attention, so
recomputed layers get them, too."""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from inspect import signature
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.library import custom_op
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from splitppo.models.sequence import SequenceSet

PACKED = "splitppo_packed"
WIDEST_HEAD = 256  # of torch's kernel
WIDEST_HEAD_4 = 128  # of FlashAttention 4's
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
    out: Any
    if query.is_cuda and query.dtype != torch.float32:
        if not window and q.shape[-1] <= WIDEST_HEAD_4 and has_flash4():
            out = flash4(q, k, v, cu_seq_lens_q, max_length_q, scaling or q.shape[-1] ** -0.5)[0]
        else:
            out = varlen_attn(
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


@torch.compiler.assume_constant_result
def has_flash4() -> bool:
    """Whether FlashAttention 4 (`flash-attn-4`) is installed, and the GPU is a Hopper or a
    Blackwell. On a Hopper torch's own kernel is FlashAttention 2."""
    return _finds_flash4()


@cache
def _finds_flash4() -> bool:
    named = find_spec("flash_attn") and find_spec("flash_attn.cute")
    return bool(named) and torch.cuda.get_device_capability()[0] in (9, 10)


@custom_op("splitppo::flash4", mutates_args=())
def flash4(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Causal attention within rows: `[L, heads, width]`, and the logarithms of the softmax's sums,
    `[heads, L]` float32."""
    out, sums, *_ = _flash4()._flash_attn_fwd(
        q, k, v, return_lse=True, **_rows(starts, longest, scale)
    )
    return out, sums


@flash4.register_fake
def _(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    shape = q.shape[1], q.shape[0]
    return q.new_empty(q.shape), q.new_empty(shape, dtype=torch.float32)


@custom_op("splitppo::flash4_backward", mutates_args=())
def _flash4_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    out: Tensor,
    sums: Tensor,
    gradient: Tensor,
    longest: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, gradient = (x.contiguous() for x in (q, k, v, gradient))
    of_q, of_k, of_v, *_ = _flash4()._flash_attn_bwd(
        q, k, v, out, gradient, sums, **_rows(starts, longest, scale)
    )
    return of_q, of_k, of_v


@_flash4_backward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.longest, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)


def _gradients(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Any, ...]:
    tensors = _flash4_backward(*ctx.saved_tensors, gradient, ctx.longest, ctx.scale)
    return *tensors, None, None, None


flash4.register_autograd(_gradients, setup_context=_keep)


def _flash4() -> Any:
    return import_module("flash_attn.cute.interface")


def _rows(starts: Tensor, longest: int, scale: float) -> dict[str, Any]:
    return {
        "cu_seqlens_q": starts,
        "cu_seqlens_k": starts,
        "max_seqlen_q": longest,
        "max_seqlen_k": longest,
        "softmax_scale": scale,
        "causal": True,
    }


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
