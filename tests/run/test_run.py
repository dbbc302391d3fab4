"""Whole runs as their users start them: resuming, exporting, previewing, tracing, failing."""

import gc
import json
import os
import re
import shutil
import time
import tomllib
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from ranks import run_ranks
from runs import SMALL, Torchrun, assert_same, figures, made_up, main_rank, names, records
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer

from splitppo import train
from splitppo.channel import RolloutLink
from splitppo.config.cli import parse
from splitppo.config.toml import to_toml
from splitppo.critic import Critic
from splitppo.engine.hf import HFEngine
from splitppo.errors import UserError
from splitppo.job.launch import Launch
from splitppo.job.wire import Hop, Wire
from splitppo.models.build import build, read_config
from splitppo.models.weights import fill
from splitppo.placement import Placement, Role, StepPlan
from splitppo.policy import Policy
from splitppo.rollout import Episode, Rollout
from splitppo.run import checkpoint
from splitppo.run import main as run_main
from splitppo.run.checks import warnings
from splitppo.run.folder import check_run_folder, check_same_run, write_run_files
from splitppo.run.life import Run
from splitppo.run.resolve import pick_device
from splitppo.run.sources import model_paths
from splitppo.run.trackers import Trackers
from splitppo.tools import answers, chat, export, plan, push


def frozen_rank(rank: int, argv: list[str]) -> int:
    gc.unfreeze()  # what the server of the ranks has frozen (warm.py)
    main_rank(rank, argv)
    return gc.get_freeze_count()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run of 1+1 with checkpoints every second step."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    frozen = run_ranks(2, frozen_rank, [*SMALL, f"--run-dir={folder}", "--checkpoint.every=2"])
    assert min(frozen) > 50_000, "models and libraries are searched for garbage in each step"
    return folder


def glossary() -> re.Pattern[str]:
    """The names that docs/metrics.md explains: of its table's first column, with {a,b}, `...` and
    NAMES filled in."""
    lines = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text().splitlines()
    names = [
        name
        for line in lines
        if line.startswith("| `")
        for name in re.findall("`(.+?)`", line.split(" | ")[0])
    ]
    patterns = []
    for name in names:
        pattern = re.sub(r"\{(.+?)\}", lambda found: f"({found[1].replace(',', '|')})", name)
        patterns.append(re.sub(r"[A-Z]{2,}|\.\.\.", "[^/]+", pattern))
    return re.compile("|".join(patterns))


def test_the_folder_keeps_what_the_dry_run_resolves(whole, capsys):
    assert train.main([*SMALL, "--dry-run", "--world-size=2"]) == 0
    kept = (whole / "resolved.json").read_text()
    assert f"resolved: {kept}" in capsys.readouterr().out
    facts = json.loads(kept)
    assert (facts["engine"], facts["device"], facts["actor"], facts["critic"]) == (
        "hf",
        "cpu",
        1,
        1,
    )
    assert facts["models"]["policy"]["parameters"] > 80_000


def test_every_metric_is_explained(whole):
    known = glossary()
    for role in ("actor", "critic"):
        lines = records(whole, role)
        assert not [
            name
            for line in lines
            for name in line
            if name not in ("step", "time") and not known.fullmatch(name)
        ]


def test_metrics_have_their_step_first_and_both_columns_spans(whole):
    for role, spans in (
        ("actor", {"rollout", "logprobs", "update"}),
        ("critic", {"score", "advantages", "update"}),
    ):
        for line in (whole / "metrics" / f"{role}.jsonl").read_text().splitlines():
            record = json.loads(line)
            assert next(iter(record)) == "step"
            if record["step"]:
                assert spans <= {name for name, _, _ in record["spans"]}
                assert all(start <= end for _, start, end in record["spans"])
    assert [record["step"] for record in records(whole, "critic")] == [1, 2, 3, 4]


def test_run_folder_holds_what_makes_it_again(whole):
    saved = tomllib.loads((whole / "config.toml").read_text())
    assert saved["rollout"]["batch_size"] == 12
    again = parse(["--config", str(whole / "config.toml")])
    assert to_toml(again) == (whole / "config.toml").read_text()
    versions = json.loads((whole / "versions.json").read_text())
    assert {"torch", "transformers", "git", "command"} <= versions.keys()
    assert len(list((whole / "logs").glob("rank_*.log"))) == 2
    samples = [
        json.loads(line)
        for line in (whole / "samples" / "step_000001.jsonl").read_text().splitlines()
    ]
    assert len(samples) == 4
    assert {"prompt", "response", "score", "ground_truth", "row"} <= samples[0].keys()


def after_step(whole: Path, step: int, folder: Path) -> Path:
    """A copy of the whole run, as if it had been killed one step after the checkpoint of a step."""
    shutil.copytree(whole, folder)
    for saved in checkpoint.complete(folder):
        if checkpoint.step_of(saved) > step:
            shutil.rmtree(saved)
    assert names(folder)[-1] == f"step_{step:06d}"
    for path in (folder / "metrics").iterdir():
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(line for line in lines if json.loads(line)["step"] <= step + 1))
    return folder


@pytest.mark.wide
def test_a_resumed_run_is_the_uninterrupted_one_under_any_placement(whole, tmp_path):
    """From 1+1 to four ranks that hold the weights twice, from there to 1+2."""
    argv = [*SMALL, "--checkpoint.every=1"]
    replicas = after_step(whole, 2, tmp_path / "replicas")
    run_ranks(
        4,
        main_rank,
        [*argv, f"--run-dir={replicas}", "--placement.mode=colocated", "--fsdp.shard-size=2"],
    )
    written = [*replicas.glob("checkpoints/*/*/__*")]
    # by the first ones alone
    assert {path.name[:4] for path in written} == {"__0_", "__1_"}
    more = after_step(replicas, 3, tmp_path / "more")
    run_ranks(3, main_rank, [*argv, f"--run-dir={more}", "--placement.critic=2"])
    for role in ("actor", "critic"):
        for folder in (replicas, more):
            assert_same(figures(folder, role), figures(whole, role))


def test_a_resumed_run_is_the_uninterrupted_one_bit_by_bit(whole, tmp_path):
    folder = after_step(whole, 2, tmp_path / "run")
    run_ranks(2, main_rank, [*SMALL, f"--run-dir={folder}", "--checkpoint.every=2"])
    for role in ("actor", "critic"):
        assert figures(folder, role) == figures(whole, role)
    assert names(folder) == names(whole)


BOUNDED = ["--value.range", "0", "1", "--ppo.lam-value=1", "--ppo.kl-coef=0"]
CRITICS = {
    "pretraining": [
        "--value.pretrain-steps=3",
        "--value.pretrain-epochs=2",
        "--value.freeze=attention",
        *BOUNDED,
    ],
    "few layers, adaptive KL, running scores": (
        "--value.layers=1 --ppo.lam=adaptive --ppo.kl-coef=0.1 "
        "--ppo.kl-target=0.05 --ppo.kl-horizon=20 --reward.normalize=running"
    ).split(),
}


@pytest.mark.wide
@pytest.mark.parametrize("name", CRITICS)
def test_a_run_resumes_in_the_middle_of(name, tmp_path):
    """Bit by bit on the same placement; to rounding on another."""
    argv = [*SMALL, *CRITICS[name], "--checkpoint.every=1", "--checkpoint.keep=0"]
    due = tmp_path / "whole"
    run_ranks(2, main_rank, [*argv, f"--run-dir={due}"])
    same, other = (after_step(due, 2, tmp_path / folder) for folder in ("same", "other"))
    run_ranks(2, main_rank, [*argv, f"--run-dir={same}"])
    run_ranks(3, main_rank, [*argv, f"--run-dir={other}", "--placement.critic=2"])
    for role in ("actor", "critic"):
        assert figures(same, role) == figures(due, role)
        assert_same(figures(other, role), figures(due, role))
    shown = answers.load(due, None, 0.0, None)("1+2=", 1)
    assert len(shown) == 2  # with the values of the layers that there are
    if "layers" in name:
        coefficients = {record["critic/kl_coef"] for record in records(due, "critic")}
        assert len(coefficients) > 2, "nothing was adapted"
        out = export.export(due, dtype="float32")
        exported = load_file(out / "value" / "model.safetensors")
        assert not any(".layers.1." in weight for weight in exported)
    if name == "pretraining":  # another run starts from its value model
        pretrained = export.export(due, 3, dtype="float32") / "value"
        again = [
            *SMALL,
            f"--value.path={pretrained}",
            f"--policy.path={due / 'tiny'}",
            "--steps=1",
            "--dry-run",
        ]
        assert train.main([*again, "--world-size=2"]) == 2  # its head gives logits
        assert train.main([*again, *BOUNDED, "--world-size=2"]) == 0
        saved = checkpoint.step_folder(due, 3) / "critic"
        held = {"model": {"score.weight": torch.zeros(1, 64)}}
        checkpoint.read_tensors(held, saved, no_dist=True)
        weights = load_file(pretrained / "model.safetensors")
        assert torch.equal(weights["score.weight"], held["model"]["score.weight"])


def test_a_run_without_a_value_model(tmp_path, capfd, monkeypatch):
    """The commands beside it know."""
    argv = [*SMALL, "--ppo.baseline=group", "--rollout.samples=2", "--placement.reference=critic"]
    due = tmp_path / "whole"
    run_ranks(2, main_rank, [*argv, f"--run-dir={due}"])
    assert "mini-batches 2, baseline group" in "".join(capfd.readouterr())
    held = json.loads((due / "resolved.json").read_text())["models"]
    assert held.keys() == {"policy", "reference"}
    line = records(due, "critic")[-1]
    assert {"critic/score/mean", "critic/returns/mean", "critic/advantages/mean"} <= line.keys()
    assert not [name for name in line if re.search("value|vf_|explained|calibration", name)]
    rows = map(json.loads, (due / "samples" / "step_000004.jsonl").read_text().splitlines())
    assert all(row["tokens"].keys() == {"text", "advantage", "reward"} for row in rows)
    capfd.readouterr()
    chat.show(due, answers.load(due, None, 0.0, None)("1+2=", 1))
    assert capfd.readouterr().out.count("values: none") == 2
    out = export.export(due)
    assert [path.name for path in out.iterdir()] == ["policy"]
    with pytest.raises(UserError, match="--value: the run has no value model"):
        push.push(due, "owner/name", value=True)
    told = plan.plan(due, gpus=4)
    assert not any("reference with the actor" in line for line in told[1:])
    assert any("reference with the critic" in line for line in told[1:])


@pytest.mark.wide
def test_a_run_resumes_whose_policy_has_not_been_trained_yet(tmp_path):
    """Its optimizer has no state, and its outermost weights were gathered last when the checkpoint
    is written."""
    argv = [
        *SMALL,
        "--value.pretrain-steps=3",
        "--checkpoint.every=2",
        "--placement.mode=colocated",
    ]
    argv += [f"--run-dir={tmp_path / 'run'}"]
    run_ranks(2, main_rank, argv)
    due = [figures(tmp_path / "run", role) for role in ("actor", "critic")]
    shutil.rmtree(checkpoint.step_folder(tmp_path / "run", 4))
    run_ranks(2, main_rank, argv)
    assert [figures(tmp_path / "run", role) for role in ("actor", "critic")] == due


def test_only_checkpoints_of_both_groups_count(whole, tmp_path):
    found = checkpoint.complete(whole)
    assert [folder.name for folder in found] == ["step_000002", "step_000004"]
    half = tmp_path / "checkpoints" / "step_000006" / "actor"
    half.mkdir(parents=True)
    checkpoint.write_manifest(half, 6, {})
    assert checkpoint.complete(tmp_path) == []
    assert checkpoint.find(tmp_path, "auto") is None


def dies_before_the_actors_word(rank: int, folder: Path) -> int:
    rename = Path.rename

    def dying(self: Path, target: Any) -> Path:
        if self.name == "actor.partial":
            raise OSError("killed")
        return rename(self, target)

    Path.rename = dying
    return train.main([*SMALL, "--steps=1", "--checkpoint.every=1", f"--run-dir={folder}"])


def test_an_older_runs_half_checkpoint_is_not_completed_by_a_new_one(tmp_path):
    """A job died with the actor's half of step 1; a new one with another seed dies with the
    critic's half of it."""
    folder = tmp_path / "run"
    made_up(folder, 1, ["actor"])
    assert run_ranks(1, dies_before_the_actors_word, folder) == [2]
    assert names(folder) == []


def test_going_back_needs_another_folder(whole):
    with pytest.raises(UserError, match="holds step_000004, a later one"):
        checkpoint.find(whole, str(checkpoint.step_folder(whole, 2)))
    assert checkpoint.find(
        whole.parent, str(checkpoint.step_folder(whole, 2))
    ) == checkpoint.step_folder(whole, 2)


def test_what_was_turned_off_stays_off_in_the_saved_configuration(tmp_path):
    config = parse(
        ["--ppo.value-clip", "None", "--reward.clip", "-1", "1", "--data.chat-kwargs", '{"a": 1}']
    )
    assert config.ppo.value_clip is None
    (tmp_path / "again.toml").write_text(to_toml(config))
    again = replace(parse(["--config", str(tmp_path / "again.toml")]), config=None)
    assert again == config


def test_export_loads_with_from_pretrained(whole, tmp_path):
    export.export(whole, out=tmp_path, dtype="float32")
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path / "policy", output_loading_info=True
    )
    policy, info = loaded
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    loaded = AutoModelForTokenClassification.from_pretrained(
        tmp_path / "value", output_loading_info=True
    )
    value, info = loaded
    assert not info["missing_keys"]
    start = AutoModelForCausalLM.from_pretrained(whole / "tiny")
    changed = [
        name
        for name, w in policy.state_dict().items()
        if not torch.equal(w, start.state_dict()[name])
    ]
    assert len(changed) == len(start.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "policy")
    ids = torch.tensor([tokenizer("123=").input_ids])
    assert value(input_ids=ids).logits.shape == (1, 4, 1)
    again = build(read_config(str(tmp_path / "value")), "value")
    fill(again, str(tmp_path / "value"), device=torch.device("cpu"))
    assert torch.equal(again.state_dict()["score.weight"], value.state_dict()["score.weight"]), (
        "the head is lost"
    )
    assert value.state_dict()["score.weight"].any()
    # the trained policy's greedy score is what the run logged last
    assert policy.get_output_embeddings().weight is policy.get_input_embeddings().weight


def test_a_damaged_checkpoint_is_not_exported(whole, tmp_path, capsys):
    shutil.copytree(whole, tmp_path / "run")
    next((checkpoint.step_folder(tmp_path / "run", 4) / "critic").glob("__0_*")).write_bytes(b"")
    with pytest.raises(
        UserError, match=r"critic/__0_0.distcp has 0 bytes, not \d+; name another step"
    ):
        export.export(tmp_path / "run")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (["--ppo.clip-low=0.3"], r"ppo.clip_low was 0.2 and is now 0.3: this is another run than"),
        (["--seed=8"], "seed was 0"),
        (["--reward.clip", "0", "1"], r"reward.clip was unset and is now \[0.0, 1.0\]"),
        (["--policy.optim.schedule=linear"], 'policy.optim.schedule was "constant"'),
        (
            ["--ppo.gamma=0.5", "--seed=8"],
            "ppo.gamma was 1.0 and is now 0.5; seed was 0 and is now 8: this is",
        ),
    ],
)
def test_another_run_is_refused_by_name(whole, change, told, capfd):
    argv = [*SMALL, "--steps=6", f"--run-dir={whole}", "--checkpoint.every=2"]
    assert train.main([*argv, *change]) == 2
    assert re.search(told, capfd.readouterr().err)
    check_run_folder(parse([*argv, *change, "--force"]))
    free = (
        "--placement.mode=colocated --compute.micro-batch-tokens=99 --checkpoint.keep=9 --timeout=9"
    ).split()
    check_same_run(parse([*argv, *free]), whole)


def prepared_rank(rank: int, argv: list[str]) -> list[str]:
    """What is ready, in a run with checkpoints at intervals, when the engine is waited for."""
    seen, connect = [], HFEngine.connect

    def connecting(self: HFEngine) -> str:
        run: Any = next(found for found in gc.get_objects() if isinstance(found, Run))
        seen.extend(role for role, saver in run.savers.items() if saver.copies)
        return connect(self)

    HFEngine.connect = connecting  # type: ignore[method-assign]
    main_rank(rank, argv)
    return seen


def test_memory_for_checkpoints_is_there_before_the_engine_is_waited_for(tmp_path):
    argv = [*SMALL, "--steps=1", "--log.validate-every=0", "--placement.mode=colocated"]
    for every, ready in ((1, ["actor", "critic"]), (0, [])):
        flags = [f"--checkpoint.every={every}", f"--run-dir={tmp_path / str(every)}"]
        found = run_ranks(1, prepared_rank, [*argv, *flags])
        assert found == [ready]


def test_a_folder_with_steps_but_no_checkpoint(tmp_path, capfd):
    """The same run begins anew there, as after a crash before the first checkpoint; another is
    refused."""
    argv = [*SMALL, f"--run-dir={tmp_path / 'run'}", "--steps=1"]
    without = [*argv, "--checkpoint.every=0", "--checkpoint.no-last"]
    assert run_ranks(1, main_rank, without) == [0]
    assert train.main(without) == 2
    assert "contains a run without checkpoints; choose another" in capfd.readouterr().err
    assert run_ranks(1, main_rank, [*without, "--force"]) == [0]
    assert "they are overwritten" in capfd.readouterr().out
    assert train.main([*argv, "--checkpoint.every=1", "--seed=8"]) == 2
    assert "seed was 0 and is now 8: this is another run" in capfd.readouterr().err
    assert run_ranks(1, main_rank, [*argv, "--checkpoint.every=1"]) == [0]
    assert (
        f"{tmp_path / 'run'} holds steps without a checkpoint: they are overwritten"
        in capfd.readouterr().out
    )
    (tmp_path / "other/metrics").mkdir(parents=True)
    (tmp_path / "other/metrics/actor.jsonl").write_text("mine\n")
    assert train.main([*SMALL, f"--run-dir={tmp_path / 'other'}", "--checkpoint.every=1"]) == 2
    assert (tmp_path / "other/metrics/actor.jsonl").read_text() == "mine\n"


def test_what_changed_is_told_where_a_run_goes_on(tmp_path, capsys):
    write_run_files(parse(["--value.optim.lr=1e-3"]), tmp_path, None, {"data.files a": "1 bytes"})
    now = parse(["--value.optim.lr=2e-3", "--reward.clip", "0", "1"])
    write_run_files(now, tmp_path, Path("step_000002"), {"data.files a": "2 bytes"})
    told = ["resuming from step_000002", "  data.files a: 1 bytes -> 2 bytes"]
    told += ["  reward.clip: unset -> [0.0, 1.0]", "  value.optim.lr: 0.001 -> 0.002"]
    assert capsys.readouterr().out.splitlines() == told


def test_a_run_that_ended_in_its_first_step_may_be_mended(tmp_path):
    argv = [*SMALL, f"--run-dir={tmp_path}", "--checkpoint.every=1"]
    write_run_files(parse(argv), tmp_path, None, {})
    (tmp_path / "metrics").mkdir()
    (tmp_path / "metrics" / "actor.jsonl").touch()
    check_run_folder(parse([*argv, "--seed=8"]))
    (tmp_path / "metrics" / "actor.jsonl").write_text("a step\n")
    with pytest.raises(UserError, match="seed was 0 and is now 8: this is another run"):
        check_run_folder(parse([*argv, "--seed=8"]))


def test_ctrl_c_before_the_run_begins(monkeypatch, capsys):
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run_main.checks, "preflight", interrupt)
    assert train.main(SMALL) == 130
    assert capsys.readouterr().err == "interrupted\n"


def interrupted_rank(rank: int, argv: list[str]) -> int:
    steps = iter(range(1, 99))

    def interrupt(_: Trackers) -> None:
        if next(steps) == 3:
            raise KeyboardInterrupt

    cast(Any, Trackers).update = interrupt
    return train.main(argv)


def test_ctrl_c_on_one_rank_says_what_is_kept(tmp_path, capfd):
    argv = [*SMALL, "--checkpoint.every=1", f"--run-dir={tmp_path / 'run'}"]
    assert run_ranks(1, interrupted_rank, argv) == [130]
    kept = checkpoint.complete(tmp_path / "run")[-1]
    assert (
        capfd.readouterr().err.splitlines()[-1]
        == f"interrupted; the last good checkpoint is {kept}"
    )


def test_a_schedule_that_ends_with_the_run_keeps_its_steps(tmp_path):
    argv = ["--policy.optim.schedule=cosine", "--steps=6"]
    (tmp_path / "config.toml").write_text(to_toml(parse(argv)))
    check_same_run(parse(argv), tmp_path)
    with pytest.raises(
        UserError, match=r"steps was 6 and is now 8, where the learning rate's schedule ends"
    ):
        check_same_run(parse([*argv, "--steps=8"]), tmp_path)


def test_what_cannot_be_removed_of_an_old_checkpoint_does_not_end_the_run(tmp_path, monkeypatch):
    """As on NFS, where a file that another host has open leaves one behind; it doesn't count, and
    goes later."""
    for step in (2, 4):
        made_up(tmp_path, step)

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(39, "Directory not empty")

    with monkeypatch.context() as held:
        held.setattr(os, "rmdir", refuse)
        checkpoint.prune(tmp_path, 1)
    assert names(tmp_path) == ["step_000004"]
    assert (tmp_path / "checkpoints" / "step_000002.gone").exists()
    checkpoint.tidy(tmp_path, 4)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_000004"]


def test_one_rank_keeps_an_early_signal_under_torchrun(monkeypatch, capsys):
    noted = []
    monkeypatch.setattr(run_main, "keep_early_signals", lambda: noted.append(True))
    assert train.main(["--steps=0"]) == 2
    assert not noted
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "::1",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    assert train.main(["--steps=0"]) == 2
    assert noted
    assert "steps=0 must be at least 1" in capsys.readouterr().err


def warned_of(groups: dict[Role, tuple[int, ...]], argv: Sequence[str]) -> list[str]:
    mode = "colocated" if groups["actor"] == groups["critic"] else "per_node"
    config = parse(argv)
    dense = SimpleNamespace(counts=SimpleNamespace(active=1, parameters=1))
    models = dict.fromkeys(model_paths(config), dense)
    resolved: Any = SimpleNamespace(
        config=config,
        placement=Placement(mode, groups),
        device=torch.device("cpu"),
        models=models,
        eos={},
        user_settings=(),
        unreplayed="",
    )
    return warnings(resolved)


def warned(*argv: str) -> list[str]:
    return warned_of({"actor": (0, 1, 2), "critic": (3, 4)}, argv)


def test_what_is_allowed_but_hardly_meant_is_warned_of():
    assert warned() == []
    unused = (
        "reference.path=mine is not used: no reference is loaded (ppo.kl_coef and "
        "ppo.kl_loss_coef are 0, or the policy's base is the reference)"
    )
    assert warned("--reference.path=mine", "--ppo.kl-coef=0") == [unused]
    assert warned("--reference.path=mine", "--ppo.kl-loss-coef=0.1") == []
    assert warned("--reference.tensor-parallel=2") == [
        unused.replace("path=mine", "tensor_parallel=2")
    ]
    slow = "value.optim.warmup_steps=6: the learning rate does not reach its peak in 5 steps"
    assert warned("--steps=5", "--value.optim.warmup-steps=6") == [slow]
    assert warned("--steps=6", "--value.optim.warmup-steps=6") == []
    (few,) = warned("--rollout.batch-size=6", "--ppo.mini-batches=3")
    for part in (
        "rollout.batch_size=6 gives 3 actor ranks 2 rows in a mini-batch",
        "1 of them",
        "at least 9 ",
    ):
        assert part in few
    assert warned("--rollout.batch-size=9", "--ppo.mini-batches=3") == []
    (few,) = warned(
        "--rollout.batch-size=12", "--ppo.mini-batches=2", "--ppo.value-mini-batches=12"
    )
    assert few.startswith("rollout.batch_size=12 gives 2 critic ranks 1 rows in a mini-batch")
    both: dict[Role, tuple[int, ...]] = {"actor": (0, 1, 2), "critic": (0, 1, 2)}
    few, same = warned_of(both, ["--rollout.batch-size=6", "--ppo.mini-batches=3"])
    assert "3 actor ranks" in few
    assert "3 critic ranks" in same


def slow_engine_rank(rank: int, argv: list[str]) -> int:
    """The second rank's engine is a second late."""
    release = HFEngine.release_memory

    def late(self: HFEngine, *, trained: bool) -> None:
        if rank == 1:
            time.sleep(1)
        release(self, trained=trained)

    HFEngine.release_memory = late
    return main_rank(rank, argv)


@pytest.mark.wide
@pytest.mark.parametrize("placement", ["--placement.actor=2", "--placement.mode=colocated"])
def test_the_wait_for_the_slowest_engine_is_told_apart(tmp_path, placement):
    run_ranks(
        3,
        slow_engine_rank,
        [*SMALL, "--steps=2", f"--run-dir={tmp_path / 'run'}", placement, "--log.validate-every=0"],
    )
    for record in records(tmp_path / "run", "actor"):
        assert 0.5 < record["timing_s/barrier_wait"] < 5
        spans = [name for name, _, _ in record["spans"]]
        assert spans.index("rollout") < spans.index("barrier_wait") < spans.index("logprobs")
    # the first pass through a model takes its time
    for record in records(tmp_path / "run", "critic")[1:]:
        assert record["timing_s/score"] < 0.5, "what the critic ranks waited for is in their work"


def slow_critic_rank(rank: int, argv: list[str]) -> int:
    """The critic learns for two seconds; log-probs take half a second."""
    update, logprobs = Critic.update, Policy.logprobs

    def learning(self: Critic, *given: Any, **named: Any) -> dict[str, Any]:
        time.sleep(2)
        return update(self, *given, **named)

    def reading(self: Policy, rollout: Rollout) -> tuple[list[torch.Tensor], dict[str, Any]]:
        time.sleep(0.5)
        return logprobs(self, rollout)

    Critic.update, Policy.logprobs = learning, reading
    return main_rank(rank, argv)


@pytest.mark.wide
def test_logprobs_are_taken_while_the_critic_learns(tmp_path):
    argv = [
        *SMALL,
        "--steps=2",
        f"--run-dir={tmp_path / 'run'}",
        "--placement.critic=2",
        "--log.validate-every=0",
    ]
    run_ranks(3, slow_critic_rank, argv)
    assert all(
        record["timing_s/wait_critic"] > 0.5 for record in records(tmp_path / "run", "actor")[1:]
    )
    for record in records(tmp_path / "run", "critic")[1:]:
        waited = record.get("timing_s/wait_logprobs", 0.0)
        assert waited < 0.3, "the actor waited for the critic before it took log-probs"


def late_rows_rank(rank: int, argv: list[str]) -> int:
    """The second critic rank has its first rows a second late."""
    recv = RolloutLink.recv

    def late(self: RolloutLink, plan: StepPlan, chunk: int) -> list[Episode]:
        if rank == 2 and chunk == 0:
            time.sleep(1)
        return recv(self, plan, chunk)

    RolloutLink.recv = late
    return main_rank(rank, argv)


@pytest.mark.wide
def test_a_critic_rank_that_has_its_rows_waits_for_the_others_rows(tmp_path):
    run_ranks(
        3,
        late_rows_rank,
        [*SMALL, "--steps=2", f"--run-dir={tmp_path / 'run'}", "--placement.critic=2"],
    )
    for record in records(tmp_path / "run", "critic")[1:]:
        assert record["timing_s/score"] < 0.5 < record["timing_s/wait_rollouts"]


@pytest.mark.parametrize(("argv", "device"), [([], "cpu"), (["--policy.path=mine"], None)])
def test_fewer_gpus_than_ranks(argv, device, monkeypatch):
    """The embedded model trains on the CPU then, as it would without any; for others it's an
    error."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    launch = Launch(rank=1, world=2, local_rank=1, local_world=2)
    if device:
        assert pick_device(parse(argv), launch) == torch.device(device)
    else:
        with pytest.raises(UserError, match=r"with 2 ranks on a node of 1 GPUs: .*; start 1 ranks"):
            pick_device(parse(argv), launch)


def test_dry_run_needs_no_process_group(capsys):
    argv = (
        "--dry-run --world-size=8 --placement.actor=5 --rollout.chunks=2 --ppo.kl-coef=0.1"
    ).split()
    assert train.main(argv) == 0
    out = capsys.readouterr().out
    assert "placement per_node: 5 actor, 3 critic" in out
    assert len(re.findall(r"rank +\d+ +node 0 .*(actor|critic)", out)) == 8
    assert "batch_size = 128" in out
    assert '"engine": "hf"' in out
    assert re.findall(r'"parameters": (\d+)', out) == ["87552", "87617", "87552"]
    assert not torch.distributed.is_initialized()


def test_preset_is_flags_and_flags_win(tmp_path):
    preset = tmp_path / "preset.toml"
    preset.write_text(
        'steps = 7\n[rollout]\nstop = ["a b", "c"]\n[reference]\noffload = true\n[ppo]\n'
        'value_clip = "None"\n'
    )
    config = parse(["--config", str(preset), "--steps", "9"])
    assert config.steps == 9
    assert config.rollout.stop == ("a b", "c")
    assert config.reference.offload
    assert config.ppo.value_clip is None
    assert not parse(["--config", str(preset), "--reference.no-offload"]).reference.offload


def crash_rank(argv: list[str]) -> int:
    """The critic raises in its second step. The other ranks fail in its wake, as over NCCL, and
    sooner."""
    advantages, recv, show = Critic.advantages, Wire.recv, traceback.format_exception

    def crash(self: Critic, *scored: Any) -> Any:
        if self.learners[0].updates == 1:
            raise ValueError("the critic's own trouble")
        return advantages(self, *scored)

    def follow(self: Wire, hop: Hop, *rest: Any) -> Any:
        while self.rank < 2 and hop.step == 2:
            if self.store.check(["failed"]):
                raise ConnectionError("closed by the peer")
        return recv(self, hop, *rest)

    def slowly(*error: Any, **how: Any) -> list[str]:
        time.sleep(0.5)
        return show(*error, **how)

    owners: Any = (Critic, Wire, traceback)
    owners[0].advantages, owners[1].recv, owners[2].format_exception = crash, follow, slowly
    return train.main(argv)


@pytest.mark.wide
def test_a_crash_on_one_rank_ends_the_job_in_seconds(tmp_path):
    argv = [*SMALL, "--steps=1000", f"--run-dir={tmp_path / 'run'}", "--log.validate-every=0"]
    job = Torchrun(3, crash_rank, argv, out=tmp_path / "out")
    assert job.wait(200) not in (0, 124)
    out, ended = job.said(), time.time()
    last = records(tmp_path / "run", "critic")[-1]["time"]
    assert ended - last < 20
    assert len(re.findall("rank [01] stops: another rank failed", out)) == 2
    tail = out[out.rindex("Root Cause") :]
    assert "ValueError: the critic's own trouble" in tail, (
        "torchrun ends with a rank that failed after it"
    )
    assert out.count("Traceback (most recent call last)") <= 3, "other ranks told their own stories"
    assert not job.left()


@pytest.mark.wide
def test_a_peer_that_does_not_come_is_named(tmp_path, capfd):
    """The critic hangs in its second scoring; the actor's wait ends with an error that says who,
    what and where."""
    (tmp_path / "reward.py").write_text(
        "import time\ncount = 0\n"
        "def score(data_source, solution_str, ground_truth, extra_info):\n"
        "    global count\n    count += 1\n    time.sleep(60 if count > 15 else 0)\n    return "
        "0.5\n"
    )
    argv = [
        *SMALL,
        f"--run-dir={tmp_path / 'run'}",
        f"--reward.function={tmp_path / 'reward.py'}:score",
    ]
    with pytest.raises(RuntimeError, match="rank 0: "):
        run_ranks(2, main_rank, [*argv, "--log.validate-every=0", "--timeout=8"])
    found = re.search(
        r"WireError: step 2 (\w+) chunk \d+ rank 0 -> rank 1: .*", err := capfd.readouterr().err
    )
    assert found, err
    for part in ("actor rank 0", "critic rank 1", "waited 8 s", "critic step 2 score", "--timeout"):
        assert part in found[0]
