"""What the columns of a file may hold: only those that are used are read, none stands twice, and
messages, tools and documents are read in each form in which data sets hold them."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from splitppo.config import DataConfig
from splitppo.data import check_files, load_prompts
from splitppo.data.files import Row, read_file
from splitppo.data.prompts import tokenize
from splitppo.envs.turns import Turns
from splitppo.errors import UserError
from splitppo.models.tiny import build_tokenizer

SPOKEN = "{% for m in messages %}({{ m.role }}){{ m.content }}{% endfor %}"
SHOWN = "{% if tools %}{{ tools | tojson }}{% endif %}{{ (documents or []) | length }}"
CONFIG = DataConfig(answer_key="answer")
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "3+4?"}]
TOOLS = [
    {"name": "add", "parameters": {"a": {"type": "int"}, "b": {"type": "int"}}},
    {"name": "now", "parameters": {"zone": {"type": "str"}}},
]


def tokenizer_of(template: Any) -> Any:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def config_of(file: Path, **changes: Any) -> DataConfig:
    return DataConfig(**{"files": (str(file),), "answer_key": "answer"} | changes)


def texts(config: DataConfig, template: Any = SPOKEN) -> list[str]:
    loaded = load_prompts(
        config, tokenizer_of(template), max_prompt_tokens=None, seed=0, split="train"
    )
    return [prompt.text for prompt in loaded.prompts]


def parquet(file: Path, **columns: Any) -> Path:
    given = {"prompt": ["1="] * 300, "answer": ["1"] * 300} | columns
    pyarrow.parquet.write_table(
        pyarrow.Table.from_arrays([pyarrow.array(x) for x in given.values()], [*given]), file
    )
    return file


def jsonl(file: Path, *rows: Any) -> Path:
    file.write_text("".join(json.dumps({"answer": "7"} | row) + "\n" for row in rows))
    return file


def odd(at: int) -> dict[str, pyarrow.Array]:
    """Columns of 300 values, of which one, or all, have no value in Python."""
    bad = bytearray(300)
    bad[at] = 0xFF
    ends = pyarrow.array(range(301), pyarrow.int32()).buffers()[1]
    text = pyarrow.Array.from_buffers(pyarrow.string(), 300, [None, ends, pyarrow.py_buffer(bad)])
    years = pyarrow.array([0] * at + [6 * 10**11] + [0] * (299 - at), pyarrow.timestamp("s"))
    zone = pyarrow.timestamp("us", tz="Mars/Phobos")
    zones = pyarrow.array([None] * at + [1] + [None] * (299 - at), zone)
    lists = pyarrow.ListArray.from_arrays(range(301), text)
    return {
        "nanoseconds": pyarrow.array([0] * at + [1] + [0] * (299 - at), pyarrow.timestamp("ns")),
        "years": years,
        "zones": zones,
        "text": text,
        "deep": pyarrow.StructArray.from_arrays([lists, years], ["of", "when"]),
    }


@pytest.mark.parametrize("name", odd(0))
def test_a_column_that_nobody_reads_is_not_read(name: str, tmp_path: Path):
    file = parquet(tmp_path / "rows.parquet", **{name: odd(270)[name]})
    assert len(texts(config_of(file))) == 300
    holder = pyarrow.StructArray.from_arrays([odd(270)[name], ["1"] * 300], ["odd", "answer"])
    file = parquet(tmp_path / "rows.parquet", holder=holder)
    assert len(texts(config_of(file, answer_key="holder.answer"))) == 300


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("nanoseconds", "row 271: column nanoseconds .*not safely convertible"),
        ("years", "row 271: column years .*out of range"),
        ("zones", "row 1: column zones .*Mars/Phobos"),
        ("text", "row 271: column text .*xff"),
        ("deep", "row 271: column deep .*xff"),
    ],
)
def test_a_value_that_python_lacks_is_named_by_column_and_row(
    name: str, where: str, tmp_path: Path
):
    at = 0 if name == "zones" else 270  # its other rows are null, which is no ground truth
    file = parquet(tmp_path / "rows.parquet", **{name: odd(at)[name]})
    with pytest.raises(UserError, match=where) as caught:
        list(read_file(config_of(file, answer_key=name), str(file), "data.files"))
    assert "\n" not in str(caught.value)


def test_the_names_of_columns_that_are_not_read_help_to_choose_one(tmp_path: Path):
    holder = pyarrow.array([{"truth": 1, "more": {"index": 2}}] * 300)
    file = parquet(tmp_path / "rows.parquet", holder=holder)
    with pytest.raises(UserError, match=r"columns: .*holder; set"):
        check_files(config_of(file, answer_key="holder.wrong"))


def test_a_column_that_stands_twice_is_refused_where_it_is_used(tmp_path: Path):
    file = tmp_path / "rows.parquet"
    twins = pyarrow.StructArray.from_arrays([[1], [2]], ["index", "index"])
    held = pyarrow.ListArray.from_arrays([0, 1], twins)
    for names, arrays in (
        (["prompt", "answer", "answer"], [["1="], ["1"], ["2"]]),
        (["answer", "prompt", "prompt"], [["1"], ["1="], ["2="]]),
        (["prompt", "answer", "extra_info"], [["1="], ["1"], twins]),
        (["prompt", "answer", "tools"], [["1="], ["1"], held]),
    ):
        table = pyarrow.Table.from_arrays([pyarrow.array(x) for x in arrays], names)
        pyarrow.parquet.write_table(table, file)
        with pytest.raises(UserError, match=f"column {names[-1]} .*(twice|duplicate field names)"):
            check_files(config_of(file))
        pyarrow.parquet.write_table(table.rename_columns([*names[:-1], "other"]), file)
        if "twice" not in names[:-1] and names[-1] != "prompt":
            assert len({*names[:-1]}) < 2 or texts(config_of(file)) == ["(user)1="]


@pytest.mark.parametrize(
    "row",
    [
        '{"prompt": "1=", "answer": "1", "answer": "2"}',
        '{"prompt": "1=", "answer": "1", "extra_info": {"a": [{"b": 1, "c": 2, "b": 1}]}}',
        '{"prompt": [{"role": "user", "content": "1=", "role": "system"}], "answer": "1"}',
    ],
)
@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_a_name_that_stands_twice_in_an_object_is_refused(row: str, suffix: str, tmp_path: Path):
    file = tmp_path / f"rows{suffix}"
    file.write_text(f"[{row}]" if suffix == ".json" else row)
    with pytest.raises(UserError, match=r"it has '(answer|b|role)' twice"):
        check_files(config_of(file))


def test_half_a_character_is_refused_where_it_is_used(tmp_path: Path):
    file = jsonl(tmp_path / "rows.jsonl", {"prompt": "1=", "note": "\ud83d"})
    assert texts(config_of(file)) == ["(user)1="]
    for name in ("prompt", "extra_info", "data_source"):
        jsonl(file, {"prompt": "1=", name: "\udc00" if name != "extra_info" else {"a": "\udc00"}})
        with pytest.raises(UserError, match="surrogates not allowed"):
            check_files(config_of(file))


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
@pytest.mark.parametrize(
    "write",
    [
        json.dumps,
        lambda value: json.dumps(json.dumps(value)),
        lambda value: f"\n {json.dumps(value, indent=1)}\n",
        lambda value: json.dumps(value, separators=(",", ":")),
    ],
)
def test_messages_as_json_text_are_messages(write: Any, suffix: str, tmp_path: Path):
    file = tmp_path / f"rows{suffix}"
    text = write(MESSAGES)
    if suffix == ".jsonl":
        jsonl(file, {"prompt": text})
    else:
        parquet(file, prompt=[text] * 300)
    assert texts(config_of(file))[0] == "(system)Be brief.(user)3+4?"


@pytest.mark.parametrize(
    "text",
    [
        str(MESSAGES),
        f"array({MESSAGES}, dtype=object)",
        "[{'role': 'user', 'content': 'a'}\n {'role': 'user', 'content': 'b'}]",
        "[Message(role='user', content='a')]",
        json.dumps(MESSAGES[1]),
        json.dumps({"messages": MESSAGES}),
        json.dumps([MESSAGES]),
        json.dumps([{"from": "human", "value": "a"}]),
        json.dumps([*MESSAGES, {"role": "tool"}]),
        json.dumps([*MESSAGES, {"role": "assistant", "content": "7"}]),
        "\n".join(map(json.dumps, MESSAGES)),
        json.dumps(MESSAGES).replace("[{", '[{"role": "system", ', 1),
    ],
)
def test_messages_in_another_notation_are_refused(text: str, tmp_path: Path):
    with pytest.raises(UserError, match=r"row 1:? .*message"):
        check_files(config_of(jsonl(tmp_path / "rows.jsonl", {"prompt": text})))


@pytest.mark.parametrize(
    "text",
    [
        "[1, 2]",
        '"3+4?"',
        '["role", "user"]',
        '"role: user, content: 7"',
        '{"name": "Ann", "role": "engineer", "content": 3}',
        '[{"city": "Bern", "value": 3}]',
        '"role: user" and "content: none"',
        "[INST] You play the role: user, and like content. [/INST]",
        f"Explain {json.dumps(MESSAGES)}",
        "[",
        "",
    ],
)
def test_other_texts_stay_texts(text: str, tmp_path: Path):
    file = jsonl(tmp_path / "rows.jsonl", {"prompt": f"{text} "}, {"prompt": "1="})
    assert texts(config_of(file, invalid="filter"))[0] == (f"(user){text} " if text else "(user)1=")


@pytest.mark.parametrize(
    "column",
    [TOOLS, json.dumps(TOOLS), [json.dumps(tool) for tool in TOOLS], json.dumps(TOOLS, indent=2)],
)
@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_a_rows_tools_are_rendered(column: Any, suffix: str, tmp_path: Path):
    file = tmp_path / f"rows{suffix}"
    rows = [{"prompt": MESSAGES, "tools": column}, {"prompt": MESSAGES, "tools": None}]
    if suffix == ".jsonl":
        rows[1]["tools"] = math.nan  # as pandas writes what is missing
    if suffix == ".jsonl":
        jsonl(file, *rows)
    else:  # it gives each object the fields of all, as null
        table = pyarrow.Table.from_pylist([{"answer": "7"} | row for row in rows])
        pyarrow.parquet.write_table(table, file)
    first, second = texts(config_of(file), SHOWN)
    assert json.loads(first.removesuffix("0")) == TOOLS
    assert second == "0"


def test_a_null_of_a_schema_stays_where_the_file_has_it(tmp_path: Path):
    tools = [{"name": "add", "default": None}]
    file = jsonl(tmp_path / "rows.jsonl", {"prompt": "1=", "tools": json.dumps(tools)})
    assert json.loads(texts(config_of(file), SHOWN)[0].removesuffix("0")) == tools


def test_documents_and_a_template_of_its_own_for_tools(tmp_path: Path):
    row = {"prompt": MESSAGES, "documents": [{"text": "a"}, {"text": "b"}]}
    assert texts(config_of(jsonl(tmp_path / "rows.jsonl", row)), SHOWN) == ["2"]
    file = jsonl(tmp_path / "rows.jsonl", {"prompt": MESSAGES, "tools": TOOLS})
    templates = {"default": SPOKEN, "tool_use": SHOWN}
    assert texts(config_of(file), templates)[0].startswith("[{")


@pytest.mark.parametrize("column", ["calculator, search", '{"name": "add"}', ["add"], [1], 3, "["])
def test_tools_that_are_no_list_of_objects_are_refused(column: Any, tmp_path: Path):
    file = jsonl(tmp_path / "rows.jsonl", {"prompt": "1=", "tools": column})
    with pytest.raises(UserError, match=r"row 1: .*tools"):
        texts(config_of(file), SHOWN)


def test_half_a_character_in_the_text_of_tools_is_refused(tmp_path: Path):
    file = jsonl(tmp_path / "rows.jsonl", {"prompt": "1=", "tools": r'[{"name": "\ud800"}]'})
    with pytest.raises(UserError, match=r"row 1: .*surrogates not allowed"):
        texts(config_of(file), SHOWN.replace("tools | tojson", "tools[0].name"))


def test_tools_that_something_else_says_too_are_refused(tmp_path: Path):
    file = jsonl(tmp_path / "rows.jsonl", {"prompt": MESSAGES, "tools": TOOLS})
    with pytest.raises(UserError, match=r"column tools and data\.chat_kwargs set"):
        texts(config_of(file, chat_kwargs='{"tools": []}'), SHOWN)
    row = Row("row 1", MESSAGES, "", "", {}, {"tools": TOOLS})
    tokenizer = tokenizer_of(SHOWN)
    (error,) = tokenize(CONFIG, [row], tokenizer, render=Turns(tokenizer).render)
    assert "the environment" in str(error)


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="Python 3.12 renders what it can read")
def test_tools_that_are_nested_too_deep_are_refused(tmp_path: Path):
    deep: Any = []
    for _ in range(900):
        deep = [deep]
    file = jsonl(tmp_path / "rows.jsonl", {"prompt": MESSAGES, "tools": [{"name": deep}]})
    with pytest.raises(UserError, match=r"row 1"):
        texts(config_of(file), SHOWN)


@pytest.mark.parametrize(("template", "prompt"), [(SPOKEN, MESSAGES), (None, "1="), (SHOWN, "1=")])
def test_a_line_says_that_nothing_shows_a_rows_tools(template: Any, prompt: Any, tmp_path: Path):
    file = jsonl(tmp_path / "rows.jsonl", {"prompt": prompt, "tools": TOOLS})
    loaded = load_prompts(
        config_of(file, chat=False),
        tokenizer_of(template),
        max_prompt_tokens=None,
        seed=0,
        split="train",
    )
    assert [note for note in loaded.notes if "column tools" in note]
