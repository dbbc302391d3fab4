"""Whole runs with what users bring: rewards that misbehave, verl's files as they are, data mixed by
weights."""

import contextlib
import io
import json
import re
import shutil
import string
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from splitppo import train
from splitppo.tools.export import export

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
import asyncio, math, os, time

def score(data_source, solution_str, ground_truth, extra_info):
    index, how = extra_info["index"], extra_info["how"]
    if how == "sleep":
        time.sleep(60)
    if how == "raise":
        raise ValueError("the reward's own trouble")
    if how == "exit":
        os._exit(3)
    if how == "kill":
        os.kill(os.getpid(), 9)
    return {"nan": math.nan, "text": "1.0", "no score": {"acc": 1}}.get(how, index / 100)

async def score_async(data_source, solution_str, ground_truth, extra_info):
    await asyncio.sleep(60 if extra_info["how"] == "sleep" else 0.01)
    how = extra_info["how"].replace("sleep", "")
    return score(data_source, solution_str, ground_truth, {**extra_info, "how": how})
"""

# how a function failed -> how a line on the screen begins to tell it
TOLD = {
    "sleep": "took longer than reward.timeout=0.5 s",
    "raise": "ValueError: the reward's own trouble ({file}, line 9, in score)",
    "nan": "returned nan: 'score' is not a finite number",
    "text": "returned '1.0': 'score' is not a finite number",
    "no score": "returned {{'acc': 1}}: it has no score",
    "exit": "its process ended with status 3",
    "kill": "its process was killed by SIGKILL",
}
KIND_OF = {"sleep": "timeout", "raise": "error", "exit": "crash", "kill": "crash"}
KIND_OF |= dict.fromkeys(("nan", "text", "no score"), "invalid")

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


@pytest.mark.parametrize(
    ("function", "bad"),
    [
        (
            "score",
            {0: "raise", 1: "nan", 2: "exit", 4: "text", 5: "raise", 6: "no score", 7: "kill"},
        ),
        ("score_async", {1: "exit", 6: "kill"}),
        ("score_async", {3: "sleep"}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value.values()),
)
def test_rows_that_a_reward_fails_on_are_counted_named_and_cost_no_other_its_score(
    function: str, bad: dict[int, str], tmp_path: Path
) -> None:
    file = tmp_path / "reward.py"
    file.write_text(TROUBLE)
    rows = [
        {"question": f"{i}=", "extra_info": {"index": i, "how": bad.get(i, "")}} for i in range(8)
    ]
    data = write_jsonl(tmp_path / "rows.jsonl", rows)
    score = [
        f"--reward.function={file}:{function}",
        "--reward.failed-score=-2",
        "--data.answer-key=",
    ]
    limit = ["--reward.timeout=0.5"] if "sleep" in bad.values() else []
    out = run(
        tmp_path / "run", f"--data.files={data}", "--data.prompt-key=question", *score, *limit
    )
    failed = [line for line in out.splitlines() if "rewards that failed" in line]
    assert len(failed) == 2, "one line a step"
    kinds = Counter(KIND_OF[how] for how in bad.values())
    for (step, rows), line in zip(samples(tmp_path / "run"), failed, strict=True):
        index_of = {row["row"]: int(row["prompt"].removesuffix("=")) for row in rows}
        assert sorted(index_of.values()) == list(range(8))  # 8 rows a step are an epoch
        assert {index_of[row["row"]]: row["score"] for row in rows} == {
            i: -2 if i in bad else i / 100 for i in range(8)
        }
        record = records(tmp_path / "run", "critic")[step]
        counts = {name: figure for name, figure in record.items() if "reward_failures" in name}
        counts.pop("critic/reward_failures/share", None)
        by_kind = {f"critic/reward_failures/{kind}": count for kind, count in kinds.items()}
        assert counts == by_kind | {"critic/reward_failures": len(bad)}
        assert record["critic/score/mean"] == pytest.approx(fmean(row["score"] for row in rows))
        for kind, count in kinds.items():
            found = re.search(rf"\b{function}: {count} x {kind}, first of row (\d+): ", line)
            assert found, line
            how = bad[index_of[int(found[1])]]
            assert KIND_OF[how] == kind
            assert line[found.end() :].startswith(TOLD[how].format(file=file)), line


def test_a_reward_that_no_row_ever_gets_ends_the_run(tmp_path: Path) -> None:
    """Here after its third step; one that fails now and then goes on (above)."""
    file = tmp_path / "reward.py"
    file.write_text("def score(ground_truth, **row):\n    return row['extra_info']['answr']\n")
    data = write_jsonl(
        tmp_path / "rows.jsonl", [{"question": f"{i}=", "answer": "1"} for i in range(4)]
    )
    flags = [f"--data.files={data}", *PLAIN, f"--reward.function={file}:score", "--steps=9"]
    with pytest.raises(RuntimeError, match=r"reward score failed on every row for 3 steps: KeyErr"):
        run(tmp_path / "run", *flags)
    assert list(records(tmp_path / "run", "critic")) == [1, 2]


def test_what_float32_cannot_hold_is_no_result(tmp_path: Path) -> None:
    """As a float32 it would be infinite, and all of the step's advantages with it."""
    file = tmp_path / "reward.py"
    results = "{'312': 1e300, '3': {'score': 0.5, 'acc': 1e300}}"
    file.write_text(
        f"def score(ground_truth, **row):\n    return {results}.get(ground_truth, 0.5)\n"
    )
    data = write_jsonl(
        tmp_path / "rows.jsonl",
        [{"question": f"{i}=", "answer": i} for i in ("312", "3", "0", "1")],
    )
    run(
        tmp_path / "run",
        f"--data.files={data}",
        *PLAIN,
        f"--reward.function={file}:score",
        "--steps=1",
    )
    (record,) = records(tmp_path / "run", "critic").values()
    assert record["critic/score/mean"] == pytest.approx(0.25)
    assert record["critic/reward_failures/invalid"] == 4
    assert "critic/acc/max" not in record
    assert record["critic/skipped"] == 0


def test_auto_for_held_out_rows_needs_no_rule_for_the_others(tmp_path: Path) -> None:
    mine, echo = (
        write_jsonl(tmp_path / f"{of}.jsonl", [{"question": "1=", "answer": "1"}] * 4)
        for of in ("my", "echo")
    )
    rewards = [
        "--reward.function=exact_match",
        "--reward.validation=auto",
        "--log.validate-every=1",
    ]
    flags = [
        f"--data.files={mine}",
        f"--data.validation-files={echo}",
        *PLAIN,
        *rewards,
        "--steps=1",
    ]
    run(tmp_path / "run", *flags)
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
        figures = {f"critic/{name}/score": scores for name, scores in parts.items()} | {
            "critic/score": due
        }
        figures["critic/length/digits"] = [sum(char.isdigit() for char in text) for text in texts]
        for name, values in figures.items():
            for kind, pick in (("mean", fmean), ("min", min), ("max", max)):
                assert record[f"{name}/{kind}"] == pytest.approx(pick(values), abs=1e-5), name
        assert not [name for name in record if name.startswith("critic/length/text")]
    for step, rows in samples(tmp_path / "run", "validation"):
        record = records(tmp_path / "run", "actor")[step]
        assert (record["val/score/mean"], record["val/rows"]) == (1.0, 3)
        letters = [sum(char.isalpha() for char in row["response"]) for row in rows]
        assert record["val/letters/mean"] == pytest.approx(fmean(letters))


@pytest.mark.parametrize("own", [True, False], ids=["its reward file", "auto"])
def test_verls_files_run_as_they_are(own: bool, tmp_path: Path) -> None:
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
    reward = [f"--reward.function={tmp_path}/gsm8k.py:compute_score"] if own else []
    # an epoch a step
    small = [
        "--rollout.batch-size=16",
        "--log.samples=16",
        "--rollout.max-new-tokens=8",
        "--log.validate-every=2",
    ]
    run(tmp_path / "run", f"--policy.path={policy}", *files, *reward, *small)

    def due(row: dict) -> float:
        answer = last_number(row["response"], r"#### (\d+)")
        if own and answer is None:
            return 0.1 if re.search(r"\d", row["response"]) else 0.0
        return 1.0 if answer == row["ground_truth"] else 0.2 * own

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
    assert {0.0, 1.0} <= seen or {0.1, 1.0} <= seen
    validations = dict(samples(tmp_path / "run", "validation"))
    assert list(validations) == [0, 2]
    for step, rows in validations.items():
        assert [row["prompt"] for row in rows] == asked("test", 5)
        assert [row["ground_truth"] for row in rows] == ["7", "12", "7", "12", "7"]
        assert [row["score"] for row in rows] == [due(row) for row in rows]
        record = records(tmp_path / "run", "actor")[step]
        assert record["val/score/mean"] == pytest.approx(fmean(due(row) for row in rows))
        assert "val/failures" not in record


def test_gsm8k_as_published_runs_by_flags_alone(tmp_path: Path) -> None:
    policy = build_policy(tmp_path / "policy", template=None)
    rows = [row["extra_info"] for row in gsm8k_rows("train", 16)]
    data = write_jsonl(
        tmp_path / "train.jsonl",
        [{"question": row["question"], "answer": row["answer"]} for row in rows],
    )
    held_out = write_jsonl(
        tmp_path / "test.jsonl", [{"question": "Is it A or B?", "answer": "A, 3+4.\n#### 7"}]
    )
    files = [
        f"--data.files={data}",
        f"--data.validation-files={held_out}",
        *PLAIN,
        "--reward.function=gsm8k",
    ]
    small = [
        "--rollout.batch-size=16",
        "--log.samples=16",
        "--rollout.max-new-tokens=8",
        "--log.validate-every=2",
    ]
    run(tmp_path / "run", f"--policy.path={policy}", *files, *small)
    questions, seen = {row["question"]: row["answer"] for row in rows}, set()
    for _, rows in [*samples(tmp_path / "run"), *samples(tmp_path / "run", "validation")]:
        for row in rows:
            truth = row["ground_truth"].rpartition("#### ")[2]
            assert row["ground_truth"] == questions.get(row["prompt"], "A, 3+4.\n#### 7")
            assert row["score"] == float(last_number(row["response"], r"#### (\d+)") == truth), row
            seen.add(row["score"])
    assert seen == {0.0, 1.0}


def test_two_sources_less_what_is_too_long_under_a_system_message(tmp_path: Path) -> None:
    policy = build_policy(tmp_path / "policy", template=CHAT)
    many = [{"data_source": "many", "question": "A" * i, "answer": "7"} for i in range(1, 9)]
    many += [{"data_source": "many", "question": "B" * 200, "answer": "7"}] * 3
    few = [{"data_source": "few", "question": "C" * i, "answer": "12"} for i in (1, 2)]
    files = [
        write_jsonl(tmp_path / f"{name}.jsonl", rows)
        for name, rows in (("many", many), ("few", few))
    ]
    mix = ["--data.files", *map(str, files), "--data.system=Say ABC.", *PLAIN]
    long = [
        "--data.overlong=filter",
        "--rollout.max-prompt-tokens=120",
        "--reward.function=gsm8k_flexible",
    ]
    out = run(tmp_path / "run", f"--policy.path={policy}", *mix, *long, "--steps=3")
    (told,) = [line for line in out.splitlines() if "data.overlong" in line]
    assert told.startswith(
        "data.overlong=filter: 3 of 13 rows of data.files have prompts over "
        "rollout.max_prompt_tokens=120 and are left "
        f"out; the first is {files[0]} row 9 ("
    )
    rows = [row for _, rows in samples(tmp_path / "run") for row in rows]
    assert len(rows) == 24
    assert {row["data_source"] for row in rows} == {"few", "many"}
    for row in rows:
        assert row["prompt"].startswith(
            "<|im_start|>system\nSay ABC.<|im_end|>\n<|im_start|>user\n"
        )
        asked = row["prompt"].split("\n")[3].removesuffix("<|im_end|>")
        assert asked in {
            one["question"] for one in (many[:8] if row["data_source"] == "many" else few)
        }


ADAPTIVE = (
    "--ppo.kl-coef=0.1",
    "--ppo.kl-target=0.05",
    "--ppo.kl-horizon=20",
    "--reward.normalize=running",
)
ADAPTIVE += ("--checkpoint.every=2", "--rollout.batch-size=12", "--ppo.critic-warmup=1")
ADAPTIVE += (
    "--policy.optim.lr=1e-3",
    "--policy.optim.schedule=linear",
    "--policy.optim.min-lr-ratio=0.5",
)


def test_what_adapts_and_is_normalised_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """An uninterrupted run of four steps of 1+1; and its first two, from which 1+2 go on. The
    policy waits in step 1: the KL coefficient and the schedule begin in the second."""
    adapted, resumed = tmp_path / "whole", tmp_path / "resumed"
    run(adapted, *ADAPTIVE, "--steps=4")
    shutil.copytree(adapted, resumed)
    shutil.rmtree(resumed / "checkpoints" / "step_000004")
    for path in (resumed / "metrics").iterdir():
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(line for line in lines if json.loads(line)["step"] <= 2))
    run(resumed, *ADAPTIVE, "--placement.critic=2", "--steps=4", world=3)
    for role in ("actor", "critic"):
        got, due = records(resumed, role), records(adapted, role)
        assert list(got) == list(due) == [1, 2, 3, 4]
        for step, record in due.items():
            clock = ("time", "spans", "optimizer_steps", "critic/calibration", "slots")
            figures = {
                k: v
                for k, v in record.items()
                if k not in clock and not k.startswith(("timing_s", "perf"))
            }
            assert {name: got[step][name] for name in figures} == pytest.approx(
                figures, rel=1e-5, abs=1e-6
            ), f"{role} {step}"
            for one, other in zip(
                got[step]["optimizer_steps"], record["optimizer_steps"], strict=True
            ):
                assert one == pytest.approx(other, rel=1e-5, abs=1e-6)
    coefficients = [record["critic/kl_coef"] for record in records(adapted, "critic").values()]
    assert coefficients[:2] == [0.1, 0.1]
    assert len(set(coefficients)) == 3, "nothing was adapted"
    rates = [record["actor/lr"] for record in records(adapted, "actor").values()]
    assert rates == pytest.approx([0, 1e-3, 0.75e-3, 0.5e-3])


def test_the_critic_warms_up_alone(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run(
        folder,
        "--steps=3",
        "--ppo.critic-warmup=2",
        "--checkpoint.every=1",
        "--checkpoint.keep=0",
        "--seed=2",
    )
    start = load_file(folder / "tiny" / "model.safetensors")
    steps: dict[str, list[dict[str, Any]]] = {"policy": [], "value": []}
    for step in (1, 2, 3):
        out = export(folder, step=step, out=tmp_path / f"export_{step}", dtype="float32")
        for kind, weights in steps.items():
            weights.append(load_file(out / kind / "model.safetensors"))

    def same(one: dict[str, Any], other: dict[str, Any]) -> list[bool]:
        return [torch.equal(weight, other[name]) for name, weight in one.items()]

    assert all(same(start, steps["policy"][0]))
    assert all(same(start, steps["policy"][1]))
    assert not any(same(start, steps["policy"][2]))
    for before, after in zip(steps["value"], steps["value"][1:], strict=False):
        assert not all(same(before, after))
    for step, record in records(folder, "actor").items():
        assert bool(record["actor/pg_loss"]) == bool(record["optimizer_steps"]) == (step == 3)
        assert (record["actor/lr"] > 0) == (step == 3)
        assert record["actor/mismatch_max"] < 1e-4, "the engine has other weights"
    assert all(len(record["optimizer_steps"]) == 4 for record in records(folder, "critic").values())
