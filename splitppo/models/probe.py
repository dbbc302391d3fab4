"""Which way a model's rows can be run: a small copy of it, each way, against the library's own forward row by row.

The copy has the model's own configuration, but few layers and random weights. So it finds what no list of types would,
such as rows that leak into each other where they are packed.
"""

import math
from collections.abc import Iterator, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from splitppo.errors import one_line
from splitppo.models.attention import WIDEST_HEAD
from splitppo.models.build import Kind, build
from splitppo.models.heads import PolicyOutputs, value_outputs
from splitppo.models.weights import materialize
from splitppo.rollout import Sample, micro_batch

CPU = torch.device("cpu")
ROUNDING = 5e-3  # nats: float32 gives 1e-5 to 1e-3, a row that sees its neighbour 0.1 and more
VOCABULARY, HEADS, WINDOW = 64, 4, 4
ROWS = ((3, 5), (1, 9), (6, 1), (2, 12))  # tokens of prompt and response
CUTS = ((0, 1, 2, 3), (3, 1), (0, 2))  # micro-batches
_known: dict[tuple[str, Kind, bool], str] = {}


def why_not(config: PretrainedConfig, kind: Kind, *, packed: bool) -> str:
    """What is wrong with rows that are run so; empty: nothing."""
    key = config.to_json_string(use_diff=False), kind, packed
    if key not in _known:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.default_generator.manual_seed(0)
            try:
                _known[key] = _difference(config, kind, packed)
            except Exception as error:  # whatever the library says of rows, or of a model, that it can't take
                _known[key] = one_line(f"{type(error).__name__}: {error}")[:200]
    return _known[key]


def _difference(config: PretrainedConfig, kind: Kind, packed: bool) -> str:
    text: Any = config.get_text_config(decoder=True)
    width = getattr(text, "head_dim", None) or text.hidden_size // (getattr(text, "num_attention_heads", None) or 1)
    if packed and width > WIDEST_HEAD:
        return f"its attention heads are {width} wide, and {WIDEST_HEAD} is the most"
    samples = [_sample(row, *tokens) for row, tokens in enumerate(ROWS)]
    why = ""
    for small in miniatures(config):
        try:
            plain = _random_model(small)
            head = nn.Linear(plain.get_output_embeddings().weight.shape[-1], 1)
            due = [_alone(plain, head if kind == "value" else None, sample) for sample in samples]
        except Exception as error:  # this copy is no model; a larger one may be
            why = why or one_line(f"a small copy of it fails ({type(error).__name__}: {error})")[:200]
            continue
        model = build(small, kind, packed=packed)
        materialize(model, CPU)
        weights = plain.state_dict() | head.state_dict(prefix="score.")
        model.load_state_dict({name: weights[name] for name in model.state_dict()})
        off = max(_distance(model, kind, packed, [samples[i] for i in cut], [due[i] for i in cut]) for cut in CUTS)
        return "" if off <= ROUNDING else f"a row's figures change by {off:.2g} among other rows"
    return why


def _distance(model: nn.Module, kind: Kind, packed: bool, samples: Sequence[Sample], due: Sequence[Tensor]) -> float:
    """How far a micro-batch's figures are from those due."""
    batch = micro_batch(samples, CPU, packed=packed)
    policy = partial(PolicyOutputs(1.0, VOCABULARY), entropy=False)
    out = value_outputs(model, batch) if kind == "value" else policy(model, batch)[0]
    off = float(torch.stack([(line[: len(row)] - row).abs().max() for line, row in zip(out, due, strict=True)]).max())
    return off if math.isfinite(off) else math.inf


def _alone(plain: Any, head: nn.Module | None, sample: Sample) -> Tensor:
    """A row's log-probs by the library alone, or with a head its values; `[T]`."""
    ids = torch.tensor([sample.prompt + sample.response])
    n = len(sample.response)
    if head is not None:
        return head(plain.base_model(input_ids=ids, use_cache=False)[0])[0, -n - 1 : -1, 0]
    logprobs = plain(input_ids=ids, use_cache=False).logits[0, -n - 1 : -1].log_softmax(-1)
    return logprobs.gather(-1, ids[0, -n:, None])[:, 0]


def _random_model(config: PretrainedConfig) -> Any:
    """Weights large enough for neighbours, windows and soft caps to matter."""
    model: Any = AutoModelForCausalLM.from_config(deepcopy(config), dtype=torch.float32).eval()
    for parameter in model.parameters():
        noise = torch.randn_like(parameter)
        parameter.copy_(noise * 1.5 * parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else parameter + 0.1 * noise)
    return model


def _sample(row: int, prompt: int, response: int) -> Sample:
    ids = torch.randint(1, VOCABULARY, (prompt + response,)).tolist()
    return Sample(row, ids[:prompt], ids[prompt:], [], True)


def miniatures(config: PretrainedConfig) -> Iterator[PretrainedConfig]:
    """Copies with few ids and short windows: narrow with a layer of each kind (two at least), as wide as the model with
    as many layers, narrow with all layers."""
    for narrow, few in ((True, True), (False, True), (True, False)):
        small: Any = deepcopy(config)
        layers = small.num_hidden_layers
        if few:
            by_layer = {k: v for k, v in vars(small).items() if isinstance(v, list | tuple) and len(v) == layers}
            kinds = [str(kind) for kind in zip(*by_layer.values(), strict=True)] or [""] * layers
            kept = sorted({*map(kinds.index, kinds), *range(min(2, layers))})
            small.num_hidden_layers = len(kept)
            for name, value in by_layer.items():
                setattr(small, name, [value[i] for i in kept])
        if narrow and (heads := getattr(small, "num_attention_heads", None)):
            few_heads, groups = min(HEADS, heads), getattr(small, "num_key_value_heads", None)
            small.hidden_size, small.num_attention_heads = few_heads * (small.hidden_size // heads), few_heads
            if groups is not None:
                small.num_key_value_heads = few_heads if groups == heads else min(2, groups)
            if getattr(small, "intermediate_size", None):
                small.intermediate_size = 96
        small.vocab_size = VOCABULARY
        small.pad_token_id = small.bos_token_id = small.eos_token_id = 0
        if getattr(small, "sliding_window", None):
            small.sliding_window = WINDOW
        yield small
