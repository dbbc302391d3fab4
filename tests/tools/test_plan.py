"""The cost model against cases worked out by hand, and what it reads off a run; the bench's jobs,
lengths and table."""

import json
import re
import subprocess
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hub import Hub
from runs import Torchrun
from transformers import Qwen2Config

from splitppo import train
from splitppo.__main__ import main
from splitppo.errors import UserError
from splitppo.models.build import read_config
from splitppo.models.trainable import Trainable, count
from splitppo.tools import bench, fit, plan
from splitppo.tools.cost import Split, Work, advice, columns, measured, predict, splits, waiting

# 500 rows a rank double the time of a rollout: 250, if all were as long as the longest, which is
# twice the mean
WORK = Work(
    batch=500,
    rollout=1.0,
    sync=0.1,
    other=0.2,
    old=2.0,
    reference=2.0,
    score=2.0,
    policy=6.0,
    value=6.0,
    longest=2.0,
)


def test_columns_by_hand():
    # rollout 1 + 1/2, sync and other 0.3; old, reference and update over two ranks 5; scores and
    # update over two 4
    assert columns(WORK, Split(2, 2)) == pytest.approx((1.5 + 0.3 + 5.0, 4.0))
    assert predict(WORK, Split(2, 2)) == pytest.approx(6.8)
    assert columns(WORK, Split(2, 2, "critic")) == pytest.approx((1.5 + 0.3 + 4.0, 5.0))
    assert columns(WORK, Split(3, 1)) == pytest.approx((4 / 3 + 0.3 + 10 / 3, 8.0))
    assert predict(WORK, Split(4, 0)) == pytest.approx(1.25 + 0.3 + 18 / 4)
    # rows that are all equally long end at once: 250 double the time of a rollout, and they are
    # scored after it
    alike = replace(WORK, longest=1.0)
    assert columns(alike, Split(2, 2, "critic")) == pytest.approx((2.0 + 0.3 + 2.0 + 3.0, 5.0))
    assert columns(alike, Split(2, 2)) == pytest.approx((2.0 + 0.3 + 2.0 + 3.0, 4.0))
    assert predict(alike, Split(4, 0)) == pytest.approx(1.5 + 0.3 + 18 / 4)
    # colocated ranks score nothing under the rollout, so nothing is late
    assert columns(replace(WORK, old=0.0, reference=0.0, score=100.0), Split(4, 0))[
        0
    ] == pytest.approx(1.25 + 0.3 + 1.5)
    assert columns(replace(WORK, old=0.0, reference=0.0), Split(4, 0))[0] == pytest.approx(
        1.25 + 0.3 + 1.5
    )
    small = replace(WORK, value=1.0, value_fixed=0.7, policy_fixed=0.1)
    assert columns(small, Split(3, 1)) == pytest.approx((4 / 3 + 0.3 + 10 / 3 + 0.1, 3.7))
    assert columns(small, Split(2, 2)) == pytest.approx((1.5 + 0.3 + 5.0 + 0.1, 2.2))


def test_the_advice_names_the_faster_splits_first():
    lines = advice(WORK, Split(3, 1), splits(4, movable=True))
    assert lines[0].startswith(
        "3+1, reference with the actor: 8.00 s a step, predicted; actor group 4.97 s"
    )
    assert (
        lines[1]
        == "  2+2, reference with the critic: 5.80 s, 1.38x this run's speed, idle group 14%"
    )
    assert lines[2] == "  colocated on 4: 6.05 s, 1.32x this run's speed, idle group 0%"
    assert not any(
        "with the critic" in line for line in advice(WORK, Split(3, 1), splits(4, movable=False))
    )


def test_all_placements_of_some_gpus():
    assert splits(1, movable=True) == [Split(1, 0)]
    assert splits(6, movable=False, sets=(2, 1)) == [Split(6, 0), Split(2, 4), Split(4, 2)]
    assert splits(3, movable=False, sets=(1, 2)) == [Split(1, 2)]
    assert splits(3, movable=False) == [Split(3, 0), Split(1, 2), Split(2, 1)]
    both = [Split(1, 2), Split(1, 2, "critic"), Split(2, 1), Split(2, 1, "critic")]
    assert splits(3, movable=True) == [Split(3, 0), *both]


def test_only_a_much_lower_rate_is_waiting():
    # 60: the limit itself
    assert [waiting(rate, 100.0) for rate in (50.0, 60.0, 100.0)] == [0.5, 0.0, 0.0]
    assert waiting(0.5, 100.0) == 0.995


def lines(split: Split, work: Work, steps: int = 5) -> tuple[list[dict], list[dict]]:
    """Metrics of a run that does what the model says; the first two steps are slow."""
    x, y = split.actor, split.critic or split.actor
    beside = split.reference == "actor"
    actor = {
        "timing_s/rollout": work.rollout * (1 + work.batch / x / 500),
        "timing_s/sync": work.sync,
        "timing_s/logprobs": (work.old + beside * work.reference) / x,
        "timing_s/update": work.policy / x + work.policy_fixed,
        "perf/update_tflop": 100 * work.policy / x,
        "timing_s/wait_advantages": 0.5,
        "timing_s/validate": 0.3,
        "timing_s/checkpoint": 0.4,
        "response_length/mean": 30.0,
        "response_length/max": 60.0,
    }
    actor["timing_s/step"] = (
        sum(value for name, value in actor.items() if "timing_s" in name) + work.other
    )
    score = (work.score + (not beside) * work.reference) / y
    critic = {
        "timing_s/score": score,
        "timing_s/update": work.value / y + work.value_fixed,
        "critic/ref_kl": 0.1,
    }
    critic["timing_s/step"] = 2 * (score + critic["timing_s/update"])
    critic["perf/idle_share"] = 0.5
    critic["perf/update_tflop"] = 100 * work.value / y
    actor["actor/mismatch_mean"] = 0.01
    slow = {name: 10 * value for name, value in actor.items()}
    return [slow] * 2 + [actor] * (steps - 2), [critic] * steps


@pytest.mark.parametrize("split", [Split(2, 2), Split(3, 1, "critic")])
def test_the_work_is_read_off_a_run(split):
    actor, critic = lines(split, WORK)
    assert asdict(measured(actor, critic, split, 500)) == pytest.approx(asdict(WORK))
    # one step is enough
    assert asdict(measured(actor[:3], critic[:3], split, 500)) == pytest.approx(asdict(WORK))
    # of the rollout's seconds, some that the first rank waited for another one's engine
    early = {"timing_s/rollout": actor[-1]["timing_s/rollout"] - 0.5, "timing_s/barrier_wait": 0.5}
    uneven = [*actor[:2], *(line | early for line in actor[2:])]
    assert asdict(measured(uneven, critic, split, 500)) == pytest.approx(asdict(WORK))
    # a wait too short to be noted in the first step, and none of the policy's updates at the
    # beginning
    critic_late = [
        line | {"timing_s/wait_critic": 2.0, "timing_s/step": line["timing_s/step"] + 2.0}
        for line in actor
    ]
    mixed = [*actor[:3], *critic_late[3:]]
    assert measured(mixed, critic, split, 500).other == pytest.approx(WORK.other)
    warming = [{k: v for k, v in line.items() if k != "timing_s/update"} for line in actor[:3]]
    assert measured(warming + actor[3:], critic, split, 500).policy == pytest.approx(WORK.policy)
    # no row was left
    untrained = [line | {"timing_s/update": 0.001, "perf/update_tflop": 0.0} for line in actor[:3]]
    assert measured(untrained + actor[3:], critic, split, 500).policy == pytest.approx(WORK.policy)
    with pytest.raises(UserError, match="no policy update after its warm-up"):
        measured(warming, critic, split, 500)
    with pytest.raises(UserError, match="no step after its 2 warm-up"):
        measured(actor[:2], critic, split, 500)


def test_what_more_gpus_do_not_shorten_is_told_by_the_other_models_rate():
    work = replace(WORK, value=0.8, value_fixed=0.6)
    # the value model's update: 40 TFLOP in 1.0 s, the policy's: 300 in 3.0
    actor, critic = lines(Split(2, 2), work)
    assert asdict(measured(actor, critic, Split(2, 2), 500)) == pytest.approx(asdict(work))
    other_way = replace(WORK, policy=0.8, policy_fixed=0.6, score=0.5)
    assert asdict(measured(*lines(Split(2, 2), other_way), Split(2, 2), 500)) == pytest.approx(
        asdict(other_way)
    )
    # models of one size differ by what is not counted of the log-probs, which does get shorter
    for line in actor:
        line["perf/update_tflop"] = 70 * line["timing_s/update"]
    for line in critic:
        line["perf/update_tflop"] = 100 * line["timing_s/update"]
    alike = measured(actor, critic, Split(2, 2), 500)
    assert (alike.policy_fixed, alike.value_fixed) == (0.0, 0.0)
    assert (alike.policy, alike.value) == pytest.approx((work.policy, 2.0))


@pytest.mark.parametrize(
    ("side", "has_reference", "has_old", "expected"),
    [  # (old, reference) on one GPU of 8 s of forward passes, where an update takes 6 s
        ("actor", True, True, (4.0, 4.0)),
        ("actor", True, False, (0.0, 8.0)),
        ("actor", False, True, (8.0, 0.0)),
        ("actor", False, False, (0.0, 0.0)),
        ("critic", True, True, (8.0, 8.0)),
        ("critic", True, False, (0.0, 2.0)),
        ("critic", False, True, (8.0, 0.0)),
    ],
)
def test_the_forward_passes_are_old_and_reference_log_probs(side, has_reference, has_old, expected):
    split = Split(2, 2, side)
    actor, critic = lines(split, WORK)
    for line in actor:
        line["timing_s/logprobs"] = 4.0
        if not has_old:
            line.pop("actor/mismatch_mean", None)
    for line in critic:
        line["timing_s/score"] = 5.0
        if not has_reference:
            line.pop("critic/ref_kl", None)
    found = measured(actor, critic, split, 500)
    assert (found.old, found.reference) == pytest.approx(expected)
    assert found.score == pytest.approx(10.0 - (found.reference if side == "critic" else 0.0))


def test_colocated_ranks_have_nothing_beside_the_phases():
    work = measured(*lines(Split(4, 0), WORK), Split(4, 0), 500)
    assert asdict(work) == pytest.approx(asdict(replace(WORK, other=0.0)))


def write_run(folder: Path, *, steps: int = 5) -> Path:
    (folder / "metrics").mkdir(parents=True)
    ppo = "[ppo]\nkl_coef = 0.1\nkl_loss_coef = 0.0\n"
    (folder / "config.toml").write_text(
        '[placement]\nreference = "actor"\n[rollout]\nbatch_size = 500\n' + ppo
    )
    (folder / "resolved.json").write_text(
        json.dumps({"placement": "per_node", "actor": 2, "critic": 2})
    )
    for role, records in zip(("actor", "critic"), lines(Split(2, 2), WORK, steps), strict=True):
        text = "".join(
            json.dumps({"step": i, "spans": []} | record) + "\n"
            for i, record in enumerate(records, 1)
        )
        (folder / "metrics" / f"{role}.jsonl").write_text(text)
    return folder


def test_the_command_reads_a_run_folder(tmp_path, monkeypatch, capsys):
    run = write_run(tmp_path / "run")
    monkeypatch.setattr("sys.argv", ["splitppo", "plan", str(run), "--gpus", "8"])
    assert main() == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("2+2, reference with the actor: 6.80 s")
    others = told[1:]
    assert len(others) == 3
    assert all("+" in line or "on 8" in line for line in others)
    with pytest.raises(UserError, match="none: no such folder"):
        plan.plan(tmp_path / "none")
    monkeypatch.setattr("sys.argv", ["splitppo", "plan", "--gpus", "8", str(run)])
    assert main() == 0
    assert capsys.readouterr().out.splitlines() == told
    for flags in (["--gpus", "0"],):
        monkeypatch.setattr("sys.argv", ["splitppo", "plan", str(run), *flags])
        assert main() == 2
        assert f"error: {' '.join(flags[-2:])}: use a number above 0" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["splitppo", "plan", "--help"])
    assert main() == 0
    assert {"RUN", "--gpus"} <= set(re.findall(r"RUN|--\w+", capsys.readouterr().out))


def test_a_teacher_is_a_model_of_the_critic_group(tmp_path):
    run = write_run(tmp_path / "run")
    alone = (run / "config.toml").read_text().replace("[ppo]\n", '[ppo]\nbaseline = "batch"\n')
    for more, splits_told in (("", False), ('[teacher]\npath = "t"\n', True)):
        (run / "config.toml").write_text(alone + more)
        told = "\n".join(plan.plan(run, gpus=8))
        assert ("reference with the actor: 6.80 s" in told) is True  # the run as it was
        assert bool(re.search(r"^  \d\+\d, reference with the actor", told, re.M)) == splits_told


def test_jobs_are_read_and_wrong_ones_told():
    assert bench.parse_job("colocated", 4)[0] == Split(4, 0)
    split, flags = bench.parse_job("3+1/critic", 4)
    assert (split, flags[-1]) == (Split(3, 1, "critic"), "critic")
    for wrong, told in (
        ("3+2", "add up to --gpus 4"),
        ("4+0", "at least one rank"),
        ("3-1", "write colocated, or ranks"),
    ):
        with pytest.raises(UserError, match=told):
            bench.parse_job(wrong, 4)


def test_lengths_are_seeded_and_as_asked():
    drawn = bench.lengths_of("lognormal:240:1024")
    assert drawn == bench.lengths_of("lognormal:240:1024")
    assert sum(drawn) / len(drawn) == pytest.approx(236, abs=4)  # the cap takes a little
    assert (min(drawn) >= 1, max(drawn)) == (True, 1024)
    assert bench.lengths_of("fixed:512") == [512]
    with pytest.raises(UserError, match="write fixed:512 or lognormal:240:1024, or name a file"):
        bench.lengths_of("normal:3")


class ForkedJob:
    """In place of a process that runs torchrun: the same job, forked."""

    def __init__(self, line: list[str], stdout: Any, stderr: Any) -> None:
        at = line.index("splitppo.train")
        assert line[1:at] == "-m torch.distributed.run --standalone --nproc_per_node 2 -m".split()
        self.job = Torchrun(2, train.main, line[at + 1 :], out=Path(stdout.name))

    def __enter__(self) -> "ForkedJob":
        return self

    def __exit__(self, *_: object) -> None:
        assert not self.job.left()

    def terminate(self) -> None:
        pass

    def wait(self, limit: float = 300) -> int:
        return self.job.wait(min(limit, 300))


@pytest.mark.wide
def test_a_comparison_of_two_real_runs(tmp_path, monkeypatch, capsys):
    out = tmp_path / "out"
    trainer = "--rollout.batch-size 16 --ppo.mini-batches 2 --ppo.kl-coef 0.1 --seed 3".split()
    trainer += ["--ppo.epochs", "2"]
    (tmp_path / "preset.toml").write_text(
        '[placement]\nactor = 1\ncritic = 1\nreference = "critic"\n[checkpoint]\nevery = 2\n'
    )
    trainer += ["--config", str(tmp_path / "preset.toml")]
    argv = "bench --gpus 2 --jobs 1+1 colocated --lengths lognormal:4:12 --warmup 2".split()
    monkeypatch.setattr("sys.argv", [*argv, "--steps", "2", "--out", str(out), *trainer])
    monkeypatch.setattr(
        bench, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": ForkedJob})
    )
    assert bench.main() == 0
    told = capsys.readouterr().out
    record = json.loads((out / "bench.json").read_text())
    split, colocated = record["results"]
    lengths = [int(word) for word in (out / "lengths.txt").read_text().split()]
    kinds: Any = {"actor": "policy", "critic": "value"}
    tiny = read_config(str(out / "colocated" / "tiny"))
    for folder, result in (("colocated", colocated), ("1+1", split)):
        steps = [
            json.loads(line)
            for line in (out / folder / "metrics" / "actor.jsonl").read_text().splitlines()
        ]
        due = [sum(lengths[i * 16 : (i + 1) * 16]) / 16 for i in range(4)]
        assert [step["response_length/mean"] for step in steps] == pytest.approx(due), (
            "rows of other lengths"
        )
        assert result["tokens_s"] == pytest.approx(
            sum(s["tokens"] for s in steps[2:]) / sum(result["steps_s"])
        )
        assert result["steps_s"] == [step["timing_s/step"] for step in steps[2:]]
        tokens = sum(step["tokens"] for step in steps[2:]) / 2 / (2 if folder == "colocated" else 1)
        for role, kind in kinds.items():
            active = count(tiny, Trainable(kind)).active
            work = 6e-12 * active * tokens * 2  # epochs
            assert result["metrics"][role]["perf/update_tflop"] == pytest.approx(work)
        assert f"{min(result['steps_s']):.2f}-{max(result['steps_s']):.2f}" in told
        assert result["metrics"]["critic"].keys() >= {
            "timing_s/score",
            "timing_s/update",
            "timing_s/step",
        }
        assert not list((out / folder).glob("checkpoints/*")), "the preset's, which nothing reads"
    assert bench.main() == 2
    assert "it exists; name a new folder" in capsys.readouterr().err


@pytest.mark.ranks
def test_what_has_run_is_kept_where_a_comparison_is_broken_off(tmp_path, monkeypatch, capsys):
    metrics = {
        role: {
            "timing_s/step": 1.0,
            "perf/idle_share": 0.0,
            "perf/update_tflop": 0.0,
            "timing_s/update": 1.0,
        }
        for role in ("actor", "critic")
    }

    def run_job(job: str, *_: Any) -> dict[str, Any]:
        if job == "3+1":
            raise KeyboardInterrupt
        return {"job": job, "metrics": metrics, "tokens_s": 9.0, "steps_s": [1.0]}

    monkeypatch.setattr(bench, "run_job", run_job)
    argv = ["bench", "--gpus", "4", "--jobs", "2+2", "3+1", "--out", str(tmp_path / "out")]
    monkeypatch.setattr("sys.argv", argv)
    assert bench.main() == 130
    assert capsys.readouterr().err == "interrupted\n"
    (kept,) = json.loads((tmp_path / "out" / "bench.json").read_text())["results"]
    assert (kept["job"], kept["tokens_s"]) == ("2+2", 9.0)


@pytest.mark.ranks
def test_a_job_that_fails_is_told_and_the_others_run(tmp_path, monkeypatch, capsys):
    argv = [
        "bench",
        "--gpus",
        "2",
        "--jobs",
        "colocated",
        "--out",
        str(tmp_path / "out"),
        "--warmup",
        "2",
        "--rollout.batch-size",
        "15",
    ]
    monkeypatch.setattr("sys.argv", argv)
    forked = SimpleNamespace(**vars(subprocess) | {"Popen": ForkedJob})
    monkeypatch.setattr(bench, "subprocess", forked)
    assert bench.main() == 1
    assert "failed: exit" in (told := capsys.readouterr().out)
    assert "rollout.batch_size=15 is not divisible by ppo.mini_batches=2" in told


def shape(folder: Path, **sizes: Any) -> Path:
    """A folder with the config.json of a model of Qwen2.5's kind, and nothing else."""
    config = Qwen2Config(num_attention_heads=28, num_key_value_heads=4, vocab_size=152064, **sizes)
    config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained(folder)
    return folder


SEVEN = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "tie_word_embeddings": False,
}


def test_a_model_s_shape_alone_gives_what_fits(tmp_path, monkeypatch, capsys):
    model = shape(tmp_path / "7b", **SEVEN)
    flags = ["--gpus", "8", "--length", "2048", "--memory", "140"]
    monkeypatch.setattr("sys.argv", ["splitppo", "plan", str(model), *flags])
    assert main() == 0
    large = capsys.readouterr().out.splitlines()
    assert "7,615,616,512 parameters" in large[0]
    assert large[1] == "planned for 128 GiB (a GPU of 138.6 GiB less 8% for fragments)"
    assert "estimates, not measurements" in large[2]
    line = r"^  (\S+).*: ([\d.]+) s a step \(actor group ([\d.]+) s.* ([\d.]+) s\), (\d+) GiB"
    found = re.findall(line, "\n".join(large), re.M)
    seconds = [float(one[1]) for one in found]
    assert len(found) == 5
    assert seconds == sorted(seconds)
    assert all(int(one[4]) <= 128 for one in found)
    for split, step, *both, _ in found:
        total = sum(map(float, both)) if split == "colocated" else max(map(float, both))
        assert float(step) == pytest.approx(total, abs=0.11)
    assert not any("offload" in line for line in large), "settings that cost time without need"
    models = []
    monkeypatch.setattr(fit, "_work", lambda resolved: models.append({*resolved.models}) or WORK)
    plan.plan(model, gpus=2, length=512, memory=140)
    assert models[0] == {"policy", "reference", "value"}
    monkeypatch.undo()
    small = plan.plan(model, gpus=4, length=2048, memory=60)
    assert all("offload" in line or "checkpointing" in line for line in small[4:-1:2])
    assert max(int(one[4]) for one in re.findall(line, "\n".join(small), re.M)) <= 55, (
        "fragments take the rest of 60 GB"
    )
    assert re.search(r"^  \S+.* does not fit: the .* needs \d+ GiB at least$", small[-1])
    long = plan.plan(model, gpus=4, length=65536, memory=80)
    assert all("--fsdp.sequence-parallel 2" in line for line in long[4:-1:2])
    small_gpu = r"7b on 1 GPUs, each with 36 GiB \(a GPU of 39.6 GiB .*"
    with pytest.raises(
        UserError, match=rf"{small_gpu}: colocated on 1 does not fit.*; use more GPUs"
    ):
        plan.plan(model, gpus=1, length=2048, memory=40)
    with pytest.raises(UserError, match="7b is a model; give --gpus and --length"):
        plan.plan(model)


def test_a_model_by_name_needs_its_configuration_alone(tmp_path, monkeypatch):
    given = shape(tmp_path, **SEVEN) / "config.json"
    with closing(Hub()) as hub:
        hub.use(monkeypatch, tmp_path / "cache")
        hub.push("acme/seven", {"config.json": given.read_bytes(), "model.safetensors": b"large"})
        lines = plan.plan(Path("acme/seven@main"), gpus=8, length=512)
        assert lines[0].startswith("acme/seven@main: 7,615,616,512")
        assert hub.gets() == {"config.json": 1}
        with pytest.raises(UserError, match="MODEL=acme/none: no such folder, and no such model"):
            plan.plan(Path("acme/none"), gpus=8, length=512)


def test_the_time_of_a_step_follows_from_the_shape(tmp_path):
    """1.5B on four H200, responses of 1,024 tokens at most: 5.9 to 6.3 s a step were measured
    (docs/measured_speed.md)."""
    sizes = {
        "hidden_size": 1792,
        "intermediate_size": 8960,
        "num_hidden_layers": 24,
        "tie_word_embeddings": True,
    }
    lines = plan.plan(shape(tmp_path, **sizes), gpus=4, length=1365, memory=140)
    seconds = [float(found) for found in re.findall(r": ([\d.]+) s a step", "\n".join(lines))]
    assert 4 < min(seconds) < 9
