"""Sequence parallelism (Ulysses; Jacobs et al. 2023, arXiv:2309.14509): the ranks of a set run the
same micro-batch, each a piece of its tokens.

Attention alone needs more than its own tokens. Before it, each rank gives its tokens of the other
ranks' heads for all tokens of its own heads; behind it they are given back. Two such exchanges in a
layer's forward pass, and two in its backward pass, which is the same the other way round.
"""

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from transformers import PretrainedConfig

from splitppo.errors import UserError
from splitppo.job.collectives import all_gather


class SequenceSet:
    """The ranks of a set, as one of them sees them. `group`: their process group."""

    def __init__(self, group: Any):
        self.group = group
        self.name: str = group.group_name
        self.ranks = dist.get_process_group_ranks(group)
        self.rank = dist.get_rank(group)

    @property
    def size(self) -> int:
        # a length: to the compiler an attribute's number would be a variable
        return len(self.ranks)

    def places(self, length: int) -> Tensor:
        """`[L]`, where this rank's tokens are among `length` of all."""
        part = length // self.size
        return torch.arange(part * self.rank, part * (self.rank + 1))

    def to_heads(self, states: Tensor) -> Tensor:
        """`[L, heads, width]` of this rank's tokens to `[size * L, own heads, width]`. Heads of
        which there are too few are repeated, as often as they must be."""
        times = 1
        while states.shape[1] * times % self.size:  # not gcd: the compiler does not know it
            times += 1
        if times > 1:
            states = states.repeat_interleave(times, 1)
        return _exchange(states, self.name, self.size, True)

    def to_tokens(self, states: Tensor) -> Tensor:
        """The inverse, without the repetition."""
        return _exchange(states, self.name, self.size, False)

    def join(self, values: Tensor) -> Tensor:
        """`[L, ...]` of each rank's tokens to `[size * L, ...]` of all. Each rank computes the same
        of it, so each has the whole gradient of its own part: nothing is sent in the backward
        pass."""
        parts = list(all_gather(values.detach(), self.group))
        parts[self.rank] = values
        return torch.cat(parts)


def sequence_of(model: nn.Module) -> SequenceSet | None:
    """The ranks over which a model's micro-batches are cut, if they are."""
    return getattr(model, "sequence", None)


def check_heads(config: PretrainedConfig, size: int, tensor: int, setting: str) -> None:
    """Raises a UserError that begins with `setting` if `size` ranks, of which each has one of
    `tensor` parts of a layer, can't share its attention heads."""
    heads: int = cast(Any, config.get_text_config(decoder=True)).num_attention_heads
    if heads % (size * tensor):
        fits = [n for n in range(1, heads // tensor + 1) if heads % (n * tensor) == 0]
        raise UserError(
            f"{setting} with sequence_parallel={size}, tensor_parallel={tensor}: type "
            f"{config.model_type!r} has {heads} attention heads, no multiple of {size * tensor}; "
            f"use a sequence_parallel of {fits}"
        )


def _exchange(states: Tensor, group: Any, size: int, to_heads: bool) -> Tensor:
    tokens, heads, width = states.shape
    if to_heads:
        sent = states.view(tokens, size, heads // size, width).transpose(0, 1).contiguous()
    else:
        sent = states.contiguous().view(size, tokens // size, heads, width)
    got = all_to_all_single_autograd(sent, None, None, group)
    if to_heads:
        return got.flatten(0, 1)
    return got.transpose(0, 1).flatten(1, 2)
