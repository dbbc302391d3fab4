"""Models that read the policy's token ids are held against its tokenizer, id by id."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast

from splitppo.config.cli import parse
from splitppo.errors import UserError
from splitppo.job.launch import Launch
from splitppo.models.tiny import build_tokenizer
from splitppo.models.tokenizer import find_differences
from splitppo.run.main import dry_run

CHAT = "{% for m in messages %}<|a|>{{ m.content }}{% endfor %}"
SIZE: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "max_position_embeddings": 64, "vocab_size": 128, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip


def tokenizer_of(*added: str, swapped: bool = False) -> PreTrainedTokenizerFast:
    """The embedded tokenizer with more tokens; `swapped`: two of its letters have each other's
    id."""
    tokenizer = build_tokenizer()
    if swapped:
        backend = json.loads(tokenizer.backend_tokenizer.to_str())
        ids = backend["model"]["vocab"]
        ids["a"], ids["b"] = ids["b"], ids["a"]
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=type(tokenizer.backend_tokenizer).from_str(json.dumps(backend)),
            pad_token=tokenizer.pad_token,
            eos_token=tokenizer.eos_token,
        )
    tokenizer.add_special_tokens({"additional_special_tokens": list(added)})
    tokenizer.chat_template = CHAT
    return tokenizer


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("ids")
    torch.manual_seed(0)
    made = {
        "policy": tokenizer_of("<|a|>", "<|b|>", "<|c|>"),
        "same": tokenizer_of("<|a|>", "<|b|>", "<|c|>"),
        "more": tokenizer_of("<|a|>", "<|b|>", "<|c|>", "<|d|>"),
        "swapped": tokenizer_of("<|a|>", "<|b|>", "<|c|>", swapped=True),
        "other added": tokenizer_of("<|a|>", "<|b|>", "<|d|>"),
        "fewer added": tokenizer_of("<|a|>", "<|b|>"),
        "other in prompts": tokenizer_of("<|b|>", "<|a|>", "<|c|>"),
        "none": None,
        "none, larger": None,
    }
    for name, tokenizer in made.items():
        settings: dict[str, Any] = SIZE | {"vocab_size": 192 if "larger" in name else 128}
        config = LlamaConfig(**settings)
        AutoModelForCausalLM.from_config(config).save_pretrained(root / name)
        if tokenizer:
            tokenizer.save_pretrained(root / name)
    rows = [{"prompt": [{"role": "user", "content": f"{i} + 1"}]} for i in range(4)]
    (root / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (root / "rw.py").write_text("def score(**_):\n    return 0.0\n")
    return root


def dry(folders: Path, *flags: str) -> str:
    argv = [
        f"--policy.path={folders / 'policy'}", f"--data.files={folders / 'data.jsonl'}",
        f"--reward.function={folders / 'rw.py'}:score", "--steps=2", "--rollout.batch-size=4",
        "--ppo.mini-batches=1", "--rollout.max-new-tokens=4", "--log.validate-every=0",
        "--ppo.kl-coef=0.1", "--data.answer-key=", "--dry-run", *flags,
    ]  # fmt: skip
    return dry_run(parse(argv), Launch())


# the folder of another model -> words of the line that refuses it, or of the one that is shown
CASES: dict[str, tuple[bool, tuple[str, ...]]] = {
    "same": (True, ()),
    "more": (True, ()),
    "swapped": (False, ("id ", "'a'", "'b'")),
    "other added": (True, ("1 added tokens", "<|c|>", "<|d|>")),
    "fewer added": (True, ("1 added tokens", "<|c|>", "None")),
    "other in prompts": (False, ("prompts contain '<|a|>'",)),
    "none": (True, ("no tokenizer",)),
    "none, larger": (False, ("no tokenizer", "192", "128")),
}


@pytest.mark.parametrize("role", ["reference", "value", "teacher"])
@pytest.mark.parametrize("name", CASES)
def test_another_tokenizer_is_refused_or_said(name: str, role: str, folders: Path) -> None:
    allowed, words = CASES[name]
    flag = f"--{role}.path={folders / name}"
    if allowed:
        lines = [line for line in dry(folders, flag).splitlines() if "tokenizer" in line]
        said = " ".join(lines)
        assert ("tokenizer" in said) == bool(words)
    else:
        with pytest.raises(UserError) as error:
            dry(folders, flag)
        said = str(error.value)
        assert said.startswith(f"{role}.path=")
    for word in words:
        assert word in said


def test_a_token_that_ends_responses_must_be_the_same(folders: Path, tmp_path: Path) -> None:
    config = json.loads((folders / "policy" / "config.json").read_text())
    for file in (folders / "policy").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    end = AutoTokenizer.from_pretrained(tmp_path).convert_tokens_to_ids("<|c|>")
    (tmp_path / "config.json").write_text(json.dumps(config | {"eos_token_id": [1, end]}))
    dry(folders, f"--policy.path={tmp_path}", f"--reference.path={folders / 'same'}")
    with pytest.raises(UserError, match=f"id {end} is None"):
        dry(folders, f"--policy.path={tmp_path}", f"--reference.path={folders / 'fewer added'}")


def with_ends(folders: Path, to: Path, ends: list[str], turn: str) -> Path:
    """A copy of a folder whose config.json names these ends; `turn` is behind a dialogue's
    answer."""
    tokenizer = AutoTokenizer.from_pretrained(folders / "same")
    eos = tokenizer.eos_token
    ids = tokenizer.convert_tokens_to_ids([end or eos for end in ends])
    shutil.copytree(folders / "same", to)
    (to / "generation_config.json").unlink()
    config = json.loads((to / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(config | {"eos_token_id": ids}))
    tokenizer.eos_token = ends[0] or eos
    tokenizer.chat_template = CHAT.replace("{% endfor", f"{turn}{{% endfor")
    tokenizer.save_pretrained(to)
    return to


@pytest.mark.parametrize(
    ("policy", "teacher", "refused"),
    [
        (([""], ""), (["<|c|>"], ""), True),
        (([""], ""), (["<|c|>", ""], ""), False),
        (([""], ""), (["<|c|>", ""], "<|c|>"), True),
        ((["", "<|c|>"], ""), ([""], ""), True),
        ((["<|c|>", ""], "<|c|>"), (["<|c|>"], "<|c|>"), False),
        ((["<|c|>", ""], "<|c|>"), ([""], ""), True),
    ],
)
def test_a_teacher_that_ends_responses_otherwise_than_the_policy_is_refused(
    folders: Path, tmp_path: Path, policy: Any, teacher: Any, refused: bool
) -> None:
    """By the end behind a dialogue's answer, where a template shows one."""
    paths = {"policy": policy, "teacher": teacher}
    flags = [
        f"--{role}.path={with_ends(folders, tmp_path / role, *of)}" for role, of in paths.items()
    ]
    if not refused:
        assert "teacher" in dry(folders, *flags)
        return
    with pytest.raises(UserError, match=r"teacher.path=.*the teacher would penalise the end"):
        dry(folders, *flags)


def test_weights_that_are_drawn_read_any_ids(folders: Path) -> None:
    dry(folders, f"--value.path={folders / 'swapped'}", "--policy.random-init")


def test_differences_are_of_the_policys_ids_alone() -> None:
    one, other = tokenizer_of("<|a|>"), tokenizer_of("<|a|>", "<|b|>")
    assert find_differences(other, one) == {}
    (only,) = find_differences(one, other).values()
    assert only == (None, "<|b|>")
    swapped = find_differences(tokenizer_of("<|a|>", swapped=True), one)
    assert sorted(swapped.values()) == [("a", "b"), ("b", "a")]
