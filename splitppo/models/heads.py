"""The policy, the value model, and what the learners compute at the response tokens: log-probs,
entropies, values. Logits are never kept."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._dynamo import maybe_mark_dynamic
from torch.utils.checkpoint import checkpoint

from splitppo import algo
from splitppo.models.batching import MicroBatch
from splitppo.models.experts import Load

LOGIT_PIECE = 2048  # tokens whose float32 logits exist at once
Measure = Callable[
    [Tensor, Tensor], tuple[Tensor, ...]
]  # (logits `[1, n, V]`, tokens `[1, n, m]`) -> `[1, n, ...]` each


class PolicyModel(nn.Module):
    """A causal model in two parts: its body, and all that makes logits of the body's states: the
    output layer, and in some models a cap or a scale. The parts are named as in the causal model
    and its folder.

    The body runs over all tokens. What follows runs over the response tokens alone, piece by piece,
    and again in the backward pass: the logits of a whole micro-batch would take more memory than
    all else (16,384 tokens and 152k ids: 5 GB in bfloat16, several times that in the backward)."""

    def __init__(self, causal: Any):
        super().__init__()
        self.config = causal.config
        self.base_model_prefix = causal.base_model_prefix
        self._modules = causal._modules
        self.__dict__["causal"] = causal  # no child: its parts are named above
        rest = copy(causal)
        rest.__dict__[self.base_model_prefix] = _States(causal.base_model)
        self.after_body = rest.forward
        self.load = Load(self)

    def forward(
        self,
        at: Tensor,
        tokens: Tensor,
        measure: Measure,
        experts: Tensor | None = None,
        **inputs: Any,
    ) -> list[Tensor]:
        """What `measure` finds, `[N, ...]` each.

        Args:
            at: `[N]`, where in the flattened ids each token was chosen.
            tokens: `[N, m]`, the token that was chosen there, perhaps others behind it.
            experts: `MicroBatch.experts`, if they are replayed.
        """
        self.load.replay(experts)
        body = getattr(self, self.base_model_prefix)(**inputs, use_cache=False)
        self.load.add(at)
        kind = type(body)
        states = body[0].flatten(0, 1)[at][None]

        def run(states: Tensor, tokens: Tensor) -> tuple[Tensor, ...]:
            return measure(self.after_body(kind(last_hidden_state=states)).logits, tokens)

        pieces = [
            # clones of the tokens: to the compiler the size of a view's base would matter too
            checkpoint(run, part, chosen.clone(), use_reentrant=False)
            for part, chosen in zip(
                states.split(LOGIT_PIECE, 1), tokens[None].split(LOGIT_PIECE, 1), strict=True
            )
        ]
        return [torch.cat([part[0] for part in parts]) for parts in zip(*pieces, strict=True)]


class ValueModel(nn.Module):
    """A causal model's body with a scalar head `score` on its last hidden states. The body is named
    as in the causal model and its folder (`base_model_prefix`). The head runs in float32, in which
    values near each other differ. A reward model for packed rows is the same with a head of its
    own."""

    float32 = ("score",)

    def __init__(self, causal: Any, score: nn.Module | None = None):
        super().__init__()
        self.config = causal.config
        self.base_model_prefix = causal.base_model_prefix
        setattr(self, self.base_model_prefix, causal.base_model)
        self.score = score or nn.Linear(causal.get_output_embeddings().weight.shape[-1], 1)
        self.load = Load(self)

    def forward(self, at: Tensor, **inputs: Any) -> Tensor:
        """`[N, 1]` values of the states `at` `[N]` in the flattened ids."""
        states = getattr(self, self.base_model_prefix)(**inputs, use_cache=False)[0]
        self.load.add(at)
        return self.score(states.flatten(0, 1)[at].to(next(self.score.parameters()).dtype))


class SharedModel(PolicyModel):
    """Policy and value model over one body, each with adapters of its own (lora.py). With tokens to
    measure it is the policy, without any the value model."""

    float32 = ValueModel.float32

    def __init__(self, causal: Any):
        super().__init__(causal)
        self.score = nn.Linear(causal.get_output_embeddings().weight.shape[-1], 1)

    def forward(self, at: Tensor, *measured: Any, **inputs: Any) -> Any:
        """As `PolicyModel.forward` or `ValueModel.forward`."""
        for layer in adapted_layers(self):
            layer._active_adapter = ["policy" if measured else "value"]
        if measured:
            return super().forward(at, *measured, **inputs)
        self.load.replay(None)
        return ValueModel.forward(cast(Any, self), at, **inputs)


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """While the context is open, a model with adapters is its base."""
    layers = adapted_layers(model)
    try:
        for layer in layers:
            layer._disable_adapters = True
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def adapted_layers(model: nn.Module) -> list[Any]:
    """The modules in which peft has put adapters beside a linear layer. Its methods that turn them
    on or off would change what requires a gradient; flags alone don't."""
    return [module for module in model.modules() if "lora_A" in module._modules]


class _States:
    """In the place of a causal model's body: takes what the body returned, and returns it."""

    def __init__(self, body: Any):
        self.body = body
        self.decoder = self  # OPT and BART call this part of their body

    def __getattr__(self, name: str) -> Any:
        return getattr(self.body, name)  # such as a scale of the logits

    def __call__(self, input_ids: Any, *_: Any, **__: Any) -> Any:
        return input_ids


@dataclass(frozen=True)
class PolicyOutputs:
    """Log-probs of the response tokens at the sampling temperature, and entropies of their
    distributions."""

    temperature: float
    vocabulary: int  # ids that may be sampled; the model may have more
    compiled: bool = False  # fuses the computation on the logits
    replays: bool = False  # whether tokens go to the experts to which the engine sent them

    def __call__(
        self, model: nn.Module, batch: MicroBatch, *, entropy: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies, `[N]` float32; without `entropy` the latter are 0."""
        return self.beside(model, batch, None, entropy=entropy)[:2]

    def beside(
        self, model: nn.Module, batch: MicroBatch, ids: Tensor | None, *, entropy: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As a call; and where others could have been chosen, `ids` `[N, k]`, their log-probs, and
        `[N, 1]` the highest log-prob of all."""
        targets = batch.responses[:, None]
        if ids is not None:
            targets = torch.cat([targets, batch.cut(ids)], 1)
        k = 0 if ids is None else 1
        logprobs, entropies, highest, _ = self._run(model, batch, targets, entropy=entropy, k=k)
        return logprobs[:, 0], entropies, logprobs[:, 1:], highest

    def likeliest(self, model: nn.Module, batch: MicroBatch, *, k: int) -> list[Tensor]:
        """Log-probs `[N]`; the k most likely tokens, `[N, k]` int32; their log-probs and that of
        all others together, `[N, k + 1]` float16."""
        logprobs, _, highest, ids = self._run(model, batch, batch.responses[:, None], k=k)
        # where the model rules a token out, a divergence needs a number all the same
        buckets = algo.buckets(highest).clamp(min=torch.finfo(torch.float16).min)
        return [logprobs[:, 0], ids.int(), buckets.half()]

    def _run(
        self,
        model: nn.Module,
        batch: MicroBatch,
        targets: Tensor,
        *,
        entropy: bool = False,
        k: int = 0,
    ) -> list[Tensor]:
        options: dict[str, Any] = {
            # a tensor: to the compiler a number would be a computation on the CPU
            "temperature": torch.full((), self.temperature, device=batch.before.device),
            "vocabulary": self.vocabulary,
            "entropy": entropy,
            "k": k,
        }

        def measure(logits: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
            if not self.compiled or targets.shape[1] < 2:
                return token_outputs(logits, targets, **options)
            for tensor in (logits, targets):
                maybe_mark_dynamic(tensor, 1)
            return _compiled()(logits, targets, **options)

        experts = batch.experts if self.replays else None
        return [*map(batch.join, model(batch.before, targets, measure, experts, **batch.inputs))]


def value_outputs(
    model: nn.Module, batch: MicroBatch, bounds: tuple[float, float] | None = None
) -> Tensor:
    """Values `[N]` float32 of the states in which the response tokens were chosen: one position
    before each. Without their `bounds`, bounded values are logits (`algo.bounded_values`)."""
    outputs = batch.join(model(batch.before, **batch.inputs)[:, 0].float())
    return algo.bounded_values(outputs, bounds)


def read_scores(outputs: Tensor, config: Any) -> Tensor:
    """A reward model's scores `[...]` float32 of its outputs `[..., labels]`: the number of its one
    label, or the probability of the one that is named."""
    label = getattr(config, "score_label", None)
    scores = outputs.float()
    return scores[..., 0] if label is None else scores.softmax(-1)[..., label]


def last_scores(model: nn.Module, batch: MicroBatch) -> Tensor:
    """A reward model's scores `[N]` float32 at the response tokens themselves, of packed rows. They
    are read off all tokens: a state may be with another rank than the one before it."""
    every = torch.arange(batch.inputs["input_ids"].shape[1], device=batch.chosen.device)
    scores = read_scores(model(every, **batch.inputs), model.config)
    return batch.whole(scores)[batch.chosen + 1]


def token_outputs(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: Tensor,
    vocabulary: int,
    entropy: bool = False,
    k: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits `[..., V]`, targets `[..., m]`, temperature `[]` -> log-probs of the targets
    `[..., m]`; entropies `[...]`, 0 if nobody asks for them; the k highest log-probs, and their
    ids, `[..., k]`."""
    scaled = logits[..., :vocabulary].float() / temperature
    total = scaled.logsumexp(-1, keepdim=True)
    entropies = algo.entropy(scaled) if entropy else torch.zeros_like(total[..., 0])
    highest = total[..., :0]
    ids = targets[..., :0]
    if k:
        # the compiler fuses a maximum, and no selection of several
        highest, ids = scaled.topk(k) if k > 1 else scaled.max(-1, keepdim=True)
    return scaled.gather(-1, targets) - total, entropies, highest - total, ids


@cache
def _compiled() -> Any:  # once for all models of a rank
    return torch.compile(token_outputs)
