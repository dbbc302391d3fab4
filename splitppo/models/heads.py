"""What the learners compute at the response tokens: log-probs, entropies, values. Logits are never kept."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._dynamo import maybe_mark_dynamic
from torch.utils.checkpoint import checkpoint

from splitppo import algo
from splitppo.models.batching import MicroBatch

LOGIT_PIECE = 2048  # tokens whose float32 logits exist at once
# settings of models that change their logits after the output layer
LOGIT_SETTINGS = (
    "final_logit_softcapping", "logit_scale", "logits_scaling", "output_multiplier_scale", "lm_head_multiplier",
    "logits_soft_cap",
)  # fmt: skip


@dataclass(frozen=True)
class PolicyOutputs:
    """Log-probs of the response tokens at the sampling temperature, and entropies of their distributions. The output
    layer runs piece by piece, and again in the backward pass: the logits of a whole micro-batch would take more memory
    than all else (16,384 tokens and 152k ids: 5 GB in bfloat16, several times that in the backward)."""

    temperature: float
    vocabulary: int  # ids that may be sampled; the model may have more
    compiled: bool = False  # fuses the computation on the logits

    def __call__(self, model: nn.Module, batch: MicroBatch, *, entropy: bool) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies, `[B, T]` float32; without `entropy` the latter are 0."""
        head = cast(Any, model).get_output_embeddings()
        run = partial(type(head).forward, head)  # the output layer's own forward, also while it is replaced
        changed_later = any(getattr(model.config, name, None) for name in LOGIT_SETTINGS)
        # a tensor: to the compiler a number would be a computation on the CPU
        temperature = torch.full((), self.temperature, device=batch.before.device)
        measure = partial(self._measure, temperature=temperature, entropy=entropy)
        found: list[Tensor] = []

        def forward(states: Tensor) -> Tensor:
            """Of the states from which the tokens were chosen; within the model's forward pass, where the weights are
            gathered. The model takes log-probs and entropies for logits, and passes them on."""
            states = states.flatten(0, 1)[batch.before]
            if changed_later:
                return run(states)[None]
            pieces = _in_pieces(lambda s, t: measure(run(s), t), states, batch.responses)
            found.append(torch.stack(pieces, dim=-1)[None])
            return found[0]

        head.forward = forward
        try:
            logits = model(**batch.inputs, use_cache=False).logits
        finally:
            del head.forward
        if not changed_later and logits is not found[0]:
            kind = type(model).__name__
            raise RuntimeError(f"{kind} changes its logits after its output layer in an unknown way; use another model")
        pieces = _in_pieces(measure, logits[0], batch.responses) if changed_later else logits[0].unbind(-1)
        logprobs, entropies = (batch.pad(part) for part in pieces)
        return logprobs, entropies

    def _measure(self, logits: Tensor, targets: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        if not self.compiled or len(targets) < 2:
            return token_outputs(logits, targets, vocabulary=self.vocabulary, **options)
        for tensor in (logits, targets):
            maybe_mark_dynamic(tensor, 0)
        return _compiled()(logits, targets, vocabulary=self.vocabulary, **options)


def value_outputs(model: nn.Module, batch: MicroBatch) -> Tensor:
    """Values `[B, T]` float32 of the states in which the response tokens were chosen: one position before each."""
    return batch.pad(model(batch.before, **batch.inputs)[:, 0].float())


def token_outputs(
    logits: Tensor, targets: Tensor, *, temperature: Tensor, vocabulary: int, entropy: bool
) -> tuple[Tensor, Tensor]:
    """Logits `[N, V]`, targets `[N]`, temperature `[]` -> log-probs of the targets, entropies; both `[N]` float32."""
    scaled = logits[:, :vocabulary].float() / temperature
    chosen = scaled.gather(-1, targets[:, None]).squeeze(-1)
    logprobs = chosen - scaled.logsumexp(-1)
    return logprobs, algo.entropy(scaled) if entropy else torch.zeros_like(logprobs)


@cache
def _compiled() -> Callable[..., tuple[Tensor, Tensor]]:
    """Compiled once for the policy and the reference."""
    return torch.compile(token_outputs)


def _in_pieces(run: Callable[..., tuple[Tensor, Tensor]], states: Tensor, targets: Tensor) -> list[Tensor]:
    """Calls `run` piece by piece, under activation checkpointing, and joins the results."""
    pieces = [
        # clones of the targets: to the compiler the size of a view's base would matter too
        checkpoint(run, part, target.clone(), use_reentrant=False)
        for part, target in zip(states.split(LOGIT_PIECE), targets.split(LOGIT_PIECE), strict=True)
    ]
    return [torch.cat(parts) for parts in zip(*cast(Any, pieces), strict=True)]
