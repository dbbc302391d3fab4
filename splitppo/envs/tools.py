"""Tools: plain functions that the policy may call, and the environment that runs them.

    env.tools = ["tools.py:multiply", "python", "calculator"]

The rank has the tokenizer, so it makes the schemas and parses the calls in sampled turns
(`call_reader`). The worker has the functions, so it checks the arguments and runs them (`ToolEnv`).
"""

import asyncio
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import best_match

from splitppo.envs import Call, Message, Turn
from splitppo.envs.calculator import calculator
from splitppo.envs.calls import (
    FORMATS,
    PROBE_SCHEMA,
    CallReader,
    Written,
    reads_all,
    template_reader,
    text_reader,
    validator,
)
from splitppo.envs.python import python_tool
from splitppo.errors import UserError, one_line
from splitppo.workers import awaited, find_in_file, is_async

Tool = Callable[..., Any]


@functools.cache  # once a process: for `python` a jail is tried
def load_tools(names: tuple[str, ...], *, network: bool = False) -> Mapping[str, Tool]:
    """The functions by the names under which the policy calls them. `network`: whether `python` may
    use the network. Raises UserError if a tool does not exist, two have the same name, or this
    machine can't isolate `python`."""
    built_in = {"calculator": lambda: calculator, "python": lambda: python_tool(network=network)}
    by_name: dict[str, Tool] = {}
    for named in names:
        tool = (
            built_in[named]()
            if named in built_in
            else find_in_file(named, "env.tools", "tool", f"tool; use {', '.join(built_in)}")
        )
        if tool.__name__ in by_name:
            raise UserError(f"env.tools={named}: two tools are called {tool.__name__}; rename one")
        by_name[tool.__name__] = tool
    return by_name


def tool_schemas(tools: Mapping[str, Tool]) -> list[dict[str, Any]]:
    """The tools' JSON schemas, as chat templates take them. Raises UserError if a function lacks a
    type hint, or its docstring lacks a parameter's description."""
    from transformers.utils import get_json_schema  # workers do without transformers

    schemas = []
    for name, tool in tools.items():
        try:
            schemas.append(get_json_schema(tool))
            # some hints have types that JSON does not have, as pictures
            Draft202012Validator.check_schema(schemas[-1]["function"]["parameters"])
        except Exception as error:  # transformers has several errors of its own
            raise UserError(
                f"env.tools: {name} has no schema ({one_line(str(error))[:200]}); give each "
                "parameter a type hint, and a line under `Args:` in the docstring"
            ) from error
    return schemas


def instructions(schemas: Sequence[Mapping[str, Any]], call_format: str = "auto") -> str:
    """A text about the tools for models whose chat template takes no `tools`. For other call
    formats the user describes them (`data.system`)."""
    functions = (json.dumps(schema["function"], ensure_ascii=False) for schema in schemas)
    text = "\n".join(["You may call these functions:", *functions])
    if call_format not in ("auto", "hermes"):
        return text
    return (
        f"{text}\nTo call one, write its name and arguments as JSON:\n"
        '<tool_call>{"name": "...", "arguments": {...}}</tool_call>'
    )


def call_reader(
    tokenizer: Any,
    schemas: Sequence[dict[str, Any]],
    call_format: str = "auto",
    written: Sequence[Written] | None = None,
) -> CallReader:
    """Returns a parser of sampled turns: the assistant's message and its calls. Calls inside
    thoughts do not count.

    Args:
        schemas: schemas of the tools.
        call_format: a name of `FORMATS`, or a regular expression with such groups. `auto`: the
            format that parses `written`: the tokenizer's response template, or one of `FORMATS`.
        written: calls as the chat template writes them (`written_calls`). None: it writes none.

    Raises UserError if there are tools and `written` can't be parsed, or the expression can't be
    used.
    """
    names = FORMATS if call_format == "auto" else [call_format]
    known = [*schemas, PROBE_SCHEMA]
    readers = [text_reader(tokenizer, known, *FORMATS.get(name, (name, ""))) for name in names]
    if call_format == "auto" and getattr(tokenizer, "response_template", None):
        readers.insert(0, template_reader(tokenizer, known))
    chosen = next((read for read in readers if reads_all(read, tokenizer, written or ())), None)
    remedy = (
        f"use {', '.join(FORMATS)}, or a regular expression whose groups are the JSON of a call, "
        "or its `name` and `arguments`"
    )
    # environments without tools may do without calls
    if not chosen and schemas and written:
        raise UserError(
            f"env.call_format={call_format} does not read calls as the chat template writes them "
            f"({one_line(written[1][1][0][1])[:120]!r}); {remedy}"
        )
    if call_format == "auto" and schemas and written == []:
        raise UserError(
            "env.call_format=auto: the chat template takes tools, but does not show how a call is "
            f"written; {remedy}"
        )
    return chosen or readers[0]


class ToolEnv:
    """The environment of rows with tools: runs the calls in a message and answers each with a
    `tool` message. The episode ends with a message without calls.

    If a call can't be parsed, names no tool, has wrong arguments or raises, the policy reads the
    error as the answer. `format_reward` is the reward of a turn whose calls all parse; a `Player`
    pays it once per row, since otherwise every further call would pay.

    Args:
        schemas: schemas of the tools. Left out: transformers makes them.
    """

    def __init__(
        self,
        tools: Mapping[str, Tool],
        format_reward: float = 0.0,
        schemas: Sequence[Mapping[str, Any]] = (),
    ):
        self.tools = tools
        self.format_reward = format_reward
        self._schemas = {
            schema["function"]["name"]: schema for schema in schemas or tool_schemas(tools)
        }

    async def step(self, message: Message) -> Turn:
        calls = message.tool_calls
        if not calls:
            return Turn(done=True)
        answers = [await self._answer(call) for call in calls]
        parsed = not any(call.error for call in calls)
        return Turn(
            [
                Message("tool", text, name=call.name, tool_call_id=call.id)
                for call, text in zip(calls, answers, strict=True)
            ],
            self.format_reward * parsed,
            metrics={
                "tool_calls": len(answers),
                "tool_errors": sum(text.startswith("error: ") for text in answers),
            },
        )

    async def _answer(self, call: Call) -> str:
        try:
            if call.error:
                raise ValueError(call.error)
            if call.name not in self.tools:
                raise ValueError(f"no function {call.name!r}; there are {', '.join(self.tools)}")
            tool = self.tools[call.name]
            errors = validator(self._schemas[call.name]).iter_errors(call.arguments)
            if error := best_match(errors):
                raise TypeError(f"{error.message} (at {error.json_path})")
            # plain functions in a thread: a process may run other rows meanwhile
            run = tool if is_async(tool) else partial(asyncio.to_thread, tool)
            result = await awaited(run(**call.arguments))
            if not isinstance(result, str):
                result = json.dumps(result, default=str, ensure_ascii=False)
        except Exception as error:  # also of the user's function, by what the policy gave it
            return f"error: {type(error).__name__}: {one_line(str(error))[:300]}"
        return result
