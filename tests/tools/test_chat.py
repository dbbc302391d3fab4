"""The chat: what it loads from a run, what it answers, what a terminal shows."""

import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from runs import SMALL, main_rank
from transformers import AutoModelForCausalLM, AutoTokenizer

from splitppo.__main__ import main
from splitppo.config.cli import parse
from splitppo.run import checkpoint
from splitppo.tools import answers, chat
from splitppo.tools.saved import load_model


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps of the embedded model on one rank, with two checkpoints; values in [0, 1]."""
    folder = tmp_path_factory.mktemp("chat") / "run"
    flags = (
        "--policy.optim.lr=0.02 --value.optim.lr=0.02 --checkpoint.every=1 --log.validate-every=0 "
        "--value.range 0 1 --ppo.lam-value=1 --ppo.kl-coef=0"
    ).split()
    run_ranks(1, main_rank, [*SMALL, *flags, "--steps=3", f"--run-dir={folder}"])
    return folder


def typed(monkeypatch: pytest.MonkeyPatch, text: str, *argv: object) -> int:
    monkeypatch.setattr(sys, "argv", ["splitppo", "chat", *map(str, argv)])
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    return main()


def greedy(model: Any, ids: list[int], most: int) -> list[int]:
    """By hand: the likeliest id after the other, up to the end of the text."""
    found = list(ids)
    while len(found) < len(ids) + most and (found == ids or found[-1] != model.config.eos_token_id):
        found.append(int(model(torch.tensor([found])).logits[0, -1].argmax()))
    return found[len(ids) :]


@torch.no_grad()
@pytest.mark.parametrize("step", [None, 2])
def test_answers_and_values_are_those_of_the_checkpoint(run: Path, step: int | None):
    saved, config = (
        checkpoint.step_folder(run, step or 3),
        parse(["--config", str(run / "config.toml")]),
    )
    tokenizer = AutoTokenizer.from_pretrained(run / "tiny")
    trained, value = (load_model(config, run, kind, saved) for kind in ("policy", "value"))
    before: Any = AutoModelForCausalLM.from_pretrained(run / "tiny")
    ids = tokenizer("12+7=").input_ids
    found = answers.load(run, step, 0.0, 4)("12+7=", 0)
    for model, answer in zip((trained.causal, before), found, strict=True):
        response = greedy(model, ids, 4)
        assert "".join(answer["text"]) == tokenizer.decode(response, skip_special_tokens=True)
        inputs = {"input_ids": torch.tensor([ids + response])}
        logits = value(torch.arange(len(ids) - 1, len(ids) + len(response) - 1), **inputs)
        expected = torch.sigmoid(logits[:, 0]).tolist()
        assert answer["value"] == pytest.approx(expected, abs=1e-4)
    assert found[0]["value"][0] != 0.5, "the value model is the trained one"


def test_a_temperature_draws_anew_for_each_line(run: Path):
    answer = answers.load(run, None, 1.0, 12)
    texts = ["".join(answer("1", number)[1]["text"]) for number in (0, 1, 0)]
    assert texts[0] == texts[2] != texts[1]


def test_lines_of_a_pipe(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """A prompt that is too long does not end the program. The models read 1,024, the training
    prompts had 4."""
    assert typed(monkeypatch, f"312=\n\n{'1' * 1019}\n{'1' * 1018}\n", run) == 2
    told = capsys.readouterr()
    assert (
        told.err.count("\n")
        == told.err.count("error: the prompt has 1019 tokens, but only 1018 fit")
        == 1
    )
    lines = told.out.splitlines()
    assert [line.partition(": ")[0] for line in lines] == [
        *"""trained
trained, values
before training
before training, values""".splitlines()
    ] * 2
    text, values = (line.partition(": ")[2] for line in lines[:2])
    pieces = [json.loads(part.rpartition(" ")[0]) for part in values.split("  ")]
    assert "".join(pieces) == text
    assert all(-9 < float(part.rpartition(" ")[2]) < 9 for part in values.split("  "))
    assert typed(monkeypatch, "312=\n", run, "--max-new-tokens", "1") == 0


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["nowhere"], "nowhere: no such folder"),
        (["--step", "9"], "step 9: the complete checkpoints of"),
        (["--temperature", "-1"], "--temperature -1.0"),
        (["--max-new-tokens", "0"], "--temperature 0.0, --max-new-tokens 0"),
    ],
)
def test_errors_are_one_line(
    run: Path, argv: list[str], says: str, monkeypatch: pytest.MonkeyPatch, capsys
):
    assert typed(monkeypatch, "1\n", *([] if argv[0] == "nowhere" else [run]), *argv) == 2
    told = capsys.readouterr()
    assert (told.out, told.err.count("\n")) == ("", 1)
    assert told.err.startswith(f"error: {says}")


def test_a_block_stands_under_each_character():
    tokens = {"text": ["ab", "", "日", "\n", "c\x1b"], "value": [0.0, 0.5, 1.0, 0.3, 9.0]}
    assert chat.layout("said", tokens, 0.0, 1.0, 4) == [
        "said",
        "ab· ", "▁▁▅ ",
        "日  ", "██  ",
        "c?  ", "██  ",
    ]  # fmt: skip
    assert chat.layout("x", {"text": ["abc"], "value": [0.3]}, 0.2, 0.2, 2) == [
        "x ",
        "ab",
        "▅▅",
        "c ",
        "▅ ",
    ]


def test_a_terminal_shows_both_side_by_side(run: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "20")
    both = [
        {"text": ["1", "2"], "value": [-5.0, 50.0]},
        {"text": [*"abcdefgh", "9"], "value": [50.0] * 9},
    ]
    chat.show(run, both)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:5] == [
        "12         abcdefgh",
        "▁█         ████████",
        "           9",
        "           █",
    ]
    assert lines[5].startswith("values from ▁ 0 to █ ")


def test_a_prompt_is_rendered_as_the_run_renders_it(run: Path, tmp_path: Path):
    shutil.copytree(run, tmp_path / "run")
    tokenizer = AutoTokenizer.from_pretrained(run / "tiny")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role[0] }}{{ m.content }}.{% endfor %}{{ mark }}"
    )
    tokenizer.save_pretrained(tmp_path / "run" / "tiny")
    settings = tmp_path / "run" / "config.toml"
    # a run of an earlier version
    changed = settings.read_text().replace("[value]", "[value]\nensemble = 1")
    changed = changed.replace(
        'chat_kwargs = "{}"', 'chat_kwargs = \'{"mark": "="}\'\nsystem = "2+"'
    )
    settings.write_text(changed)
    given = answers.load(tmp_path / "run", None, 0.0, 3)("1", 0)
    assert given == answers.load(run, None, 0.0, 3)("s2+.u1.=", 0)
    assert given != answers.load(run, None, 0.0, 3)("1", 0)


ENV = """
from splitppo.envs import Message, Turn

class Asks:
    def __init__(self, row, seed): ...
    def reset(self): return None
    def step(self, message): return Turn([Message("user", "so?")])
    def close(self): ...
"""


def test_an_environment_answers_between_turns(run: Path, tmp_path: Path):
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "env.py").write_text(ENV)
    file = tmp_path / "run" / "config.toml"
    path = f'path = "{tmp_path / "env.py"}:Asks"'
    file.write_text(file.read_text().replace("[env]\n", f"[env]\n{path}\n"))
    for answer in answers.load(tmp_path / "run", None, 5.0, 400)("12=", 0):
        said = list(zip(answer["text"], answer["value"], strict=True))
        heard = "".join(text for text, value in said if value is None)
        assert heard == "so?" * (len(heard) // 3) != ""
        chat.layout("", answer, 0.0, 1.0, 20)
