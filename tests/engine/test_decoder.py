"""The decoder of the embedded engine against a model that computes every row again at each
token."""

import random
from typing import Any

import pytest
import torch
from test_families import PLAIN, configured
from torch import Tensor
from transformers import AutoModelForCausalLM

from splitppo.engine import Ask, find_stops
from splitppo.engine.decoder import Decoder

CPU = torch.device("cpu")
# keys by column, sliding windows, places from the mask, layers that are recomputed
TYPICAL = ("qwen2, tied", "gemma3", "bloom", "lfm2, hybrid")
KINDS = [
    pytest.param(name, marks=() if name in TYPICAL else pytest.mark.families) for name in PLAIN
]


def likeliest(logits: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    logprobs, tokens = torch.log_softmax(logits, dim=-1).max(dim=-1)
    return tokens, logprobs


@torch.no_grad()
def random_model(config: Any) -> Any:
    torch.manual_seed(1)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for tensor in model.parameters():
        noise = torch.randn_like(tensor)
        tensor.copy_(noise * tensor.shape[-1] ** -0.5 if tensor.ndim > 1 else tensor + 0.1 * noise)
    return model


def some_asks() -> list[Ask]:
    """Rows that enter one by one, some longer than all before them, and some that one outlives by
    far."""
    generator = random.Random(0)
    sizes = [
        (3, 40),
        (1, 2),
        (9, 5),
        (2, 17),
        (14, 2),
        (3, 5),
        (30, 9),
        (1, 1),
        (2, 9),
        (5, 2),
        (1, 5),
    ]
    drawn = [[generator.randrange(2, 90) for _ in range(size)] for size, _ in sizes]
    return [
        Ask(row, ids, 0, tokens, may_stop=False)
        for row, (ids, (_, tokens)) in enumerate(zip(drawn, sizes, strict=True))
    ]


@pytest.mark.parametrize("name", KINDS)
def test_rows_that_enter_and_leave_are_as_if_each_was_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, settings, _ = PLAIN[name]
    model = random_model(configured(kind, settings))
    decoder = Decoder(model, device=CPU, pad=0, eos=set(), max_rows=4)
    monkeypatch.setattr("splitppo.engine.decoder.ROOM", 4)
    decoder.begin(likeliest, find_stops(None, ()))
    decoder.submit(some_asks())
    pieces = {}
    while decoder.busy:
        pieces |= {piece.row: piece for piece in decoder.poll()}
    for ask in some_asks():
        piece, ids = pieces[ask.row], list(ask.ids)
        for token, logprob in zip(piece.tokens, piece.logprobs, strict=True):
            with torch.no_grad():
                logits = model(torch.tensor([ids]), use_cache=False).logits[:, -1]
            (due,), (due_logprob,) = (part.tolist() for part in likeliest(logits))
            assert (token, logprob) == (due, pytest.approx(due_logprob, abs=1e-5)), (
                ask.row,
                len(ids),
            )
            ids.append(token)
        assert (len(piece.tokens), piece.end) == (ask.tokens, "limit")
