"""The embedded engine's batches against a model that computes every row again at each token."""

import random
from typing import Any

import pytest
import torch
from test_families import PLAIN, configured
from torch import Tensor
from transformers import AutoModelForCausalLM

from splitppo.config import RolloutConfig
from splitppo.engine import Ask
from splitppo.engine.hf import HFEngine

CPU = torch.device("cpu")
# keys by column, sliding windows, places from the mask, layers that are recomputed
TYPICAL = ("qwen2, tied", "gemma3", "bloom", "lfm2, hybrid")
KINDS = [
    pytest.param(name, marks=() if name in TYPICAL else pytest.mark.families) for name in PLAIN
]


class Ids:
    """A tokenizer that has all ids."""

    pad_token_id, eos_token_id, chat_template = 0, None, None

    def get_vocab(self) -> dict[str, int]:
        return {"last": 2**20}


def likeliest(logits: Tensor) -> tuple[Tensor, Tensor]:
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
    engine = HFEngine(model.config, Ids(), device=CPU, dtype=torch.float32, max_rows=4)
    engine.load_weights(model.state_dict().items())
    monkeypatch.setattr("splitppo.engine.hf.ROOM", 4)
    engine.submit(some_asks(), RolloutConfig(temperature=0), 0)
    pieces = {}
    while engine.open:
        pieces |= {piece.row: piece for piece in engine.poll()}
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
