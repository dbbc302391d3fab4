"""Prompts from files and generated tasks, their order, and what is said about wrong files."""

import json
import time
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from splitppo.config import DataConfig
from splitppo.data import batch_indices, check_files, check_task, generated_prompts, load_prompts
from splitppo.errors import UserError
from splitppo.rewards import rules
from splitppo.tiny import build_tokenizer

GSM8K = Path(__file__).parents[1] / "../shared/data/gsm8k"
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "({{ message.role }}){{ message.content }}\n{% endfor %}{% if add_generation_prompt %}(assistant){% endif %}"
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


def _write(path: Path, rows: list[Any]) -> str:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("suffix", [".parquet", ".json", ".jsonl"])
def test_verl_rows_read_alike_from_every_kind_of_file(suffix: str, tmp_path: Path, chat: Any) -> None:
    system = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    file = _write(tmp_path / f"rows{suffix}", [VERL_ROW, {**VERL_ROW, "prompt": system, "data_source": "other"}])
    config = DataConfig(files=(file,))
    check_files(config)
    first, second = load_prompts(config, config.files, chat, max_prompt_tokens=64)
    assert first.text == "(user)What is 3+4?\n(assistant)"
    assert chat.decode(first.tokens) == first.text
    assert (first.data_source, first.ground_truth, first.extra_info) == ("mine", "7", {"index": 5})
    assert second.text == "(system)Be brief.\n(user)Hi\n(assistant)"
    assert second.data_source == "other"


def test_plain_columns_nested_keys_and_defaults(tmp_path: Path, plain: Any, chat: Any) -> None:
    row = {"q": {"text": "3+4="}, "a.b": 7}
    files = (_write(tmp_path / "sums.jsonl", [row]), _write(tmp_path / "more.json", [row, row]))
    config = DataConfig(files=files, prompt_key="q.text", answer_key="a.b")
    check_files(config)
    prompts = load_prompts(config, files, plain, max_prompt_tokens=9)
    assert [prompt.data_source for prompt in prompts] == ["sums", "more", "more"]
    assert (prompts[0].text, prompts[0].ground_truth, prompts[0].extra_info) == ("3+4=", 7, {})
    assert load_prompts(config, files, chat, max_prompt_tokens=99)[0].text == "(user)3+4=\n(assistant)"
    untemplated = DataConfig(files=files, prompt_key="q.text", answer_key="", chat=False)
    assert load_prompts(untemplated, files, chat, max_prompt_tokens=99)[0].text == "3+4="
    assert load_prompts(untemplated, files, chat, max_prompt_tokens=99)[0].ground_truth is None


def test_special_tokens_are_the_tokenizers_own_only_without_a_template(tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = build_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", 1)])
    file = _write(tmp_path / "rows.jsonl", [{"prompt": "3", "a": 1}])
    config = DataConfig(files=(file,), answer_key="a")
    three = tokenizer.convert_tokens_to_ids("3")
    assert load_prompts(config, config.files, tokenizer, max_prompt_tokens=99)[0].tokens == [1, three]
    tokenizer.chat_template = TEMPLATE
    assert 1 not in load_prompts(config, config.files, tokenizer, max_prompt_tokens=99)[0].tokens


def test_string_and_message_prompts_may_stand_in_one_data_set(tmp_path: Path, chat: Any) -> None:
    files = (
        _write(tmp_path / "a.jsonl", [{**VERL_ROW, "prompt": text} for text in ("1", "22", "333")]),
        _write(tmp_path / "b.jsonl", [VERL_ROW]),
        _write(tmp_path / "c.jsonl", [{**VERL_ROW, "prompt": "4444"}]),
    )
    prompts = load_prompts(DataConfig(files=files, chat=False), files, chat, max_prompt_tokens=99)
    assert [prompt.text for prompt in prompts] == ["1", "22", "333", "(user)What is 3+4?\n(assistant)", "4444"]
    assert [chat.decode(prompt.tokens) for prompt in prompts] == [prompt.text for prompt in prompts]


@pytest.mark.skipif(not GSM8K.is_dir(), reason="no ../shared/data/gsm8k beside the repository")
def test_gsm8k_in_verls_schema(chat: Any) -> None:
    config = DataConfig(files=(str(GSM8K / "train.parquet"),))
    check_files(config)
    prompts = load_prompts(config, config.files, chat, max_prompt_tokens=1200)
    assert len(prompts) == 7473
    assert prompts[0].text.startswith("(user)Natalia sold clips to 48 of her friends in April")
    assert prompts[0].text.endswith('output the final answer after "####".\n(assistant)')
    assert (prompts[0].data_source, prompts[0].ground_truth) == ("openai/gsm8k", "72")
    assert prompts[0].extra_info["index"] == 0


@pytest.mark.skipif(not GSM8K.is_dir(), reason="no ../shared/data/gsm8k beside the repository")
def test_gsm8k_as_published_asks_the_same_questions(chat: Any) -> None:
    verl = DataConfig(files=(str(GSM8K / "test.parquet"),))
    published = DataConfig(files=(str(GSM8K / "test.jsonl"),), prompt_key="question", answer_key="answer")
    check_files(published)
    prompts = load_prompts(verl, verl.files, chat, max_prompt_tokens=1200)
    questions = load_prompts(published, published.files, chat, max_prompt_tokens=1200)
    assert len(questions) == 1319
    assert [f"(user){prompt.extra_info['question']}\n(assistant)" for prompt in prompts] == [q.text for q in questions]
    assert rules.gsm8k("", questions[0].ground_truth, prompts[0].ground_truth, {}) == 1


ROW = {"prompt": "1=", "answer": "1"}
MESSAGES = {"prompt": [{"role": "user", "content": "1"}], "answer": "1"}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], r"rows\.jsonl holds no rows; remove it from --data\.files"),
        (
            [ROW, ROW, {"question": "1="}],
            r"data\.prompt_key=prompt: .*rows\.jsonl row 3 has no such column; columns: q",
        ),
        ([ROW, {"prompt": "1=", "x": {"y": 1}}], r"data\.answer_key=answer: .* row 2 .* columns: prompt, x\.y; set"),
        ([ROW, {**ROW, "answer": None}], r"data\.answer_key=answer: .*row 2 has null there"),
        ([ROW, {**ROW, "prompt": 3}], r"row 2 has a prompt of type int; it must be a string or a list"),
        ([ROW, {**ROW, "prompt": {"role": "user"}}], r"row 2 has a prompt of type dict"),
        ([ROW, {**ROW, "prompt": None}], r"row 2 has a prompt of type NoneType"),
        ([ROW, {**ROW, "prompt": " \n"}], r"row 2 has an empty prompt"),
        ([ROW, {**ROW, "prompt": []}], r"row 2 has an empty prompt"),
        ([ROW, {**ROW, "prompt": [{"role": "user", "content": ""}]}], r"row 2 has an empty prompt"),
        ([ROW, {**ROW, "prompt": ["hello"]}], r"row 2 has a prompt whose message 1 is not \{role"),
        ([ROW, {**ROW, "prompt": [{"role": "user", "content": ["a"]}]}], r"row 2 .* message 1 is not \{role"),
        (
            [ROW, {**ROW, "prompt": "12345678="}],
            r"max_prompt_tokens=8: .*row 2 has a prompt of 9 tokens .*1 of 2.* 9 or",
        ),
        ([ROW, {**ROW, "data_source": 3}], r"row 2 has a data_source of type int"),
        ([ROW, {**ROW, "extra_info": "x"}], r"row 2 has an extra_info of type str"),
        ([ROW, ["prompt"]], r"row 2 is a list; a row is an object"),
        ([ROW, MESSAGES], r"row 2 has a prompt of chat messages, but the tokenizer .* has no chat template; use"),
    ],
)
def test_wrong_rows_are_named_in_one_line(rows: list[Any], message: str, tmp_path: Path, plain: Any) -> None:
    config = DataConfig(files=(_write(tmp_path / "rows.jsonl", rows),), answer_key="answer")
    with pytest.raises(UserError, match=message) as caught:
        load_prompts(config, config.files, plain, max_prompt_tokens=8)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.csv", b"prompt,answer\n", r"data\.files=.*rows\.csv: unknown kind of file; use \.parquet, \.json or"),
        ("rows.jsonl", b"", "holds no rows"),
        ("rows.jsonl", b"\n \n", "holds no rows"),
        ("rows.json", b"", "holds no rows"),
        ("rows.json", b"[]", "holds no rows"),
        ("rows.json", b'{"prompt": "1"}', r"rows\.json holds one dict; a \.json file is a list of rows"),
        ("rows.json", b'[{"prompt": ', r"rows\.json: broken JSON"),
        ("rows.jsonl", b'\n{"prompt": "1", \n', r"rows\.jsonl row 2: broken JSON"),
        ("rows.jsonl", b'{"prompt": "\xff"}\n', r"rows\.jsonl row 1: broken JSON"),
        ("rows.jsonl", b'{"prompt": "1"}\n', r"answer_key=reward_model\.ground_truth: .*row 1 .*columns: prompt; set"),
        ("rows.parquet", b"PAR1 or not", r"rows\.parquet is no parquet file"),
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
        load_prompts(config, config.files, chat, max_prompt_tokens=99)


@pytest.mark.parametrize(("task", "digits", "count"), [("addition", 1, 100), ("addition", 9, 4000), ("echo", 1, 64)])
def test_generated_splits_are_disjoint_seeded_and_a_fifth(task: str, digits: int, count: int, plain: Any) -> None:
    config = DataConfig(task=task, digits=digits)
    train = generated_prompts(config, plain, seed=5, split="train")
    held_out = generated_prompts(config, plain, seed=5, split="validation")
    assert (len(train), len(held_out)) == (count - count // 5, count // 5)
    assert len({prompt.text for prompt in [*train, *held_out]}) == count
    assert generated_prompts(config, plain, seed=5, split="train") == train
    assert generated_prompts(config, plain, seed=6, split="train") != train
    assert {prompt.data_source for prompt in train} == {task}


def test_generated_rows_ask_what_they_score(plain: Any, chat: Any) -> None:
    for prompt in generated_prompts(DataConfig(task="addition", digits=2), plain, seed=0, split="train"):
        a, b = prompt.text.removeprefix("What is ").removesuffix("?").split("+")
        assert len(a) == len(b) == 2
        assert int(a) + int(b) == int(prompt.ground_truth)
    for prompt in generated_prompts(DataConfig(task="echo"), plain, seed=0, split="validation"):
        assert prompt.text == f"{prompt.ground_truth}="
        assert plain.decode(prompt.tokens) == prompt.text
    first = generated_prompts(DataConfig(task="addition"), chat, seed=0, split="train")[0]
    assert first.text.startswith("(user)What is ")
    assert first.text.endswith("?\n(assistant)")


def test_unknown_task_and_digits_are_refused(plain: Any) -> None:
    check_task("echo")
    with pytest.raises(UserError, match=r"data\.task=sums: .*use echo or addition"):
        check_task("sums")
    for digits in (0, -1, 10):
        with pytest.raises(UserError, match=rf"data\.digits={digits}: operands have 1 to 9 digits"):
            generated_prompts(DataConfig(task="addition", digits=digits), plain, seed=0, split="train")


@pytest.mark.parametrize(("n", "per_step"), [(10, 4), (10, 10), (7, 3), (3, 8), (1, 2)])
def test_order_is_epochs_of_permutations_cut_into_steps(n: int, per_step: int) -> None:
    steps = [batch_indices(n, per_step, step, seed=3) for step in range(1, 5 * n + 1)]
    assert all(len(step) == per_step for step in steps)
    stream = [index for step in steps for index in step]
    epochs = [stream[start : start + n] for start in range(0, len(stream) - n + 1, n)]
    assert all(sorted(epoch) == list(range(n)) for epoch in epochs)
    if n == 10:
        assert len({tuple(epoch) for epoch in epochs}) == len(epochs), "two epochs in the same order"
        assert batch_indices(n, per_step, 1, seed=4) != steps[0]
        assert batch_indices(n, per_step, 1, seed=-1) != steps[0]


def test_a_late_step_costs_as_little_as_an_early_one() -> None:
    start = time.monotonic()
    assert len(set(batch_indices(7473, 512, 10_000_000, seed=0))) > 256
    assert time.monotonic() - start < 1
