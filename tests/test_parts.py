"""A user's loss and advantages: the file of docs/parts.md against the single-process reference, and
what is refused."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import run_ranks
from runs import assert_same, figures, main_rank
from test_flagship import compare, inputs, reference, run
from test_windows import LENGTHS, WINDOW, lengths_file
from tiers import wide
from torch import Tensor

from splitppo.config import rules
from splitppo.config.cli import parse
from splitppo.errors import UserError
from splitppo.models.heads import PolicyOutputs
from splitppo.policy import UsersLoss
from splitppo.run import build
from splitppo.run.checks import check_inputs
from splitppo.run.folder import check_same_run, inputs_of, write_run_files
from splitppo.run.parts import find_parts
from splitppo.run.sources import keep_copies

__all__ = ["inputs"]  # the fixture
PAGE = (Path(__file__).parents[1] / "docs" / "parts.md").read_text(encoding="utf-8")
MIXED = """

def mixed(rewards, values, lengths, prompts):
    return advantages(rewards, values, lengths, prompts) + rewards - values


def near(reference_logprobs, **columns):
    return loss(**columns) + 0.1 * (columns["logprobs"] - reference_logprobs).square()
"""
SAMPLES = 2


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page's file, with functions that also read values and the reference."""
    (code, *_) = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
    file = tmp_path_factory.mktemp("parts") / "parts.py"
    file.write_text(code + MIXED)
    return file


def gspo(logp: Tensor, old: Tensor, advantages: Tensor, ref: Tensor) -> Tensor:
    ratio = (logp - old).mean().exp()
    losses = torch.stack([-min(ratio * a, ratio.clamp(0.8, 1.2) * a) for a in advantages])
    return losses + 0.1 * (logp - ref) ** 2


def grpo(rewards: list[Tensor], values: list[Tensor]) -> list[Tensor]:
    """Of rows in data order, as those of a step are without windows."""
    scores = [float(row.sum()) for row in rewards]
    estimates = []
    for i, (row, value) in enumerate(zip(rewards, values, strict=True)):
        start = i - i % SAMPLES
        group = torch.tensor(scores[start : start + SAMPLES])
        score = (scores[i] - group.mean()) / (group.std(correction=0) + 1e-4)
        estimates.append(score + row - value)
    return estimates


@pytest.mark.parametrize(
    ("world", "placement"),
    [
        wide(2, {"placement__actor": 1}),
        wide(3, {"placement__actor": 1}),
        (1, {}),
        wide(4, {"placement__actor": 2}),
        wide(2, {"placement__mode": "colocated", "fsdp__sequence_parallel": 2}),
        wide(
            4,
            {
                "placement__mode": "colocated",
                "fsdp__tensor_parallel": 2,
                "value__tensor_parallel": 1,
            },
        ),
    ],
    ids=["1+1", "1+2", "1", "2+2", "cut rows", "sets of two and of one"],
)
def test_every_placement_is_the_reference(inputs, tmp_path, file, world, placement):
    changes = {"ppo__clip_low": 0.2, "ppo__clip_high": 0.2, "ppo__importance": "token"}
    changes |= {"ppo__loss": f"{file}:near", "ppo__advantages": f"{file}:mixed"}
    seen = run(inputs, tmp_path, world, rollout__samples=SAMPLES, **changes, **placement)
    own = {"loss": gspo, "estimate": grpo}
    compare(seen, reference(inputs, seen, samples=SAMPLES, importance="token", **own))
    line = seen["lines"][-1] | seen["lines"][0]
    assert "actor/ppo_kl" in line
    assert "actor/pg_clipfrac" not in line


def test_what_a_loss_writes_into_its_inputs_changes_nothing_else(tmp_path):
    file = tmp_path / "loss.py"
    file.write_text(
        "def part(logprobs, old_logprobs, advantages, **more):\n"
        "    old_logprobs.zero_()\n    return -(logprobs.sub_(1)).exp() * advantages\n"
    )
    part = find_parts(parse([f"--ppo.loss={file}:part"]))["loss"]
    leaf = torch.tensor([-1.0, -2.0], requires_grad=True)
    columns = {
        "logprobs": 1 * leaf,
        "old_logprobs": torch.tensor([-1.0, -2.0]),
        "advantages": torch.ones(2),
        "lengths": torch.tensor([2]),
        "reference_logprobs": None,
    }
    part(**columns).sum().backward()
    assert columns["logprobs"].tolist() == columns["old_logprobs"].tolist() == [-1, -2]
    torch.testing.assert_close(leaf.grad, -(leaf.detach() - 1).exp())


@pytest.mark.wide
def test_rows_that_go_on_resume_with_their_own_parts(inputs, tmp_path, file):
    """Windows, a stop between two steps, and another placement: the same figures."""
    argv = [
        *(f"--policy.path={inputs / 'policy'}", f"--reward.function={inputs / 'reward.py'}:score"),
        *(f"--rollout.window={WINDOW}", f"--rollout.lengths={lengths_file(tmp_path, LENGTHS)}"),
        *("--rollout.batch-size=8", "--rollout.samples=2", "--rollout.max-new-tokens=12"),
        *("--log.validate-every=0", "--ppo.loss", f"{file}:loss"),
        *("--ppo.advantages", f"{file}:mixed", "--ppo.no-whiten"),
    ]
    run_ranks(1, main_rank, [*argv, f"--run-dir={tmp_path / 'whole'}", "--steps=3"])
    run_ranks(1, main_rank, [*argv, f"--run-dir={tmp_path / 'run'}", "--steps=2"])
    run_ranks(2, main_rank, [*argv, f"--run-dir={tmp_path / 'run'}", "--steps=3"])
    for role in ("actor", "critic"):
        assert_same(figures(tmp_path / "run", role), figures(tmp_path / "whole", role))


@pytest.mark.parametrize(
    ("setting", "body", "says"),
    [
        ("loss", "return logprobs.sum()", r"returned \[\] for 3 tokens; return .* \[3\]"),
        ("loss", "return logprobs[:2]", r"returned \[2\] for 3 tokens"),
        ("loss", "return logprobs, {}", "returned tuple for 3 tokens"),
        (
            "loss",
            "return (logprobs - old_logprobs).detach()",
            "returned a tensor without a gradient; .* logprobs",
        ),
        (
            "loss",
            "return logprobs / advantages",
            "returned -inf .*, computed from logprobs=-2, old_logprobs=-2, advantages=0, ref",
        ),
        ("advantages", "return (rewards / lengths.sum()).tolist()", "returned list for 3 tokens"),
        (
            "advantages",
            "return rewards / values",
            "returned nan for token 1 of 3, computed from rewards=0, values=0; return finite",
        ),
    ],
)
def test_results_that_no_update_can_use(tmp_path, setting, body, says):
    arguments = {
        "loss": "logprobs, old_logprobs, advantages, lengths, **more",
        "advantages": "rewards, values, lengths, prompts",
    }[setting]
    file = tmp_path / f"{setting}.py"
    file.write_text(f"def part({arguments}):\n    {body}\n")
    part = find_parts(parse([f"--ppo.{setting}={file}:part"]))[setting]
    numbers = {
        "logprobs": torch.tensor([-1.0, -2.0, -3.0], requires_grad=True),
        "old_logprobs": torch.tensor([-1.0, -2.0, -3.0]),
        "advantages": torch.tensor([1.0, 0.0, 2.0]),
        "lengths": torch.tensor([1, 2]),
        "reference_logprobs": torch.tensor([-1.0, -2.0, -3.0]),
    }
    if setting == "advantages":
        numbers = {
            "rewards": torch.tensor([1.0, 0.0, 2.0]),
            "values": torch.tensor([1.0, 0.0, 1.0]),
        }
        numbers |= {"lengths": torch.tensor([1, 2]), "prompts": torch.tensor([0, 1])}
    with pytest.raises(UserError, match=rf"ppo\.{setting}=.*:part {says}"):
        part(**numbers)
    assert not len(part(**{name: column[:0] for name, column in numbers.items()}))


@pytest.mark.parametrize(
    ("named", "says"),
    [
        ("none.py:loss", "no such file"),
        ("parts.py", "no such function; use None or path/to/file.py:name"),
        ("parts.py:lost", "has no lost"),
        ("parts.py:few", r"does not take the arguments .*; define it with \(logprobs, old"),
        ("parts.py:number", "does not take the arguments"),
    ],
)
def test_a_name_that_is_no_loss_is_refused_at_once(tmp_path, named, says):
    (tmp_path / "parts.py").write_text("number = 3\ndef few(logprobs, advantages): ...\n")
    with pytest.raises(UserError, match=rf"ppo\.loss={tmp_path}/{named}.*{says}"):
        check_inputs(parse([f"--ppo.loss={tmp_path}/{named}"]))


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ("--ppo.loss a.py:b --ppo.clip-high 0.3", "ppo.clip_high=0.3 .* ppo.loss=a.py:b"),
        ("--ppo.loss a.py:b --ppo.clip-mode mask", "ppo.clip_mode=mask .* unset one"),
        (
            "--ppo.advantages a.py:b --ppo.baseline group --rollout.samples 2",
            "ppo.baseline=group: .* use ppo.baseline=batch",
        ),
    ],
)
def test_settings_that_a_part_replaces(argv, says):
    with pytest.raises(UserError, match=says):
        rules.check(parse(argv.split()))


@pytest.mark.parametrize("setting", ["loss", "advantages"])
def test_a_changed_file_is_another_run(tmp_path, file, setting):
    """RUN has its name, its hash and a copy, which may stand for the file if that is gone."""
    mine = tmp_path / "mine.py"
    mine.write_text(file.read_text())
    folder = tmp_path / "run"
    folder.mkdir()
    argv = [f"--ppo.{setting}={mine}:{setting}", f"--run-dir={folder}"]
    config = parse(argv)
    before = inputs_of(config, {}, {})
    assert list(before) == [f"ppo.{setting} {mine}"]
    write_run_files(config, folder, None, before)
    keep_copies(config, {}, folder)
    check_same_run(config, folder, before)
    mine.write_text(mine.read_text() + "\n")
    with pytest.raises(UserError, match=rf"ppo.{setting} .*mine.py was .* or --force to resume"):
        check_same_run(config, folder, inputs_of(config, {}, {}))
    check_same_run(parse([*argv, "--force"]), folder, inputs_of(config, {}, {}))
    (copy,) = folder.glob("rewards/**/mine.py")
    mine.unlink()
    copied = parse([f"--ppo.{setting}={copy}:{setting}", f"--run-dir={folder}"])
    assert find_parts(copied).keys() == {setting}
    check_same_run(copied, folder, inputs_of(copied, {}, {}))


def test_compiling_calls_no_loss_of_the_users(monkeypatch):
    """Its rows are zeros."""
    policy = SimpleNamespace(surrogate="of PPO")
    monkeypatch.setattr(build, "Policy", lambda *_, **__: policy)
    builder: Any = object.__new__(build.Builder)
    monkeypatch.setattr(build.memory, "fits_awake", lambda _: True)
    builder.parts = {"loss": lambda **_: pytest.fail("it was called")}
    builder.context = SimpleNamespace(config=parse([]))
    builder.resolved = SimpleNamespace(dtype=torch.float32, unreplayed="")
    builder.outputs = PolicyOutputs(1.0, 8, compiled=False)
    builder.generator = builder._runner = builder._learner = builder._reference = lambda *_: None
    used: list[Any] = []
    builder._warm_up = lambda policy: used.append(policy.surrogate)
    builder.actor()
    assert used == ["of PPO"]
    assert type(policy.surrogate) is UsersLoss


def test_an_engine_sleeps_while_the_policy_compiles_if_both_do_not_fit(monkeypatch):
    calls: list[str] = []
    engine = SimpleNamespace(
        connect=lambda: calls.append("connect"),
        release_memory=lambda trained: calls.append(f"sleep {trained}"),
    )
    group = SimpleNamespace(is_first=False)
    builder: Any = object.__new__(build.Builder)
    monkeypatch.setattr(build, "Policy", lambda *_, **__: None)
    monkeypatch.setattr(build.memory, "fits_awake", lambda _: False)
    builder.parts = {}
    builder.connected = False
    builder.context = builder.outputs = None
    builder.resolved = SimpleNamespace(dtype=torch.float32, unreplayed="")
    builder.outputs = PolicyOutputs(1.0, 8, compiled=False)
    builder.generator = lambda: SimpleNamespace(engine=engine, group=group)
    builder._runner = builder._learner = builder._reference = builder._begin_phase = lambda *_: None
    builder._warm_up = lambda _: calls.append("compile")
    generator, _ = builder.actor()
    builder.connect_engine(generator)
    assert calls == ["connect", "sleep True", "compile"]


def test_the_pages_command_is_a_run(tmp_path, file, monkeypatch):
    (command,) = re.findall(r"^    splitppo train --nproc_per_node 2 (.*--ppo.loss.*)$", PAGE, re.M)
    monkeypatch.chdir(file.parent)
    run_ranks(2, main_rank, [*command.split(), "--steps=1", f"--run-dir={tmp_path / 'run'}"])
    recorded = json.loads((tmp_path / "run" / "inputs.json").read_text())
    assert {f"ppo.{name} parts.py" for name in ("loss", "advantages")} <= recorded.keys()
    assert "actor/pg_clipfrac" not in figures(tmp_path / "run", "actor")[1]
