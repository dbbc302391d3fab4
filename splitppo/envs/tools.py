"""Tools: plain functions that the policy may call, and the environment that runs them.

    env.tools = ["tools.py:multiply", "python", "calculator"]

The rank has the tokenizer, so it makes the schemas and reads the calls in what was sampled
(`CallReader`). The worker has the functions, so it checks the arguments and runs them (`ToolEnv`).
"""

import asyncio
import inspect
import json
import re
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from splitppo.envs import Call, EnvFactory, Message, Turn
from splitppo.envs.calculator import calculator
from splitppo.envs.python import python_tool
from splitppo.errors import UserError, one_line
from splitppo.job.loading import awaited, find_in_file, is_async

Tool = Callable[..., Any]
# How models write a call: the group is JSON, one call or a list. The first format is also that of
# the instructions for models whose template knows no tools.
FORMATS = {
    "hermes": r"<tool_call>(.*?)(?:</tool_call>|\Z)",  # Qwen's, too
    "llama": r"(?:\A\s*|<\|python_tag\|>\s*)(?=\{)(.*)|<\|python_tag\|>(.*)",  # Llama 3
    "mistral": r"\[TOOL_CALLS\](.*)",
}
# what a chat template holds of each format
_MARKS = {"hermes": "<tool_call>", "llama": "<|python_tag|>", "mistral": "[TOOL_CALLS]"}
_KINDS: dict[Any, tuple[str, tuple[type, ...]]] = {  # of a parameter: its name, and its JSON values
    int: ("an integer", (int,)),
    float: ("a number", (int, float)),
    str: ("a text", (str,)),
    bool: ("true or false", (bool,)),
    list: ("a list", (list,)),
    dict: ("an object", (dict,)),
}


def load_tools(
    names: Sequence[str], *, network: bool = False, setting: str = "env.tools"
) -> dict[str, Tool]:
    """The functions by the names under which the policy calls them. `network`: `python` may use it.
    Raises UserError if there is none of a name, two have the same one, or `python` can't be kept
    apart from the machine here."""
    built_in = {"calculator": lambda: calculator, "python": lambda: python_tool(network=network)}
    known = f"tool; use {', '.join(built_in)}"
    found: dict[str, Tool] = {}
    for named in names:
        make = built_in.get(named)
        tool = make() if make else find_in_file(named, setting, what="tool", known=known)
        name = getattr(tool, "__name__", named)
        if name in found:
            raise UserError(f"{setting}={named}: another tool is called {name}, too; rename one")
        found[name] = tool
    return found


def tool_schemas(tools: Mapping[str, Tool], setting: str = "env.tools") -> list[dict[str, Any]]:
    """The tools as a chat template gets them, in JSON schema. Raises UserError if a function lacks
    a type hint or its docstring's words on a parameter."""
    from transformers.utils import get_json_schema  # workers do without transformers

    schemas = []
    for name, tool in tools.items():
        try:
            schemas.append(get_json_schema(tool))
        except Exception as error:  # transformers has several errors of its own
            raise UserError(
                f"{setting}: {name} has no schema ({one_line(str(error))}); give each parameter a "
                "type hint, and a line under `Args:` in the docstring"
            ) from error
    return schemas


def instructions(schemas: Sequence[Mapping[str, Any]], call_format: str = "auto") -> str:
    """What tells a model about the tools whose chat template does not read `tools`. How to write a
    call of another format is the user's to say (`data.system`)."""
    functions = "\n".join(json.dumps(schema["function"]) for schema in schemas)
    text = f"You may call these functions:\n{functions}"
    if call_format not in ("auto", "hermes"):
        return text
    return (
        f"{text}\nTo call one, write its name and arguments as JSON:\n"
        '<tool_call>{"name": "...", "arguments": {...}}</tool_call>'
    )


class CallReader:
    """Reads an assistant's message and its calls from what was sampled.

    With a tokenizer that has a response template, `tokenizer.parse_response` reads it; else
    `call_format` does: a name of `FORMATS`, a regular expression whose first group is the JSON of a
    call, or whose groups `name` and `arguments` are its parts; `auto` is the format that the chat
    template names, else the first. A regular expression goes before the response template. Raises
    UserError if it is none.
    """

    def __init__(
        self, tokenizer: Any, schemas: Sequence[dict[str, Any]], call_format: str = "auto"
    ):
        self.tokenizer = tokenizer
        self.schemas = list(schemas)
        chosen = call_format
        self.by_template = False
        if call_format == "auto":
            self.by_template = getattr(tokenizer, "response_template", None) is not None
            marks = str(tokenizer.chat_template)
            chosen = next((name for name, mark in _MARKS.items() if mark in marks), "hermes")
        try:
            self.pattern = re.compile(FORMATS.get(chosen, chosen), re.DOTALL)
        except re.error as error:
            raise UserError(
                f"env.call_format={chosen} is no regular expression ({error}); "
                f"use auto, {', '.join(FORMATS)} or one with a group for the JSON of a call"
            ) from error
        if not self.pattern.groups:
            raise UserError(
                f"env.call_format={chosen} has no group; put the JSON of a call into brackets"
            )

    def __call__(self, before: Sequence[int], sampled: Sequence[int]) -> Message:
        """The message of a turn: `sampled` are its ids, `before` those of the row so far."""
        text = self.tokenizer.decode(sampled, skip_special_tokens=False)
        shown = self.tokenizer.decode(sampled, skip_special_tokens=True)
        if not self.by_template:
            calls = [call for match in self.pattern.finditer(text) for call in _calls(match)]
            return Message("assistant", shown, tuple(calls))
        try:
            parsed = self.tokenizer.parse_response(
                list(sampled), prefix=list(before), tools=self.schemas
            )
        except ValueError as error:
            return Message("assistant", shown, (Call("", error=one_line(str(error))[:200]),))
        calls = [_call(call) for call in parsed.get("tool_calls") or ()]
        return Message("assistant", str(parsed.get("content") or ""), tuple(calls))


def _calls(match: re.Match[str]) -> Iterator[Call]:
    """The calls in a match of a format."""
    named = match.groupdict()
    text = next((group for group in match.groups() if group is not None), "").strip()
    try:
        if "name" in named:
            yield _call({"name": named["name"], "arguments": named.get("arguments") or "{}"})
            return
        while True:
            value, end = json.JSONDecoder().raw_decode(text)
            yield from map(_call, value if isinstance(value, list) else [value])
            # what follows may be more calls (Llama's semicolon), or the end of the turn
            text = text[end:].lstrip("; \n")
            if not text.startswith(("{", "[")):
                return
    except (ValueError, RecursionError) as error:
        yield Call("", error=f"the call is no JSON: {error}")


def _call(value: Any) -> Call:
    """A call from its JSON: `name`, and `arguments` or `parameters`, an object or its text."""
    given = value.get("function", value) if isinstance(value, dict) else {}
    if not (isinstance(given, dict) and isinstance(given.get("name"), str)):
        return Call("", error='a call is {"name": "...", "arguments": {...}}')
    name = given["name"]
    arguments = given.get("arguments", given.get("parameters", {}))
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError as error:
        return Call(name, error=f"the arguments are no JSON: {error}")
    if not isinstance(arguments, dict):
        return Call(name, error="the arguments are no JSON object")
    return Call(name, arguments, str(value.get("id") or ""))


class ToolEnv:
    """The environment of a row with tools: runs the calls in a message, and answers each with a
    `tool` message. It is over when a message has no call.

    An error of a call (its text, name or arguments, or what the function raises) is an answer that
    the policy can read. `format_reward` is for the first turn of the row whose calls all parse:
    once, or calling would pay without end.
    """

    in_threads = False  # whether plain functions run beside the event loop

    def __init__(self, tools: Mapping[str, Tool], format_reward: float = 0.0):
        self.tools = tools
        self.format_reward = format_reward

    def reset(self) -> None:
        """The prompt is the row's own."""

    def step(self, message: Message) -> Any:
        return asyncio.run(self.answer(message))

    async def answer(self, message: Message) -> Turn:
        """What `step` returns."""
        if not message.tool_calls:
            return Turn(done=True)
        answers = [await self._run(call) for call in message.tool_calls]
        reward = 0.0
        if not any(call.error for call in message.tool_calls):
            reward = self.format_reward
            self.format_reward = 0.0
        messages = [
            Message("tool", text, name=call.name, call_id=call.id)
            for call, (text, _) in zip(message.tool_calls, answers, strict=True)
        ]
        errors = sum(failed for _, failed in answers)
        return Turn(messages, reward, metrics={"tool_calls": len(answers), "tool_errors": errors})

    async def _run(self, call: Call) -> tuple[str, bool]:
        """The answer to a call, and whether it is an error."""
        if wrong := call.error or self._wrong(call):
            return f"error: {wrong}", True
        tool = self.tools[call.name]
        beside = self.in_threads and not is_async(tool)
        try:
            given = asyncio.to_thread(tool, **call.arguments) if beside else tool(**call.arguments)
            result = await awaited(given)
        except Exception as error:  # of the user's function, by what the policy gave it
            return f"error: {type(error).__name__}: {one_line(str(error))[:300]}", True
        return result if isinstance(result, str) else json.dumps(result, default=str), False

    def _wrong(self, call: Call) -> str:
        """Why a call has no function that takes its arguments; "": it has."""
        if call.name not in self.tools:
            return f"there is no function {call.name!r}; there are {', '.join(self.tools)}"
        tool = self.tools[call.name]
        try:
            inspect.signature(tool).bind(**call.arguments)
        except TypeError as error:
            return f"{call.name}{inspect.signature(tool)}: {error}"
        hints = typing.get_type_hints(tool)
        for name, value in call.arguments.items():
            kind, types = _KINDS.get(hints.get(name), ("", (object, bool)))
            # to Python, true is an integer
            number = bool not in types and isinstance(value, bool)
            if number or not isinstance(value, types):
                return f"{call.name}: {name} must be {kind}, not {json.dumps(value)[:80]}"
        return ""

    def close(self) -> None:
        """There is nothing to free."""


class AsyncToolEnv(ToolEnv):
    """A ToolEnv of which one process runs many at a time: a function is `async`."""

    in_threads = True

    async def step(self, message: Message) -> Turn:
        return await self.answer(message)


def tool_env(tools: Mapping[str, Tool], format_reward: float = 0.0) -> EnvFactory:
    """Makes a row's environment from tools. It is async if one of the functions is."""
    kind = AsyncToolEnv if any(is_async(tool) for tool in tools.values()) else ToolEnv
    return lambda row, seed: kind(tools, format_reward)
