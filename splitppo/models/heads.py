"""What the learners read off a model at the response tokens: log-probs, entropies, values; logits are never kept."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._dynamo import maybe_mark_dynamic
from torch.utils.checkpoint import checkpoint

from splitppo import algo
from splitppo.rollout import MicroBatch

# tokens whose logits are there at once, in float32: bounds the memory of a large vocabulary
LOGIT_PIECE = 2048
# what some models do to their logits behind the output layer
AFTER_THE_HEAD = (
    "final_logit_softcapping", "logit_scale", "logits_scaling", "output_multiplier_scale", "lm_head_multiplier",
    "logits_soft_cap",
)  # fmt: skip


@dataclass(frozen=True)
class PolicyOutputs:
    """Log-probs of the response tokens at the sampling temperature, and the entropy of their distributions.

    The output layer is run piece by piece, and again in the backward pass: the logits of a whole micro-batch would be
    larger than all else (16,384 tokens and 152k ids: 5 GB in bfloat16, and several times that on the way back).

    Attributes:
        vocabulary: ids from 0 that may be sampled (`models.known_ids`); the model's own may be padded.
        compiled: fuse what is done to a piece's logits.
    """

    temperature: float
    vocabulary: int
    compiled: bool = False

    def __call__(self, model: nn.Module, batch: MicroBatch, *, entropy: bool) -> tuple[Tensor, Tensor]:
        """Both `[B, T]` float32; the entropy is zero where it isn't asked for."""
        head = cast(Any, model).get_output_embeddings()
        # a tensor, since a number would be a computation on the CPU to the compiler
        temperature = torch.full((), self.temperature, device=batch.before.device)
        measure = partial(self._measure, temperature=temperature, entropy=entropy)
        if any(getattr(model.config, name, None) for name in AFTER_THE_HEAD):
            with _replaced(head, lambda states: head_of(head, _at(states, batch))[None]):
                logits = model(**batch.inputs, use_cache=False).logits[0]
            pieces = _in_pieces(measure, logits, batch.responses)
        else:
            pieces = self._without_logits(model, head, batch, measure)
        logprobs, entropies = (batch.pad(part) for part in pieces)
        return logprobs, entropies

    def _measure(self, logits: Tensor, targets: Tensor, **how: Any) -> tuple[Tensor, Tensor]:
        if not self.compiled or len(targets) < 2:
            return token_outputs(logits, targets, vocabulary=self.vocabulary, **how)
        for tensor in (logits, targets):
            maybe_mark_dynamic(tensor, 0)
        return _compiled()(logits, targets, vocabulary=self.vocabulary, **how)

    def _without_logits(self, model: nn.Module, head: nn.Module, batch: MicroBatch, measure: Any) -> list[Tensor]:
        """The output layer gives the figures in place of logits, which the model passes on as they are."""

        def run(states: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
            return measure(head_of(head, states), targets)

        found: list[Tensor] = []

        def figures(states: Tensor) -> Tensor:
            found.append(torch.stack(_in_pieces(run, _at(states, batch), batch.responses), dim=-1)[None])
            return found[0]

        with _replaced(head, figures):
            logits = model(**batch.inputs, use_cache=False).logits
        if logits is not found[0]:
            raise RuntimeError(
                f"{type(model).__name__} changes its logits after its output layer in a way that is not known here"
            )
        return list(logits[0].unbind(-1))


def value_outputs(model: nn.Module, batch: MicroBatch) -> Tensor:
    """Values of the states in which the response tokens were chosen: read one position before each.

    Returns:
        `[B, T]` float32.
    """
    return batch.pad(model(batch.before, **batch.inputs)[:, 0].float())


def token_outputs(
    logits: Tensor, targets: Tensor, *, temperature: Tensor, vocabulary: int, entropy: bool
) -> tuple[Tensor, Tensor]:
    """Log-probs of the targets `[N]` and entropies of the distributions, both `[N]` float32, from logits `[N, V]`;
    `temperature` is `[]` float32."""
    scaled = logits[:, :vocabulary].float() / temperature
    chosen = scaled.gather(-1, targets[:, None]).squeeze(-1)
    logprobs = chosen - scaled.logsumexp(-1)
    return logprobs, algo.entropy(scaled) if entropy else torch.zeros_like(logprobs)


@cache
def _compiled() -> Callable[..., tuple[Tensor, Tensor]]:
    """One for the policy and the reference."""
    return torch.compile(token_outputs)


def head_of(head: nn.Module, states: Tensor) -> Tensor:
    """The output layer's own work, while its `forward` is replaced."""
    return type(head).forward(head, states)


def _at(states: Tensor, batch: MicroBatch) -> Tensor:
    """`[B, L, H]` -> `[N, H]`, the states from which the response tokens were chosen: nothing is computed for prompts
    and padding."""
    return states.flatten(0, 1)[batch.before]


def _in_pieces(run: Callable[..., tuple[Tensor, Tensor]], states: Tensor, targets: Tensor) -> list[Tensor]:
    """`run` piece by piece, under recomputation; its results joined."""
    pieces = [
        # copies of the targets: to the compiler the size of what a view is of would matter, too
        checkpoint(run, part, target.clone(), use_reentrant=False)
        for part, target in zip(states.split(LOGIT_PIECE), targets.split(LOGIT_PIECE), strict=True)
    ]
    return [torch.cat(parts) for parts in zip(*cast(Any, pieces), strict=True)]


@contextmanager
def _replaced(layer: nn.Module, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Within a forward pass of the whole model, since only there its weights are gathered."""
    layer.forward = forward
    try:
        yield
    finally:
        del layer.forward
