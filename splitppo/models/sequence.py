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
from torch.distributed.distributed_c10d import _resolve_process_group
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
        """`[L]` of each rank's tokens to `[size * L]` of all. Each rank computes the same of it, so
        each has the whole gradient of its own part: nothing is sent in the backward pass."""
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


# An operator, as those of tensor.py
@torch.library.custom_op("splitppo::exchange_heads", mutates_args=())
def _exchange(states: Tensor, group: str, size: int, to_heads: bool) -> Tensor:
    tokens, heads, width = states.shape
    if to_heads:
        sent = states.view(tokens, size, heads // size, width).transpose(0, 1).contiguous()
    else:
        sent = states.contiguous().view(size, tokens // size, heads, width)
    got = torch.empty_like(sent)
    dist.all_to_all_single(got, sent, group=_resolve_process_group(cast(Any, group)))
    if to_heads:
        return got.flatten(0, 1)
    # one head a rank: flatten would return a view, whose strides are not those of the fake below
    return got.transpose(0, 1).flatten(1, 2).contiguous()


@_exchange.register_fake
def _(states: Tensor, group: str, size: int, to_heads: bool) -> Tensor:
    tokens, heads, width = states.shape
    if to_heads:
        return states.new_empty(tokens * size, heads // size, width)
    return states.new_empty(tokens // size, heads * size, width)


def _keep(ctx: Any, inputs: tuple[Tensor, str, int, bool], output: Tensor) -> None:
    ctx.how = inputs[1:]


def _give_back(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    group, size, to_heads = ctx.how
    return _exchange(grad, group, size, not to_heads), None, None, None


_exchange.register_autograd(_give_back, setup_context=_keep)
