"""Token by token, with real engines: what is trained on is what was sampled, at its place, with the
engine's log-prob; and the policy reads what the chat template makes of the dialogue."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch
from devices import skip_without_vllm
from envs import LocalPool
from ranks import ALONE
from templates import TEMPLATES, WORDS, tokenizer_of
from test_engine import CLOSE, ENGINES, hf_engine, llama_config, random_llama, start_vllm

from splitppo.config import Config, EnvConfig, RolloutConfig
from splitppo.engine import Ask, Piece
from splitppo.engine.hf import HFEngine
from splitppo.envs import Message, Turn
from splitppo.envs.player import Player, turns_of
from splitppo.generator.sampler import Sampler
from splitppo.models.batching import micro_batch
from splitppo.models.heads import PolicyModel, PolicyOutputs
from splitppo.rollout import Episode, Prompt, Rollout

TOKENIZER = tokenizer_of(None, "</s>")  # all of them have the same ids
MODEL = {"vocab_size": len(TOKENIZER) + 8, "eos_token_id": [TOKENIZER.eos_token_id]}


@dataclass
class Recorded:
    """An engine, and what it said of each row: (place in the row, token, log-prob)."""

    engine: Any
    begun: dict[int, int] = field(default_factory=dict)
    said: dict[int, list[tuple[int, int, float]]] = field(default_factory=dict)
    ends: set[str] = field(default_factory=set)

    def submit(self, asks: Sequence[Ask], *more: Any) -> None:
        self.begun |= {ask.row: len(ask.ids) for ask in asks}
        self.engine.submit(asks, *more)

    def poll(self) -> list[Piece]:
        pieces = self.engine.poll()
        for piece in pieces:
            self.ends.add(piece.end)
            places = range(self.begun[piece.row], 10**9)
            drawn = zip(places, piece.tokens, piece.logprobs, strict=False)
            self.said.setdefault(piece.row, []).extend(drawn)
        return pieces

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)


class Talker:
    """Answers in the roles that a template knows, up to five times, and notes the dialogue."""

    def __init__(self, row: dict[str, Any], seed: int):
        self.draw = random.Random(seed)
        self.roles, self.dialogue = row["extra_info"]["roles"], row["extra_info"]["dialogue"]
        self.turns = self.draw.randint(2, 5)

    def reset(self) -> list[Message]:
        text = "".join(self.draw.choices(WORDS, k=5)).strip() + "?"
        self.dialogue.append({"role": "user", "content": text})
        return [Message("user", text)]

    def step(self, message: Message) -> Turn:
        self.turns -= 1
        role = self.draw.choice(self.roles)
        texts = ["".join(self.draw.choices(WORDS, k=4)).strip() + "." for _ in range(2)]
        texts = texts[: self.draw.randint(1, 2) if role == "tool" else 1]
        self.dialogue.append({"role": "assistant", "content": message.content})
        answers = [{"role": role, "content": text, "tool_call_id": "0" * 9} for text in texts]
        self.dialogue.append(answers)
        return Turn([Message(role, text) for text in texts], done=not self.turns)

    def close(self) -> None: ...


def talkative(seed: int) -> Any:
    """A policy that ends a turn every few tokens, and never says what begins a text: a part of the
    states that no layer changes makes one token likelier than others, and one impossible."""
    model: Any = random_llama(llama_config(**MODEL), seed)
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 4.0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.down_proj.weight[0] = 0.0
        model.lm_head.weight[:, 0] = 0.0
        model.lm_head.weight[TOKENIZER.eos_token_id, 0] = 12.0
        model.lm_head.weight[TOKENIZER.bos_token_id, 0] = -40.0
    return model


@pytest.fixture(scope="module")
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    config = llama_config(**MODEL)
    if request.param == "vllm":
        skip_without_vllm()
        made = start_vllm(tmp_path_factory.mktemp("vllm"), config, TOKENIZER, 64)
    else:
        made = hf_engine(config, TOKENIZER, 64)
    yield made
    made.close()


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize(
    "engine", ["hf", pytest.param("vllm", marks=[pytest.mark.vllm, ENGINES])], indirect=True
)
def test_random_dialogues(engine: Any, name: str) -> None:
    # each template with and without windows, each engine with each template
    window = 7 if list(TEMPLATES).index(name) % 2 == isinstance(engine, HFEngine) else 0
    stop = () if window else ("9",)
    sampling = RolloutConfig(max_new_tokens=20, stop=stop)
    count = 24 if window else 36
    template, end, roles = TEMPLATES[name]
    tokenizer = tokenizer_of(template, end)
    given = Config(rollout=sampling, env=EnvConfig(path="env.py:Talker"))
    pool: Any = LocalPool(Talker, 2)
    dialogues: dict[int, list[Any]] = {}

    def prompt(row: int) -> Prompt:
        info = {"roles": roles, "dialogue": dialogues.setdefault(row, [])}
        return Prompt("", [5], "", "", info)

    player = Player(pool, cast(Any, turns_of(given, tokenizer)), given)
    sampler = Sampler(
        count // 4 if window else count,
        prompt,
        limit=sampling.max_new_tokens,
        window=window,
        player=player,
    )
    recorded: Any = Recorded(engine)
    models = [talkative(0), talkative(1)]  # of steps in turn
    rows: list[Episode] = []
    step = 0
    while len(rows) < count:
        step += 1
        engine.load_weights(models[step % 2].state_dict().items())
        lists = sampler.generate(recorded, step, range(sampler.streams.slots), sampling, 3)
        rows += [row for ended in lists for row in ended]
        sampler.gather_open(ALONE)
    rows.sort(key=lambda row: row.row)
    pool.close()
    assert not player.failures
    assert recorded.ends == {"eos", "limit", *(["stop"] if stop else [])}
    assert {row.end for row in rows} == {"environment", "limit"}
    # how many of these there are is chance, as the engine's rounding is
    assert any(len(row.turns) > 2 for row in rows)
    otherwise = False
    for row in rows:
        dialogue = dialogues[row.row]
        read = [[*row.prompt]]
        for said, heard in row.turns:
            read.append([*read[-1], *said, *heard])
        # what was said at last has no answer
        shown = [message for part in dialogue[: 2 * len(read) - 3] for message in listed(part)]
        text = tokenizer.apply_chat_template(shown, tokenize=False, add_generation_prompt=True)
        assert bare(tokenizer.decode(read[-2])) == bare(text)
        otherwise |= tokenizer(text, add_special_tokens=False)["input_ids"] != read[-2]
    assert otherwise  # ids that are decoded and tokenised again would differ
    check_training(rows, recorded.said, models)


def listed(part: Any) -> list[dict[str, str]]:
    return part if isinstance(part, list) else [part]


def bare(text: str) -> str:
    """Without spaces: some templates trim what was said."""
    return "".join(text.split())


@torch.no_grad()
def check_training(rows: list[Episode], said: dict[int, Any], models: list[Any]) -> None:
    """The rows as the trainer runs them, against what the engine said, and against a pass over each
    row by itself."""
    tokens = [token for row in rows for _, token, _ in said[row.row]]
    drawn = torch.tensor([logprob for row in rows for *_, logprob in said[row.row]])
    for row in rows:
        assert [len(row.prompt) + int(place) for place in row.places] == [
            place for place, *_ in said[row.row]
        ]
    for packed in (False, True):
        batch = micro_batch(rows, torch.device("cpu"), packed=packed)
        ids = batch.inputs["input_ids"].flatten()
        assert ids[batch.before + 1].tolist() == batch.responses.tolist() == tokens
    assert torch.equal(Rollout(rows).logprobs(), drawn)
    versions = [version for row in rows for version, count in row.stretches for _ in range(count)]
    by_version = torch.tensor(versions) % 2
    for number, model in enumerate(models):
        mine = by_version == number
        found = [of_row(model, row) for row in rows]
        torch.testing.assert_close(torch.cat(found)[mine], drawn[mine], rtol=0, atol=CLOSE)
        outputs = PolicyOutputs(1.0, len(TOKENIZER))
        batch = micro_batch(rows, torch.device("cpu"))
        trained, _ = outputs(PolicyModel(model), batch, entropy=False)
        torch.testing.assert_close(trained, torch.cat(found), rtol=0, atol=CLOSE)


def of_row(model: Any, row: Episode) -> torch.Tensor:
    logits = model(row.ids.long()[None], use_cache=False).logits[0, :, : len(TOKENIZER)]
    at = row.places + len(row.prompt)
    return logits.log_softmax(-1)[at - 1, row.ids.long()[at]]
