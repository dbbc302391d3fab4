"""Rewards on the way against the paper, which reads them off the sampled tokens by itself; and what
they are for."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks
from reference_ppo import Row
from runs import main_rank, records
from test_dialogues import LIMITS, game, listener
from test_flagship import compare, inputs, reference, run
from test_windows import LENGTHS, WINDOW, lengths_file
from tiers import wide

from splitppo.models.tiny import build_tokenizer

__all__ = ["game", "inputs"]  # the fixtures

# Digits are paid where they stand, and half of the sum again at the end. In another order, and an
# end has two parts: what is paid is summed.
REWARD = """
def worth(character):
    return (int(character) - 4) / 20 if character.isdigit() else 0.0

def score(data_source, solution_str, ground_truth, extra_info):
    spans = [(end, worth(c) / 2) for end, c in enumerate(solution_str, 1)]
    return {"score": 1.5 * sum(map(worth, solution_str)), "spans": spans + spans[::-1]}
"""


def payer(heard: Callable[[Row, int], Row] | None = None) -> Callable[[Row, int], Row]:
    """Adds to a row what is paid for the tokens of its last message. `heard`: what an environment
    adds to the row."""
    rules: dict[str, Any] = {}
    exec(REWARD, rules)
    tokenizer: Any = build_tokenizer()

    def paid(row: Row, number: int) -> Row:
        row = heard(row, number) if heard else row
        begin = max(row.observed, default=-1)
        texts = [
            tokenizer.decode([row.response[i]], skip_special_tokens=True) if i > begin else ""
            for i in row.actions
        ]
        return replace(row, paid=[rules["worth"](text) if text else 0.0 for text in texts])

    return paid


@pytest.fixture(scope="module")
def rewarded(inputs: Path) -> Path:
    (inputs / "paid.py").write_text(REWARD)
    return inputs


def check(
    inputs: Path, folder: Path, world: int, hyper: dict[str, Any], heard: Any = None, **flags: Any
) -> dict:
    options = {f"ppo__{name}": value for name, value in hyper.items() if name != "samples"}
    options |= {"reward__function": f"{inputs / 'paid.py'}:score"} | flags
    seen = run(inputs, folder, world, odd="exact", **options)
    window = flags.get("rollout__window", 0)
    due = reference(inputs, seen, window=window, heard=payer(heard), **hyper)
    compare(seen, due)
    return seen


@pytest.mark.parametrize(
    ("world", "hyper", "flags"),
    [
        wide(2, {}, {"placement__actor": 1}),
        wide(3, {"lam": "adaptive", "lam_alpha": 0.3, "lam_value": 1.0}, {"placement__actor": 2}),
        wide(3, {}, {"placement__actor": 1}),
        wide(2, {}, {"placement__mode": "colocated", "fsdp__tensor_parallel": 2}),
        wide(2, {}, {"placement__mode": "colocated", "fsdp__sequence_parallel": 2}),
        (1, {"baseline": "group", "samples": 2}, {"rollout__samples": 2}),
        wide(2, {"baseline": "batch"}, {"placement__mode": "colocated"}),
        wide(2, {"baseline": "group", "samples": 2}, {
            "placement__mode": "colocated", "rollout__samples": 2}),
    ],
)  # fmt: skip
def test_spans_are_the_papers_rewards(rewarded, tmp_path, world, hyper, flags):
    seen = check(rewarded, tmp_path, world, hyper, **flags)
    assert seen["lines"][-1]["critic/spans/mean"] > 2


@pytest.mark.parametrize(
    ("world", "placement"),
    [(1, {}), wide(3, {"placement__actor": 2}), wide(2, {"placement__mode": "colocated"})],
)
def test_spans_of_partial_rollouts(rewarded, tmp_path, world, placement):
    """A row's spans may end in what an earlier step sampled."""
    options = {"rollout__lengths": lengths_file(tmp_path, LENGTHS), "rollout__max_new_tokens": 12}
    hyper = {"old_logprobs": "engine"}
    check(rewarded, tmp_path, world, hyper, rollout__window=WINDOW, **options, **placement)


@pytest.mark.wide
@pytest.mark.parametrize("window", [0, 5])
def test_spans_of_a_dialogues_last_message(rewarded, game, tmp_path, window):
    hyper = {"old_logprobs": "engine"} if window else {}
    options = {"env__path": f"{game / 'env.py'}:Env", "rollout__window": window, **LIMITS}
    check(rewarded, tmp_path, 2, hyper, listener(game), placement__actor=1, **options)


# What each character adds to the score, where it stands; and the same score at the end.
CAUSAL = """
from itertools import pairwise
from splitppo.rewards.rules import echo

def causal(data_source, solution_str, ground_truth, extra_info):
    heads = (solution_str[:end] for end in range(len(solution_str) + 1))
    scores = [echo("", head, ground_truth, {}) for head in heads]
    spans = [(end, now - before) for end, (before, now) in enumerate(pairwise(scores), 1)]
    return {"score": scores[-1], "spans": spans}

def summed(data_source, solution_str, ground_truth, extra_info):
    return echo("", solution_str, ground_truth, {})
"""


@pytest.mark.campaign
@pytest.mark.parametrize("baseline", ["value", "batch"])
@pytest.mark.parametrize("seed", range(3))
def test_causal_spans_learn_faster_than_their_sum(tmp_path: Path, seed: int, baseline: str):
    scores = {}
    (tmp_path / "paid.py").write_text(CAUSAL)
    for name in ("causal", "summed"):
        argv = ["--data.task=echo", "--steps=33", f"--seed={seed}", "--log.validate-every=0"]
        argv += [f"--ppo.baseline={baseline}", f"--run-dir={tmp_path / name}"]
        run_ranks(1, main_rank, [*argv, f"--reward.function={tmp_path / 'paid.py'}:{name}"])
        last = records(tmp_path / name, "critic")[-3:]
        scores[name] = sum(line["critic/score/mean"] for line in last) / 3
    assert scores["causal"] > 1.4 * scores["summed"], scores
