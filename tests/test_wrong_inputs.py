"""Whatever is wrong in what a user gives: one line that names value, rule and remedy, and exit status 2."""

import contextlib
import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from transformers import BertConfig, LlamaConfig

from splitppo import models, train
from splitppo.engine.vllm_process import vllm_version
from splitppo.tiny import build_tiny

SMALL = ("--steps=2", "--rollout.batch-size=8", "--ppo.mini-batches=2", "--log.validate-every=0")

FLAGS = [
    # tyro's own box: it names the flag
    (["--steps=x"], ["--steps", "'x'"]),
    (["--steps=1.5"], ["--steps", "'1.5'"]),
    (["--rollout.bath-size=8"], ["--rollout.bath-size", "--rollout.batch-size"]),
    (["--engine.kind=sglang"], ["--engine.kind", "sglang"]),
    (["--policy.optim.schedule=step"], ["--policy.optim.schedule", "step"]),
    (["--policy.optim.betas=0.9"], ["--policy.optim.betas"]),
    (["stray"], ["stray"]),
]

EARLY = [
    # flags
    (
        ["--rollout.batch-size=510", "--ppo.mini-batches=4"],
        ["rollout.batch_size=510 does not cut into 4 mini-batches; use 508 or 512\n"],
    ),
    (
        ["--rollout.batch-size=510", "--ppo.mini-batches=4", "--rollout.samples=3"],
        ["rollout.batch_size=510 does not cut into 4 mini-batches; use 504 or 516\n"],
    ),
    (["--rollout.samples=3", "--ppo.mini-batches=1"], ["batch_size=128 is not a multiple", "samples=3", "126 or 129"]),
    (["--rollout.batch-size=2", "--ppo.mini-batches=3"], ["rollout.batch_size=2", "use 3\n"]),
    (["--steps=0"], ["steps=0 must be at least 1"]),
    (["--rollout.max-new-tokens=-1"], ["rollout.max_new_tokens=-1 must be at least 1"]),
    (["--policy.optim.lr=-1e-3"], ["policy.optim.lr=-0.001 must be at least 0"]),
    (["--value.optim.lr=inf"], ["value.optim.lr=inf must be a finite number"]),
    (["--ppo.kl-coef=nan"], ["ppo.kl_coef=nan must be a finite number"]),
    (["--rollout.temperature=0"], ["rollout.temperature=0.0 must be above 0"]),
    (["--ppo.gamma=1.01"], ["ppo.gamma=1.01 must lie between 0 and 1"]),
    (["--policy.optim.betas", "0.9", "1"], ["policy.optim.betas=(0.9, 1.0)", "[0, 1)", "use 0.9 0.999"]),
    (["--policy.optim.betas", "nan", "0.9"], ["policy.optim.betas=nan"]),
    (["--ppo.dual-clip=1"], ["ppo.dual_clip=1.0 must be above 1", "use 3.0"]),
    (["--ppo.dual-clip=nan"], ["ppo.dual_clip=nan must be a finite number"]),
    (["--ppo.clip-low=1"], ["ppo.clip_low=1.0 must lie between 0 and 1"]),
    (["--timeout=1e14"], ["timeout=100000000000000.0 must lie between 0 and 1000000000"]),
    (["--seed=99999999999999999999"], ["seed=99999999999999999999 must fit into 64 bits"]),
    (["--data.digits=0", "--data.task=addition"], ["data.digits=0 must lie between 1 and 9"]),
    (["--data.task=sums"], ["data.task=sums", "echo or addition"]),
    pytest.param(
        ["--engine.kind=vllm"],
        ["engine.kind=vllm, but vLLM is not installed; pip install", "or --engine.kind hf"],
        marks=pytest.mark.skipif(vllm_version() is not None, reason="vLLM is installed"),
    ),
    (["--engine.tensor-parallel=0"], ["engine.tensor_parallel=0 must be at least 1"]),
    (["--engine.memory-fraction=1.5"], ["engine.memory_fraction=1.5 must lie between 0 and 1"]),
    (["--engine.kind=hf", "--engine.tensor-parallel=2"], ["engine.tensor_parallel=2 is vLLM's; use 1 with"]),
    (["--engine.kind=hf", "--engine.sleep=1"], ["engine.sleep=1 is vLLM's; use auto with engine.kind hf, or"]),
    (["--rollout.top-p=0"], ["rollout.top_p=0.0 must be above 0 and at most 1; 1 turns it off"]),
    (["--rollout.top-k=-1"], ["rollout.top_k=-1 must be at least 0; 0 turns it off"]),
    (["--world-size=2"], ["world_size=2 is for --dry-run", "--nproc_per_node"]),
    # presets
    (["--config={d}/none.toml"], ["--config {d}/none.toml: no such file"]),
    (["--config={d}/broken.toml"], ["--config {d}/broken.toml: not TOML", "line 2", "write it as"]),
    (["--config={d}/model/model.safetensors"], ["not TOML"]),
    (["--config={d}/key.toml"], ["key.toml: unknown key 'rollout.batch-size'; did you mean rollout.batch_size?"]),
    (["--config={d}/empty_section.toml"], ["unknown key 'checkpoints'; did you mean checkpoint?"]),
    (["--config={d}/type.toml"], ['type.toml: ppo.lam = "high"', "could not convert", "--help"]),
    (["--config={d}/list.toml"], ["list.toml: steps = [1, 2]"]),
    (["--config={d}/bool.toml"], ["bool.toml: rollout.batch_size = true"]),
    (["--config={d}/section.toml"], ["section.toml: steps is a section there", "write steps = value"]),
    (["--config={d}/value.toml"], ["value.toml: ppo = 3", "write [ppo]"]),
    # placement
    (["--placement.actor=2"], ["placement.actor=2: all 1 ranks play both", "start more ranks or leave it unset"]),
    (["--placement.mode=per_node"], ["placement.mode=per_node needs 2 ranks", "use colocated"]),
    (
        ["--dry-run", "--world-size=8", "--placement.actor=5", "--placement.critic=4"],
        ["actor=5", "8 ranks", "give one"],
    ),
    (["--dry-run", "--world-size=8", "--placement.actor=9"], ["actor=9", "no rank of 8 is left for the critic"]),
    (["--dry-run", "--world-size=8", "--nodes=2", "--placement.actor=5"], ["placement.actor=5", "a multiple of 2"]),
    (["--dry-run", "--world-size=7", "--nodes=2"], ["world_size=7", "use a multiple of 2"]),
    (["--dry-run", "--world-size=0"], ["world_size=0"]),
    # files
    (["--data.files={d}/none.jsonl"], ["data.files={d}/none.jsonl: no such file", "give a path"]),
    (["--data.files={d}/rows.csv"], ["data.files={d}/rows.csv: unknown kind of file; use .parquet, .json or .jsonl"]),
    (["--data.files={d}/empty.jsonl"], ["empty.jsonl holds no rows; remove it from --data.files"]),
    (["--data.files={d}/good.jsonl"], ["data.answer_key=reward_model.ground_truth", "columns: prompt, answer; set"]),
    (["--data.files={d}/cut.jsonl", "--data.answer-key=answer"], ["cut.jsonl row 1: broken JSON", "mend it"]),
    (["--data.files={d}/no.parquet"], ["no.parquet is no parquet file", "write it again"]),
    # model folders
    (["--policy.path={d}/none"], ["model folder {d}/none: no config.json there; give"]),
    (["--policy.path={d}/config_only"], ["config_only: no model.safetensors; save it as safetensors"]),
    (["--policy.path={d}/config_only", "--policy.random-init"], ["config_only: no tokenizer there; save one"]),
    (["--policy.path={d}/unknown"], ["model folder {d}/unknown: config.json is of no model that transformers knows"]),
    (["--policy.path={d}/heads"], ["model folder {d}/heads: config.json is of no model", "attention heads"]),
    (["--policy.path={d}/encoder"], ["'bert' is not a causal language model; choose another policy.path"]),
    (["--value.path={d}/encoder"], ["'bert' is not a causal language model; choose another value.path"]),
    (["--policy.path={d}/cut"], ["cut/model.safetensors is no safetensors file", "fetch it again"]),
    (["--policy.path={d}/half"], ["half: b.safetensors is in the index but not there; fetch it again"]),
    (["--value.path={d}/narrow", "--value.random-init"], ["value.path={d}/narrow: its vocabulary of 50", "(83)"]),
    # reward functions
    (["--reward.function=exactmatch"], ["reward.function=exactmatch: no such rule; use auto, exact_match"]),
    (["--reward.function={d}/none.py:score"], ["reward.function={d}/none.py:score: no such file"]),
    (["--reward.function={d}/reward.py:scores"], ["reward.py has no scores; functions there: ", "nan"]),
    (["--reward.function={d}/reward.py:two"], ["reward.py:two: it does not take", "define it with (data_source, "]),
    (["--reward.function={d}/imports.py:score"], ["imports.py failed: ModuleNotFoundError", "line 2", "mend the file"]),
    # run folder and resume
    (["--run-dir={d}/rows.csv"], ["run_dir={d}/rows.csv", "choose another --run-dir"]),
    (["--resume={d}/run/checkpoints/step_000004"], ["needs --run-dir"]),
    (
        ["--resume={d}/nowhere", "--run-dir={d}/new"],
        ["--resume {d}/nowhere: no complete checkpoint", "name a RUN/checkpoints/step_*"],
    ),
    (["--resume=never", "--run-dir={d}/run"], ["--resume never, but {d}/run holds step_000004; choose another"]),
    (["--run-dir={d}/run", "--steps=4"], ["steps=4, but {d}/run/checkpoints/step_000004 is of step 4: raise --steps"]),
]

DATA = [
    # told by all ranks at once, with a process group, before a model is built
    (["--data.files={d}/third.jsonl"], ["third.jsonl row 3 has a prompt of type int", "must be a string"]),
    (
        ["--data.files={d}/good.jsonl", "--rollout.max-prompt-tokens=5", "--reward.function=exact_match"],
        [
            "rollout.max_prompt_tokens=5",
            "good.jsonl row 2 has a prompt of 9 tokens",
            "set --rollout.max_prompt_tokens 9",
        ],
    ),
    (
        ["--data.files={d}/good.jsonl", "--reward.function=last_number"],
        ["prompt 2 of 2: ground truth 'blue'", "last_number needs a number; set --reward.function"],
    ),
    (
        ["--data.files={d}/good.jsonl"],
        ["reward.function=auto: no rule for data_source 'good'", "set --reward.function"],
    ),
]

MODELS = [
    # told while the models are loaded, or in the first step
    (["--policy.path={d}/shape"], ["weight model.norm.weight is [32], but [64] by config.json; take both from one"]),
    (["--policy.path={d}/lacks"], ["no weight model.norm.weight in its safetensors"]),
    (["--reward.function={d}/reward.py:word"], ["reward.py:word returned 'good'", "return a number"]),
    (["--reward.function={d}/reward.py:nan"], ["reward.py:nan returned nan", "is not a finite number"]),
    (["--reward.function={d}/reward.py:bare"], ["reward.py:bare returned {'acc': 1}", "it has no score"]),
]

REWARDS = """
def word(data_source, solution_str, ground_truth, extra_info): return "good"
def nan(data_source, solution_str, ground_truth, extra_info): return float("nan")
def bare(data_source, solution_str, ground_truth, extra_info): return {"acc": 1}
def two(solution_str, ground_truth): return 1.0

rows = 0
def later(how):
    global rows
    rows += 1
    if rows > 8:
        if how == "raise":
            raise ValueError("the reward's own trouble")
        return float("nan")
    return 0.5
def raises_later(data_source, solution_str, ground_truth, extra_info): return later("raise")
def nan_later(data_source, solution_str, ground_truth, extra_info): return later("nan")
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything that the table names and that is there."""
    folder = tmp_path_factory.mktemp("inputs")
    texts = {
        "broken.toml": "steps = 3\n[rollout\n",
        "key.toml": "[rollout]\nbatch-size = 8\n",
        "empty_section.toml": "[checkpoints]\n",
        "type.toml": 'steps = 3\n[ppo]\nlam = "high"\n',
        "list.toml": "steps = [1, 2]\n",
        "bool.toml": "[rollout]\nbatch_size = true\n",
        "section.toml": "[steps]\n",
        "value.toml": "ppo = 3\n",
        "rows.csv": "prompt,answer\n",
        "empty.jsonl": "\n",
        "good.jsonl": '{"prompt": "1+1=", "answer": "2"}\n{"prompt": "The sky: ", "answer": "blue"}\n',
        "third.jsonl": '{"prompt": "a", "answer": "2"}\n{"prompt": "b", "answer": "2"}\n{"prompt": 3, "answer": "2"}\n',
        "cut.jsonl": '{"prompt": "1+1=", "ans',
        "no.parquet": "PAR",
        "reward.py": REWARDS,
        "imports.py": "import os\nimport no_such_module\n",
        "unknown/config.json": '{"model_type": "nope"}',
        "heads/config.json": '{"model_type": "llama", "hidden_size": 64, "num_attention_heads": 7}',
    }
    for role in ("actor", "critic"):
        texts[f"run/checkpoints/step_000004/{role}/COMPLETE"] = '{"step": 4}'
    for name, text in texts.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    for name in ("model", "shape", "lacks", "cut", "half"):
        build_tiny(folder / name, seed=0)
    weights = load_file(folder / "model" / "model.safetensors")
    norm = weights.pop("model.norm.weight")
    save_file(weights, folder / "lacks" / "model.safetensors")
    save_file(weights | {"model.norm.weight": norm[:32].clone()}, folder / "shape" / "model.safetensors")
    (folder / "cut" / "model.safetensors").write_bytes(b"cut")
    index = {"weight_map": {"model.norm.weight": "model.safetensors", "model.embed_tokens.weight": "b.safetensors"}}
    (folder / "half" / "model.safetensors.index.json").write_text(json.dumps(index))
    BertConfig().save_pretrained(folder / "encoder")
    LlamaConfig.from_pretrained(folder / "model").save_pretrained(folder / "config_only")
    LlamaConfig(vocab_size=50, hidden_size=64, num_attention_heads=4).save_pretrained(folder / "narrow")
    return folder


def command(argv: list[str], inputs: Path) -> list[str]:
    return [word.format(d=inputs) for word in argv]


def assert_told(err: str, says: list[str], inputs: Path) -> None:
    """One line, and all that it must say."""
    assert err.startswith("error: "), err
    assert err.count("\n") == 1, err
    for text in says:
        assert text.replace("{d}", str(inputs)) in err


def forbidden(*_: Any, **__: Any) -> None:
    raise AssertionError("too late: this could have been told before")


@pytest.mark.parametrize(("argv", "says"), FLAGS, ids=lambda value: " ".join(value))
@pytest.mark.timeout(20)
def test_a_flag_that_tyro_refuses_is_named(argv, says, capsys, monkeypatch):
    monkeypatch.setattr(train, "Runtime", forbidden)
    with pytest.raises(SystemExit) as stop:
        train.main(argv)
    err = capsys.readouterr().err
    assert stop.value.code == 2
    assert "Traceback" not in err
    assert all(text in err for text in says), err


@pytest.mark.parametrize(("argv", "says"), EARLY, ids=lambda value: " ".join(value))
@pytest.mark.timeout(20)
def test_told_before_anything_is_written_or_built(argv, says, inputs, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "Runtime", forbidden)
    monkeypatch.setattr(models, "build", forbidden)
    before = sorted(path for path in inputs.rglob("*") if "__pycache__" not in path.parts)
    assert train.main(command(argv, inputs)) == 2
    assert_told(capsys.readouterr().err, says, inputs)
    assert sorted(path for path in inputs.rglob("*") if "__pycache__" not in path.parts) == before
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without GPU")
def test_a_gpu_that_is_not_there(capsys):
    assert train.main(["--compute.device=cuda"]) == 2
    err = capsys.readouterr().err
    assert err == (
        "error: compute.device=cuda with 1 ranks on a node of 0 GPUs: each rank needs its own; "
        "start on a GPU machine or set --compute.device cpu\n"
    )


def main_rank(rank: int, argv: list[str], build: Callable | None) -> tuple[int, str]:
    """Exit status of a rank and what it says on stderr."""
    if build:
        models.build = build
    with contextlib.redirect_stderr(io.StringIO()) as said:
        status = train.main(argv)
    return status, said.getvalue()


@pytest.mark.parametrize(("argv", "says"), DATA, ids=lambda value: " ".join(value))
def test_wrong_rows_are_told_by_one_rank_before_a_model_is_built(argv, says, inputs, tmp_path):
    given = [*SMALL, *command(argv, inputs), "--data.answer-key=answer", f"--run-dir={tmp_path / 'run'}"]
    results = run_ranks(2, main_rank, given, forbidden, timeout=60)
    assert [status for status, _ in results] == [2, 2]
    assert_told("".join(err for _, err in results), says, inputs)


@pytest.mark.parametrize(("argv", "says"), MODELS, ids=lambda value: " ".join(value))
def test_wrong_weights_and_rewards_are_a_line_too(argv, says, inputs, tmp_path):
    given = [*SMALL, *command(argv, inputs), f"--run-dir={tmp_path / 'run'}"]
    ((status, err),) = run_ranks(1, main_rank, given, None, timeout=60)
    assert status == 2
    assert_told(err, says, inputs)


def torchrun(*argv: str) -> tuple[int, str]:
    """Exit status and stderr of a job of two ranks."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "-m", "splitppo.train"]
    done = subprocess.run(
        [*launcher, *argv], capture_output=True, text=True, timeout=100, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    return done.returncode, done.stderr


def own_tracebacks(err: str) -> list[str]:
    """Those of the ranks: torchrun ends with one of its own."""
    return [part for part in err.split("Traceback (most recent call last)")[1:] if "splitppo/train.py" in part]


def test_torchrun_shows_a_wrong_flag_once_whichever_rank_is_first():
    status, err = torchrun("--rollout.batch-size=510", "--ppo.mini-batches=4")
    assert status != 0
    line = "error: rollout.batch_size=510 does not cut into 4 mini-batches; use 508 or 512"
    assert err.splitlines().count(line) == 1, err
    assert own_tracebacks(err) == []


@pytest.mark.parametrize("how", ["raises", "nan"])
def test_a_reward_that_fails_in_step_2_ends_the_job_with_its_cause_last(how, inputs, tmp_path):
    run = tmp_path / "run"
    status, err = torchrun(
        *SMALL, "--steps=1000", f"--run-dir={run}", f"--reward.function={inputs}/reward.py:{how}_later"
    )
    ended = time.time()
    assert status != 0
    last = json.loads((run / "metrics" / "critic.jsonl").read_text().splitlines()[-1])
    assert last["step"] == 1
    assert ended - last["time"] < 20
    cause = "ValueError: the reward's own trouble" if how == "raises" else "reward.py:nan_later returned nan"
    assert cause in err[err.rindex("Root Cause") :], err
    ours = err[: err.index("torch/distributed/run.py")]
    assert len(own_tracebacks(ours)) == (how == "raises"), err
    assert len(re.findall(f"^(error: .*)?{cause}", ours, re.MULTILINE)) == 1, err
