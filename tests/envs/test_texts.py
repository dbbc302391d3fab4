"""Whatever a policy, an environment, a tool, a reward or a data file says ends no run: texts that
no tokenizer, template, file or screen expects, through the same code as in a run, in this process.
"""

import asyncio
import json
import pickle
import random
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from templates import CHATML, TEMPLATES, tokenizer_of
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from splitppo.config import Config, DataConfig, EnvConfig, RewardConfig, RolloutConfig
from splitppo.data.files import Row, read_file
from splitppo.data.prompts import tokenize
from splitppo.engine import Ask, Piece
from splitppo.envs import Message, Turn, pool
from splitppo.envs.player import Player, turns_of
from splitppo.envs.tools import tool_schemas
from splitppo.envs.turns import Turns
from splitppo.errors import UserError, well_formed
from splitppo.generator.sampler import Sampler
from splitppo.rewards.functions import read_result
from splitppo.rollout import IDS, LOGPROBS, Episode, Prompt, Segment, dialogue
from splitppo.run.files import write_rows
from splitppo.workers import Failure, describe, find_in_file

MEGABYTE = 1 << 20
ALONE = SimpleNamespace(
    is_first=True, gather_set=lambda part: [part], all_gather=lambda parts: [parts]
)
PIECES = [
    "a", "so what", "Ω 中文", "\U0001f600", "e\u0301", " ", "\n", "\r\n", "\t", "\0", "\x1b[2J",
    "\x7f", "\ud800", "\udfff", "\ud83d\ude00", "\udcff", "\ufffe", "\U0010ffff", "\U000f0000",
    "\ufeff", "\u2028", "\u202e", "\u2066", "\u200f", "\u200b", "<|im_end|>", "<s>", "</s>",
    "<|eot|>", "<end_of_turn>", "<|call|>", "<tool_call>", "</tool_call>", "<think>", "</think>",
    "[TOOL_CALLS]", "<|im_", "end|>", "{{ messages }}", "{% endfor %}", "{0}", "%s", "\\ud800",
    "\\", '"', "'", "null", "NaN", '{"a": [1, {}]}', "[" * 40, "sampled-by-the-policy", "error: ",
    "\n[cut]", "9" * 30, "&lt;b&gt;",
]  # fmt: skip


def text_of(draw: random.Random, most: int = 6) -> str:
    return "".join(draw.choices(PIECES, k=draw.randint(0, most)))


def json_of(draw: random.Random, depth: int = 3) -> Any:
    """A JSON value of any shape."""
    kind = draw.randrange(9 if depth else 6)
    if kind < 6:
        number = draw.choice([0, -1, 2**70, 1e308, float("inf"), float("nan"), 0.1])
        return [text_of(draw), number, True, False, None, text_of(draw, 2)][kind]
    parts = [json_of(draw, depth - 1) for _ in range(draw.randrange(4))]
    return parts if kind == 6 else {text_of(draw, 2): part for part in parts}


def is_text(text: str) -> bool:
    return text == well_formed(text)


def tokenizer_for(name: str | None) -> Any:
    """Bytes, and control tokens."""
    tokenizer = tokenizer_of(*TEMPLATES[name][:2]) if name else tokenizer_of(None, "</s>")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    backend = Tokenizer(BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = type(tokenizer)(
        tokenizer_object=backend, bos_token="<s>", eos_token=tokenizer.eos_token,
        extra_special_tokens=["<|call|>"], clean_up_tokenization_spaces=False,
    )  # fmt: skip
    tokenizer.chat_template = TEMPLATES[name][0] if name else None
    return tokenizer


class Here(pool.EnvPool):
    """Environments in this process. Messages are pickled, as to a worker's process."""

    def __init__(self, env: EnvConfig):
        self.name = "here"
        self.rows = 0
        self.handler = pool.Envs(env)
        self._has_state = bool(env.path)
        self._held = {}
        self._workers = cast(Any, [self])

    def _run(self, work: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(asyncio.run(work))
        return future

    async def _settle(self, worker: Any, ask: Any) -> Any:
        return await ask(worker)

    async def call(self, *message: Any) -> Any:
        try:
            sent = pickle.dumps(message)
        except RecursionError as error:  # as a worker's pool does
            return Failure("", "invalid", describe(error))
        try:
            result, read = self.handler(*pickle.loads(sent))
            said = read(await result if asyncio.iscoroutine(result) else result)
        except Exception as error:
            said = Failure("", "error", describe(error))
        return pickle.loads(pickle.dumps(said))


class Says:
    """An environment that says what its data row holds."""

    def __init__(self, row: dict[str, Any], seed: int):
        self.says = row["extra_info"]

    def reset(self) -> Any:
        return self.says["reset"]

    def step(self, message: Message) -> Any:
        assert is_text(message.content)
        return self.says["turns"].pop(0)

    def close(self) -> None: ...


class Speaks:
    """An engine: each turn of a row is the row's next text, and the end of a turn."""

    def __init__(self, turns: Sequence[Sequence[list[int]]]):
        self.turns = [[*row] for row in turns]
        self.asks: list[Ask] = []

    def abort(self) -> None: ...

    def submit(self, asks: Sequence[Ask], *_: Any) -> None:
        self.asks += asks

    def poll(self) -> list[Piece]:
        ask = self.asks.pop(0)
        ids = self.turns[ask.row].pop(0)[: ask.tokens]
        return [Piece(ask.row, ids, [-1.0] * len(ids), "eos")]


def play(
    env: EnvConfig, tokenizer: Any, spoken: Sequence[Sequence[str]], infos: Sequence[dict[str, Any]]
) -> tuple[list[Episode], dict[int, Failure], Player]:
    """The rows of one step, of which each says these texts, and what failed them."""
    end = tokenizer.eos_token
    config = Config(
        rollout=RolloutConfig(max_context=4 * MEGABYTE),
        env=env,
        reward=RewardConfig(failed_score=-7.0),
    )
    player = Player(Here(env), cast(Any, turns_of(config, tokenizer)), config)
    ids = [
        [tokenizer(text + end, add_special_tokens=False)["input_ids"] for text in row]
        for row in spoken
    ]
    sampler = Sampler(
        len(infos), lambda row: Prompt("go", [97], "", "", infos[row]), limit=4 * MEGABYTE,
        context=4 * MEGABYTE, player=player,
    )  # fmt: skip
    lists = sampler.generate(cast(Any, Speaks(ids)), 1, range(len(infos)), RolloutConfig(), 0)
    rows = sorted((row for part in lists for row in part), key=lambda row: row.row)
    assert len(rows) == len(infos), "each row ends"
    failures = dict(player.failures)
    for row in rows:
        assert (row.end == "failed") == (row.row in failures)
        assert (row.rewards[-1] == -7.0) == (row.end == "failed")
        said = dialogue(
            Prompt("go", [97], "", "", {}), row,
            lambda ids: tokenizer.decode(ids, skip_special_tokens=True),
        )  # fmt: skip
        json.dumps(said, ensure_ascii=False).encode()
    json.dumps(player.metrics(ALONE), ensure_ascii=False, allow_nan=False).encode()
    return rows, failures, player


# what an environment may say instead of a text or a number; why it fails its row, if it does
ODD_NUMBERS: list[tuple[Any, str]] = [
    *((number, "finite number") for number in (1e39, -1e300, 10**400, Decimal("1e99"), "much")),
    *((number, "finite number") for number in (float("nan"), float("-inf"), "0.5", None)),
    (3e38, ""), (True, ""), (Decimal("0.5"), ""), ([0.5], ""),
]  # fmt: skip


def odd_turn(draw: random.Random, message: Message) -> tuple[Any, str]:
    """What is wrong in a turn, and the cause that its row must give."""
    number, cause = draw.choice(ODD_NUMBERS)
    return draw.choice(
        [
            (Turn([message], reward=number), cause),
            (Turn([message], metrics={text_of(draw): number}), cause),
            (Turn(cast(Any, [message.content])), "not a message of an environment"),
            (Turn([Message("assistant", message.content)]), "role user, tool or system"),
            (Turn([Message("user", cast(Any, json_of(draw) or 1))]), ""),
            (json_of(draw), "return splitppo.envs.Turn"),
        ]
    )


def row_of(draw: random.Random, roles: Sequence[str], length: int) -> tuple[dict[str, Any], str]:
    """What the environment of a row says, and why the row fails; "": it does not."""

    def message(role: str) -> Message:
        text = text_of(draw) + "a"
        text += text_of(draw) * (length // len(text) + 1)
        id = draw.choice(["abcdefghi", "1" * 9, text_of(draw)])
        if len(id) == 9 and not id.isalnum():
            id = "a"  # a template's words in it are written otherwise, perhaps in another length
        return Message(role, text, name=text_of(draw), tool_call_id=id)

    def cause(message: Message) -> str:
        wrong = (
            "/mistral" in roles
            and message.role == "tool"
            and len(well_formed(message.tool_call_id)) != 9
        )
        return "Tool call IDs should be" if wrong else ""

    said = [message(draw.choice(roles[:-1])) for _ in range(2)]
    causes = [cause(one) for one in said]
    turns: list[Any] = [
        Turn([one], draw.random(), metrics={text_of(draw): 1.0, "turns": 2.0, "reward": 5.0})
        for one in said
    ]
    if draw.random() < 0.3:
        turns[1], causes[1] = odd_turn(draw, said[1])
        # its own texts may fail it, too
        causes[1] = causes[1] or "|".join(["", cause(said[1]), "not a message of an env"])
    reset = draw.choice([None, [], [message("user")]])
    why = causes[0] or causes[1]
    if length and reset:  # a prompt that no context holds
        why = f"|its prompt has|{why}"
    return {"reset": reset, "turns": [*turns, Turn(done=True)]}, why


@pytest.mark.parametrize("rows", [40, pytest.param(500, marks=pytest.mark.campaign)])
@pytest.mark.parametrize("name", TEMPLATES)
def test_what_environments_say(name: str, rows: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(pool.BUILT_IN, "says", cast(Any, Says))
    draw = random.Random(f"{name}/{rows}")
    tokenizer = tokenizer_for(name)
    roles = [*TEMPLATES[name][2], f"/{name}"]
    cases = [
        row_of(draw, roles, min(25 * rows**2, MEGABYTE) if number == 9 else 0)
        for number in range(rows)
    ]
    spoken = [[well_formed(text_of(draw)) for _ in range(3)] for _ in cases]
    env = EnvConfig(path="says", max_observation_tokens=200)
    infos = [info for info, _ in cases]
    played, failures, player = play(env, tokenizer, spoken, pickle.loads(pickle.dumps(infos)))
    controls = Counter[int]()
    for row, (info, cause) in zip(played, cases, strict=True):
        failure = failures.get(row.row)
        if cause.startswith("|"):  # it may fail, and by these
            assert not failure or any(part in failure.text for part in cause.split("|") if part)
        elif cause:
            assert failure
            assert cause in failure.text
        else:
            assert not failure, failure
        if failure:
            assert failure.kind == "invalid"
        for (_, heard), turn in zip(row.turns, info["turns"], strict=False):
            if heard:
                (message,) = turn.messages
                plain = player.turns.observation(
                    [Message(message.role, "a")], [tokenizer.eos_token_id]
                )
                special = {*tokenizer.added_tokens_decoder}
                assert [t for t in heard if t in special] == [t for t in plain if t in special]
                text = well_formed(message.content)[:20].strip()
                assert text[:20] in tokenizer.decode(heard)
                controls.update(t for t in heard if t in special)
    assert controls or name == "mistral"  # whose turns end by the policy's token alone


TOOLS = '''
def echo(value: str):
    """Repeats.

    Args:
        value: any.
    """
    return value

def odd(kind: int):
    """Returns what JSON may not hold.

    Args:
        kind: of it.
    """
    circle = []
    circle.append(circle)
    deep = []
    for _ in range(5000):
        deep = [deep]
    if kind == 0:
        raise ValueError("half \\udc80 and \\0")
    return [
        None, {(1, 2): 3}, circle, deep, float("nan"), b"bytes", {1, 2}, object(), "\\ud800\\0",
        {"\\udfff": "\\u202e"}, 10**5000, {"a": "中"},
    ][kind]
'''


def call_of(draw: random.Random) -> str:
    """A policy's text with calls, most of them right."""
    name = draw.choice(["echo", "odd", text_of(draw)])
    right = {"echo": {"value": text_of(draw)}, "odd": {"kind": draw.randrange(12)}}.get(name, {})
    arguments = draw.choice([right, right, right, json_of(draw), json.dumps(right)])
    number = draw.choice(["abcdefghi", text_of(draw)])
    call: Any = {"name": name, "arguments": arguments, "id": number}
    call = draw.choice([call, call, call, [call, call], json_of(draw), {"function": call}])
    text = json.dumps(call, ensure_ascii=draw.random() < 0.8)
    text = draw.choice([text, text, text, text[: len(text) // 2], "[" * 3000, text + text])
    depth = draw.choice([0, 0, 0, 0, 200, 600, 900])
    if depth:
        text = f'{{"name": "echo", "arguments": {{"value": {"[" * depth}{"]" * depth}}}}}'
    marks = draw.choice([("<tool_call>", "</tool_call>"), ("[TOOL_CALLS]", ""), ("", "")])
    return f"{text_of(draw, 2)}{marks[0]}{text}{marks[1]}"


@pytest.mark.parametrize("rows", [60, pytest.param(500, marks=pytest.mark.campaign)])
@pytest.mark.parametrize("name", ["chatml", "mistral", "llama"])
def test_what_policies_call_and_tools_answer(name: str, rows: int, tmp_path: Path):
    (tmp_path / "tools.py").write_text(TOOLS)
    draw = random.Random(f"{name}/{rows}")
    tokenizer = tokenizer_for(name)
    names = tuple(f"{tmp_path}/tools.py:{tool}" for tool in ("echo", "odd"))
    env = EnvConfig(tools=names, max_turns=3, max_observation_tokens=300, format_reward=0.5)
    if name == "mistral":
        tokenizer.chat_template = "{# [TOOL_CALLS] #}" + tokenizer.chat_template
    spoken = [
        [well_formed(call_of(draw)).replace(tokenizer.eos_token, "") for _ in range(3)]
        for _ in range(rows)
    ]
    played, failures, _ = play(env, tokenizer, spoken, [{}] * rows)
    answers = 0
    for row in played:
        if failure := failures.get(row.row):
            assert failure.kind == "invalid"
            assert any(cause in failure.text for cause in ("Tool call IDs", "RecursionError")), (
                failure
            )
        else:
            assert sum(row.rewards) in (0.0, 0.5)
            answers += len(row.turns) - 1
    assert answers > rows // 15
    assert len(failures) < rows * 0.7


def test_rewards_that_float32_does_not_hold_together(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(pool.BUILT_IN, "says", cast(Any, Says))
    large = Turn([Message("user", "a")], reward=3e38)
    infos = [
        {"reset": None, "turns": [large, replace(large, reward=reward), Turn(done=True)]}
        for reward in (3e38, -3e38)
    ]
    spoken = [["a"] * 3] * 2
    _, failures, _ = play(EnvConfig(path="says"), tokenizer_for("chatml"), spoken, infos)
    assert failures.keys() == {0}
    assert "sum up to 6.0" in failures[0].text


def test_what_can_t_be_read_fails_its_row(monkeypatch: pytest.MonkeyPatch):
    """Where the row began, and where it goes on, whose environment has not begun."""
    monkeypatch.setitem(pool.BUILT_IN, "says", cast(Any, Says))
    tokenizer = tokenizer_for("chatml")
    env = EnvConfig(path="says")
    read = Turns.spoken

    def spoken(self: Turns, before: Sequence[int], sampled: Sequence[int]) -> Message:
        if "b" in tokenizer.decode(sampled):
            raise KeyError("no parser")
        return read(self, before, sampled)

    monkeypatch.setattr(Turns, "spoken", spoken)
    player = Player(Here(env), cast(Any, turns_of(Config(env=env), tokenizer)), Config(env=env))
    ids = array(IDS, tokenizer("b")["input_ids"])
    row = Episode(5, ids, (Segment(ids, array(LOGPROBS, [0.0])), Segment(array(IDS), None)))
    assert player.ask(row, Prompt("go", [97], "", "", {}), 0)
    (reply,) = player.poll({5: row}, 1)
    assert reply.end == "failed"
    player.end(5)
    infos = [{"reset": None, "turns": [Turn([Message("user", "a")]), Turn(done=True)]}] * 2
    _, failures, _ = play(env, tokenizer, [["a", "b"], ["a", "a"]], infos)
    assert [(row, one.kind, "no parser" in one.text) for row, one in failures.items()] == [
        (0, "invalid", True)
    ]


def test_a_row_with_tools_goes_on_elsewhere_from_its_record(tmp_path: Path):
    """No tool is called again, and the format is rewarded once."""
    log = tmp_path / "log"
    (tmp_path / "tools.py").write_text(
        TOOLS.replace("return value", f"open({str(log)!r}, 'a').write(value); return value")
    )
    tokenizer = tokenizer_for("chatml")
    env = EnvConfig(tools=(f"{tmp_path}/tools.py:echo",), format_reward=0.5)
    config = Config(env=env)
    ends = tokenizer.eos_token

    def ids(text: str) -> array:
        return array(IDS, tokenizer(text, add_special_tokens=False)["input_ids"])

    def said(value: str, reward: float = 0.0) -> Segment:
        call = f'<tool_call>{{"name": "echo", "arguments": {{"value": {value}}}}}</tool_call>{ends}'
        return Segment(ids(call), array(LOGPROBS, [0.0] * len(ids(call))), reward=reward)

    heard = Segment(ids("another tokenizer's text"), None)
    waits = Segment(ids(""), None)
    prompt = Prompt("go", [97], "", "", {})
    for first, paid, reward in (('"a"', 0.5, 0.0), ("3 4", 0.0, 0.5)):
        log.write_text("")
        player = Player(Here(env), cast(Any, turns_of(config, tokenizer)), config)
        row = Episode(7, ids("go"), (said(first, paid), heard, said('"b"')))
        assert not player.ask(row, prompt, 0)
        assert not player.pool._held
        row = replace(row, segments=(*row.segments, waits))
        assert player.ask(row, prompt, 0)
        (reply,) = player.poll({7: row}, 0)
        assert "b<|im_end|>" in tokenizer.decode(reply.observed.ids)
        assert reply.reward == reward
        assert log.read_text() == "b"
        player.end(7)
        # a row that ends in the middle of a turn has no environment
        player.end(8)


def results(draw: random.Random) -> Iterator[Any]:
    """What a reward function may return."""
    while True:
        number = draw.choice(ODD_NUMBERS)[0]
        yield draw.choice(
            [
                number,
                json_of(draw),
                {"score": number, text_of(draw): draw.random()},
                {"score": 1.0, text_of(draw): text_of(draw), text_of(draw): number},
            ]
        )


@pytest.mark.parametrize("count", [300, pytest.param(3000, marks=pytest.mark.campaign)])
def test_what_rewards_return(count: int, tmp_path: Path):
    scored = []
    for _, result in zip(range(count), results(random.Random(count)), strict=False):
        outcome = pickle.loads(pickle.dumps(read_result(result)))
        if isinstance(outcome, Failure):
            assert outcome.kind == "invalid"
            assert is_text(outcome.text)
            assert "\n" not in outcome.text
        else:
            scored.append({"score": outcome[0], **outcome[1]})
            assert all(map(is_text, outcome[1]))
    assert len(scored) > count // 10
    for row in scored[:20]:
        write_rows(tmp_path, 1, [row])


@pytest.mark.parametrize("count", [100, pytest.param(2000, marks=pytest.mark.campaign)])
def test_what_data_files_say(count: int, tmp_path: Path):
    """A half of a character in a file is refused, since a file can be mended. All other texts are
    prompts as they stand there."""
    draw = random.Random(count)
    tokenizer = tokenizer_for("chatml")
    file = tmp_path / "rows.jsonl"
    config = DataConfig(files=(str(file),), answer_key="answer")
    refused = 0
    for number in range(count):
        columns = {"prompt": text_of(draw), "answer": text_of(draw), text_of(draw): json_of(draw)}
        columns["prompt"] *= (
            min(500 * count, MEGABYTE) // (len(columns["prompt"]) + 1) if number == 7 else 1
        )
        columns |= {"extra_info": {text_of(draw): json_of(draw)}, "data_source": text_of(draw)}
        escapes = draw.random() < 0.8
        line = json.dumps(columns, ensure_ascii=escapes)
        file.write_bytes(line.encode(errors="surrogatepass"))
        # escapes of two halves are one character
        whole = json.loads(line)
        read = [whole[name] for name in ("prompt", "answer", "extra_info", "data_source")]
        holds = is_text(json.dumps(read, ensure_ascii=False)) and (escapes or is_text(line))
        holds &= bool(whole["prompt"].strip())
        try:
            (row,) = read_file(config, str(file), "data.files")
        except UserError as error:
            row = error
        assert isinstance(row, Row) == holds, row
        if isinstance(row, Row):
            (prompt,) = tokenize(config, [row], tokenizer)
            assert isinstance(prompt, Prompt), prompt
            assert row.prompt in tokenizer.decode(prompt.tokens)
            assert row.ground_truth == whole["answer"]
        else:
            refused += 1
            assert "row 1" in str(row)
    assert 0 < refused < count


def test_schemas_hold_other_scripts(tmp_path: Path):
    (tmp_path / "tools.py").write_text(TOOLS.replace("Repeats.", "重复. ü"))
    tools = {"echo": find_in_file(f"{tmp_path}/tools.py:echo", "env.tools", "tool", "tool")}
    tokenizer = tokenizer_for("chatml")
    assert tokenizer.chat_template == CHATML
    turns = Turns(tokenizer, tools=tool_schemas(tools))
    assert "重复. ü" in turns.render([Message("user", "a")])
