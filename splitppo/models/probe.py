"""Whether a model can run on packed (or padded) rows: tried on a copy with few layers and random
weights, against transformers row by row. So it also finds problems that no list of model types
knows."""

import math
from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from splitppo.errors import one_line
from splitppo.models.attention import WIDEST_HEAD
from splitppo.models.batching import micro_batch
from splitppo.models.build import Kind, build, make
from splitppo.models.experts import Load
from splitppo.models.heads import PolicyOutputs, last_scores, read_scores, value_outputs
from splitppo.rollout import Episode, episode_of

# nats: rounding in float32 gives 1e-5 to 1e-3, a row that sees its neighbour 0.1 and more
TOLERANCE = 5e-3
VOCABULARY = 64
HEADS = 4
WINDOW = 4
ROWS = ((3, 5), (1, 9), (6, 1), (2, 12))  # tokens of prompt and response
CUTS = ((0, 1, 2, 3), (3, 1), (0, 2))  # micro-batches


class _Shuffled:
    """Stands for a set of ranks that share rows: outside attention, tokens have another order. So a
    model that mixes tokens elsewhere, too, is found without ranks."""

    size = 1

    def places(self, length: int) -> Tensor:
        self.order = torch.randperm(length)
        return self.order

    def to_heads(self, states: Tensor) -> Tensor:
        return states[self.order.argsort()]

    def to_tokens(self, states: Tensor) -> Tensor:
        return states[self.order]

    join = to_heads


def find_mismatch(config: PretrainedConfig, kind: Kind, *, packed: bool, cut: bool = False) -> str:
    """Why the model's outputs on such rows aren't those of transformers; "" if they are. `cut`:
    with packed rows of which each rank has some tokens."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.default_generator.manual_seed(0)
        try:
            return _mismatch(config, kind, packed, cut)
        except Exception as error:  # of transformers, for rows or models that it can't take
            return one_line(f"{type(error).__name__}: {error}")[:200]


def find_undriven(config: PretrainedConfig) -> str:
    """Why nobody can say to which experts a policy's routers send tokens (`Load.replay`); "" if it
    can be said."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        driven = any(map(_drives, _small_copies(config)))
    return "" if driven else f"type {config.model_type!r} has routers that can't be overridden"


def _drives(config: PretrainedConfig) -> bool:
    """Whether each layer's experts are those that are given, and not the router's own."""
    ids = torch.randint(1, VOCABULARY, (1, 8))
    try:
        model = _random_model(config, "policy")
        load = Load(model)
        load.drive()
        model(input_ids=ids, use_cache=False)
        others = [(module.chosen + 1) % module.num_experts for module in load.experts]
        load.replay(load.packing.pack(torch.stack(others, 1)))
        model(input_ids=ids, use_cache=False)
        pairs = zip(load.experts, others, strict=True)
        return all(torch.equal(module.chosen, other) for module, other in pairs)
    except Exception:  # this copy is too small for its type, or its layers are all dense
        return False


def _mismatch(config: PretrainedConfig, kind: Kind, packed: bool, cut: bool) -> str:
    text: Any = config.get_text_config(decoder=True)
    heads = getattr(text, "num_attention_heads", None) or 1
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    if packed and width > WIDEST_HEAD:
        return f"its attention heads are {width} wide, and {WIDEST_HEAD} is the most"
    episodes = []
    problem = ""
    for row, (prompt, response) in enumerate(ROWS):
        ids = torch.randint(1, VOCABULARY, (prompt + response,)).tolist()
        first = -1 if kind == "reward" else prompt  # of the response: a text has one score
        episodes.append(episode_of(row, ids[:first], ids[first:]))
    for small in _small_copies(config):
        try:
            plain = _random_model(small, kind)
            head = (
                plain.score
                if kind == "reward"
                else nn.Linear(plain.get_output_embeddings().weight.shape[-1], 1)
            )
            expected = [_expected(plain, head, kind, episode) for episode in episodes]
        except Exception as error:  # this copy is too small for its type; the next one may do
            problem = (
                problem
                or one_line(f"a small copy of it fails ({type(error).__name__}: {error})")[:200]
            )
            continue
        model = build(small, kind, packed=packed)
        weights = plain.state_dict() | head.state_dict(prefix="score.")
        model.load_state_dict({name: weights[name] for name in model.state_dict()}, assign=True)
        cuts = [([episodes[i] for i in rows], [expected[i] for i in rows]) for rows in CUTS]
        error = max(_error(model, kind, packed, cut, *rows) for rows in cuts)
        return (
            ""
            if error <= TOLERANCE
            else f"a row's outputs change by {error:.2g} when packed with other rows"
        )
    return problem


def _error(
    model: nn.Module,
    kind: Kind,
    packed: bool,
    cut: bool,
    episodes: Sequence[Episode],
    expected: Sequence[Tensor],
) -> float:
    """The largest difference between a micro-batch's outputs and the expected ones."""
    sequence: Any = _Shuffled() if cut else None
    batch = micro_batch(episodes, torch.device("cpu"), packed=packed, sequence=sequence)
    if kind == "policy":
        out, _ = PolicyOutputs(1.0, VOCABULARY)(model, batch, entropy=False)
    else:
        out = (value_outputs if kind == "value" else last_scores)(model, batch)
    errors = [
        (line - row).abs().max()
        for line, row in zip(out.split([*map(len, expected)]), expected, strict=True)
    ]
    return float(torch.stack(errors).max().nan_to_num(math.inf, math.inf))


def _expected(plain: Any, head: nn.Module, kind: Kind, episode: Episode) -> Tensor:
    """`[T]` log-probs of a row alone, by transformers; its values, by the head; or its score."""
    ids = episode.ids.long()[None]
    n = len(episode.response)
    if kind == "reward":
        logits = plain(input_ids=ids).logits  # of the text, or of its tokens
        return read_scores(logits.flatten(0, -2)[-1:], plain.config)
    if kind == "value":
        return head(plain.base_model(input_ids=ids, use_cache=False)[0])[0, -n - 1 : -1, 0]
    logprobs = plain(input_ids=ids, use_cache=False).logits[0, -n - 1 : -1].log_softmax(-1)
    return logprobs.gather(-1, ids[0, -n:, None])[:, 0]


def _random_model(config: PretrainedConfig, kind: Kind) -> Any:
    """Its weights are large enough for neighbours, windows and soft caps to matter."""
    model: Any = make(deepcopy(config), kind, torch.float32).eval()
    for parameter in model.parameters():
        noise = torch.randn_like(parameter)
        parameter.copy_(
            noise * 1.5 * parameter.shape[-1] ** -0.5
            if parameter.ndim > 1
            else parameter + 0.1 * noise
        )
    return model


def _small_copies(config: PretrainedConfig) -> Iterator[PretrainedConfig]:
    """Few ids, short windows, and: narrow with a layer of each kind (two at least); as wide as the
    model with as many layers; narrow with all layers."""
    for narrow, few in ((True, True), (False, True), (True, False)):
        small: Any = deepcopy(config)
        if few:
            _keep_few_layers(small)
        if narrow and getattr(small, "num_attention_heads", None):
            _make_narrow(small)
        small.vocab_size = VOCABULARY
        small.pad_token_id = small.bos_token_id = small.eos_token_id = 0
        if getattr(small, "sliding_window", None):
            small.sliding_window = WINDOW
        yield small


def _keep_few_layers(config: Any) -> None:
    layers = config.num_hidden_layers
    by_layer = {
        k: v for k, v in vars(config).items() if isinstance(v, list | tuple) and len(v) == layers
    }
    kinds = [str(kind) for kind in zip(*by_layer.values(), strict=True)] or [""] * layers
    chosen = sorted({*map(kinds.index, kinds), *range(min(2, layers))})
    config.num_hidden_layers = len(chosen)
    for name in ("first_k_dense_replace", "num_dense_layers"):  # before those with experts
        if getattr(config, name, 0):
            setattr(config, name, 1)
    for name, value in by_layer.items():
        setattr(config, name, [value[i] for i in chosen])


def _make_narrow(config: Any) -> None:
    heads = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", None)
    config.num_attention_heads = min(HEADS, heads)
    config.hidden_size = config.num_attention_heads * (config.hidden_size // heads)
    if groups is not None:
        config.num_key_value_heads = min(
            config.num_attention_heads if groups == heads else 2, groups
        )
    for name in ("intermediate_size", "moe_intermediate_size"):
        if getattr(config, name, None):
            setattr(config, name, 96)
