"""Rows of several turns against the paper: the reference gets what was sampled alone, and plays the
environments by itself."""

import json
import shutil
from base64 import b64decode
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from reference_ppo import Row
from runs import assert_same, figures, main_rank
from test_flagship import BATCH, SEED, STEPS, compare, flags, inputs, reference, run
from tiers import wide

from splitppo.envs import Message
from splitppo.models.tiny import build_tiny, build_tokenizer
from splitppo.rollout import Episode, tensor_of
from splitppo.rollout.wire import unpack_rows

__all__ = ["inputs"]  # the fixture

ENDS = [
    1,
    3,
    4,
    5,
    9,
    12,
    20,
    27,
    33,
    40,
    51,
    60,
    72,
]  # ids that end a turn: an untrained model says one of them soon
LIMITS = {"rollout__max_new_tokens": 12, "env__max_turns": 5}
OLD = {"old_logprobs": "engine"}

# By the first digit of the prompt: the same answers always; answers and rewards that depend on what
# was said; rows that go on until they are cut, most in the middle of a turn.
ENV = """
import asyncio
import random
import time
from splitppo.envs import Message, Turn

class Env:
    def __init__(self, row, seed):
        self.kind = int(row["prompt"][0]) % 3
        self.asks = str(seed % 10) + "?"
        self.turns = 0

    def reset(self):
        return None

    def step(self, message):
        self.turns += 1
        said = message.content
        if self.kind == 0:
            return Turn([Message("user", "so?\\n")], done=self.turns == 3)
        reward = 0.125 * len(said) - 0.25 * self.turns
        cut = self.kind == 2 and len(said) == 1
        heard = {"heard": 0.1 * 7.0 ** len(said)}  # whose sum depends on the order
        return Turn([Message("user", said[::-1] + self.asks)], reward, len(said) == 3, cut, heard)

    def close(self):
        pass

def delay():
    return random.SystemRandom().random() * 0.03

class Slow(Env):
    def step(self, message):
        time.sleep(delay())
        return super().step(message)

class Async(Env):
    async def step(self, message):
        await asyncio.sleep(delay())
        return super().step(message)
"""

REWARD = """
def score(data_source, solution_str, ground_truth, extra_info, messages):
    spoken = [message["content"] for message in messages if message["role"] == "assistant"]
    assert spoken[-1] == solution_str
    return 0.05 * len(solution_str) - 0.125 * len(messages)
"""


def write_game(inputs: Path) -> None:
    """An environment, and a policy that ends its turns."""
    (inputs / "env.py").write_text(ENV)
    (inputs / "reward.py").write_text(REWARD)
    config = inputs / "policy" / "config.json"
    config.write_text(config.read_text().replace('"eos_token_id": 1', f'"eos_token_id": {ENDS}'))
    (inputs / "policy" / "generation_config.json").unlink(missing_ok=True)


@pytest.fixture(scope="module")
def game(inputs: Path) -> Path:
    write_game(inputs)
    return inputs


def listener(game: Path, samples: int = 1) -> Callable[[Row, int], Row]:
    """What the environment makes of the sampled tokens of the row of a number, played here turn by
    turn. So many rows that follow each other have one seed."""
    found: dict[str, Any] = {}
    exec((game / "env.py").read_text(), found)
    tokenizer: Any = build_tokenizer()

    def heard(row: Row, number: int) -> Row:
        noise = blake2b(f"{SEED}/{number // samples}/-1".encode(), digest_size=8).digest()
        seed = int.from_bytes(noise, "little") >> 1
        env = found["Env"]({"prompt": tokenizer.decode(row.prompt)}, seed)
        ids: list[int] = []
        own: list[int] = []
        observed: set[int] = set()
        rewards: list[float] = []
        answered = ended = False
        for token in row.response:
            assert not ended, "sampled after the environment had ended"
            own.append(token)
            ids.append(token)
            rewards.append(0.0)
            answered = token in ENDS
            if not answered:
                continue
            said = tokenizer.decode(own, skip_special_tokens=True)
            turn = env.step(Message("assistant", said))
            rewards[-1] = turn.reward
            full = len(rewards) == LIMITS["rollout__max_new_tokens"]
            ended = turn.done or turn.truncated or env.turns == LIMITS["env__max_turns"] or full
            if not ended:
                answer = tokenizer(turn.messages[0].content)["input_ids"]
                observed |= {*range(len(ids), len(ids) + len(answer))}
                ids += answer
            own = []
        assert ended or len(rewards) == LIMITS["rollout__max_new_tokens"]
        return replace(
            row, response=ids, observed=frozenset(observed), rewards=rewards, answered=answered
        )

    return heard


@pytest.mark.parametrize(
    ("world", "placement", "window"),
    [
        wide(1, {}, 5),
        wide(2, {"placement__actor": 1}, 0),
        wide(3, {"placement__actor": 2}, 5),
        (2, {"placement__actor": 1, "env__seed": "prompt", "rollout__samples": 2}, 5),
        wide(4, {"placement__actor": 1, "env__seed": "prompt", "rollout__samples": 2}, 5),
        wide(2, {"placement__mode": "colocated"}, 0),
        wide(2, {"placement__mode": "colocated", "fsdp__tensor_parallel": 2}, 5),
        wide(
            3, {"placement__actor": 2, "fsdp__tensor_parallel": 2, "value__tensor_parallel": 1}, 0
        ),
    ],
    ids=[
        "one rank",
        "1+1",
        "2+1",
        "1+1, a game a prompt",
        "1+3, a game a prompt",
        "colocated",
        "a set of two",
        "a set of two, and 1",
    ],
)
def test_every_placement_is_the_paper(game, tmp_path, world, placement, window):
    options = {"env__path": f"{game / 'env.py'}:Env", "rollout__window": window, **LIMITS}
    samples = placement.get("rollout__samples", 1)
    hyper: dict[str, Any] = OLD if window else {}
    options |= {f"ppo__{name}": value for name, value in hyper.items()}
    seen = run(game, tmp_path, world, odd="exact", **placement, **options)
    heard = listener(game, samples)
    due = reference(game, seen, window=window, heard=heard, samples=samples, **hyper)
    compare(seen, due)
    numbered = [item for rows in seen["rows"] for item in rows.items()]
    every = [row for _, row in numbered]
    assert {len(turns) for *_, turns in every} >= {1, 2, 3}
    assert any(len(turns) > 1 and turns[-1][-1] not in ENDS for *_, turns in every), "none was cut"
    for number, (prompt, response, _, _, turns) in numbered:
        sampled = [token for said in turns for token in said]
        assert heard(Row(prompt, sampled, 0.0, [], True), number).response == response
    decode = partial(build_tokenizer().decode, skip_special_tokens=True)
    for rows, scores in zip(seen["rows"], seen["scores"], strict=True):
        for row, (*_, turns) in rows.items():
            due_score = 0.05 * len(decode(turns[-1])) - 0.125 * 2 * len(turns)
            assert scores[row] == pytest.approx(due_score)
    lines = seen["lines"][:STEPS]
    assert all(line["env/failures"] == 0 for line in lines)
    if not window:
        told = [said[-1] in ENDS for *_, turns in every for said in turns]
        assert sum(line["env/turns"] for line in lines) == sum(told)
    else:
        assert [line["window/sampled"] for line in lines] == [BATCH * window] * STEPS


@pytest.mark.wide
def test_a_teacher_reads_what_was_said_and_teaches_what_was_sampled(game, tmp_path):
    build_tiny(game / "teacher", seed=3)
    shutil.copy(game / "policy" / "config.json", game / "teacher")  # it ends turns as the policy
    options = {"env__path": f"{game / 'env.py'}:Env", "rollout__window": 5, **LIMITS}
    options |= {"ppo__old_logprobs": "engine", "distill__top_k": 5, "distill__coef": 0.5}
    options |= {"teacher__path": game / "teacher", "placement__actor": 2}
    seen = run(game, tmp_path, 3, odd="exact", **options)
    taught: dict[str, Any] = {"teacher": "teacher", "top_k": 5, "coef": 0.5, **OLD}
    compare(seen, reference(game, seen, window=5, heard=listener(game), **taught))


@pytest.mark.wide
def test_with_adapters(game, tmp_path):
    from test_lora import RANK, LoraConfig, begun

    changes: dict[str, Any] = {
        "env__path": f"{game / 'env.py'}:Env",
        "rollout__window": 5,
        **LIMITS,
    }
    changes |= {f"{kind}__lora__rank": RANK for kind in ("policy", "value")}
    changes["ppo__old_logprobs"] = "engine"
    seen = run(game, tmp_path, 2, odd="exact", placement__actor=1, **changes)
    adapters = {kind: begun(game / kind, kind, LoraConfig(RANK)) for kind in ("policy", "value")}
    due = reference(
        game, seen, window=5, heard=listener(game), adapters=adapters, old_logprobs="engine"
    )
    compare(seen, due)


def opened(run: Path) -> list[Episode]:
    """The open rows of a run's checkpoint after step 3."""
    state = json.loads((run / "checkpoints" / "step_000003" / "actor" / "state.json").read_text())
    packed = [b64decode(row) for _, row, _ in state["open"]]
    return unpack_rows(tensor_of(packed, torch.int32))


@pytest.mark.wide
@pytest.mark.parametrize("window", [0, 5])
def test_neither_workers_nor_delays_nor_stops_change_a_bit(game, tmp_path, window):
    """An engine and micro-batches of one row: which rows come together decides how sums are
    rounded. Under another placement figures are the same but for that."""
    changes = {name.replace("__", "."): value for name, value in LIMITS.items()}
    changes |= {"rollout.window": window, "ppo.old-logprobs": "engine" if window else "trainer"}
    changes |= {"engine.max-rows": 1, "compute.micro-batch-tokens": 1, "rollout.chunks": 1}
    changes |= {"rollout.batch-size": 12, "rollout.max-new-tokens": 20, "ppo.epochs": 1}

    def trained(name: str, env: str, steps: int, *, world: int = 1, **more: Any) -> list[Any]:
        own = {"env.path": f"{game / 'env.py'}:{env}", "steps": steps}
        own |= {flag.replace("__", "."): value for flag, value in more.items()}
        argv = flags(game, tmp_path / name, changes | own)
        run_ranks(world, main_rank, [word for word in argv if word != "--checkpoint.no-last"])
        return [figures(tmp_path / name, role) for role in ("actor", "critic")]

    changes["checkpoint.every"] = 3
    steps = 5 if window else 2
    due = trained("due", "Env", steps, reward__workers=1)
    assert trained("slow", "Slow", steps, reward__workers=4) == due
    if not window:
        return
    trained("cut", "Async", 3)
    held = opened(tmp_path / "cut")
    assert any(row.awaits for row in held), "no row waits for an answer"
    assert any(len(row.turns) > 1 and not row.awaits for row in held), "none is within a turn"
    shutil.copytree(tmp_path / "cut", tmp_path / "elsewhere")
    assert trained("cut", "Async", steps) == due
    elsewhere = trained("elsewhere", "Async", steps, world=3, placement__actor=2)
    for got, figure in zip(elsewhere, due, strict=True):
        assert_same(got, figure)


@pytest.mark.wide
@pytest.mark.parametrize(
    "task", ["guess", "textarena:GuessTheNumber-v0", "textarena:Blackjack-v0", "reasoning_gym:gcd"]
)
def test_a_run_that_stops_in_the_middle_of_dialogues_goes_on_elsewhere(task, tmp_path):
    """With windows, under another placement; held-out rows are played, too."""
    argv = [f"--data.task={task}", "--rollout.window=5", "--rollout.batch-size=6"]
    argv += ["--rollout.max-new-tokens=30", "--rollout.temperature=2", "--policy.path", "tiny"]
    argv += ["--env.max-turn-tokens=4"] if task.startswith("textarena") else []
    argv += ["--checkpoint.every=3", "--data.validation-rows=4", "--log.validate-every=3"]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run_ranks(2, main_rank, [*argv, "--placement.actor=1", "--steps=6", f"--run-dir={whole}"])
    run_ranks(2, main_rank, [*argv, "--placement.actor=1", "--steps=3", f"--run-dir={cut}"])
    held = opened(cut)
    in_turns = any(row.turns and row.turns[0][1] for row in held)
    assert in_turns or (held and "gym" in task), "no row is open after an answer"
    run_ranks(3, main_rank, [*argv, "--placement.actor=2", "--steps=6", f"--run-dir={cut}"])
    for role in ("actor", "critic"):
        assert_same(figures(cut, role), figures(whole, role))
    for step in (0, 3, 6):
        name = Path("validation") / f"step_{step:06d}.jsonl"
        rows = [[*map(json.loads, (run / name).read_text().splitlines())] for run in (whole, cut)]
        assert len(rows[0]) == 4
        assert rows[0] == rows[1]
