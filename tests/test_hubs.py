"""Tasks of reasoning_gym and games of textarena; what docs/hubs.md types."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from devices import needs
from ranks import run_ranks
from runs import main_rank, records

from splitppo.config import Config, DataConfig, EnvConfig, RewardConfig
from splitppo.config.cli import parse
from splitppo.config.rules import check
from splitppo.data.files import Row, generate
from splitppo.envs import Message
from splitppo.envs.pool import Envs, load
from splitppo.errors import UserError
from splitppo.rewards import rules
from splitppo.rewards.functions import scored_by
from splitppo.rewards.scorer import Scorer, check_prompts
from splitppo.rollout import Prompt
from splitppo.run import main as run_main
from splitppo.workers import Failure

# their imports take seconds: where they are used
pytestmark = [needs("reasoning_gym", "reasoning-gym"), needs("textarena", "textarena")]

PAGE = (Path(__file__).parents[1] / "docs" / "hubs.md").read_text(encoding="utf-8")
EASY = '{"max_terms": 2, "max_digits": 1, "size": 60}'
MIXED = {"name": "leg_counting", "weight": 1, "config": {"max_animals": 4}}


def made(name: str, settings: str = EASY, seed: int = 0, *, held_out: bool = False) -> list[Row]:
    config = DataConfig(task=f"reasoning_gym:{name}", task_settings=settings)
    return [*generate(config, seed, held_out=held_out)]


def questions(rows: list[Row]) -> set[str]:
    return {str(row.prompt) for row in rows}


def typed(heading: str) -> list[list[str]]:
    """The flags of the commands below a heading of the page."""
    section = re.split(r"^## ", PAGE.partition(f"## {heading}\n")[2], flags=re.M)[0]
    code = re.sub(r"\\\n", " ", "\n".join(re.findall(r"^    (.*)$", section, re.M)))
    return [
        shlex.split(line)[4:]
        for line in code.splitlines()
        if line.startswith("splitppo train --nproc_per_node 2")
    ]


SMALL = (
    "--rollout.batch-size=8 --data.validation-rows=40 --log.validate-every=1 --ppo.mini-batches=1 "
    "--checkpoint.every=1 --ppo.epochs=1"
).split()


@pytest.mark.wide
@pytest.mark.parametrize(
    ("heading", "world"),
    [("A task of reasoning_gym", 1), ("Several tasks", 2), ("A game of textarena", 2)],
)
def test_the_pages_commands_train(heading: str, world: int, tmp_path: Path):
    (command,) = typed(heading)
    run_ranks(world, main_rank, [*command, *SMALL, "--steps=1", f"--run-dir={tmp_path}/run"])
    lines = records(tmp_path / "run", "actor")
    assert [line["step"] for line in lines if "val/score/mean" in line] == [0, 1]
    assert "val/failures" not in lines[0]
    if heading == "Several tasks":
        assert "val/score/reasoning_gym:leg_counting/mean" in lines[0]
    assert records(tmp_path / "run", "critic")[0]["critic/reward_failures"] == 0


def test_a_harder_run_goes_on_from_an_easy_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """From the page, with fewer steps: the weights and the count of steps go on."""
    monkeypatch.chdir(tmp_path)
    easy, hard = typed("From easy to hard")
    run_ranks(2, main_rank, [*easy, *SMALL, "--steps=1"])
    run_ranks(2, main_rank, [*hard, *SMALL, "--steps=2"])
    first, second = (records(tmp_path / "runs" / name, "actor") for name in ("easy", "hard"))
    assert records(tmp_path / "runs" / "hard", "critic")[-1]["critic/reward_failures"] == 0
    assert [line["step"] for line in first if line["step"]] == [1]
    assert [line["step"] for line in second if line["step"]] == [2]
    (sample,) = (tmp_path / "runs" / "hard" / "samples").iterdir()
    assert re.search(r"\d\d\+\d\d", json.loads(sample.read_text().splitlines()[0])["question"])


def test_rows_are_made_by_number_and_no_question_is_in_both_splits():
    trained, held_out = (made("chain_sum", held_out=part) for part in (False, True))
    rows = {row.extra_info["index"]: row for row in (*trained, *held_out)}
    assert sorted(rows) == [*range(60)]
    assert not questions(trained) & questions(held_out)
    assert questions(trained) == questions(made("chain_sum"))
    first = trained[0]
    assert first.data_source == "reasoning_gym:chain_sum"
    assert first.ground_truth == first.extra_info["entry"]["answer"]
    # of another seed not the same rows, moved
    others = questions(made("chain_sum", '{"size": 60}', seed=1))
    assert len(others & questions(made("chain_sum", '{"size": 60}'))) < 5
    unset = '{"size": 60, "seed": null}'
    assert questions(made("chain_sum", unset, seed=1)) == others
    fixed = '{"size": 60, "seed": 5}'
    same = [[row.prompt for row in made("chain_sum", fixed, seed)] for seed in (0, 1)]
    assert same[0] == same[1]


@pytest.mark.wide
def test_other_processes_make_the_same_rows():
    """Also of a task that draws from Python's own generator, and, with PYTHONHASHSEED, of one that
    follows the order of sets."""
    code = (
        "from splitppo.data.files import generate; from splitppo.config import DataConfig\n"
        "for task in ('chain_sum', 'list_functions', 'ransom_note'):\n"
        "    config = DataConfig(task=f'reasoning_gym:{task}', task_settings='{\"size\": 12}')\n"
        "    print([row.prompt for row in generate(config, 0, held_out=False)])\n"
    )
    environ = os.environ | {"PYTHONHASHSEED": "0"}
    command = [sys.executable, "-W", "ignore", "-c", code]
    texts = {subprocess.check_output(command, env=environ) for _ in range(2)}
    assert len(texts) == 1


def test_a_mixture_draws_by_weights_and_each_row_has_its_tasks_settings():
    parts = [{"name": "chain_sum", "weight": 3, "config": {"max_terms": 2}}, MIXED]
    rows = made("composite", json.dumps({"datasets": parts, "size": 400}))
    legs = [row for row in rows if row.data_source == "reasoning_gym:leg_counting"]
    assert 0.15 < len(legs) / len(rows) < 0.35
    assert all(row.extra_info["settings"] == {"max_animals": 4} for row in legs)


@pytest.mark.parametrize(
    ("name", "settings", "says"),
    [
        ("chain_sun", "{}", "there is no chain_sun; did you mean chain_sum"),
        ("chain_sum", '{"max_term": 3}', "unexpected keyword argument 'max_term'"),
        ("chain_sum", '{"max_terms": 1}', "max_terms must be >= min_terms"),
        ("chain_sum", '{"size": "many"}', "'>' not supported"),
        ("chain_sum", '{"size": 1, "seed": 1}', "raise size in data.task_settings"),
        ("composite", "{}", "Must specify at least one dataset"),
        ("composite", json.dumps({"datasets": [MIXED | {"weight": 0}]}), "Weight must be positive"),
        ("composite", json.dumps({"datasets": [MIXED | {"name": "leg"}]}), "'leg' not registered"),
        ("composite", '{"datasets": [1]}', "data.task_settings="),
    ],
)
def test_a_wrong_task_or_setting_is_refused(name: str, settings: str, says: str):
    with pytest.raises(UserError, match=rf"^data\.task=reasoning_gym:{name}.*{re.escape(says)}"):
        assert made(name, settings) + made(name, settings, held_out=True)


def test_a_task_that_raises_and_a_package_that_is_missing(monkeypatch: pytest.MonkeyPatch):
    import reasoning_gym as gym

    task = gym.factory.DATASETS["chain_sum"][0]
    with monkeypatch.context() as patch:
        patch.setattr(task, "__getitem__", lambda *_: {}["no row"])
        with pytest.raises(UserError, match=r"can't make a row \(KeyError\('no row'\)\)"):
            made("chain_sum", '{"size": 7}')
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"pip install 'splitppo\[reasoning-gym\]'"):
        made("chain_sum", '{"size": 8}')
    with pytest.raises(UserError, match=r"pip install 'splitppo\[reasoning-gym\]'"):
        check_prompts(["auto"], {0: Prompt("", [1], "reasoning_gym:chain_sum", "1", {})})
    with pytest.raises(UserError, match=r"pip install 'splitppo\[textarena\]'"):
        load(EnvConfig(path="textarena:GuessTheNumber-v0"))


@pytest.mark.ranks
def test_a_row_is_scored_as_its_task_and_settings_have_it():
    """A row without an entry fails, and no other. What scores has the row's settings: a few tasks'
    scores depend on them."""
    assert rules._gym_task("chain_sum", EASY).config.max_terms == 2
    sums = made("chain_sum")[0]
    due = sums.ground_truth
    rows = [(sums, due), (sums, f"<answer>9999</answer>so <answer>\n{due}</answer>.")]
    rows += [(sums, "<answer></answer>"), (sums, f"It is {due}!")]
    entry = {"question": "", "answer": "10", "metadata": {"difficulty": {}}}
    wrong = Row("", "", "reasoning_gym:chain_sum", "1", {"entry": entry})
    scorer = Scorer(RewardConfig(), {"reasoning_gym:chain_sum"})
    prompts = [
        (Prompt("", [1], row.data_source, row.ground_truth, row.extra_info), text)
        for row, text in (*rows, (wrong, "1"))
    ]
    scored = scorer.submit(prompts)()
    scorer.close()
    scores = [row.score for row in scored]
    assert scores[:3] == [1, 1, 0]
    assert scores[3] == pytest.approx(len(due) / len(f"It is {due}!"))
    assert [[failure.kind for failure in row.failures] for row in scored[3:]] == [[], ["error"]]


@pytest.mark.parametrize("source", ["reasoning_gym:chain_sum", "textarena"])
def test_auto_takes_the_rule_of_the_package(source: str):
    assert scored_by("auto", source) == {"textarena": "none"}.get(source, "reasoning_gym")


def test_ranks_with_other_prompts_end_before_training(monkeypatch: pytest.MonkeyPatch):
    prompts = tuple(SimpleNamespace(prompts=[SimpleNamespace(text=text)]) for text in "ab")
    monkeypatch.setattr(run_main, "load_data", lambda resolved: (resolved, prompts))
    monkeypatch.setattr(run_main.memory, "gpu_memory", lambda _: 0)
    monkeypatch.setattr(run_main.memory, "offloaded", lambda resolved, _: (resolved, ""))
    answers = {"prompts": lambda own: [own, "other"], "memory": lambda own: [own]}
    runtime: Any = SimpleNamespace(
        broadcast=lambda *_: '["2026-01-01", []]',
        all_gather=lambda key, own: answers[key](own),
        status=SimpleNamespace(set_phase=lambda _: None),
    )
    nothing: dict[str, Any] = dict.fromkeys(RESOLVED)
    resolved = run_main.Resolved(**nothing, models={})
    with pytest.raises(UserError, match="PYTHONHASHSEED=0"):
        run_main.agree(resolved, runtime)
    answers["prompts"] = lambda own: [own, own]
    assert run_main.agree(resolved, runtime)[1] == prompts


RESOLVED = (
    *("config", "local", "placement", "local_world", "device", "dtype", "compiled", "engine"),
    *("tokenizer", "vocabulary_size"),
)

SAYS = [
    ("--data.task=sums", "data.task=sums: there is no such task; use echo, addition, guess, "),
    ("--data.task=chess:x", "data.task=chess:x: there is no such task"),
    ("--data.task=reasoning_gym", "data.task=reasoning_gym: there is no such task"),
    ("--data.task-settings={}a", "data.task_settings={}a must be a JSON object"),
    ('--data.task-settings={"a":1}', "is only for --data.task reasoning_gym:NAME"),
    ('--env.settings={"a":1} --data.task=guess', "is only for --data.task textarena:NAME"),
    ("--data.task=textarena:A --env.path=guess", "brings its own environment"),
    ("--env.path=textarena:A", "set --data.task textarena:A instead"),
]


@pytest.mark.parametrize(("argv", "says"), SAYS)
def test_settings_that_contradict_each_other(argv: str, says: str):
    with pytest.raises(UserError, match=re.escape(says)):
        check(parse(argv.split()))
    check(parse(["--data.task=textarena:A", "--env.settings={}", "--env.max-turns=3"]))


# textarena


def play(game: Any, said: list[str]) -> list[Any]:
    turns = [game.step(Message("assistant", text)) for text in said]
    return [([m.content for m in turn.messages], turn.reward, turn.done) for turn in turns]


def test_a_game_says_what_is_new_and_rewards_its_last_turn():
    make, is_async = load(
        EnvConfig(path="textarena:GuessTheNumber-v0", settings='{"max_turns": 3}')
    )
    assert not is_async
    game = make({}, 5)
    (begun,) = game.reset()
    assert begun.role == "user"
    assert "within 3 turns" in begun.content
    number = game.game.state.game_state["game_number"]
    wrong = [guess for guess in range(1, 21) if guess != number][:2]
    hints = ["higher" if guess < number else "lower" for guess in wrong]
    turns = play(game, [*(f"It is [{guess}]" for guess in wrong), str(number)])
    assert turns[:2] == [([f"The target number is {hint}.\n"], 0, False) for hint in hints]
    assert turns[2][1:] == (1, True)


def test_a_game_follows_from_its_seed_whatever_is_played_beside_it():
    make, _ = load(EnvConfig(path="textarena:Blackjack-v0"))
    said = ["[hit]", "[hit]", "[stand]", "[hit]", "[stand]"]
    alone, beside, other = make({}, 3), make({}, 3), make({}, 4)
    begun = alone.reset()
    due = play(alone, said)
    assert beside.reset() == begun
    first = play(beside, said[:2])
    other.reset()
    others = play(other, said)
    assert first + play(beside, said[2:]) == due
    assert others != due
    assert due[0] != due[1], "both draw the same"


@pytest.mark.parametrize(
    ("game", "settings", "says"),
    [
        ("GuessTheNumber", "{}", "did you mean GuessTheNumber-v0"),
        ("GuessTheNumber-v0", '{"max_turn": 3}', "'max_turn'.*max_turns"),
        ("GuessTheNumber-v0", '{"max_number": -5}', "empty range.* choose other settings"),
        ("TicTacToe-v0", "{}", "another game for one player"),
        # it begins with one player
        ("QuantumTicTacToe-v0", "{}", "it is for several players"),
    ],
)
def test_a_game_that_cannot_be_played_is_refused(game: str, settings: str, says: str):
    with pytest.raises(UserError, match=rf"^data\.task=textarena:{game}: .*{says}"):
        load(EnvConfig(path=f"textarena:{game}", settings=settings))


def test_a_game_without_a_number_as_its_reward_fails_its_row(monkeypatch: pytest.MonkeyPatch):
    envs = Envs(EnvConfig(path="textarena:GuessTheNumber-v0"))
    for key in (0, 1):
        envs("reset", key, {}, key)
    monkeypatch.setattr(envs.held[0].game, "step", lambda _: (True, {}))
    monkeypatch.setattr(envs.held[0].game, "close", lambda: ({0: "Bad format."}, {}))
    answers = [envs("step", key, Message("assistant", "[3]")) for key in (0, 1)]
    failed, turn = (read(said) for said, read in answers)
    assert isinstance(failed, Failure)
    assert failed.kind == "invalid"
    assert "Bad format." in failed.text
    assert not turn.done


def test_the_environment_of_a_game_is_its_task():
    config = parse(["--data.task=textarena:A", '--env.settings={"a": 1}'])
    assert config.environment == EnvConfig(path="textarena:A", settings='{"a": 1}')
    assert Config().environment == EnvConfig()
    assert parse(["--data.task=guess"]).environment.path == "guess"
