"""`splitppo prepare`: rows in verl's schema, folders that are complete or absent."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from huggingface_hub import constants

from splitppo.__main__ import main
from splitppo.config import DataConfig
from splitppo.config.cli import parse
from splitppo.data import load_prompts
from splitppo.errors import UserError
from splitppo.models.tiny import build_tokenizer
from splitppo.rewards.scorer import check_prompts
from splitppo.tools.prepare import DATA, answer_of, prepare

CONFIGS = Path(__file__).parents[2] / "configs"
SOLUTION = "She sold 2,000/2 = <<2000/2=1000>>1,000.\n#### 1,000"
# A file of verl's has its fields in this order.
VERL_ROW = {
    "data_source": "openai/gsm8k",
    "prompt": [
        {
            "content": "How many? Let's think step by step and output the final answer after "
            '"####".',
            "role": "user",
        }
    ],
    "ability": "math",
    "reward_model": {"ground_truth": "1000", "style": "rule"},
    "extra_info": {"answer": SOLUTION, "index": 0, "question": "How many?", "split": "train"},
}


def jsonl(file: Path, rows: list[Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def parquet(file: Path, rows: list[Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)


def test_gsm8k_is_verls_to_the_letter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    published = [
        {"question": "How many?", "answer": SOLUTION},
        {"question": "And now?", "answer": "None.\n#### -7"},
    ]
    jsonl(tmp_path / "source" / "train.jsonl", published)
    # as on the hub
    parquet(tmp_path / "source" / "main" / "test-00000-of-00001.parquet", published[1:])
    out = tmp_path / "new" / "gsm8k"
    prepare("gsm8k", tmp_path / "source", out)
    assert "2 rows" in capsys.readouterr().out
    table = pyarrow.parquet.read_table(out / "train.parquet")
    assert table.slice(0, 1).equals(pyarrow.Table.from_pylist([VERL_ROW]))  # and so is the schema
    second, third = (
        pyarrow.parquet.read_table(out / f"{split}.parquet").to_pylist()[-1]
        for split in ("train", "test")
    )
    assert (second["extra_info"]["index"], second["extra_info"]["split"]) == (1, "train")
    assert (third["extra_info"]["index"], third["extra_info"]["split"]) == (0, "test")
    assert (
        second["reward_model"] == third["reward_model"] == {"ground_truth": "-7", "style": "rule"}
    )
    assert sorted(path.name for path in out.parent.iterdir()) == ["gsm8k"]
    assert sorted(path.name for path in out.iterdir()) == ["test.parquet", "train.parquet"]
    # the trainer takes them as they are
    found = load_prompts(
        DataConfig(files=(str(out / "train.parquet"),)), build_tokenizer_with_chat(),
        max_prompt_tokens=512, seed=0,
        split="train", check=lambda prompts: check_prompts(["auto"], prompts),
    )  # fmt: skip
    assert [prompt.ground_truth for prompt in found.prompts] == ["1000", "-7"]


def build_tokenizer_with_chat() -> Any:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    return tokenizer


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        ("a\n#### 72", "72"),
        ("a\n#### -1,234.50 \n", "-1234.50"),
        ("a\n####5", "5"),
        ("#### 5 apples", ""),
        ("no mark", ""),
        (r"So $x = \boxed{5}$.", "5"),
        (r"$\boxed{1}$, no: $\boxed{\frac{1}{2}}$", r"\frac{1}{2}"),
        (r"$\boxed{\sqrt{\frac{2}{x^{3}}}}$ and {more}", r"\sqrt{\frac{2}{x^{3}}}"),
        # a brace that is not closed is escaped
        (r"$\boxed{\left\{ 1, 2 \right.}$", r"\left\{ 1, 2 \right."),
        (r"$\boxed{\text{a}\\{b}}$", r"\text{a}\\{b}"),
        (r"$\fbox{7}$", "7"),
        (r"$\boxed 5$ and more", "5"),
        (r"\[ \boxed 5 \]", "5"),
        (r"$\boxed {8}$", "8"),
        (r"$\boxed5$", "5"),
        (r"$\boxed 3$, and then $\boxed{4}$", "4"),
        (r"$\boxed{4}$, and then $\boxed 3$", "3"),
        (r"$\boxed{}$", ""),
        (r"$\boxed{5", ""),
        (r"$\boxedx{5}$", ""),
        (r"$\boxed{4}$, and then $\boxed{5", ""),
        (r"$\boxed{\fbox{6}}$", "6"),
    ],
)
def test_answers(solution: str, answer: str) -> None:
    assert answer_of(solution) == answer


def test_math_keeps_level_and_type_and_leaves_out_rows_without_an_answer(
    tmp_path: Path, capsys: Any
) -> None:
    def row(solution: str) -> dict[str, str]:
        return {
            "problem": "What is $x$?",
            "level": "Level 5",
            "solution": solution,
            "type": "Algebra",
        }

    jsonl(tmp_path / "train.jsonl", [row("unboxed"), row(r"$\boxed{x^{2}}$"), row(r"$\boxed{}$")])
    parquet(tmp_path / "test.parquet", [row(r"$\boxed 2$")])
    prepare("math", tmp_path, tmp_path / "out")
    (train,), (test,) = (
        pyarrow.parquet.read_table(tmp_path / "out" / f"{split}.parquet").to_pylist()
        for split in ("train", "test")
    )
    assert train == {
        "level": "Level 5",
        "type": "Algebra",
        "data_source": "DigitalLearningGmbH/MATH-lighteval",
        "prompt": [
            {
                "content": "What is $x$? Let's think step by step and output the final answer "
                "within \\boxed{}.",
                "role": "user",
            }
        ],
        "ability": "math",
        "reward_model": {"ground_truth": "x^{2}", "style": "rule"},
        "extra_info": {
            "answer": r"$\boxed{x^{2}}$",
            "index": 1,
            "question": "What is $x$?",
            "split": "train",
        },
    }
    assert test["reward_model"]["ground_truth"] == "2"
    first, second = capsys.readouterr().out.splitlines()
    assert "1 rows" in first
    assert "2 without" in first
    assert "row 1" in first
    assert "without" not in second


def test_the_hubs_cache_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        UserError, match=r"openai/gsm8k.*https://github\.com/openai/grade-school-math .*--source"
    ):
        prepare("gsm8k", None, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    folder = tmp_path / "hub" / "datasets--openai--gsm8k"
    for split in ("train", "test"):
        name = DATA["gsm8k"].file.format(split)
        parquet(
            folder / "snapshots" / ("a" * 40) / name,
            [{"question": "How many?", "answer": SOLUTION}],
        )
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("a" * 40)
    prepare("gsm8k", None, tmp_path / "out")
    assert pyarrow.parquet.read_table(tmp_path / "out" / "train.parquet").to_pylist() == [VERL_ROW]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            None,
            r"--source .*: holds none of train\.jsonl, train\.parquet, main/train-.*https://github",
        ),
        ([VERL_ROW], r"train\.jsonl row 1 must have text in columns question and answer; "),
        (
            [{"question": "a", "answer": 5}],
            r"train\.jsonl row 1 must have text in columns question and answer; ",
        ),
        ([[]], r"train\.jsonl row 1 must have text in columns question and answer; "),
        ([{"question": "a", "answer": "b"}], r"train\.jsonl holds no row with an answer; "),
    ],
)
def test_wrong_sources_leave_nothing_behind(
    rows: list[Any] | None, message: str, tmp_path: Path
) -> None:
    (tmp_path / "source").mkdir()
    if rows is not None:
        jsonl(tmp_path / "source" / "train.jsonl", rows)
    with pytest.raises(UserError, match=message) as caught:
        prepare("gsm8k", tmp_path / "source", tmp_path / "data" / "new" / "gsm8k")
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_folder_is_written_once_and_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "source", tmp_path / "deep" / "out"
    for split in ("train", "test"):
        jsonl(source / f"{split}.jsonl", [{"question": "How many?", "answer": SOLUTION}])
    write, interrupted = pyarrow.parquet.write_table, []

    def write_table(table: Any, file: Path) -> None:
        assert not out.exists() or not any(out.iterdir()), "it shows before it is complete"
        if file.name == "test.parquet" and not interrupted:
            interrupted.append(file)
            raise KeyboardInterrupt
        write(table, file)

    monkeypatch.setattr(pyarrow.parquet, "write_table", write_table)
    with pytest.raises(KeyboardInterrupt):
        prepare("gsm8k", source, out)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    out.mkdir(parents=True)  # an empty one is taken
    prepare("gsm8k", source, out)
    assert capsys.readouterr().out.count("1 rows") == 2
    prepare("gsm8k", source, out)
    assert "complete" in capsys.readouterr().out
    (out / "test.parquet").unlink()
    with pytest.raises(UserError, match=r"--out .*out: exists and is not complete"):
        prepare("gsm8k", source, out)
    assert [path.name for path in out.iterdir()] == ["train.parquet"]


def test_the_presets_data_are_what_prepare_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"question": "How many?", "answer": SOLUTION}
    for split in ("train", "test"):
        jsonl(tmp_path / "source" / f"{split}.jsonl", [row])
    monkeypatch.chdir(tmp_path)
    presets = sorted((CONFIGS / "gsm8k").glob("*.toml"))
    assert len(presets) >= 3
    for preset in presets:
        commands = re.findall(r"^#   splitppo (prepare .*)$", preset.read_text(), re.M)
        assert commands, f"{preset.name} does not say where its data come from"
        for line in commands:
            monkeypatch.setattr(sys, "argv", ["splitppo", *line.split(), "--source=source"])
            assert main() == 0
        config = parse(["--config", str(preset)])
        assert all(
            Path(file).is_file() for file in config.data.files + config.data.validation_files
        )
