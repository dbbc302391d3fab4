"""Whole runs with what users bring: rewards that misbehave, verl's files as they are, data mixed by
weights."""

import contextlib
import io
import json
import re
import string
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

import pyarrow
import pyarrow.parquet
import pytest
import torch
from ranks import run_ranks
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from splitppo import train

SMALL = (
    "--steps=2",
    "--rollout.batch-size=8",
    "--ppo.mini-batches=2",
    "--log.validate-every=0",
    "--log.samples=8",
)
PLAIN = ("--data.prompt-key=question", "--data.answer-key=answer")  # columns
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content "
    "}}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ASK = 'Let\'s think step by step and output the final answer after "####".'

TROUBLE = """
import math, os

def score(data_source, solution_str, ground_truth, extra_info):
    index, how = extra_info["index"], extra_info["how"]
    if how == "raise":
        raise ValueError("the reward's own trouble")
    if how == "exit":
        os._exit(3)
    return {"nan": math.nan}.get(how, index / 100)
"""


SEVERAL = """
def length(data_source, solution_str, ground_truth, extra_info=None):
    digits = sum(c.isdigit() for c in solution_str)
    return {"score": len(solution_str) / 10, "digits": digits, "text": solution_str}

async def judge(data_source, solution_str, ground_truth, extra_info=None):
    return 0.5 if ground_truth in solution_str else -0.5

def held_out(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": 1.0, "letters": sum(c.isalpha() for c in solution_str)}
"""

# Laid out as verl's own reward for GSM8K is: names of two methods, a window at the end, helpers, a
# score for the form.
VERL_REWARD = '''
import re

_CLIP_CHARS = 300


def extract_solution(solution_str, method="strict"):
    assert method in ["strict", "flexible"]
    if len(solution_str) > _CLIP_CHARS:
        solution_str = solution_str[-_CLIP_CHARS:]
    if method == "strict":
        solutions = re.findall("#### (\\\\-?[0-9\\\\.\\\\,]+)", solution_str)
        return solutions[-1].replace(",", "").replace("$", "") if solutions else None
    found = re.findall("(\\\\-?[0-9\\\\.\\\\,]+)", solution_str)
    answers = [answer for answer in found if answer not in ["", "."]]
    return answers[-1] if answers else None


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Scores a solution; `extra_info` is the row's."""
    assert data_source == "openai/gsm8k" and isinstance(ground_truth, str)
    assert set(extra_info) == {"split", "index", "answer", "question"}
    assert extra_info["answer"].endswith("#### " + ground_truth)
    answer = extract_solution(solution_str)
    if answer is None:
        return 0.1 if extract_solution(solution_str, method="flexible") else 0
    return 1.0 if answer == ground_truth else 0.2
'''


def main_rank(rank: int, argv: Sequence[str]) -> str:
    """What a rank prints; an error if it did not end well."""
    with (
        contextlib.redirect_stdout(io.StringIO()) as said,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        status = train.main(argv)
    if status:
        raise RuntimeError(f"exit status {status}: {err.getvalue()}")
    return said.getvalue()


def run(folder: Path, *argv: str, world: int = 2) -> str:
    """A run in `folder`; returns what its ranks print."""
    return "".join(run_ranks(world, main_rank, [*SMALL, *argv, f"--run-dir={folder}"]))


def jsonl(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def records(folder: Path, role: str) -> dict[int, dict]:
    """step -> the metrics of a role."""
    return {record["step"]: record for record in jsonl(folder / "metrics" / f"{role}.jsonl")}


def samples(folder: Path, kind: str = "samples") -> Iterator[tuple[int, list[dict]]]:
    """Each step's rows."""
    files = sorted((folder / kind).glob("step_*.jsonl"))
    assert files
    for file in files:
        yield int(file.stem.removeprefix("step_")), jsonl(file)


def write_jsonl(path: Path, rows: Sequence[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def build_policy(folder: Path, *, template: str | None) -> Path:
    """A model of few tokens, some of them whole answers, so that what it says at random is right
    now and then.

    Characters that it lacks, such as those of the template's marks, are its token of the unknown.
    """
    words = [
        "<pad>",
        "<eos>",
        "?",
        "#### 7",
        "#### 12",
        "7",
        "12",
        " ",
        "x",
        *string.ascii_uppercase[:3],
    ]
    inner = Tokenizer(
        models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="?")
    )
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")  # type: ignore[assignment]
    inner.decoder = decoders.Fuse()  # type: ignore[assignment]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>"
    )
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "vocab_size": len(words),
    }
    ids = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(
            LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes, **ids)
        ).save_pretrained(folder)
    return folder


def gsm8k_rows(split: str, count: int) -> list[dict]:
    """Rows of verl's schema, made as verl's own preparation makes them."""
    rows = []
    for index in range(count):
        question, truth = (
            f"Tom has {index} eggs and buys {7 - index % 3} more. How many now?",
            ("7", "12")[index % 2],
        )
        answer = f"He buys eggs, {index} + 2 = <<{index}+2={truth}>>{truth}.\n#### {truth}"
        rows.append(
            {
                "data_source": "openai/gsm8k",
                "prompt": [{"role": "user", "content": f"{question} {ASK}"}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": truth},
                "extra_info": {
                    "split": split,
                    "index": index,
                    "answer": answer,
                    "question": question,
                },
            }
        )
    return rows


def last_number(text: str, pattern: str) -> str | None:
    found = re.findall(pattern, text)
    return found[-1] if found else None


def test_auto_for_held_out_rows_needs_no_rule_for_the_others(tmp_path: Path) -> None:
    mine, echo = (
        write_jsonl(tmp_path / f"{of}.jsonl", [{"question": "1=", "answer": "1"}] * 4)
        for of in ("my", "echo")
    )
    rewards = (
        "--reward.function=exact_match --reward.validation=auto --log.validate-every=1"
    ).split()
    flags = [
        f"--data.files={mine}",
        f"--data.validation-files={echo}",
        *PLAIN,
        *rewards,
        "--steps=1",
    ]
    run(tmp_path / "run", *flags, world=1)
    assert "val/score/mean" in records(tmp_path / "run", "actor")[0]


def test_failures_of_all_critic_ranks_are_counted_once(tmp_path: Path) -> None:
    file = tmp_path / "reward.py"
    file.write_text(TROUBLE)
    hows = ["raise", "", "nan", "exit", "", "raise", "", "raise"]
    rows = [
        {"question": f"{i}=", "extra_info": {"index": i, "how": how}} for i, how in enumerate(hows)
    ]
    data = write_jsonl(tmp_path / "rows.jsonl", rows)
    given = ["--data.prompt-key=question", "--data.answer-key=", f"--reward.function={file}:score"]
    held_out = write_jsonl(tmp_path / "held_out.jsonl", rows[:4])
    given += [f"--data.validation-files={held_out}", "--log.validate-every=2"]
    out = run(tmp_path / "run", f"--data.files={data}", *given, "--placement.critic=2", world=3)
    counts = {"error": 3, "invalid": 1, "crash": 1}
    due: dict[str, float] = {
        f"critic/reward_failures/{kind}": count for kind, count in counts.items()
    }
    due["critic/reward_failures/share"] = 5 / 8
    for record in records(tmp_path / "run", "critic").values():
        assert {name: v for name, v in record.items() if "reward_f" in name} == due | {
            "critic/reward_failures": 5
        }
        assert record["critic/score/mean"] == pytest.approx((1 + 4 + 6) / 100 / 8)
    validations = [
        record for record in records(tmp_path / "run", "actor").values() if "val/rows" in record
    ]
    assert [record["val/failures"] for record in validations] == [3, 3]
    assert [record["val/score/mean"] for record in validations] == pytest.approx([1 / 100 / 4] * 2)
    lines = [line for line in out.splitlines() if line.startswith("[critic] rewards that failed")]
    assert len(lines) == 2
    for line in lines:
        assert all(
            f"score: {count} x {kind}, first of row " in line for kind, count in counts.items()
        )


def test_several_functions_make_a_weighted_sum_and_figures_of_their_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(SEVERAL)
    policy = build_policy(tmp_path / "policy", template=None)
    rows = [{"question": f"{'ABC'[i % 3]}=", "answer": ("7", "12")[i % 2]} for i in range(6)]
    data = write_jsonl(tmp_path / "rows.jsonl", rows)
    held_out = write_jsonl(tmp_path / "held_out.jsonl", rows[:3])
    functions = ["--reward.function", f"{file}:length", f"{file}:judge", "gsm8k_flexible"]
    weights = [
        "--reward.weights",
        "0.5",
        "2",
        "-1",
        f"--reward.validation={file}:held_out",
        "--reward.workers=2",
    ]
    files = [
        f"--data.files={data}",
        f"--data.validation-files={held_out}",
        *PLAIN,
        "--log.validate-every=2",
    ]
    run(
        tmp_path / "run",
        f"--policy.path={policy}",
        *functions,
        *weights,
        *files,
        "--rollout.max-new-tokens=6",
    )
    for step, rows in samples(tmp_path / "run"):
        texts, truths = [row["response"] for row in rows], [row["ground_truth"] for row in rows]
        parts = {
            "length": [len(text) / 10 for text in texts],
            "judge": [
                0.5 if truth in text else -0.5 for text, truth in zip(texts, truths, strict=True)
            ],
            "gsm8k_flexible": [
                float(last_number(a, r"\d+") == b) for a, b in zip(texts, truths, strict=True)
            ],
        }
        due = [0.5 * a + 2 * b - c for a, b, c in zip(*parts.values(), strict=True)]
        assert [row["score"] for row in rows] == pytest.approx(due, abs=1e-5)
        record = records(tmp_path / "run", "critic")[step]
        figures = {f"critic/reward/{name}/score": scores for name, scores in parts.items()} | {
            "critic/score": due
        }
        figures["critic/reward/length/digits"] = [
            sum(char.isdigit() for char in text) for text in texts
        ]
        for name, values in figures.items():
            for kind, pick in (("mean", fmean), ("min", min), ("max", max)):
                assert record[f"{name}/{kind}"] == pytest.approx(pick(values), abs=1e-5), name
        assert not [name for name in record if name.startswith("critic/reward/length/text")]
    for step, rows in samples(tmp_path / "run", "validation"):
        record = records(tmp_path / "run", "actor")[step]
        assert (record["val/score/mean"], record["val/rows"]) == (1.0, 3)
        letters = [sum(char.isalpha() for char in row["response"]) for row in rows]
        assert record["val/reward/letters/mean"] == pytest.approx(fmean(letters))


def test_verls_files_run_as_they_are(tmp_path: Path) -> None:
    """Data, held-out data and reward file of a verl user, by flags alone."""
    policy = build_policy(tmp_path / "policy", template=CHAT)
    (tmp_path / "gsm8k.py").write_text(VERL_REWARD)
    for split, count in (("train", 16), ("test", 5)):
        table = pyarrow.Table.from_pylist(gsm8k_rows(split, count))
        pyarrow.parquet.write_table(table, tmp_path / f"{split}.parquet")
    files = [
        f"--data.files={tmp_path}/train.parquet",
        f"--data.validation-files={tmp_path}/test.parquet",
    ]
    reward = [f"--reward.function={tmp_path}/gsm8k.py:compute_score"]
    # an epoch a step
    small = (
        "--rollout.batch-size=16 --log.samples=16 --rollout.max-new-tokens=8 --log.validate-every=2"
    ).split()
    run(tmp_path / "run", f"--policy.path={policy}", *files, *reward, *small)

    def due(row: dict) -> float:
        answer = last_number(row["response"], r"#### (\d+)")
        if answer is None:
            return 0.1 if re.search(r"\d", row["response"]) else 0.0
        return 1.0 if answer == row["ground_truth"] else 0.2

    def asked(split: str, count: int) -> list[str]:
        contents = [row["prompt"][0]["content"] for row in gsm8k_rows(split, count)]
        return [f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n" for text in contents]

    seen = set()
    for step, rows in samples(tmp_path / "run"):
        assert sorted(row["prompt"] for row in rows) == sorted(asked("train", 16))
        assert {row["data_source"] for row in rows} == {"openai/gsm8k"}
        assert [row["score"] for row in rows] == [due(row) for row in rows]
        record = records(tmp_path / "run", "critic")[step]
        assert record["critic/reward_failures"] == 0
        assert record["critic/score/mean"] == pytest.approx(fmean(due(row) for row in rows))
        seen |= {row["score"] for row in rows}
    assert {0.1, 1.0} <= seen or {0.0, 1.0} <= seen
    validations = dict(samples(tmp_path / "run", "validation"))
    assert list(validations) == [0, 2]
    for step, rows in validations.items():
        assert [row["prompt"] for row in rows] == asked("test", 5)
        assert [row["ground_truth"] for row in rows] == ["7", "12", "7", "12", "7"]
        assert [row["score"] for row in rows] == [due(row) for row in rows]
        record = records(tmp_path / "run", "actor")[step]
        assert record["val/score/mean"] == pytest.approx(fmean(due(row) for row in rows))
        assert "val/failures" not in record
