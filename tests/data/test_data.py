"""Prompts from files and generated tasks, their order, and what is said about wrong files."""

import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, cast

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
from tokenizers.processors import TemplateProcessing

from splitppo.config import DataConfig
from splitppo.config.cli import parse
from splitppo.config.rules import check
from splitppo.data import PromptSet, Split, check_files, load_prompts, prompt_index
from splitppo.data.prompts import tokenize
from splitppo.errors import UserError
from splitppo.models.tiny import build_tokenizer
from splitppo.rewards.scorer import check_prompts
from splitppo.rollout import Prompt

TEMPLATE = (
    "{% if think %}(think){% endif %}"
    "{% for message in messages %}{% if message.role == 'tool' %}{{ raise_exception('no tools') "
    "}}{% endif %}"
    "({{ message.role }}){{ message.content }}\n{% endfor %}{% if add_generation_prompt "
    "%}(assistant){% endif %}"
)
VERL_ROW = {
    "data_source": "mine",
    "prompt": [{"role": "user", "content": "What is 3+4?"}],
    "reward_model": {"ground_truth": "7", "style": "rule"},
    "extra_info": {"index": 5},
}


@pytest.fixture(scope="module")
def plain() -> Any:
    return build_tokenizer()


@pytest.fixture(scope="module")
def chat() -> Any:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def _load(
    config: DataConfig, tokenizer: Any, longest: int = 99, *, seed: int = 0, split: Split = "train"
) -> PromptSet:
    return load_prompts(config, tokenizer, max_prompt_tokens=longest, seed=seed, split=split)


def _texts(config: DataConfig, tokenizer: Any, longest: int = 99, *, seed: int = 0) -> list[str]:
    return [prompt.text for prompt in _load(config, tokenizer, longest, seed=seed).prompts]


def _write(path: Path, rows: list[Any]) -> str:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("suffix", [".parquet", ".json", ".jsonl"])
def test_verl_rows_read_alike_from_every_kind_of_file(
    suffix: str, tmp_path: Path, chat: Any
) -> None:
    system = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    file = _write(
        tmp_path / f"rows{suffix}",
        [VERL_ROW, {**VERL_ROW, "prompt": system, "data_source": "other"}],
    )
    config = DataConfig(files=(file,))
    check_files(config)
    first, second = _load(config, chat, 64).prompts
    assert first.text == "(user)What is 3+4?\n(assistant)"
    assert chat.decode(first.tokens) == first.text
    assert (first.data_source, first.ground_truth, first.extra_info) == ("mine", "7", {"index": 5})
    assert second.text == "(system)Be brief.\n(user)Hi\n(assistant)"
    assert second.data_source == "other"
    assert (first.messages, second.messages) == (VERL_ROW["prompt"], system)


def test_plain_columns_nested_keys_and_defaults(tmp_path: Path, plain: Any, chat: Any) -> None:
    row = {"q": {"text": "3+4="}, "a.b": 7}
    files = (_write(tmp_path / "sums.jsonl", [row]), _write(tmp_path / "more.json", [row, row]))
    config = DataConfig(files=files, prompt_key="q.text", answer_key="a.b")
    check_files(config)
    prompts = _load(config, plain, 9).prompts
    assert [prompt.data_source for prompt in prompts] == ["sums", "more", "more"]
    assert (prompts[0].text, prompts[0].ground_truth, prompts[0].extra_info) == ("3+4=", 7, {})
    assert prompts[0].messages is None
    templated = _load(config, chat).prompts[0]
    assert templated.text == "(user)3+4=\n(assistant)"
    assert templated.messages == [{"role": "user", "content": "3+4="}]
    untemplated = DataConfig(files=files, prompt_key="q.text", answer_key="", chat=False)
    bare = _load(untemplated, chat).prompts[0]
    assert (bare.text, bare.ground_truth, bare.messages) == ("3+4=", None, None)


def test_special_tokens_are_the_tokenizers_own_only_without_a_template(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<eos> $A", special_tokens=[("<eos>", 1)]
    )
    file = _write(tmp_path / "rows.jsonl", [{"prompt": "3", "a": 1}])
    config = DataConfig(files=(file,), answer_key="a")
    three = tokenizer.convert_tokens_to_ids("3")
    assert _load(config, tokenizer).prompts[0].tokens == [1, three]
    tokenizer.chat_template = TEMPLATE
    assert 1 not in _load(config, tokenizer).prompts[0].tokens


def test_string_and_message_prompts_may_stand_in_one_data_set(tmp_path: Path, chat: Any) -> None:
    files = (
        _write(tmp_path / "a.jsonl", [{**VERL_ROW, "prompt": text} for text in ("1", "22", "333")]),
        _write(tmp_path / "b.jsonl", [VERL_ROW]),
        _write(tmp_path / "c.jsonl", [{**VERL_ROW, "prompt": "4444"}]),
    )
    prompts = _load(DataConfig(files=files, chat=False), chat).prompts
    assert [prompt.text for prompt in prompts] == [
        "1",
        "22",
        "333",
        "(user)What is 3+4?\n(assistant)",
        "4444",
    ]
    assert [chat.decode(prompt.tokens) for prompt in prompts] == [prompt.text for prompt in prompts]


ROW = {"prompt": "1=", "answer": "1"}
ANSWERED = {
    "prompt": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}],
    "answer": "1",
}
MESSAGES = {"prompt": [{"role": "user", "content": "1"}], "answer": "1"}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], r"rows\.jsonl holds no rows; remove it from --data\.files"),
        (
            [ROW, ROW, {"question": "1="}],
            r"data\.prompt_key=prompt: .*rows\.jsonl row 3 has no such column; columns: q",
        ),
        (
            [ROW, {"prompt": "1=", "x": {"y": 1}}],
            r"data\.answer_key=answer: .* row 2 .* columns: prompt, x\.y; set --data\.answer-key, "
            r"or ''",
        ),
        ([ROW, {**ROW, "answer": None}], r"data\.answer_key=answer: .*row 2 has null there"),
        (
            [ROW, {**ROW, "answer": math.nan}],
            r"data\.answer_key=answer: .*row 2 has NaN there; fill it in, or set",
        ),
        (
            [ROW, ANSWERED],
            r"row 2 has a prompt that ends with the assistant's answer; remove that message or "
            r"drop the row",
        ),
        (
            [ROW, {**ROW, "prompt": 3}],
            r"row 2 has a prompt of type int; it must be a string or a list",
        ),
        ([ROW, {**ROW, "prompt": {"role": "user"}}], r"row 2 has a prompt of type dict"),
        ([ROW, {**ROW, "prompt": None}], r"row 2 has a prompt of type NoneType"),
        ([ROW, {**ROW, "prompt": " \n"}], r"row 2 has an empty prompt"),
        ([ROW, {**ROW, "prompt": []}], r"row 2 has an empty prompt"),
        ([ROW, {**ROW, "prompt": [{"role": "user", "content": ""}]}], r"row 2 has an empty prompt"),
        ([ROW, {**ROW, "prompt": ["hello"]}], r"row 2 has a prompt whose message 1 is not \{role"),
        (
            [ROW, {**ROW, "prompt": [{"role": "user", "content": ["a"]}]}],
            r"row 2 .* message 1 is not \{role",
        ),
        (
            [ROW, {**ROW, "prompt": "12345678="}],
            r"1 of 2 rows .*max_prompt_tokens=8; .*row 2 \(9 tokens\): set .* 9, or",
        ),
        ([ROW, {**ROW, "data_source": 3}], r"row 2 has a data_source of type int"),
        ([ROW, {**ROW, "extra_info": "x"}], r"row 2 has an extra_info of type str"),
        ([ROW, ["prompt"]], r"row 2 is a list; a row is an object"),
        (
            [ROW, MESSAGES],
            r"row 2 has a prompt of chat messages, but the tokenizer .* has no chat template; use",
        ),
    ],
)
def test_wrong_rows_are_named_in_one_line(
    rows: list[Any], message: str, tmp_path: Path, plain: Any
) -> None:
    config = DataConfig(files=(_write(tmp_path / "rows.jsonl", rows),), answer_key="answer")
    with pytest.raises(UserError, match=message) as caught:
        _load(config, plain, 8)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "rows.csv",
            b"prompt,answer\n",
            r"data\.files=.*rows\.csv: unknown kind of file; use \.parquet, \.json or",
        ),
        ("rows.jsonl", b"", "holds no rows"),
        ("rows.jsonl", b"\n \n", "holds no rows"),
        ("rows.json", b"", "holds no rows"),
        ("rows.json", b"[]", "holds no rows"),
        (
            "rows.json",
            b'{"prompt": "1"}',
            r"rows\.json contains a dict; a \.json file must be a list of rows",
        ),
        ("rows.json", b'[{"prompt": ', r"rows\.json: JSON can't be read"),
        ("rows.jsonl", b'\n{"prompt": "1", \n', r"rows\.jsonl row 2: JSON can't be read"),
        ("rows.jsonl", b'{"prompt": "\xff"}\n', r"rows\.jsonl row 1: JSON can't be read"),
        (
            "rows.jsonl",
            b'{"prompt": "1"}\n',
            r"answer_key=reward_model\.ground_truth: .*row 1 .*columns: prompt; set",
        ),
        ("rows.parquet", b"PAR1 or not", r"rows\.parquet can't be read as parquet"),
        (None, b"", r"data\.files=.*: no such file"),
    ],
)
def test_check_files_needs_no_tokenizer_to_find_wrong_files(
    name: str | None, content: bytes, message: str, tmp_path: Path
) -> None:
    file = tmp_path / (name or "absent.jsonl")
    if name:
        file.write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        check_files(DataConfig(files=(str(file),)))
    assert "\n" not in str(caught.value)
    good = _write(tmp_path / "good.jsonl", [VERL_ROW])
    with pytest.raises(UserError, match=message.replace(r"data\.files", r"data\.validation_files")):
        check_files(DataConfig(files=(good,), validation_files=(str(file),)))


def test_a_message_list_the_template_refuses_names_its_row(tmp_path: Path, chat: Any) -> None:
    row = {**VERL_ROW, "prompt": [{"role": "tool", "content": "x"}]}
    config = DataConfig(files=(_write(tmp_path / "rows.jsonl", [VERL_ROW, row]),))
    with pytest.raises(UserError, match=r"rows\.jsonl row 2: the chat template refuses .*no tools"):
        _load(config, chat)


@pytest.mark.parametrize(
    ("task", "digits", "count"), [("addition", 1, 100), ("addition", 9, 4000), ("echo", 1, 64)]
)
def test_generated_splits_are_disjoint_seeded_and_a_fifth(
    task: str, digits: int, count: int, plain: Any
) -> None:
    config = replace(DataConfig(task=cast(Any, task)), digits=digits, validation_rows=4000)
    train = _load(config, plain, seed=5).prompts
    held_out = _load(config, plain, seed=5, split="validation").prompts
    assert (len(train), len(held_out)) == (count - count // 5, count // 5)
    assert len({prompt.text for prompt in [*train, *held_out]}) == count
    assert _load(config, plain, seed=5).prompts == train
    assert _load(config, plain, seed=6).prompts != train
    fewer = _load(
        replace(config, max_rows=9, validation_rows=7), plain, seed=5, split="validation"
    ).prompts
    assert fewer == held_out[:7]
    assert {prompt.data_source for prompt in train} == {task}


def test_generated_rows_ask_what_they_score(plain: Any, chat: Any) -> None:
    for prompt in _load(DataConfig(task="addition", digits=2), plain).prompts:
        a, b = prompt.text.removeprefix("What is ").removesuffix("?").split("+")
        assert len(a) == len(b) == 2
        assert int(a) + int(b) == int(prompt.ground_truth)
    for prompt in _load(DataConfig(task="echo"), plain, split="validation").prompts:
        assert prompt.text == f"{prompt.ground_truth}="
        assert plain.decode(prompt.tokens) == prompt.text
    first = _load(DataConfig(task="addition"), chat).prompts[0]
    assert first.text.startswith("(user)What is ")
    assert first.text.endswith("?\n(assistant)")


def batch_indices(n: int, per_step: int, step: int, seed: int) -> list[int]:
    return [prompt_index(n, (step - 1) * per_step + i, seed) for i in range(per_step)]


@pytest.mark.parametrize(("n", "per_step"), [(10, 4), (10, 10), (7, 3), (3, 8), (1, 2)])
def test_order_is_epochs_of_permutations_cut_into_steps(n: int, per_step: int) -> None:
    steps = [batch_indices(n, per_step, step, seed=3) for step in range(1, 5 * n + 1)]
    assert all(len(step) == per_step for step in steps)
    stream = [index for step in steps for index in step]
    epochs = [stream[start : start + n] for start in range(0, len(stream) - n + 1, n)]
    assert all(sorted(epoch) == list(range(n)) for epoch in epochs)
    if n == 10:
        assert len({tuple(epoch) for epoch in epochs}) == len(epochs), (
            "two epochs in the same order"
        )
        assert batch_indices(n, per_step, 1, seed=4) != steps[0]
        assert batch_indices(n, per_step, 1, seed=-1) != steps[0]


def test_the_order_without_weights_stays_what_it_was() -> None:
    # what version 0.1.0 gave: a run must go on as it began
    assert batch_indices(10, 4, 1, seed=3) == [2, 0, 8, 3]
    assert batch_indices(10, 4, 3, seed=-1) == [9, 7, 2, 9]
    assert batch_indices(7473, 4, 100_000, seed=0) == [7108, 649, 3602, 7352]


def test_a_late_step_costs_as_little_as_an_early_one() -> None:
    # an epoch after the other: minutes
    assert len(set(batch_indices(7473, 512, 10_000_000, seed=0))) > 256


@pytest.fixture
def three_files(tmp_path: Path) -> DataConfig:
    sizes = {"a": 50, "b": 30, "c": 20}
    files = [
        _write(tmp_path / f"{name}.jsonl", [{"prompt": f"{i}{name}"} for i in range(size)])
        for name, size in sizes.items()
    ]
    return DataConfig(files=tuple(files), answer_key="")


def test_max_rows_draws_from_all_files_and_keeps_their_order(
    three_files: DataConfig, plain: Any
) -> None:
    everything = _texts(three_files, plain)
    assert _texts(replace(three_files, max_rows=100), plain) == everything
    assert _texts(replace(three_files, max_rows=1000), plain) == everything
    ten = replace(three_files, max_rows=10)
    drawn = {seed: _load(ten, plain, seed=seed) for seed in range(40)}
    places: Counter[int] = Counter()
    for prompts in drawn.values():
        indices = [everything.index(prompt.text) for prompt in prompts.prompts]
        assert indices == sorted(set(indices))
        assert len(indices) == 10
        places.update(indices)
    assert _load(ten, plain, seed=7) == drawn[7]
    assert drawn[7] != drawn[8]
    assert len(places) > 90, "some rows are never drawn"
    shares = [
        sum(places[i] for i in range(low, high)) / 400
        for low, high in ((0, 50), (50, 80), (80, 100))
    ]
    assert shares == pytest.approx([0.5, 0.3, 0.2], abs=0.08)
    assert len(_load(DataConfig(max_rows=5), plain).prompts) == 5


def test_a_file_may_be_trained_on_twice_but_not_held_out_too(
    three_files: DataConfig, plain: Any
) -> None:
    first, second, third = three_files.files
    twice = replace(three_files, files=(first, first), validation_files=(third, third))
    check_files(twice)
    assert [len(_load(twice, plain, split=split).prompts) for split in ("train", "validation")] == [
        100,
        40,
    ]
    link = Path(first).with_name("link.jsonl")
    link.symlink_to(first)
    for held_out in (
        first,
        str(Path(first).parent / ".." / Path(first).parent.name / "a.jsonl"),
        str(link),
    ):
        with pytest.raises(
            UserError, match=r"data\.validation_files=.* is one of data\.files, too; held-out rows"
        ):
            check_files(replace(three_files, files=(second, first), validation_files=(held_out,)))


def test_held_out_files_go_with_a_generated_task_too(three_files: DataConfig, plain: Any) -> None:
    config = DataConfig(validation_files=three_files.files[:1], answer_key="", validation_rows=3)
    assert _load(config, plain).prompts[0].data_source == "echo"
    assert [prompt.text for prompt in _load(config, plain, split="validation").prompts] == [
        "0a",
        "1a",
        "2a",
    ]
    assert _load(three_files, plain, split="validation") == PromptSet([], [])


def test_system_message_goes_before_prompts_without_one(tmp_path: Path, chat: Any) -> None:
    user, own = {"role": "user", "content": "1+1"}, {"role": "system", "content": "Mine."}
    prompts = ["3=", [user], [own, user], [{**own, "role": "developer"}, user]]
    file = _write(tmp_path / "rows.jsonl", [{"prompt": prompt} for prompt in prompts])
    config = DataConfig(files=(file,), answer_key="", system="Be brief.")
    string, bare, with_own, with_developer = _load(config, chat).prompts
    given = [string.column, bare.column, with_own.column, with_developer.column]
    assert given == prompts, "a reward function gets the column as it is"
    assert string.text == "(system)Be brief.\n(user)3=\n(assistant)"
    assert string.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "3="},
    ]
    assert bare.text == "(system)Be brief.\n(user)1+1\n(assistant)"
    assert with_own.text == "(system)Mine.\n(user)1+1\n(assistant)"
    assert with_developer.text == "(developer)Mine.\n(user)1+1\n(assistant)"
    assert _load(DataConfig(system=""), chat).prompts[0].text.startswith("(system)\n(user)")


def test_chat_arguments_reach_the_template(chat: Any, tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = TEMPLATE
    rows = [{"prompt": "3="}, {"prompt": [{"role": "user", "content": "4="}]}]
    config = DataConfig(files=(_write(tmp_path / "rows.jsonl", rows),), answer_key="")
    on = replace(config, chat_kwargs='{"think": true}')
    assert _texts(on, tokenizer) == ["(think)(user)3=\n(assistant)", "(think)(user)4=\n(assistant)"]
    assert (
        _texts(replace(config, chat_kwargs='{"think": false}'), tokenizer)[0]
        == "(user)3=\n(assistant)"
    )
    assert (
        _texts(replace(config, chat_kwargs='{"add_generation_prompt": false}'), tokenizer)[0]
        == "(user)3=\n"
    )
    for wrong in ('{"continue_final_message": true}', '{"tokenize": true}'):
        with pytest.raises(
            UserError,
            match=r"rows\.jsonl row 1: the chat template refuses .*fix .*data\.chat_kwargs",
        ):
            _load(replace(config, chat_kwargs=wrong), tokenizer)


@pytest.mark.parametrize("setting", [{"system": "Be brief."}, {"chat_kwargs": '{"think": true}'}])
def test_what_is_for_the_template_needs_one(setting: dict[str, Any], plain: Any, chat: Any) -> None:
    name = next(iter(setting))
    with pytest.raises(
        UserError,
        match=rf"data\.{name} only affects the chat template, but the tokenizer .* has none; use",
    ):
        _load(DataConfig(**setting), plain)
    with pytest.raises(
        UserError,
        match=rf"data\.{name} only affects the chat template, but data\.chat is off; turn it on",
    ):
        _load(DataConfig(**setting, chat=False), chat)
    assert _load(DataConfig(**setting), chat).prompts


@pytest.mark.parametrize("given", ["[]", "{think: 1}"])
def test_chat_arguments_are_an_object(given: str) -> None:
    with pytest.raises(UserError, match=r"^data\.chat_kwargs="):
        check(parse([f"--data.chat-kwargs={given}"]))
    check(parse(['--data.chat-kwargs={"enable_thinking": false}']))


LONG = ["1=", "123456789=", "22=", "12345678="]


@pytest.mark.parametrize("split", ["train", "validation"])
def test_rows_over_the_limit_are_left_out_and_noted(
    split: Split, tmp_path: Path, plain: Any
) -> None:
    file = _write(tmp_path / "rows.jsonl", [{"prompt": prompt} for prompt in LONG])
    field = "files" if split == "train" else "validation_files"
    given: dict[str, Any] = {field: (file,)}
    setting, config = f"data.{field}", DataConfig(answer_key="", **given)
    filtered = replace(config, overlong="filter")
    prompts = _load(filtered, plain, 4, split=split)
    assert [prompt.text for prompt in prompts.prompts] == ["1=", "22="]
    assert prompts.notes == [
        f"data.overlong=filter: 2 of 4 rows of {setting} have prompts over "
        f"rollout.max_prompt_tokens=4 and are left out; the first is {file} row 2 (10 tokens)"
    ]
    assert _load(filtered, plain, 10, split=split).notes == []
    with pytest.raises(
        UserError, match=rf"filter: 4 of 4 rows of {setting} .*=1; .*row 1 \(2 tokens\): .* 10, or"
    ):
        _load(replace(config, overlong="filter"), plain, 1, split=split)
    with pytest.raises(
        UserError, match=r"2 of 4 rows .*max_prompt_tokens=4; .*row 2 \(10 tokens\): set"
    ):
        _load(config, plain, 4, split=split)


BAD: list[Any] = [
    {**VERL_ROW, "prompt": None},
    {**VERL_ROW, "reward_model": {"ground_truth": None}},
    {**VERL_ROW, "reward_model": {"ground_truth": math.nan}},
    {**VERL_ROW, "prompt": ANSWERED["prompt"]},
    {"question": "1="},
    ["prompt"],
    {**VERL_ROW, "prompt": [{"role": "tool", "content": "refused by the template"}]},
    {**VERL_ROW, "extra_info": {"index": 6}, "reward_model": {"ground_truth": "seven"}},
]


def _gsm8k(prompts: Mapping[int, Prompt]) -> dict[int, UserError]:
    return check_prompts(["gsm8k"], prompts)


@pytest.mark.parametrize("split", ["train", "validation"])
def test_invalid_rows_are_refused_or_left_out_counted_and_named(
    split: Split, tmp_path: Path, chat: Any
) -> None:
    field = "files" if split == "train" else "validation_files"
    good = [{**VERL_ROW, "extra_info": {"index": index}} for index in range(3)]
    rows = [*BAD[:3], good[0], *BAD[3:], *good[1:]]
    clean, file = _write(tmp_path / "clean.jsonl", good), _write(tmp_path / "rows.jsonl", rows)
    given: dict[str, Any] = {field: (clean, file)}
    config = DataConfig(**given, invalid="filter")
    check_files(config)
    arguments: dict[str, Any] = {
        "max_prompt_tokens": 64,
        "seed": 0,
        "split": split,
        "check": _gsm8k,
    }
    found = load_prompts(config, chat, **arguments)
    assert [prompt.extra_info["index"] for prompt in found.prompts] == [0, 1, 2, 0, 1, 2]
    (note,) = found.notes
    assert note.startswith(f"data.invalid=filter: 8 of 14 rows of data.{field} ")
    assert f"{file} row 1 has a prompt of type NoneType" in note
    assert load_prompts(replace(config, **{field: (clean,)}), chat, **arguments).notes == []
    # each kind alone, in the middle of a file, is refused by name
    for number, bad in enumerate(BAD):
        one = _write(tmp_path / f"{number}.jsonl", [good[0], bad, good[1]])
        refusing = replace(config, **{field: (one,)}, invalid="refuse")
        check_files(refusing)
        with pytest.raises(UserError, match=rf"{number}\.jsonl row 2.*--data\.invalid filter"):
            load_prompts(refusing, chat, **arguments)
        left = load_prompts(replace(refusing, invalid="filter"), chat, **arguments)
        assert [prompt.extra_info["index"] for prompt in left.prompts] == [0, 1]
        assert f"1 of 3 rows of data.{field} " in left.notes[0]
        # a file with no other row is refused all the same, beside a clean one, too
        alone = _write(tmp_path / f"alone{number}.jsonl", [bad, bad])
        with pytest.raises(UserError, match=rf"alone{number}\.jsonl row 1\b(?!.*invalid)"):
            load_prompts(replace(config, **{field: (clean, alone)}), chat, **arguments)


def test_an_answer_that_is_to_be_continued_may_end_a_prompt(tmp_path: Path, chat: Any) -> None:
    file = _write(tmp_path / "rows.jsonl", [ANSWERED])
    kwargs = '{"continue_final_message": true, "add_generation_prompt": false}'
    (prompt,) = _load(
        DataConfig(files=(file,), answer_key="answer", chat_kwargs=kwargs), chat
    ).prompts
    assert prompt.text == "(user)1\n(assistant)2"


PICTURE = {"bytes": "iVBOR", "path": None}


@pytest.mark.parametrize("suffix", [".parquet", ".json", ".jsonl"])
@pytest.mark.parametrize(
    ("columns", "name"),
    [
        ({"images": [PICTURE]}, "images"),
        ({"image": PICTURE}, "image"),
        ({"video": "a.mp4"}, "video"),
        ({"videos": ["a.mp4"]}, "videos"),
        ({"audio": [0.5, 0.25]}, "audio"),
        ({"audios": ["a.wav"], "images": None}, "audios"),
        ({"images": [], "prompt": "<image>3="}, "images"),
        ({"audio": None, "prompt": [{"role": "user", "content": "Listen: <audio>"}]}, "audio"),
    ],
)
def test_rows_with_more_than_text_are_refused(
    columns: Any, name: str, suffix: str, tmp_path: Path, chat: Any
) -> None:
    file = _write(tmp_path / f"rows{suffix}", [ROW | columns])
    config = DataConfig(files=(file,), answer_key="answer", invalid="filter")
    for read in (check_files, lambda config: _load(config, chat)):
        with pytest.raises(
            UserError, match=rf"row 1 has a column {name}, but only text models are supported; use"
        ):
            read(config)


def test_columns_without_pictures_and_pictures_without_columns_are_text(
    tmp_path: Path, plain: Any
) -> None:
    rows: list[Any] = [{"prompt": "<image>=", "answer": "1"}]
    rows += [
        ROW | empty
        for empty in ({"image": None}, {"images": []}, {"video": math.nan}, {"audio": ""})
    ]
    rows += [{"image": "2=", "prompt": "", "answer": "1"}]
    files = [_write(tmp_path / f"{number}.jsonl", [row]) for number, row in enumerate(rows)]
    assert len(_load(DataConfig(files=tuple(files[:-1]), answer_key="answer"), plain).prompts) == 5
    assert _texts(
        DataConfig(files=(files[-1],), answer_key="answer", prompt_key="image"), plain
    ) == ["2="]


def test_a_tokenizer_that_ends_texts_does_not_end_prompts(tmp_path: Path, plain: Any) -> None:
    tokenizer = build_tokenizer()
    special: Any = [("<eos>", 1), ("<pad>", 0)]
    ending = TemplateProcessing(single="<pad> $A <eos>", special_tokens=special)
    tokenizer.backend_tokenizer.post_processor = ending
    file = _write(tmp_path / "rows.jsonl", [{"prompt": "3="}, {"prompt": "3<eos>"}])
    config = DataConfig(files=(file,), answer_key="")
    found = _load(config, tokenizer)
    three, equals = plain("3=")["input_ids"]
    assert [prompt.tokens for prompt in found.prompts] == [[0, three, equals], [0, three, 1]]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="$A <pad>", special_tokens=special
    )
    other = _load(config, tokenizer)
    assert other.prompts[0].tokens == [three, equals, 0]


@pytest.mark.parametrize(
    ("template", "kwargs", "message"),
    [
        (
            TEMPLATE,
            '{"thinks": 1}',
            "chat_kwargs has thinks, which the chat template never reads; drop it, or name what",
        ),
        (TEMPLATE, '{"tools": []}', "has tools, which the chat template never reads; drop it"),
        ("plain", '{"think": 1}', "has think, which the chat template never reads; drop it"),
        ("{{ oh", '{"think": 1}', "the chat template can't be read (unexpected end of template"),
        (
            {"default": TEMPLATE, "rag": "{{ documents }}"},
            '{"documents": []}',
            "has documents, which the",
        ),
        (TEMPLATE, '{"think": 1, "padding": true, "tokenizer_kwargs": {}}', ""),
        (
            {"default": "a", "rag": "{{ documents }}"},
            '{"documents": [], "chat_template": "rag"}',
            "",
        ),
        ({"default": "a", "tool_use": "{{ tools }}"}, '{"tools": [{}]}', ""),
        ("{% generation %}{{ think }}{% endgeneration %}", '{"think": 1}', ""),
    ],
)
def test_arguments_that_the_template_never_reads_are_refused(
    template: Any, kwargs: str, message: str
) -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = template
    config = DataConfig(chat_kwargs=kwargs)
    if message:
        with pytest.raises(UserError, match=re.escape(message)):
            tokenize(config, [], tokenizer)
    else:
        assert tokenize(config, [], tokenizer) == []


def test_all_rows_show_the_same_time() -> None:
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{{ strftime_now('%H:%M:%S.%f') }} " + TEMPLATE
    now = datetime(2026, 2, 3, 4, 5, 6, 789)
    given: dict[str, Any] = {"max_prompt_tokens": 99, "seed": 0, "split": "train"}
    found, again, later = (
        load_prompts(DataConfig(), tokenizer, **given, now=time) for time in (now, now, None)
    )
    assert {prompt.text[:16] for prompt in found.prompts} == {"04:05:06.000789 "}
    assert len({prompt.text[:16] for prompt in later.prompts}) == 1
    assert found == again != later
    assert found.notes[0].startswith(
        "the chat template shows the current time, so a later resume is refused"
    )


def test_broken_json_is_no_invalid_row(tmp_path: Path, plain: Any) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "1="}\n{"prompt": \n')
    with pytest.raises(UserError, match="row 2: JSON can't be read"):
        _load(DataConfig(files=(str(file),), answer_key="", invalid="filter"), plain)


def test_over_long_rows_are_counted_among_the_valid_ones(tmp_path: Path, plain: Any) -> None:
    file = _write(
        tmp_path / "rows.jsonl",
        [{"prompt": prompt} for prompt in ("", "0=", "1=", "123456=", "2=")],
    )
    config = DataConfig(files=(file,), answer_key="", invalid="filter", overlong="filter")

    def load(longest: int) -> PromptSet:
        arguments: dict[str, Any] = {"max_prompt_tokens": longest, "seed": 0, "split": "train"}
        return load_prompts(
            config, plain, **arguments, check=lambda prompts: {min(prompts): UserError("zero")}
        )

    found = load(4)
    assert [prompt.text for prompt in found.prompts] == ["1=", "2="]
    assert [note.split(" rows")[0] for note in found.notes] == [
        "data.invalid=filter: 2 of 5",
        "data.overlong=filter: 1 of 3",
    ]
    assert f"the first is {file} row 4 " in found.notes[1]
    with pytest.raises(UserError, match=r"filter: 3 of 3 rows of data\.files"):
        load(1)


def test_max_rows_counts_what_is_left(tmp_path: Path, plain: Any) -> None:
    rows = [{"prompt": "1" * (9 if i % 2 else 2)} for i in range(20)]
    file = _write(tmp_path / "rows.jsonl", rows)
    config = DataConfig(files=(file, file), answer_key="", overlong="filter", max_rows=15)
    prompts = _load(config, plain, 4)
    assert len(prompts.prompts) == 15
    assert {prompt.text for prompt in prompts.prompts} == {"11"}
    everything_else = _write(tmp_path / "long.jsonl", [{"prompt": "999999"}])
    gone = replace(config, files=(file, everything_else), max_rows=None)
    assert len(_load(gone, plain, 4).prompts) == 10


def test_gsm8k_as_published_and_in_verls_schema_by_flags_alone(tmp_path: Path, chat: Any) -> None:
    question, answer = "What is 3+4?", "3+4 = <<3+4=7>>7\n#### 7"
    verl = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{question} Think."}],
        "ability": "math",
        "reward_model": {"ground_truth": "7", "style": "rule"},
        "extra_info": {"answer": answer, "index": 0, "question": question, "split": "train"},
    }
    published = _write(tmp_path / "gsm8k.jsonl", [{"question": question, "answer": answer}])
    prepared = _write(tmp_path / "gsm8k.parquet", [verl, verl])
    flags = {
        published: ["--data.prompt-key", "question", "--data.answer-key", "answer"],
        prepared: [],
    }
    read = {}
    for file, columns in flags.items():
        config = parse(["--data.files", file, *columns])
        check(config)
        check_files(config.data)
        read[file] = _load(config.data, chat).prompts
    assert [(p.text, p.data_source, p.ground_truth, p.extra_info) for p in read[published]] == [
        (f"(user){question}\n(assistant)", "gsm8k", answer, {})
    ]
    one = (f"(user){question} Think.\n(assistant)", "openai/gsm8k", "7", verl["extra_info"])
    assert [(p.text, p.data_source, p.ground_truth, p.extra_info) for p in read[prepared]] == [
        one,
        one,
    ]
    nested = parse(
        [
            "--data.files",
            prepared,
            "--data.prompt-key=extra_info.question",
            "--data.answer-key=extra_info.answer",
        ]
    )
    assert _load(nested.data, chat).prompts[0].text == read[published][0].text
    assert _load(nested.data, chat).prompts[0].ground_truth == answer


def test_columns_of_json_texts_are_refused_where_they_are_used(tmp_path: Path) -> None:
    name = "rows.parquet"
    texts = pyarrow.array(['"7"'], pyarrow.string()).cast(pyarrow.json_())
    table = pyarrow.table({"prompt": ["1="], "answer": ["1"], "other": texts})
    pyarrow.parquet.write_table(table, tmp_path / name)
    check_files(DataConfig(files=(str(tmp_path / name),), answer_key="answer"))
    with pytest.raises(
        UserError,
        match=r"has a column other of mixed types, .*give it one type, or write .*\.jsonl",
    ):
        check_files(DataConfig(files=(str(tmp_path / name),), answer_key="other"))
