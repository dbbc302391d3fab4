"""The reward model: its texts, its scores against the library's, and a value model that starts from
it."""

import json
import math
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from episodes import episode
from ranks import run_ranks
from runs import main_rank, records
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch.distributed.device_mesh import init_device_mesh
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForSequenceClassification,
    PreTrainedTokenizerFast,
)

from splitppo import train
from splitppo.config import RewardConfig
from splitppo.job.collectives import Group
from splitppo.models import build as ours
from splitppo.models import weights
from splitppo.models.runner import Runner
from splitppo.models.sharding import parallelize
from splitppo.models.tiny import build_tiny
from splitppo.models.tokenizer import read_tokenizer
from splitppo.rewards.model import RewardModel, RewardText, longest_text
from splitppo.rollout import Episode, Prompt

CPU = torch.device("cpu")
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789=+?! "


def letters(folder: Path, *, encoder: bool) -> Any:
    """A tokenizer of characters; an encoder's puts [CLS] and [SEP] around a text."""
    vocab = {name: i for i, name in enumerate(["[PAD]", "[CLS]", "[SEP]", "[UNK]", *LETTERS])}
    inner = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")  # type: ignore[assignment]
    if encoder:
        inner.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="[PAD]", model_max_length=24
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A policy, an encoder with its own tokenizer, and a decoder with the policy's."""
    root = tmp_path_factory.mktemp("models")
    build_tiny(root / "policy", seed=1)
    letters(root / "encoder", encoder=True)
    torch.manual_seed(0)
    shape: Any = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    shape["num_labels"] = 1
    bert = BertConfig(vocab_size=4 + len(LETTERS), max_position_embeddings=32, **shape)
    spread(BertForSequenceClassification(bert)).save_pretrained(root / "encoder")
    policy = ours.read_config(str(root / "policy"))
    shape |= {"vocab_size": policy.vocab_size, "max_position_embeddings": 64, "pad_token_id": None}
    llama = LlamaConfig(**shape)
    spread(LlamaForSequenceClassification(llama)).save_pretrained(root / "decoder")
    AutoTokenizer.from_pretrained(root / "policy").save_pretrained(root / "decoder")
    return {name: root / name for name in ("policy", "encoder", "decoder")}


def spread(model: Any) -> Any:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model


def some_rows(tokenizer: Any) -> tuple[list[Prompt], list[Episode]]:
    prompts, samples = [], []
    for row, (asked, said) in enumerate(
        (("12=", "12"), ("312=", "3123123"), ("0=", ""), ("21=", "2113"))
    ):
        tokens, response = (tokenizer(text)["input_ids"] for text in (asked, said))
        prompts.append(Prompt(asked, tokens, "echo", said, {}))
        samples.append(
            episode(
                row, tokens, [*response, tokenizer.eos_token_id], [0.0] * (len(response) + 1), "eos"
            )
        )
    return prompts, samples


def by_the_library(folder: Path, texts: list[list[int]]) -> list[float]:
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return [float(model(input_ids=torch.tensor([ids])).logits) for ids in texts]


def scores_of_rank(
    rank: int, folder: Path, policy: Path, offload: bool, world: int
) -> dict[int, float]:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("rows",))
    tokenizer = AutoTokenizer.from_pretrained(policy)
    config = ours.read_config(str(folder))
    model = ours.build(config, "reward")
    model.requires_grad_(False)
    parallelize(model, mesh, dtype=torch.float32, activation_checkpointing=False)
    weights.fill(model, str(folder), device=CPU)
    own = read_tokenizer(str(folder))
    text = RewardText(own, tokenizer, longest=longest_text(config, own))
    found = RewardModel(model, Runner(Group(mesh), CPU, 24), text, offload=offload)
    prompts, samples = some_rows(tokenizer)
    # a rank without rows takes part
    mine = {1: [[0, 1, 2, 3]], 3: [[0, 1, 3], [2], []]}[world][rank]
    scored = found.score([prompts[i] for i in mine], [samples[i] for i in mine], RewardConfig())
    assert all(row.spans is None for row in scored)
    return {i: row.score for i, row in zip(mine, scored, strict=True)}


@pytest.mark.parametrize(
    ("kind", "world", "offload"), [("encoder", 1, False), ("decoder", 3, True)]
)
def test_scores_are_the_librarys(
    folders: dict[str, Path], kind: str, world: int, offload: bool
) -> None:
    parts = run_ranks(world, scores_of_rank, folders[kind], folders["policy"], offload, world)
    found = {row: score for part in parts for row, score in part.items()}
    tokenizer, own = (AutoTokenizer.from_pretrained(folders[name]) for name in ("policy", kind))
    prompts, samples = some_rows(tokenizer)
    if kind == "encoder":
        texts = [
            own(p.text + tokenizer.decode(s.response, skip_special_tokens=True))["input_ids"]
            for p, s in zip(prompts, samples, strict=True)
        ]
        assert texts[0][0] == 1
        assert texts[0][-1] == 2
    else:
        texts = [s.ids.tolist() for s in samples]  # the policy's own ids
    expected = by_the_library(folders[kind], texts)
    assert len(found) == 4
    for row, score in found.items():
        assert score == pytest.approx(expected[row], abs=1e-5), row
    assert len({round(score, 3) for score in expected}) == 4


def whole(text: RewardText, prompt: Prompt, sample: Episode) -> tuple[list[int], bool]:
    """The ids of a row that is scored as a whole, and whether its beginning was cut."""
    reading = text.encode(prompt, sample)
    ((ids, first),) = reading.texts
    assert (first, reading.ends, reading.which) == (len(ids) - 1, [], [0])
    return ids, reading.cut


def test_a_long_text_loses_its_beginning_and_that_is_counted(folders: dict[str, Path]) -> None:
    tokenizer, own = (
        AutoTokenizer.from_pretrained(folders[name]) for name in ("policy", "encoder")
    )
    text = RewardText(own, tokenizer, longest=8)
    prompts, samples = some_rows(tokenizer)
    assert whole(text, prompts[1], samples[1]) == (own("123123")["input_ids"], True)
    assert whole(text, prompts[0], samples[0]) == (own("12=12")["input_ids"], False)
    same = RewardText(tokenizer, tokenizer, longest=5)
    assert whole(same, prompts[1], samples[1]) == (samples[1].ids[-5:].tolist(), True)


def test_a_chat_template_of_its_own_is_used(folders: dict[str, Path]) -> None:
    tokenizer, own = (
        AutoTokenizer.from_pretrained(folders[name]) for name in ("policy", "encoder")
    )
    own.chat_template = (
        "{% for m in messages %}{{ m['role'][0] + '!' + m['content'] + '?' }}{% endfor %}"
    )
    prompts, samples = some_rows(tokenizer)
    text = RewardText(own, tokenizer, longest=99)
    spoken = whole(text, prompts[0], samples[0])[0]
    assert own.decode(spoken).replace(" ", "") == "u!12=?a!12?"
    system = Prompt(
        "x", prompts[0].tokens, "echo", "", {}, messages=[{"role": "system", "content": "hi"}]
    )
    spoken = whole(text, system, samples[0])[0]
    assert own.decode(spoken).replace(" ", "") == "s!hi?a!12?"
    own.chat_template = None
    plain = RewardText(own, tokenizer, longest=99)
    assert whole(plain, system, samples[0])[0] == own("hi\n12")["input_ids"]


def test_a_run_learns_from_a_model_and_a_function(folders: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def letters(data_source, solution_str, ground_truth, extra_info):\n"
        "    return {'score': len(solution_str), 'letters': len(solution_str)}\n"
    )
    argv = [
        "--steps=3",
        f"--run-dir={tmp_path / 'run'}",
        "--rollout.batch-size=16",
        "--log.validate-every=0",
    ]
    argv += [
        f"--reward.model={folders['encoder']}",
        "--reward.model-weight=0.5",
        "--ppo.mini-batches=2",
    ]
    argv += [
        f"--policy.path={folders['policy']}",
        "--rollout.max-new-tokens=5",
        "--reward.weights=2.0",
    ]
    argv += [f"--reward.function={tmp_path / 'mine.py'}:letters"]
    run_ranks(2, main_rank, argv)
    for record in records(tmp_path / "run", "critic"):
        assert record["critic/reward_model_cut/mean"] == 0
        parts = 0.5 * record["critic/reward_model/mean"] + 2 * record["critic/reward/letters/mean"]
        assert record["critic/score/mean"] == pytest.approx(parts, abs=1e-5)
        assert record["critic/reward_model/min"] < record["critic/reward_model/max"]


def failing_rank(rank: int, argv: list[str], every: int) -> int:
    """A run whose reward model gives row r the score r % 4, but nan where r % every is every -
    1."""

    def run(self: RewardModel, texts: Any) -> list[torch.Tensor]:
        scores = [
            math.nan if text.row % every == every - 1 else float(text.row % 4) for text in texts
        ]
        return [torch.tensor(scores)]

    cast(Any, RewardModel).run = run
    return train.main(argv)


def test_a_score_that_is_not_finite_is_a_failure(
    folders: dict[str, Path], tmp_path: Path, capfd
) -> None:
    """As a function's: it counts as failed_score, is left out of the moments, is counted, and named
    with its row."""
    argv = [
        "--steps=9",
        f"--run-dir={tmp_path / 'run'}",
        "--rollout.batch-size=16",
        "--log.validate-every=0",
    ]
    argv += [
        f"--reward.model={folders['encoder']}",
        f"--policy.path={folders['policy']}",
        "--rollout.max-new-tokens=2",
    ]
    argv += (
        "--reward.function=none --reward.model-weight=0.5 --reward.failed-score=7 "
        "--ppo.mini-batches=1"
    ).split()
    one = [*argv, "--steps=1", "--reward.normalize=batch"]
    assert run_ranks(2, failing_rank, one, 4) == [0, 0]
    (record,) = records(tmp_path / "run", "critic")
    assert (record["critic/reward_failures"], record["critic/reward_failures/invalid"]) == (4, 4)
    assert record["critic/score/max"] == 0.5 * 7
    # the others are 0, 0.5, 1, four of each
    mean, deviation = 0.5, (8 * 0.25 / 11) ** 0.5
    assert record["critic/rewards/max"] == pytest.approx((3.5 - mean) / deviation)
    assert record["critic/rewards/min"] == pytest.approx((0 - mean) / deviation)
    assert "reward model: 4 x invalid, first of row 3: reward.model=" in capfd.readouterr().out
    assert run_ranks(1, failing_rank, [*argv, f"--run-dir={tmp_path / 'all'}"], 1) == [2]
    (error,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert error.startswith(
        "error: reward reward model failed on every row for 3 steps: reward.model="
    )


def test_a_value_model_starts_as_the_reward_model(folders: dict[str, Path], tmp_path: Path) -> None:
    """Its value of the last state but one is what the reward model would say of the text so far."""
    argv = [
        "--steps=1",
        f"--run-dir={tmp_path / 'run'}",
        "--rollout.batch-size=8",
        "--log.validate-every=0",
    ]
    argv += [
        f"--value.path={folders['decoder']}",
        f"--policy.path={folders['policy']}",
        "--rollout.max-new-tokens=1",
    ]
    argv += [
        f"--reward.model={folders['decoder']}",
        "--reward.function",
        "none",
        "--ppo.mini-batches=1",
    ]
    argv += ["--log.samples=8", "--rollout.max-prompt-tokens=32"]
    run_ranks(1, main_rank, argv)
    rows = [
        json.loads(line)
        for line in (tmp_path / "run" / "samples" / "step_000001.jsonl").read_text().splitlines()
    ]
    tokenizer = AutoTokenizer.from_pretrained(folders["policy"])
    values = by_the_library(
        folders["decoder"], [tokenizer(row["prompt"])["input_ids"] for row in rows]
    )
    assert records(tmp_path / "run", "critic")[0]["critic/values/mean"] == pytest.approx(
        sum(values) / len(values), abs=1e-4
    )


def test_an_encoders_rows_are_not_cut(folders: dict[str, Path], capsys) -> None:
    argv = [f"--reward.model={folders['encoder']}", "--placement.mode=colocated", "--dry-run"]
    cut = ["--world-size=2", "--value.sequence-parallel=2"]
    assert train.main([*argv, *cut]) == 2
    said = capsys.readouterr().err
    assert (
        f"reward.sequence_parallel=2: reward.model={folders['encoder']}: its rows can't be" in said
    )
    assert said.strip().endswith("set --reward.sequence-parallel 1")
    assert train.main([*argv, *cut, "--reward.sequence-parallel=1"]) == 0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"num_labels": 2, "id2label": {"0": "a", "1": "b"}, "label2id": {"a": 0, "b": 1}},
            "reward.label=unset: ",
        ),
        ({"model_type": "mamba"}, "is not a sequence-classification model"),
    ],
)
def test_a_model_that_is_no_reward_is_refused(
    folders: dict[str, Path], tmp_path: Path, change, says, capsys
) -> None:
    for file in folders["encoder"].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    assert train.main([f"--reward.model={tmp_path}", "--steps=1"]) == 2
    assert says in capsys.readouterr().err
