"""A process reward model against a loop over the heads of each text, one forward pass each."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from episodes import episode
from ranks import run_ranks
from runs import main_rank, records
from safetensors.torch import load_file
from test_reward_model import CPU, folders, letters, spread
from tiers import wide
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from splitppo import train
from splitppo.config import Config, RewardConfig
from splitppo.errors import UserError
from splitppo.job.collectives import Group
from splitppo.models import build, weights
from splitppo.models.runner import Runner
from splitppo.models.sharding import parallelize
from splitppo.models.tokenizer import read_tokenizer
from splitppo.rewards.model import (
    Reading,
    RewardModel,
    RewardText,
    check_steps,
    find_places,
    longest_text,
    mark_steps,
    step_ends,
)
from splitppo.rewards.scorer import Scored
from splitppo.rollout import Episode, Prompt
from splitppo.run.models import read_model

__all__ = ["folders"]  # the fixture

LABELS: Any = {
    "num_labels": 2,
    "id2label": {0: "bad", 1: "good"},
    "label2id": {"bad": 0, "good": 1},
}
# prompt, response, the ends of its steps
ROWS = [
    ("12=", "1+23+4", [2, 5, 6]),
    ("3=", "+0++77+", [2 + 1, 7]),
    ("21=", "", []),
    ("5=", "94", [2]),
    ("5=", "1+1+1+1+1+1", [2, 4, 6, 8, 10, 11]),
]


@pytest.mark.parametrize(
    ("separator", "text", "ends"),
    [
        ("\n\n", "a\n\nb\n\n", [3, 6]),
        ("\n\n", "a\n\nb", [3, 4]),
        ("\n\n", "\n\na\n\n\n\n b \n", [5, 11]),
        ("\n\n", " \n", []),
        ("\n", "é\n🙂", [2, 3]),
        ("Step", "Stepa Step", [4 + 1 + 5]),
        ("\n\n", "", []),
    ],
)
def test_where_steps_end(separator: str, text: str, ends: list[int]) -> None:
    assert step_ends(text, separator) == ends
    marked, marks = mark_steps(text, separator, "<s>")
    assert len(marks) == len(ends)
    assert all(marked[:mark].endswith("<s>") for mark in marks)
    assert mark_steps(text, separator, None) == (text, ends)
    if ends:
        assert marked.count("<s>") == len(ends)


@pytest.fixture(scope="module")
def models(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Decoders with the policy's ids (two labels; of tokens), and one with a tokenizer of its own
    that has a marker."""
    root = tmp_path_factory.mktemp("steps")
    shape: Any = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    shape |= {
        "num_attention_heads": 2,
        "max_position_embeddings": 64,
        "pad_token_id": None,
        "classifier_dropout": 0.0,
    }
    size = build.read_config(str(folders["policy"])).vocab_size
    torch.manual_seed(3)
    for name, auto in (
        ("labels", AutoModelForSequenceClassification),
        ("tokens", AutoModelForTokenClassification),
        ("marked", AutoModelForSequenceClassification),
    ):
        auto: Any
        vocab = 60 if name == "marked" else size
        config = LlamaConfig(vocab_size=vocab, **shape, **LABELS)
        spread(auto.from_config(config)).save_pretrained(root / name)
        tokenizer: Any = AutoTokenizer.from_pretrained(folders["policy"])
        if name == "marked":
            tokenizer = letters(root / name, encoder=False)
            tokenizer.add_special_tokens({"additional_special_tokens": ["<s>"]})
            tokenizer.chat_template = (
                "{% for m in messages %}{{ m.role[0] }}!{{ m.content | trim }}?{% endfor %}"
            )
        tokenizer.save_pretrained(root / name)
    small = Qwen2Config(vocab_size=size, num_key_value_heads=2, **shape, **LABELS)
    two_layers = with_two_layers(AutoModelForSequenceClassification.from_config(small))
    spread(two_layers).save_pretrained(root / "qwen")
    file = root / "qwen" / "config.json"
    names = {"architectures": ["Qwen2ForProcessRewardModel"]}
    names |= {"auto_map": {"AutoModel": "modeling_qwen2_rm.Qwen2ForProcessRewardModel"}}
    file.write_text(json.dumps(json.loads(file.read_text()) | names))
    AutoTokenizer.from_pretrained(folders["policy"]).save_pretrained(root / "qwen")
    return folders | {name: root / name for name in ("labels", "tokens", "marked", "qwen")}


def with_two_layers(model: Any) -> Any:
    """With the head of Qwen2.5-Math-PRM."""
    width = model.config.hidden_size
    model.score = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2))
    return model


def rows_of(tokenizer: Any) -> tuple[list[Prompt], list[Episode]]:
    prompts, rows = [], []
    for row, (asked, said, _) in enumerate(ROWS):
        tokens, ids = (tokenizer(text)["input_ids"] for text in (asked, said))
        prompts.append(Prompt(asked, tokens, "echo", "", {}))
        rows.append(episode(row, tokens, [*ids, tokenizer.eos_token_id]))
    return prompts, rows


def steps_rank(
    rank: int, folder: Path, policy: Path, world: int, how: dict[str, Any]
) -> dict[int, Scored]:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("rows",))
    tokenizer, own = (read_tokenizer(str(path)) for path in (policy, folder))
    config = build.read_config(str(folder))
    build.choose_label(config, "good" if config.num_labels == 2 else None, "")
    model = build.build(config, "reward", packed=how["one_pass"]).requires_grad_(False)
    parallelize(model, mesh, dtype=torch.float32, activation_checkpointing=False)
    weights.fill(model, str(folder), device=CPU)
    longest = longest_text(config, own)
    options: dict[str, Any] = {"longest": longest} | how
    text = RewardText(own, tokenizer, **options)
    found = RewardModel(model, Runner(Group(mesh), CPU, 24), text, offload=False)
    prompts, rows = rows_of(tokenizer)
    mine = range(len(rows))[rank::world]
    reward = RewardConfig(model_weight=0.5)
    scored = found.score([prompts[i] for i in mine], [rows[i] for i in mine], reward)
    return dict(zip(mine, scored, strict=True))


def score_by_the_library(model: Any, ids: list[int]) -> float:
    with torch.no_grad():
        outputs = model(input_ids=torch.tensor([ids])).logits
    outputs = outputs.flatten(0, -2)[-1]
    return float(outputs[0] if len(outputs) == 1 else outputs.softmax(-1)[1])


@pytest.mark.parametrize(
    ("kind", "world", "how"),
    [
        ("decoder", 1, {"one_pass": True}),
        ("labels", 3, {"one_pass": True}),
        ("labels", 1, {"one_pass": False}),
        ("labels", 1, {"one_pass": True, "longest": 7}),
        ("tokens", 1, {"one_pass": True}),
        ("tokens", 1, {"one_pass": False}),
        ("encoder", 1, {"one_pass": False}),
        ("marked", 1, {"one_pass": True}),
        ("marked", 1, {"one_pass": False}),
        ("qwen", 2, {"one_pass": True}),
        ("qwen", 1, {"one_pass": False}),
    ],
)
def test_each_step_is_scored_as_the_text_up_to_its_end(
    models: dict[str, Path], kind: str, world: int, how: dict[str, Any]
) -> None:
    reading = {"steps": "+", "step_token": "<s>" if kind == "marked" else None} | how
    parts = run_ranks(world, steps_rank, models[kind], models["policy"], world, reading)
    scored = {row: one for part in parts for row, one in part.items()}
    policy, own = (AutoTokenizer.from_pretrained(models[name]) for name in ("policy", kind))
    auto: Any = (
        AutoModelForTokenClassification if kind == "tokens" else AutoModelForSequenceClassification
    )
    if kind == "qwen":
        model = with_two_layers(auto.from_config(Qwen2Config.from_pretrained(models[kind]))).eval()
        model.load_state_dict(load_file(models[kind] / "model.safetensors"))
    else:
        model = auto.from_pretrained(models[kind], dtype=torch.float32).eval()
    for row, (asked, said, ends) in enumerate(ROWS):
        heads = [policy(asked + said[:end]).input_ids for end in ends]
        if not ends:
            heads = [[*policy(asked + said).input_ids, policy.eos_token_id]]
        if kind == "encoder":
            heads = [own(asked + said[:end]).input_ids for end in ends or [None]]
        if kind == "marked":
            texts = [said[:end].replace("+", "<s>") for end in ends]
            if row == 1:  # what is blank is no step, and its separator is text
                texts = ["+0<s>", "+0<s>+77<s>"]
            texts = [text.removesuffix("<s>") + "<s>" for text in texts]
            heads = [own(f"u!{asked}?a!{text}").input_ids for text in texts]
            heads = heads or [own(f"u!{asked}?a!?").input_ids]
        longest = how.get("longest", 99)
        due = [score_by_the_library(model, head[-longest:]) for head in heads]
        one = scored[row]
        assert one.spans is not None
        assert [end for end, _ in one.spans] == ends
        assert [reward for _, reward in one.spans] == pytest.approx(
            [0.5 * score for score in due if ends], abs=1e-5
        )
        assert one.score == pytest.approx(0.5 * sum(due), abs=1e-5)
        assert one.figures["reward_model"] == pytest.approx(sum(due), abs=1e-5)
        texts_cut = len(policy(asked + said).input_ids) + 1 > longest
        assert one.figures["reward_model_cut"] == float(texts_cut)


@pytest.mark.parametrize(
    ("world", "flags"),
    [
        (1, []),
        wide(3, ["--placement.actor=2"]),
        wide(2, ["--placement.mode=colocated", "--value.sequence-parallel=2"]),
        wide(2, ["--placement.mode=colocated", "--value.tensor-parallel=2"]),
    ],
)
def test_a_run_pays_the_steps(
    models: dict[str, Path], tmp_path: Path, world: int, flags: list[str]
) -> None:
    """Samples show what each step got: the row's sum is its score."""
    argv = [f"--reward.model={models['tokens']}", "--reward.label=good", "--reward.function=none"]
    argv += [f"--policy.path={models['policy']}", f"--run-dir={tmp_path}", "--steps=1"]
    argv += ["--reward.steps=e", "--rollout.batch-size=16", "--rollout.max-new-tokens=40"]
    argv += ["--log.validate-every=0", "--ppo.mini-batches=1", "--log.samples=16", *flags]
    run_ranks(world, main_rank, argv)
    (record,) = records(tmp_path, "critic")
    lines = (tmp_path / "samples" / "step_000001.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    tokenizer = AutoTokenizer.from_pretrained(models["policy"])
    model: Any = AutoModelForTokenClassification.from_pretrained(
        models["tokens"], dtype=torch.float32
    ).eval()
    counts = []
    whole = 0
    for row in rows:
        texts, rewards = row["tokens"]["text"], row["tokens"]["reward"]
        ends = step_ends(row["response"], "e")
        counts.append(len(ends))
        due = [0.0] * len(texts)
        for end in ends:
            at = next(i for i in range(len(texts)) if len("".join(texts[: i + 1])) == end)
            head = tokenizer(row["prompt"] + row["response"][:end]).input_ids
            due[at] = score_by_the_library(model, head)
        if all(texts[:-1]):  # the model reads all tokens, also those without a text
            whole += 1
            assert rewards == pytest.approx(due, abs=2e-4)
        assert row["score"] == pytest.approx(sum(rewards), abs=1e-3)
    assert max(counts) > 1
    assert whole > len(rows) / 3
    if len(rows) == 16:
        assert record["critic/spans/mean"] == pytest.approx(sum(counts) / 16)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--reward.steps=+"], "reward.steps='+' needs a reward.model"),
        (["--reward.label=good"], "reward.label='good' needs a reward.model"),
        (["--reward.step-token=<s>", "--reward.model={marked}"], "reward.steps is unset"),
        (["--reward.model={labels}"], "has the labels bad, good,"),
        (["--reward.model={labels}", "--reward.label=fine"], "reward.label=fine: "),
        (["--reward.model={decoder}", "--reward.label=LABEL_0"], "has the labels"),
        (["--reward.model={decoder}", "--reward.steps="], "reward.steps="),
        (["--reward.model={decoder}", r"--reward.steps=\n\n"], "a spelled-out escape"),
    ],
)
def test_steps_and_labels_that_are_none_are_refused(
    models: dict[str, Path], flags: list[str], says: str, capsys: Any
) -> None:
    paths = {name: str(path) for name, path in models.items()}
    assert train.main([*(flag.format(**paths) for flag in flags), "--dry-run"]) == 2
    assert says in capsys.readouterr().err


def test_steps_share_a_pass_where_the_model_is_causal(models: dict[str, Path]) -> None:
    """Also without the kernel, on CPUs. A model that scores rows as a whole stays as it was."""
    for name, label, causal in (
        ("decoder", None, True),
        ("labels", "good", True),
        ("tokens", "good", True),
        ("qwen", "good", True),
        ("encoder", None, False),
    ):
        path = str(models[name])
        for steps in ("+", None):
            config = Config(reward=RewardConfig(model=path, label=label, steps=steps))
            model = read_model(config, "reward", path, {}, False, True)
            assert model.packed is (causal and steps is not None), name


def joined_tokenizer(*tokens: str) -> Any:
    """A token for each of these texts, whose ids are their numbers."""
    inner: Any = Tokenizer(WordLevel({token: i for i, token in enumerate(tokens)}, tokens[0]))
    inner.decoder = Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


def test_steps_of_the_policys_own_tokens() -> None:
    """A token may end two steps; what an environment answered is behind them."""
    tokenizer = joined_tokenizer("?", "a", "+b+", "c")
    prompt = Prompt("?", [0], "", "", {})
    mask = [True, False, True, True, True, False, False]
    row = episode(0, [0], [1, 0, 1, 2, 3, 0, 0], mask=mask)
    text = RewardText(tokenizer, tokenizer, longest=99, steps="+", one_pass=True)
    reading = text.encode(prompt, row)
    assert reading.texts == [(row.ids.tolist(), 4)]
    assert (reading.ends, reading.which) == ([2, 4, 5], [0, 0, 1])


@pytest.mark.parametrize(("marker", "last"), [("<s>", "<s>"), (None, "[SEP]")])
def test_a_pass_a_step_ends_with_the_marker_or_with_what_ends_each_text(
    models: dict[str, Path], marker: str | None, last: str
) -> None:
    policy, own = (AutoTokenizer.from_pretrained(models[name]) for name in ("policy", "encoder"))
    own.add_special_tokens({"additional_special_tokens": ["<s>"]})
    text = RewardText(own, policy, longest=99, steps="+", step_token=marker)
    row = episode(0, [1], policy("1+2").input_ids)
    reading = text.encode(Prompt("5=", [1], "", "", {}), row)
    assert [own.convert_ids_to_tokens(ids[-1]) for ids, _ in reading.texts] == [last, last]


@pytest.mark.parametrize(
    ("template", "due"),
    [
        ("{{ m.content | trim }}!", "12=!  1+2  !"),
        ("{{ m.content }}!", "12=!  1+2  !"),
        ("{{ m.content[:2] }}!", "12!  1+2  !"),
        ("{{ '!' }}", "!!  1+2  "),
    ],
)
def test_a_template_may_strip_messages_or_leave_parts_out(
    models: dict[str, Path], template: str, due: str
) -> None:
    """The response is whole all the same."""
    policy, own = (AutoTokenizer.from_pretrained(models[name]) for name in ("policy", "marked"))
    own.chat_template = f"{{% for m in messages %}}{template}{{% endfor %}}"
    ids = policy("  1+2  ").input_ids
    text = RewardText(own, policy, longest=99, steps="+", one_pass=True)
    reading = text.encode(Prompt("12=", [1], "", "", {}), episode(0, [1], ids))
    ((read, first),) = reading.texts
    places = [first + which for which in reading.which]
    assert own.decode(read).replace(" ", "") == due.replace(" ", "")
    assert own.decode([read[places[0]]]) == "+"
    assert own.decode(read[: places[1] + 1]).rstrip().endswith("2")
    assert reading.ends == [4, 7]


def test_steps_end_in_the_response_and_not_where_its_text_stands_again(models: dict[str, Path]):
    policy, own = (AutoTokenizer.from_pretrained(models[name]) for name in ("policy", "marked"))
    own.chat_template = "{% for m in messages %}{{ m.content }}!12!{% endfor %}"
    text = RewardText(own, policy, longest=99, steps="+", one_pass=True)
    ids = policy("12").input_ids
    reading = text.encode(Prompt("1=", [1], "", "", {}), episode(0, [1], ids))
    ((read, first),) = reading.texts
    (place,) = [first + which for which in reading.which]
    assert own.decode(read[: place + 1]).replace(" ", "") == "1=!12!12"


def test_a_token_holds_an_end_by_where_it_stands_in_the_text() -> None:
    special, nothing = (0, 0), []
    offsets = [special, (0, 1), (1, 2), (1, 2), (3, 4), special]
    assert find_places(offsets, [1, 2, 3, 4]) == [1, 3, 3, 4]
    assert find_places(offsets, nothing) == nothing


def test_a_step_without_a_finite_score_fails_the_row() -> None:
    model: Any = SimpleNamespace(text=SimpleNamespace(steps="+"))
    reading = Reading([([1, 2, 3], 1)], [0, 1], [4, 9], cut=False)
    reward = RewardConfig(model="m", model_weight=0.5, failed_score=7.0)
    scored = RewardModel._score(model, reading, [1.0, float("nan")], reward)
    assert (scored.score, scored.spans) == (3.5, [])
    assert [failure.kind for failure in scored.failures] == ["invalid"]
    fine = RewardModel._score(model, reading, [1.0, 2.0], reward)
    assert (fine.score, fine.spans, fine.failures) == (1.5, [(4, 0.5), (9, 1.0)], ())


def test_a_tokenizer_that_knows_no_places_is_refused() -> None:
    with pytest.raises(UserError, match="does not map characters"):
        check_steps(SimpleNamespace(is_fast=False), RewardConfig(model="m", steps="+"))
    check_steps(SimpleNamespace(is_fast=False), RewardConfig(model="m"))
