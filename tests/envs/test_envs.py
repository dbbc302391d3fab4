"""The protocol of environments, tools and their calls, and what is built in."""

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast

import pytest

from splitppo.config import EnvConfig
from splitppo.envs import Call, Message, Turn, read_turn
from splitppo.envs.guess import Guess
from splitppo.envs.pool import load
from splitppo.envs.tools import (
    ToolEnv,
    calculator,
    call_reader,
    instructions,
    load_tools,
    tool_schemas,
)
from splitppo.errors import UserError
from splitppo.models.tiny import build_tokenizer

FILE = '''
import threading
from splitppo.envs import Message, Turn

class Echo:
    def __init__(self, row, seed): self.row = row
    def reset(self): return None
    def step(self, message): return Turn([Message("user", message.content)], reward=1)
    def close(self): pass

class Half:
    def reset(self): ...

def multiply(a: int, b: float = 2.0) -> float:
    """Multiplies two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return a * b

async def wait(text: str):
    """Waits.

    Args:
        text: any.
    """
    return {"waited": text}

def thread() -> bool:
    """Says where it runs."""
    return threading.current_thread() is threading.main_thread()

def bare(a):
    """Has no hints."""
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("user") / "mine.py"
    path.write_text(FILE)
    return path


def test_environments_have_names(file: Path):
    env = load(EnvConfig(path=f"{file}:Echo"))[0]({"prompt": "p"}, 7)
    turn = env.step(Message("assistant", "hello"))
    assert read_turn(turn) == Turn([Message("user", "hello")], 1.0)
    assert load(EnvConfig(path="guess")) == (Guess, False)


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ("gues", "env.path=gues: no such environment; use guess or path/to/file.py:name"),
        ("{d}/none.py:Env", "no such file {d}/none.py; give a path that every rank can read"),
        ("{d}/mine.py:Env", "has no Env when it is imported"),
        ("{d}/mine.py:Half", "lacks step; define a class with"),
        ("{d}/mine.py:multiply", "lacks reset"),
        ("{d}/broken.py:Env", "importing the environment file {d}/broken.py failed: Module"),
    ],
)  # fmt: skip
def test_a_wrong_name_is_refused(file: Path, named: str, message: str):
    (file.parent / "broken.py").write_text("import nothing_there")
    with pytest.raises(UserError) as caught:
        load(EnvConfig(path=named.format(d=file.parent)))
    assert message.format(d=file.parent) in str(caught.value)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, "step returned None; return splitppo.envs.Turn"),
        (Turn(cast(Any, ["hello"])), "'hello' is not a message of an environment"),
        (Turn([Message("assistant", "x")]), "with role user, tool or system"),
        (Turn([Message("user", 3)]), "and a text"),  # type: ignore
        (Turn(cast(Any, [{"role": "user"}])), "content"),
        (Turn(reward=float("nan")), "'reward' is not a finite number"),
        (Turn(metrics=cast(Any, {"x": "y"})), "'x' is not a finite number"),
        (Turn(metrics=cast(Any, {1: 2.0, "1": 3.0})), "two of its names"),
    ],
)
def test_a_wrong_turn_is_refused(result: Any, message: str):
    with pytest.raises((TypeError, ValueError), match=message):
        read_turn(result)


def test_messages_may_be_dicts():
    turn = read_turn(Turn([{"role": "user", "content": "x"}], metrics={"n": True}))  # type: ignore
    assert turn == Turn([Message("user", "x")])
    assert turn.metrics == {"n": 1.0}


def test_a_number_called_reward_is_not_the_reward():
    turn = read_turn(Turn(reward=1.0, metrics={"reward": 2.0, "half \ud83d": 3.0}))
    assert (turn.reward, turn.metrics) == (1.0, {"reward": 2.0, "half \\ud83d": 3.0})


# how models write calls: format -> (text of a turn, the calls in it or part of the error)
A = Call("multiply", {"a": 3})
B = Call("multiply", {"a": 4})
A_TEXT = '{"name": "multiply", "arguments": {"a": 3}}'
READ: list[tuple[str, str, list[Call] | str]] = [
    ("hermes", 'so <tool_call>\n{"name": "multiply", "arguments": {"a": 3}}\n</tool_call>.', [A]),
    ("hermes", '<tool_call>{"name": "multiply", "arguments": {"a": 3}}</tool_call>\n'
     '<tool_call>{"name": "multiply", "arguments": "{\\"a\\": 4}"}</tool_call>', [A, B]),
    ("hermes", '<tool_call>{"name": "multiply", "arguments": {"a": 3}}<eos>', [A]),
    ("hermes", '<tool_call>{"name": "multiply", "argum</tool_call>', "the call is no JSON"),
    ("hermes", "<tool_call></tool_call>", "the call is no JSON"),
    ("hermes", "<tool_call>[3]</tool_call>", "a call is"),
    ("hermes", '<tool_call>{"name": "multiply", "arguments": [3]}</tool_call>', "a call is"),
    ("hermes", '<tool_call>{"name": "multiply", "arguments": "3 4"}</tool_call>', "a call is"),
    ("hermes", f"<tool_call>{'[' * 100_000}</tool_call>", "the call is no JSON"),
    ("hermes", '{"name": "multiply", "arguments": {"a": 3}}', []),
    ("llama", '{"name": "multiply", "parameters": {"a": 3}}<eos>', [A]),
    ("llama", '<|python_tag|>{"name": "multiply", "parameters": {"a": 3}}; '
     '{"name": "multiply", "parameters": {"a": 4}}', [A, B]),
    ("llama", '{"name": "multiply", "parameters"', "the call is no JSON"),
    ("llama", "<|python_tag|>multiply(3)", "the call is no JSON"),
    ("llama", "The result is {3}.", []),
    ("mistral", '[TOOL_CALLS][{"name": "multiply", "arguments": {"a": 3}, "id": "abcdefghi"}]<eos>',
     [Call("multiply", {"a": 3}, "abcdefghi")]),
    ("hermes", f"<tool_call>{A_TEXT * 2000}</tool_call>", [A] * 2000),
    (r"CALL (.*)\n", 'CALL {"name": "multiply", "arguments": {"a": 3}}\n', [A]),
]  # fmt: skip


@pytest.mark.parametrize(("call_format", "text", "expected"), READ)
def test_calls_are_read(call_format: str, text: str, expected: list[Call] | str):
    tokenizer = SimpleNamespace(
        chat_template=None, decode=lambda ids, skip_special_tokens: "".join(ids)
    )
    message = call_reader(tokenizer, [], call_format)([], list(text))  # type: ignore
    if isinstance(expected, str):
        assert [expected in call.error for call in message.tool_calls] == [True]
    else:
        assert list(message.tool_calls) == expected
    assert message.role == "assistant"


@pytest.mark.parametrize(
    ("call_format", "message"),
    [("(", "unterminated"), ("call", "no group"), ("(?P<name>a)", "no group")],
)
def test_a_wrong_format_is_refused(call_format: str, message: str):
    with pytest.raises(UserError, match=message):
        call_reader(build_tokenizer(), [], call_format)


def test_a_response_template_reads_calls(file: Path):
    """Of the tokenizer's own, by transformers: also the thinking, which is no content."""
    tokenizer: Any = build_tokenizer()
    tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "A:",
        "fields": {
            "reasoning_content": {"open": "(", "close": ")", "content": "text"},
            "tool_calls": {
                "open": "$", "close": "$", "repeats": True, "content": "json",
                "transform": {"type": "function", "function": "{content}"},
            },
            "content": {"close_pattern": "<eos>", "content": "text"},
        },
    }  # fmt: skip
    read = call_reader(tokenizer, tool_schemas(load_tools((f"{file}:multiply",))))

    def reading(text: str, before: str = "what? A:") -> Message:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        return read(tokenizer(before)["input_ids"], [*ids, tokenizer.eos_token_id])

    assert reading("(so)yes") == Message("assistant", "yes")
    assert reading("so)yes", "what? A:(") == Message("assistant", "yes")  # begun by the template
    assert reading("(so)$3$").tool_calls[0].error.startswith("a call is")
    assert reading("$3 4$").tool_calls[0].error


ENV: list[tuple[Call, str]] = [
    (Call("multiply", {"a": 3}), "6.0"),
    (Call("multiply", {"a": 3, "b": 4}), "12"),
    (Call("calculator", {"expression": "123*456"}), "56088"),
    (Call("", error="the call is no JSON"), "error: ValueError: the call is no JSON"),
    (Call("divide", {}), "error: ValueError: no function 'divide'; there are multiply, calculator"),
    (Call("multiply", {"b": 3}), "error: TypeError: 'a' is a required property"),
    (Call("multiply", {"a": 3, "c": 3}), "error: TypeError: multiply() got an unexpected"),
    (Call("multiply", {"a": "3"}), "error: TypeError: '3' is not of type 'integer' (at $.a)"),
    (Call("multiply", {"a": True}), "error: TypeError: True is not of type 'integer' (at $.a)"),
    (Call("multiply", {"a": 3.5}), "error: TypeError: 3.5 is not of type 'integer' (at $.a)"),
    (Call("calculator", {"expression": "1/0"}), "error: ZeroDivisionError: division by zero"),
]


def step(env: ToolEnv, text: str, *calls: Call) -> Turn:
    return read_turn(asyncio.run(env.step(Message("assistant", text, calls))))


@pytest.mark.parametrize(("call", "answer"), ENV)
def test_a_call_is_answered(file: Path, call: Call, answer: str):
    tools = load_tools((f"{file}:multiply", "calculator"))
    env = ToolEnv(tools, format_reward=0.1)
    turn = step(env, "", call)
    (message,) = turn.messages
    assert message.role == "tool"
    assert message.content.startswith(answer)
    assert not turn.done
    assert turn.reward == (0.0 if call.error else 0.1)
    assert turn.metrics == {"tool_calls": 1, "tool_errors": answer.startswith("error")}


def hinted(
    at: Literal["left", "right", 3],
    tags: list[str],
    limit: int | None = None,
    either: int | list[int] = 0,
    sizes: dict[str, float] = {},  # noqa: B006
    pair: tuple[int, str] = (0, ""),
    nullable: bool = False,
):
    """Has many hints.

    Args:
        at: a.
        tags: b.
        limit: c.
        either: d.
        sizes: e.
        pair: f.
        nullable: g.
    """
    return "ran"


@pytest.mark.parametrize(
    ("arguments", "fits"),
    [
        ({}, True),
        ({"at": "middle"}, False),
        ({"at": "3"}, False),
        ({"at": None}, False),
        ({"tags": "a"}, False),
        ({"tags": ["a", 1]}, False),
        ({"tags": {"a": "b"}}, False),
        ({"tags": []}, True),
        ({"limit": None}, True),
        ({"limit": "1"}, False),
        ({"limit": True}, False),
        ({"either": [1, 2]}, True),
        ({"either": {"a": 1}}, False),
        ({"either": "1"}, False),
        ({"either": None}, False),
        ({"sizes": {"a": 1}}, True),
        ({"sizes": {"a": "1"}}, False),
        ({"pair": [1, "a"]}, True),
        ({"pair": ["a", 1]}, False),
        ({"nullable": True}, True),
        ({"nullable": None}, False),
    ],
)
def test_arguments_are_checked_by_the_schema_that_is_shown(arguments: dict[str, Any], fits: bool):
    call = Call("hinted", {"at": "left", "tags": ["a"], **arguments})
    answer = step(ToolEnv({"hinted": hinted}), "", call).messages[0].content
    assert (answer == "ran") == fits
    assert fits or answer.startswith("error: TypeError: ")


@pytest.mark.parametrize(
    ("result", "answer"),
    [
        ({"größe": "½"}, '{"größe": "½"}'),
        ([1, None], "[1, null]"),
        (None, "null"),
        ({1: 2}, '{"1": 2}'),
        (Path("/a"), '"/a"'),
        ({(1, 2): 3}, "error: TypeError: keys must be"),
    ],
)
def test_any_result_is_an_answer(result: Any, answer: str):
    def tool():
        """Returns it."""
        return result

    turn = step(ToolEnv({"tool": tool}), "", Call("tool"))
    assert turn.messages[0].content.startswith(answer)
    assert turn.metrics["tool_errors"] == answer.startswith("error")


def test_a_result_that_holds_itself_is_an_error():
    def tool():
        """Returns it."""
        result: list[Any] = []
        result.append(result)
        return result

    (message,) = step(ToolEnv({"tool": tool}), "", Call("tool")).messages
    assert message.content.startswith("error: ValueError")


def test_the_reward_for_the_format_is_for_calls_that_all_parse(file: Path):
    env = ToolEnv(load_tools((f"{file}:multiply",)), format_reward=0.1)
    bad = Call("", error="no JSON")
    turns = [step(env, "", *calls) for calls in ((A, bad), (A, B), (A,))]
    assert [turn.reward for turn in turns] == [0.0, 0.1, 0.1]
    assert step(env, "12") == Turn(done=True)


def test_an_async_tool_makes_an_async_environment(file: Path):
    env = ToolEnv(load_tools((f"{file}:wait", f"{file}:thread")))
    turn = step(env, "", Call("wait", {"text": "x"}, id="one"), Call("thread"))
    # a plain function must not hold up the other rows of the process
    assert [m.content for m in turn.messages] == ['{"waited": "x"}', "false"]
    assert turn.messages[0] == Message("tool", '{"waited": "x"}', name="wait", tool_call_id="one")
    for tools, asynchronous in ((("thread",), False), (("thread", "wait"), True)):
        names = tuple(f"{file}:{name}" for name in tools)
        assert load(EnvConfig(tools=names))[1] is asynchronous


def test_schemas_and_instructions(file: Path):
    tools = load_tools((f"{file}:multiply", "calculator"))
    schemas = tool_schemas(tools)
    assert [schema["function"]["name"] for schema in schemas] == ["multiply", "calculator"]
    text = instructions(schemas)
    assert "<tool_call>" in text
    assert "<tool_call>" not in instructions(schemas, "llama")
    assert json.loads(text.splitlines()[1])["parameters"]["required"] == ["a"]
    schemas[0]["function"]["description"] = "größer"
    assert "größer" in instructions(schemas)
    with pytest.raises(UserError, match=r"bare has no schema .*give each parameter a type hint"):
        tool_schemas(load_tools((f"{file}:bare",)))
    with pytest.raises(UserError, match="two tools are called multiply"):
        load_tools((f"{file}:multiply", f"{file}:multiply"))
    with pytest.raises(UserError, match=r"no such tool; use calculator, python or path"):
        load_tools(("calculate",))


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("123*456", "56088"), ("(3 + 4) * -5", "-35"), ("6/3", "2"), ("1/4", "0.25"),
        ("7 // 2", "3"),
        ("2**10", "1024"), ("7 ^ 2", "49"), ("-7 % 3", "2"), ("1e3", "1000"), (" 5 ", "5"),
        ("1/0", "division"), ("9**9**9", "4096 bits"), ("2**4097", "4096 bits"),
        ("1e308*10", "too large"),
        ("9**1000*9**1000", "too large"), ("(-8)**0.5", "no real number"), ("2.5**9999", "bits"),
        ("__import__('os')", "no arithmetic"), ("True + 1", "no arithmetic"),
        ("[1] * 99", "no arithmetic"),
        ("'a' * 99", "no arithmetic"), ("x", "no arithmetic"), ("1 +", "no arithmetic"),
        ("", "no arithmetic"),
        ("(" * 400 + "1" + ")" * 400, "no arithmetic"), ("1+" * 600 + "1", "more than 1000"),
        ("1 << 99", "no arithmetic"), ("0**-1", "power"), ("\0", "no arithmetic"),
    ],
)  # fmt: skip
def test_the_calculator(expression: str, value: str):
    if re.fullmatch(r"[-.\d]+", value):
        assert calculator(expression) == value
    else:
        with pytest.raises((ValueError, ArithmeticError), match=value):
            calculator(expression)


def play(seed: int, guesses: Callable[[range], str]) -> list[Turn]:
    env = Guess({}, seed)
    turns = []
    while not turns or not turns[-1].done:
        turns.append(env.step(Message("assistant", guesses(env.left))))
    return turns


def score(turns: list[Turn]) -> float:
    return sum(turn.reward for turn in turns)


def test_guess():
    def middle(left: range) -> str:
        return f"I say {left[len(left) // 2]}."

    games = [play(seed, middle) for seed in range(300)]
    assert all(score(turns) == pytest.approx(1.0) for turns in games)
    assert max(len(turns) for turns in games) == 3
    assert {turns[0].messages[0].content for turns in games} == {"higher\n", "lower\n", "yes\n"}
    # the seed decides, nothing else
    assert play(5, middle) == play(5, middle)
    assert len({Guess({}, seed).number for seed in range(300)}) == 10
    # what says nothing finds out nothing
    assert [turn.reward for turn in play(5, lambda left: "no idea")] == [0.0, 0.0, 0.0]
    assert [turn.reward for turn in play(5, lambda left: "99")] == [0.0, 0.0, 0.0]
    assert Guess({}, 0).reset() == [Message("user", "A number from 0 to 9?\n")]


def test_a_worker_needs_no_torch():
    """A process that runs environments starts in a moment."""
    code = "import sys, splitppo.envs.tools, splitppo.envs.guess; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert {"torch", "numpy", "transformers"}.isdisjoint(loaded.stdout.split())
