"""FlashAttention 4 as an operator, with arithmetic in the place of its kernels: what the operator
hands to them and back, also where it is compiled. Its kernels are tested on GPUs."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from splitppo.models.attention import _row_by_row, flash4


def scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    later = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
    return (torch.einsum("ihd,jhd->hij", q, k) * scale).masked_fill(later, float("-inf"))


def parts(starts: Tensor, *tensors: Tensor) -> Any:
    """Of each row; keys and values repeated for the query heads that share them."""
    heads = tensors[0].shape[1]
    whole = [x.repeat_interleave(heads // x.shape[1], 1) for x in tensors]
    return zip(*(x.split(starts.diff().tolist()) for x in whole), strict=True)


def forward(q: Tensor, k: Tensor, v: Tensor, **how: Any) -> tuple[Any, ...]:
    assert (how["causal"], how["max_seqlen_q"], how["return_lse"]) == (True, 8, True)
    rows = [
        (scores(of_q, of_k, how["softmax_scale"]), of_v)
        for of_q, of_k, of_v in parts(how["cu_seqlens_q"], q, k, v)
    ]
    out = [torch.einsum("hij,jhd->ihd", row.softmax(-1), of_v) for row, of_v in rows]
    return torch.cat(out), torch.cat([row.logsumexp(-1) for row, _ in rows], 1), None


def backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, gradient: Tensor, sums: Tensor, **how: Any
) -> tuple[Any, ...]:
    scale = how["softmax_scale"]
    gradients = []
    for row in parts(how["cu_seqlens_q"], q, k, v, out, gradient, sums.T[..., None]):
        of_q, of_k, of_v, of_out, of_gradient, of_sums = row
        weights = (scores(of_q, of_k, scale) - of_sums[..., 0].T[..., None]).exp()
        means = (of_gradient * of_out).sum(-1).T[..., None]
        change = weights * (torch.einsum("ihd,jhd->hij", of_gradient, of_v) - means) * scale
        gradients.append(
            (
                torch.einsum("hij,jhd->ihd", change, of_k),
                torch.einsum("hij,ihd->jhd", change, of_q),
                torch.einsum("hij,ihd->jhd", weights, of_gradient),
            )
        )
    whole = [torch.cat(tensors) for tensors in zip(*gradients, strict=True)]
    return tuple(
        x.unflatten(1, (like.shape[1], -1)).sum(2) for x, like in zip(whole, (q, k, v), strict=True)
    )


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_go_through_the_operator(monkeypatch: Any, compiled: bool) -> None:
    kernels: Any = ModuleType("flash_attn.cute.interface")
    kernels._flash_attn_fwd = forward
    kernels._flash_attn_bwd = backward
    for name in ("flash_attn", "flash_attn.cute", kernels.__name__):
        monkeypatch.setitem(sys.modules, name, kernels)
    starts = torch.tensor([0, 5, 13], dtype=torch.int32)
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(13, heads, 8, generator=generator) for heads in (4, 2, 2)]
    tensors = [x.requires_grad_() for x in made]

    operator: Any = flash4

    def run(q: Tensor, k: Tensor, v: Tensor, longest: int) -> Tensor:
        return operator(q, k, v, starts, longest, 0.3)[0]

    call: Any = torch.compile(run, fullgraph=True, dynamic=True) if compiled else run
    out = call(*tensors, 8)
    by_row: Any = _row_by_row
    right = by_row(*tensors, starts, 0.3, 0)
    torch.testing.assert_close(out, right)
    torch.testing.assert_close(
        torch.autograd.grad(out.square().sum(), tensors),
        torch.autograd.grad(right.square().sum(), tensors),
    )
