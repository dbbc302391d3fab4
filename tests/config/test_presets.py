"""The presets and pages of configs/, the benchmark of launch/: what they say can be run, and is
what they say."""

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
import tyro
from measured import read_figures
from ranks import run_ranks
from runs import main_rank, records
from tiers import wide
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    OlmoConfig,
    OlmoeConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from splitppo import train
from splitppo.config import Config, RewardConfig
from splitppo.config.cli import parse
from splitppo.config.rules import check
from splitppo.config.toml import leaves
from splitppo.engine import build as start
from splitppo.errors import UserError
from splitppo.models.cost import GB, USABLE
from splitppo.models.tiny import VOCABULARY, build_tokenizer
from splitppo.rewards.functions import check_rewards, find_function, read_result
from splitppo.rewards.scorer import Scorer
from splitppo.rollout import Prompt
from splitppo.run.files import read_file
from splitppo.tools import bench

ROOT = Path(__file__).parents[2]
CONFIGS, DOCS = ROOT / "configs", ROOT / "docs"
PRESETS = [str(path.relative_to(CONFIGS)) for path in sorted(CONFIGS.rglob("*.toml"))]
# pages that name modules, or what is no more
DEVELOPERS = {"architecture.md", "package.md"}
PAGES = (
    *sorted(page.name for page in DOCS.glob("*.md") if page.name not in DEVELOPERS),
    "../README.md",
)
CHAT = (
    "{% for m in messages %}({{ m.role }}){{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}(assistant){% endif %}"
)
GSM8K = 7473  # training prompts

# verl's defaults (verl/trainer/config/ppo_trainer.yaml), under the names of here
VERL = {
    "rollout.temperature": 1.0,
    "rollout.top_p": 1.0,
    "rollout.top_k": 0,
    "rollout.samples": 1,
    "ppo.gamma": 1.0,
    "ppo.lam": 1.0,
    "ppo.lam_value": None,
    "ppo.clip_low": 0.2,
    "ppo.clip_high": 0.2,
    "ppo.dual_clip": 3.0,
    "ppo.value_clip": 0.5,
    "ppo.entropy_coef": 0.0,
    "ppo.kl_kind": "k1",
    "ppo.kl_loss_coef": 0.0,
    "ppo.whiten": True,
    "ppo.epochs": 1,
    "ppo.value_epochs": None,
    "ppo.value_mini_batches": None,
    "ppo.importance": "off",
    "ppo.aggregate": "token_mean",
    "compute.activation_checkpointing": True,
} | {
    f"{model}.optim.{name}": value
    for model in ("policy", "value")
    for name, value in {
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.01,
        "max_grad_norm": 1.0,
        "schedule": "constant",
        "warmup_steps": 0,
    }.items()
}
# preset -> data.train_batch_size, ppo_mini_batch_size, and the flags of the script
SCRIPTS = {
    "gsm8k/qwen2.5_0.5b.toml": (256, 64, {"checkpoint.every": 10, "log.validate_every": 10}),
    "gsm8k/qwen2.5_7b.toml": (1024, 256, {"checkpoint.every": 20, "data.overlong": "filter"}),
    "gsm8k/qwen2.5_7b_small_critic.toml": (
        1024,
        256,
        {"checkpoint.every": 20, "data.overlong": "filter"},
    ),
}
SCRIPT = {
    "policy.optim.lr": 1e-6,
    "value.optim.lr": 1e-5,
    "ppo.kl_coef": 0.001,
    "rollout.max_prompt_tokens": 512,
    "rollout.max_new_tokens": 512,
}


Needs = dict[str, tuple[float, str]]  # phase -> GiB, and their parts

# preset -> its GPUs, the shapes of its models, what a GPU of each group needs (GiB)
LARGE: dict[str, tuple[int, dict[str, str], dict[str, int]]] = {
    "gsm8k/qwen2.5_7b.toml": (8, {"policy": "7b"}, {"actor": 51, "critic": 50}),
    "lora/qwen2.5_7b_1gpu.toml": (1, {"policy": "7b"}, {"actor": 52}),
    "lora/qwen2.5_14b_2gpus.toml": (2, {"policy": "14b"}, {"actor": 59}),
    "large/qwen2.5_14b_4gpus.toml": (4, {"policy": "14b"}, {"actor": 71}),
    "large/qwen2.5_32b_8gpus.toml": (8, {"policy": "32b"}, {"actor": 54}),
    "large/llama3_8b_beside_70b.toml": (
        8,
        {"policy": "8b", "reference": "70b"},
        {"actor": 65, "critic": 58},
    ),
    "moe/olmoe_1b_7b.toml": (4, {"policy": "olmoe", "value": "1b"}, {"actor": 62}),
    "moe/qwen3_30b_a3b_lora.toml": (4, {"policy": "30b", "value": "0.6b"}, {"actor": 46}),
    "long/r1_distill_1.5b_2gpus.toml": (2, {"policy": "1.5b"}, {"actor": 63}),
    "long/r1_distill_7b_8gpus.toml": (8, {"policy": "7b"}, {"actor": 65}),
}
HEADS: dict[str, Any] = {"head_dim": 128}
SHAPES: dict[str, Any] = {
    name: kind(
        hidden_size=hidden, intermediate_size=inside, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=shared, vocab_size=ids,
        max_position_embeddings=32768, tie_word_embeddings=False,
    )
    for name, kind, hidden, inside, layers, heads, shared, ids in (
        ("1.5b", Qwen2Config, 1536, 8960, 28, 12, 2, 151936),
        ("7b", Qwen2Config, 3584, 18944, 28, 28, 4, 152064),
        ("14b", Qwen2Config, 5120, 13824, 48, 40, 8, 152064),
        ("32b", Qwen2Config, 5120, 27648, 64, 40, 8, 152064),
        ("8b", LlamaConfig, 4096, 14336, 32, 32, 8, 128256),
        ("70b", LlamaConfig, 8192, 28672, 80, 64, 8, 128256),
        ("olmoe", partial(OlmoeConfig, num_experts=64, num_experts_per_tok=8),
         2048, 1024, 16, 16, 16, 50304),
        ("1b", OlmoConfig, 2048, 8192, 16, 16, 16, 50304),
        ("30b", partial(Qwen3MoeConfig, num_experts=128, num_experts_per_tok=8, **HEADS,
                        moe_intermediate_size=768), 2048, 6144, 48, 32, 4, 151936),
        ("0.6b", Qwen3Config, 1024, 3072, 28, 16, 8, 151936),
    )
}  # fmt: skip


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A policy and a reward model of one layer with random weights, and rows in verl's schema."""
    root = tmp_path_factory.mktemp("small")
    tokenizer = build_tokenizer()
    tokenizer.chat_template = CHAT
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        pad_token_id=VOCABULARY["<pad>"],
        eos_token_id=VOCABULARY["<eos>"],
    )
    config.num_labels = 1
    for name, kind in (("policy", LlamaForCausalLM), ("reward", LlamaForSequenceClassification)):
        kind(config).save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    for name, count in (("train", 20), ("test", 5)):
        rows = [verl_row(name, index) for index in range(count)]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), root / f"{name}.parquet")
    return {path.stem: path for path in root.iterdir()}


def verl_row(split: str, index: int) -> dict[str, Any]:
    """As verl's examples/data_preprocess/gsm8k.py writes it."""
    question, number = f"What is {index}+1?", str(index + 1)
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f'{question} Answer after "####".'}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": number},
        "extra_info": {
            "split": split,
            "index": index,
            "answer": f"#### {number}",
            "question": question,
        },
    }


def settings(config: Config) -> dict[str, Any]:
    return dict(leaves(asdict(config)))


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_keep_the_rules(preset: str) -> None:
    check(parse([f"--config={CONFIGS / preset}"]))


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_serve_both_sides_of_a_comparison(preset: str) -> None:
    """The flag `--ppo.baseline` leaves out what a preset sets of the value model."""
    argv = ["--config", str(CONFIGS / preset), "--rollout.window=0", "--ppo.lam=1"]
    config = parse([*argv, "--ppo.baseline=batch", "--placement.reference=actor"])
    check(config)
    assert config.value == Config().value
    assert config.policy == parse(argv).policy


def test_the_embedded_models_settings_have_a_name() -> None:
    """By which a model that was exported from it trains as it does."""
    named = parse(["--config=tiny", "--policy.path=./exported", "--ppo.lam=0.5"])
    assert replace(named, config=None) == replace(parse(["--ppo.lam=0.5"]), policy=named.policy)
    assert named.policy.optim == parse([]).policy.optim
    assert parse(["--policy.path=./exported"]).rollout.max_new_tokens > 100


def test_presets_that_ship_have_names_everywhere(monkeypatch, tmp_path: Path) -> None:
    """In a folder without configs/; a file of one's own goes first."""
    due = settings(parse(["--config", str(CONFIGS / "smollm2" / "addition.toml")]))
    monkeypatch.chdir(tmp_path)
    for name in ("smollm2/addition", "smollm2/addition.toml", "configs/smollm2/addition.toml"):
        assert settings(parse(["--config", name])) == due | {"config": name}
    with pytest.raises(
        UserError, match=r"--config smollm2/none: no such file; .*\bsmollm2/addition\b"
    ):
        parse(["--config", "smollm2/none"])
    (tmp_path / "smollm2").mkdir()
    (tmp_path / "smollm2" / "addition").write_text("steps = 3\n")
    assert parse(["--config", "smollm2/addition"]).steps == 3


@pytest.mark.parametrize(
    "preset",
    [
        # a dry run begins an environment, in a process
        pytest.param(preset, marks=[pytest.mark.ranks] if "calculator" in preset else [])
        for preset in PRESETS
        if preset not in LARGE
    ],
)
def test_presets_run_dry(
    preset: str, small: dict[str, Path], monkeypatch, tmp_path: Path, capsys
) -> None:
    """With small models and small data in place of those that they name."""
    config = parse([f"--config={CONFIGS / preset}"])
    flags = [f"--policy.path={small['policy']}", f"--run-dir={tmp_path}"]
    flags += [f"--value.path={small['policy']}"] if config.value.path else []
    flags += [f"--reward.model={small['reward']}"] if config.reward.model else []
    flags += [f"--teacher.path={small['policy']}"] if config.teacher.path else []
    # the small model's tokens are characters
    flags += ["--rollout.max-context=2048"] if config.rollout.max_context else []
    flags += [f"--data.files={small['train']}"] if config.data.files else []
    flags += [f"--data.validation-files={small['test']}"] if config.data.validation_files else []
    if (
        "configs/sentiment/vader_reward.py:vader" in config.reward.validation
        and find_spec("vaderSentiment") is None
    ):
        flags.append("--reward.validation=exact_match")
    world = 2
    if preset in SCRIPTS:
        # as on a machine with GPUs: the placement must suit vLLM's tensor parallelism
        monkeypatch.setattr(start, "vllm_version", lambda: "0.26.0")
        flags += ["--compute.device=cuda"]
        world = 8 if "7b" in preset else 4
    monkeypatch.chdir(ROOT)
    status = train.main(
        [f"--config={CONFIGS / preset}", *flags, "--dry-run", f"--world-size={world}"]
    )
    out, err = capsys.readouterr()
    assert status == 0, err
    assert "resolved: " in out
    assert "memory a rank" in out
    if config.data.files:
        assert "data: 20 prompts" in out
        assert f"{min(5, config.data.validation_rows)} held out" in out


@pytest.fixture
def needs_of(small: dict[str, Path], monkeypatch, tmp_path: Path, capsys) -> Callable[..., Needs]:
    """What the dry run of a preset says that a rank needs, by phase, in GiB; with the shapes of its
    models: folders with config.json and a tokenizer."""
    monkeypatch.setattr(start, "vllm_version", lambda: "0.26.0")
    # no weights there
    monkeypatch.setattr("splitppo.run.models.weights.check_folder", lambda *_, **__: [])

    def dry_run(preset: str, *flags: str) -> Needs:
        world, names, _ = LARGE[preset]
        argv = [f"--config={CONFIGS / preset}", "--dry-run", "--policy.random-init", *flags]
        for name, kind in names.items():
            SHAPES[kind].save_pretrained(tmp_path / kind)
            tokenizer = build_tokenizer()
            tokenizer.chat_template = CHAT
            tokenizer.save_pretrained(tmp_path / kind)
            argv.append(f"--{name}.path={tmp_path / kind}")
        argv += [f"--data.files={small['train']}", f"--data.validation-files={small['test']}"]
        argv += [f"--run-dir={tmp_path}", f"--world-size={world}", "--compute.device=cuda"]
        status = train.main(argv)
        out, err = capsys.readouterr()
        assert status == 0, err
        found = re.findall(r"^  (\w+ \w+) ([\d.]+): (.*)$", out, re.M)
        return {phase: (float(gib), parts) for phase, gib, parts in found}

    return dry_run


def highest(needs: Needs, role: str) -> float:
    return max(gib for phase, (gib, _) in needs.items() if phase.startswith(role))


@pytest.mark.parametrize(
    "preset", [preset if preset.startswith(("gsm8k", "lora/qwen2.5_7b")) else wide(preset)
               for preset in LARGE]
)  # fmt: skip
def test_large_presets_fit_by_the_estimate(preset: str, needs_of: Callable[..., Needs]):
    """The file says what a GPU needs."""
    needs = needs_of(preset)
    assert {f"{role} update" for role in ("actor", "critic")} <= needs.keys()
    text = (CONFIGS / preset).read_text()
    assert text.startswith("# Never run on its real model")
    for role, gib in LARGE[preset][2].items():
        need = highest(needs, role)
        assert need == pytest.approx(gib, abs=0.6)
        assert need * 2**30 <= USABLE * 80 * GB
        assert re.search(rf"\b{gib}\b", text.partition("run_dir")[0])


@pytest.mark.parametrize(
    ("flags", "due"),
    [(flags, due) if "`" not in flags else wide(flags, due)
     for flags, *due in read_figures()[1]["estimates_7b"]["rows"]],
)  # fmt: skip
def test_what_the_pages_say_of_7b_is_the_estimate(
    flags: str, due: list[str], needs_of: Callable[..., Needs]
):
    """By docs/figures.toml for its flags, and by the lines of docs/memory.md for none."""
    needs = needs_of("gsm8k/qwen2.5_7b.toml", *"".join(re.findall("`(.*)`", flags)).split())
    assert [round(highest(needs, role)) for role in ("actor", "critic")] == [*map(int, due)]
    if "`" not in flags:
        page = (DOCS / "memory.md").read_text()
        lines = re.findall(r"^      (\w+ \w+) ([\d.]+): (.*), \.\.\.$", page, re.M)
        assert len(lines) == 3
        for phase, gib, parts in lines:
            assert (needs[phase][0], needs[phase][1][: len(parts)]) == (float(gib), parts)


STAND_IN = """#!/usr/bin/env bash
[[ $1 == -c ]] && exec PYTHON "$@"
printf '%s\\n' "$@" "" >> "$CALLS"
"""


@pytest.mark.wide
@pytest.mark.parametrize("gpus", [4, 8])
def test_every_job_of_the_comparison_runs_dry(
    gpus: int, small: dict[str, Path], monkeypatch, tmp_path: Path, capsys
):
    """With small models: the script as it is, but that its commands are noted and not run."""
    for program in ("python", "splitppo"):
        (tmp_path / program).write_text(STAND_IN.replace("PYTHON", sys.executable))
        (tmp_path / program).chmod(0o755)
    for size in ("0.5B", "1.5B", "7B"):
        (tmp_path / f"Qwen2.5-{size}-Instruct").symlink_to(small["policy"])
    calls, path = tmp_path / "calls", f"{tmp_path}:{os.environ['PATH']}"
    shapes = ["1.5b", "small-critic", "long", "fixed", "7b", "7b-small-critic"]
    command = [ROOT / "launch" / "compare.sh", str(gpus), tmp_path, *shapes]
    environ = os.environ | {
        "PATH": path,
        "CALLS": str(calls),
        "OUT": str(tmp_path / "out"),
        "BENCH": "--warmup 4",
    }
    subprocess.run(command, env=environ, check=True)
    tables = [call.split("\n") for call in calls.read_text().strip().split("\n\n")]
    prompts = tmp_path / "out" / "prompts.jsonl"
    lines = prompts.read_text().splitlines(keepends=True)
    assert len(lines) == 4096
    prompts.write_text("".join(lines[:64]))  # all jobs read them
    monkeypatch.setattr(start, "vllm_version", lambda: "0.26.0")
    splits = [f"{gpus - size}+{size}" for size in (gpus // 2, gpus // 4)]
    jobs = ("colocated", *(job for split in splits for job in (split, f"{split}/critic")))
    rows = []
    for i, args in enumerate(tables):
        assert args[0] == "bench"
        given, extra = tyro.cli(bench.Bench, args=args[1:], return_unknown_args=True)
        windows = "--rollout.window" in extra
        assert (given.gpus, given.warmup) == (gpus, 4)
        assert given.jobs == (("colocated", f"{gpus - 1}+1") if windows else jobs)
        rows.append(extra[extra.index("--rollout.batch-size") + 1])
        for job in jobs if i == 0 else jobs[-1:]:
            flags = bench.job_flags(
                given, extra, bench.lengths_of(given.lengths or "")[:9], tmp_path
            )
            flags += [
                *bench.parse_job(job, given.gpus)[1],
                f"--run-dir={tmp_path / 'run'}",
                "--compute.device=cuda",
            ]
            status = train.main([*flags, "--dry-run", f"--world-size={gpus}"])
            out, err = capsys.readouterr()
            assert status == 0, err
            assert "data: 64 prompts of 1" in out  # of 99 digits and a template
    assert rows == [str(size * gpus) for size in (128, 128, 64, 124, 60, 28, 128, 64, 64)]
    wrong = subprocess.run(
        [*command, "2b"], env=environ | {"OUT": str(tmp_path / "none")}, stderr=subprocess.PIPE
    )
    assert (wrong.returncode, wrong.stderr[:10]) == (2, b"error: 2b:")
    assert not (tmp_path / "none").exists(), "it began before it had read all names"


@pytest.mark.parametrize("preset", SCRIPTS)
def test_gsm8k_presets_are_verls(preset: str) -> None:
    got = settings(parse([f"--config={CONFIGS / preset}"]))
    prompts, mini_batch, flags = SCRIPTS[preset]
    due = VERL | SCRIPT | flags
    due |= {"rollout.batch_size": prompts, "ppo.mini_batches": prompts // mini_batch}
    due |= {"steps": 15 * (GSM8K // prompts), "data.validation_rows": 1319}
    assert {name: got[name] for name in due} == due


def test_the_small_critic_is_the_7b_preset_otherwise() -> None:
    large, small = (
        settings(parse([f"--config={CONFIGS / name}"]))
        for name in ("gsm8k/qwen2.5_7b.toml", "gsm8k/qwen2.5_7b_small_critic.toml")
    )
    own = {
        "config",
        "run_dir",
        "value.path",
        "placement.actor",
        "placement.critic",
        "placement.reference",
    }
    own |= {"engine.tensor_parallel"}
    assert {name for name in large if large[name] != small[name]} == own


@pytest.mark.parametrize("page", PAGES)
def test_settings_named_in_the_pages_exist(page: str) -> None:
    """On the pages for those who come from elsewhere, the second column of the tables is ours, and
    what follows --."""
    text = (DOCS / page).read_text(encoding="utf-8")
    known = set(settings(Config()))
    second = [
        line.split("|")[2]
        for line in text.splitlines()
        if line.startswith("| ") and line.count("|") == 4
    ]
    ours = second if page.startswith("from_") else [text]
    sections = "|".join({name.split(".")[0] for name in known})
    named = [
        name for cell in ours for name in re.findall(rf"`((?:{sections})\.[a-z_.]+)[` =]", cell)
    ]
    assert len(named) > 10 or not page.startswith("from_")
    # a flag of verl's has no dashes, one of TRL's no dot
    flags = re.findall(r"--([a-z]+(?:\.[a-z-]+)+)", text)
    named += [flag.replace(".no-", ".").replace("-", "_") for flag in flags]
    assert [name for name in named if name not in known] == []


@pytest.mark.parametrize(("page", "least"), [("from_verl.md", 10), ("from_trl.md", 12)])
def test_defaults_named_in_the_pages_are_the_defaults(page: str, least: int) -> None:
    """What the third column of their tables says is so `here` or `in both`: of a setting in the
    second."""
    known, told = settings(Config()), 0
    words = {"off": [None, False, 0], "greedy": [0.0], "k1": ["k1"], "constant": ["constant"]}
    value = "|".join([*words, r"\d[\de.-]*"])
    for line in (DOCS / page).read_text(encoding="utf-8").splitlines():
        _, _, names, remark, *_ = [*line.split("|"), "", "", ""]
        if found := re.search(
            rf"({value})(?: and ({value}))?`?(?: \(off\))? (?:here|in both)\b", remark
        ):
            defaults = [known[name] for name in re.findall(r"`([a-z_.]+)`", names)]
            for word in filter(None, found.groups()):
                assert set(words.get(word) or [float(word)]) & set(defaults), line
            told += 1
    assert told >= least


def test_the_preset_of_the_training_page_keeps_the_rules(tmp_path: Path) -> None:
    blocks = re.findall(
        r"^```toml\n(.*?)^```", (DOCS / "training.md").read_text(encoding="utf-8"), re.M | re.S
    )
    (tmp_path / "mine.toml").write_text(blocks[0])
    check(parse([f"--config={tmp_path / 'mine.toml'}"]))


@pytest.mark.parametrize("page", PAGES)
def test_files_and_commands_named_in_the_pages_exist(page: str) -> None:
    text = (DOCS / page).read_text(encoding="utf-8")
    named = re.findall(r"\b(?:tests|configs|launch|splitppo)/[\w./-]+\.[a-z]+\b", text)
    named += [f"{name.replace('.', '/')}.py" for name in re.findall(r"-m (splitppo\.\w+)", text)]
    linked = re.findall(r"\]\(([\w./-]+)\)", text)
    assert [name for name in named if not (ROOT / name).is_file()] == []
    assert [name for name in linked if not (DOCS / page).parent.joinpath(name).is_file()] == []


def python_blocks(page: str) -> list[str]:
    return re.findall(
        r"^```python\n(.*?)^```", (DOCS / page).read_text(encoding="utf-8"), re.M | re.S
    )


@pytest.mark.ranks
def test_the_example_of_the_rewards_page_scores(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(python_blocks("rewards.md")[0])
    functions = tuple(f"{tmp_path}/rewards.py:{name}" for name in ("answer", "brief", "judge"))
    scorer = Scorer(RewardConfig(functions, (1.0, 0.2, 0.5), failed_score=-1.0), {"gsm8k"})
    prompt = Prompt("", [1], "gsm8k", "7", {"longest": 10})
    found = scorer.submit(
        [(prompt, "#### 7"), (prompt, "It may well be 8"), (prompt, "#### 7 raise")]
    )()
    scorer.close()
    # judge raises on the last row, and on it alone
    assert [row.score for row in found] == pytest.approx(
        [1 + 0.2 + 0.5, 0.2 * (1 - 0.6), 1 + 0.2 * (1 - 0.2) - 0.5]
    )
    assert [row.figures["answer/marked"] for row in found] == [1, 0, 1]
    assert [[f"{f.function} {f.kind}" for f in row.failures] for row in found] == [
        [],
        [],
        ["judge error"],
    ]


def test_the_example_of_spans_scores(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(python_blocks("rewards.md")[1])
    found = find_function(f"{tmp_path}/rewards.py:copied")
    row = {"data_source": "", "ground_truth": "31", "extra_info": {}}
    for text, rewards in (("317", [0.5, 0.5, -0.5]), ("71", [-0.5, 0.5]), ("", [])):
        spans = [*enumerate(rewards, 1)]
        assert read_result(found(solution_str=text, **row), text) == (sum(rewards), {}, spans)


def test_verls_compute_score_is_taken_unchanged(tmp_path: Path) -> None:
    """The example of from_verl.md."""
    file = tmp_path / "my_reward.py"
    file.write_text(python_blocks("from_verl.md")[0])
    check_rewards([f"{file}:compute_score"])
    row = {"data_source": "", "ground_truth": "7", "extra_info": {}}
    found = find_function(f"{file}:compute_score")(solution_str="so #### 7", **row)
    assert read_result(found) == (1.0, {"acc": 1.0}, None)


def test_verls_example_is_the_preset() -> None:
    """The commands of from_verl.md, side by side: ours gives what the preset of the same script
    does."""
    example = (DOCS / "from_verl.md").read_text(encoding="utf-8").partition("## An example")[2]
    cells = [
        line.split("|")[2].strip(" `") for line in example.splitlines() if line.startswith("| ")
    ]
    flags = " ".join(cell for cell in cells if cell.startswith("--")).split()
    ours, preset = (
        settings(parse(given))
        for given in (flags, [f"--config={CONFIGS / 'gsm8k/qwen2.5_7b.toml'}"])
    )
    own = {"config", "run_dir", "placement.actor", "placement.critic"}
    own |= {
        "data.overlong",
        "reward.function",
        "checkpoint.every",
        "placement.reference",
        "engine.tensor_parallel",
    }
    assert {name for name in ours if ours[name] != preset[name]} == own
    assert ours["reward.function"] == ("my_reward.py:compute_score",)


def test_trls_settings_run(tmp_path: Path, small: dict[str, Path]) -> None:
    """The preset of from_trl.md, with small models and data: a reward model scores, the value model
    starts as it."""
    preset = tmp_path / "tldr.toml"
    page = (DOCS / "from_trl.md").read_text()
    preset.write_text(re.findall(r"^```toml\n(.*?)^```", page, re.M | re.S)[0])
    data = tmp_path / "train.jsonl"
    data.write_text(
        "".join(json.dumps({"prompt": f"Say {number}."}) + "\n" for number in range(20))
    )
    argv = [
        f"--config={preset}", f"--run-dir={tmp_path}/run", f"--policy.path={small['policy']}",
        f"--reward.model={small['reward']}", f"--value.path={small['reward']}",
        f"--data.files={data}", "--steps=2", "--rollout.batch-size=8", "--rollout.max-new-tokens=8",
        "--compute.device=cpu",
    ]  # fmt: skip
    assert parse(argv).reward.missing_eos_penalty == 1
    run_ranks(2, main_rank, argv)
    actors, critics = (records(tmp_path / "run", role) for role in ("actor", "critic"))
    (table,) = re.findall(r"^## Metrics\n(.*?)^## ", page, re.M | re.S)
    ours = re.findall(r"`((?:actor|critic|response_length)/[a-z_/]+)`", table)
    assert len(ours) > 12
    assert set(ours) <= actors[0].keys() | critics[0].keys()
    scores = [record["critic/reward_model/mean"] for record in critics]
    assert scores == [record["critic/score/mean"] for record in critics]
    assert scores[0] != 0
    # its head is the reward model's: the first values aren't the 0 of a new head
    assert critics[0]["critic/values/max"] != 0


def test_the_tokenizer_of_small_has_a_template(small: dict[str, Path]) -> None:
    """Else the dry runs above would not show that message prompts are read."""
    assert AutoTokenizer.from_pretrained(small["policy"]).chat_template == CHAT


def test_a_preset_that_an_editor_of_windows_wrote(tmp_path: Path) -> None:
    preset = tmp_path / "mine.toml"
    preset.write_text("seed = 7\n[data]\nchat = false\n", encoding="utf-8-sig")
    config = parse([f"--config={preset}"])
    assert (config.seed, config.data.chat) == (7, False)
    (tmp_path / "config.toml").write_text("seed = 7\n", encoding="utf-8-sig")
    assert read_file(tmp_path / "config.toml", tomllib.loads, "fix it") == {"seed": 7}
