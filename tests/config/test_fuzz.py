"""Whatever a preset or a data file holds: it is read, or refused in one line, and never ends in a
traceback."""

import json
import string
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from splitppo import data
from splitppo.config import Config, DataConfig
from splitppo.config.cli import parse
from splitppo.config.rules import check
from splitppo.config.toml import leaves, toml_value
from splitppo.errors import UserError
from splitppo.models.tiny import build_tiny
from splitppo.models.tokenizer import read_tokenizer

MANY = settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
NAMES = sorted(dict(leaves(asdict(Config()))))
SECTIONS = sorted({name.rpartition(".")[0] for name in NAMES} - {""})
TEXT = st.text(string.printable + "äß漢\u0000\ud7ff", max_size=12)
NUMBERS = st.integers(-(2**70), 2**70) | st.floats() | st.sampled_from([0, 1, -1, 0.5, 1e308])
SCALARS = st.none() | st.booleans() | NUMBERS | TEXT
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3)
)
USED = (
    "prompt",
    "reward_model",
    "data_source",
    "extra_info",
    "ground_truth",
    "role",
    "content",
    "question",
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Any:
    folder = tmp_path_factory.mktemp("tiny")
    build_tiny(folder, seed=0)
    return read_tokenizer(str(folder))


def fine_or_one_line(work: Any) -> None:
    line = "fine"
    try:
        work()
    except UserError as error:
        line = str(error)
    assert line.strip()


def read(path: Path) -> None:
    check(parse(["--config", str(path)]))


@MANY
@given(content=st.binary(max_size=60) | TEXT.map(lambda text: text.encode(errors="ignore")))
def test_any_bytes_as_a_preset(tmp_path, content):
    path = tmp_path / "preset.toml"
    path.write_bytes(content)
    fine_or_one_line(partial(read, path))


@MANY
@given(
    settings_=st.dictionaries(st.sampled_from([*NAMES, *SECTIONS]), VALUES, min_size=1, max_size=4)
)
def test_any_value_of_any_setting(tmp_path, settings_):
    def written(value: Any) -> str:
        if isinstance(value, dict):
            return (
                "{"
                + ", ".join(f"{json.dumps(key)} = {written(part)}" for key, part in value.items())
                + "}"
            )
        if isinstance(value, list):
            return "[" + ", ".join(map(written, value)) + "]"
        return '"None"' if value is None else toml_value(value)

    path = tmp_path / "preset.toml"
    lines = [f"{name} = {written(value)}\n" for name, value in settings_.items()]
    path.write_text("".join(lines), encoding="utf-8", errors="replace")
    fine_or_one_line(partial(read, path))


ROWS = st.lists(
    st.dictionaries(st.sampled_from(USED) | TEXT, VALUES, max_size=4) | VALUES, max_size=4
)
KEYS = st.sampled_from(
    ["prompt", "reward_model.ground_truth", "extra_info", "", ".", "a.b.c", "question"]
)


def load(config: DataConfig, tokenizer: Any) -> None:
    data.check_files(config)
    data.load_prompts(config, tokenizer, max_prompt_tokens=64, seed=0, split="train")


@MANY
@given(
    rows=ROWS,
    prompt=KEYS,
    answer=KEYS,
    chat=st.booleans(),
    overlong=st.sampled_from(["refuse", "filter"]),
)
def test_any_json_as_data(tmp_path, tokenizer, rows, prompt, answer, chat, overlong):
    as_list, as_lines = tmp_path / "data.json", tmp_path / "data.jsonl"
    as_list.write_text(json.dumps(rows), encoding="utf-8")
    as_lines.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    config = DataConfig(prompt_key=prompt, answer_key=answer, chat=chat, overlong=overlong)
    for path in (as_list, as_lines):
        fine_or_one_line(partial(load, replace(config, files=(str(path),)), tokenizer))


@MANY
@given(
    content=st.binary(max_size=80), suffix=st.sampled_from(["json", "jsonl", "parquet", "txt", ""])
)
def test_any_bytes_as_data(tmp_path, tokenizer, content, suffix):
    path = tmp_path / f"data.{suffix}"
    path.write_bytes(content)
    fine_or_one_line(partial(load, DataConfig(files=(str(path),)), tokenizer))


COLUMNS = st.sampled_from(
    [
        pa.string(),
        pa.int64(),
        pa.binary(),
        pa.list_(pa.string()),
        pa.struct([("ground_truth", pa.string())]),
    ]
)


@MANY
@given(
    columns=st.dictionaries(st.sampled_from(USED), COLUMNS, min_size=1, max_size=4),
    rows=st.integers(0, 3),
)
def test_any_columns_of_a_parquet_file(tmp_path, tokenizer, columns, rows):
    some = {
        pa.string(): "a", pa.int64(): 7, pa.binary(): b"\xff", pa.list_(pa.string()): ["a", None],
        pa.struct([("ground_truth", pa.string())]): {"ground_truth": "x"},
    }  # fmt: skip
    table = pa.table({name: pa.array([some[kind]] * rows, kind) for name, kind in columns.items()})
    path = tmp_path / "data.parquet"
    parquet.write_table(table, path)
    fine_or_one_line(partial(load, DataConfig(files=(str(path),)), tokenizer))
