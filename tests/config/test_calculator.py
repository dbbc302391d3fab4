"""configs/calculator: its data, its reward, its first steps."""

import asyncio
import json
import shutil
from pathlib import Path

import pytest
from prepare_calculator import FILES, prepare_calculator
from product import product
from ranks import run_ranks
from runs import main_rank, records
from templates import CHATML, tokenizer_of_bytes
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from splitppo.config.cli import parse
from splitppo.envs import Message
from splitppo.envs.player import turns_of
from splitppo.envs.tools import ToolEnv, load_tools

ROOT = Path(__file__).parents[2]
PRESET = ROOT / "configs" / "calculator" / "calculator.toml"


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small one whose tokens are bytes."""
    folder = tmp_path_factory.mktemp("policy")
    tokenizer = tokenizer_of_bytes(CHATML)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=4096, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.setattr("prepare_calculator.FILES", {"train.jsonl": 40, "test.jsonl": 10})
    prepare_calculator(tmp_path / "data")
    texts = {name: (tmp_path / "data" / name).read_text().splitlines() for name in FILES}
    prompts = [json.loads(line)["prompt"] for lines in texts.values() for line in lines]
    assert len(set(prompts)) == 50
    for line in map(json.loads, texts["test.jsonl"]):
        expression = line["prompt"].removeprefix("Call the calculator for ").partition(",")[0]
        called = load_tools(("calculator",))["calculator"](expression)
        assert called == line["reward_model"]["ground_truth"]
    assert capsys.readouterr().out.endswith("40 rows in train.jsonl and 10 rows in test.jsonl\n")


@pytest.mark.parametrize(
    ("said", "due"),
    [
        ("70172", 1),
        ("It is 70,172.", 1),
        ("212*331 = 70173", 0),
        ("<tool_call>212*331", 0),
        ("", 0),
    ],
)
def test_the_reward(said: str, due: int):
    assert product("calculator", said, "70172", {}) == {"score": due, "right": due}


def test_the_examples_are_calls_that_are_answered_so(policy: Path):
    """The preset shows what the trainer reads and writes."""
    config = parse([f"--config={PRESET}"])
    tools = load_tools(config.env.tools)
    turns = turns_of(config, AutoTokenizer.from_pretrained(policy))
    assert turns
    examples = str(config.data.system).split("\nuser\n")[1:]
    assert len(examples) == 2
    for example in examples:
        parts = example.replace("\ntool\n", "\nassistant\n").split("\nassistant\n")
        asked, call, answer, said = (part.strip() for part in parts)
        message = turns.spoken([], turns.tokenizer(call, add_special_tokens=False)["input_ids"])
        turn = asyncio.run(ToolEnv(tools, config.env.format_reward).step(message))
        assert turn.messages == [Message("tool", answer, name="calculator")]
        assert turn.reward == config.env.format_reward
        assert call.endswith(config.rollout.stop)
        assert message.tool_calls[0].arguments["expression"] in asked
        assert said == answer


@pytest.mark.wide
def test_the_first_steps(policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Tokens are bytes, so that rows need more room."""
    monkeypatch.setattr("prepare_calculator.FILES", {"train.jsonl": 80, "test.jsonl": 4})
    prepare_calculator(tmp_path / "data" / "calculator")
    shutil.copytree(PRESET.parent, tmp_path / "configs" / "calculator")
    monkeypatch.chdir(tmp_path)
    argv = [f"--config={PRESET}", f"--policy.path={policy}", "--run-dir=run", "--steps=2"]
    argv += ["--rollout.batch-size=4", "--data.validation-rows=4", "--compute.dtype=float32"]
    argv += ["--rollout.max-context=2048", "--log.validate-every=2"]
    run_ranks(1, main_rank, argv)
    lines = records(tmp_path / "run", "actor")
    assert [line["step"] for line in lines if line["step"]] == [1, 2]
    right = [line["val/reward/right/mean"] for line in lines if "val/score/mean" in line]
    assert len(right) == 2
