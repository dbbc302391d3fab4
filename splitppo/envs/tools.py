"""Tools: plain functions that the policy may call, and the environment that runs them.

    env.tools = ["tools.py:multiply", "python", "calculator"]

The rank has the tokenizer, so it makes the schemas and reads the calls in what was sampled
(`call_reader`). The worker has the functions, so it checks the arguments and runs them (`ToolEnv`).
"""

import ast
import asyncio
import json
import math
import operator
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from splitppo.envs import NO_ID, Call, Message, Turn
from splitppo.envs.python import python_tool
from splitppo.errors import UserError, one_line
from splitppo.workers import awaited, find_in_file, is_async

Tool = Callable[..., Any]
# reads a turn: the ids of the row so far, and those that were sampled then
CallReader = Callable[[Sequence[int], Sequence[int]], Message]
# How models write a call: what their chat template holds, and the call. Its group is JSON, one call
# or a list. The first is also that of the instructions for models whose template knows no tools.
FORMATS = {
    "hermes": ("<tool_call>", r"<tool_call>(.*?)(?:</tool_call>|\Z)"),  # Qwen's, too
    "llama": ("<|python_tag|>", r"(?:\A\s*(?=\{)|<\|python_tag\|>)(.*)"),  # Llama 3
    "mistral": ("[TOOL_CALLS]", r"\[TOOL_CALLS\](.*)"),
}
LONGEST = 1000  # characters of an expression for the calculator
BITS = 4096  # of its largest number

_OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


def load_tools(names: Sequence[str], *, network: bool = False) -> dict[str, Tool]:
    """The functions by the names under which the policy calls them. `network`: `python` may use it.
    Raises UserError if there is none of a name, two have the same one, or `python` can't be kept
    apart from the machine here."""
    built_in = {"calculator": lambda: calculator, "python": lambda: python_tool(network=network)}
    found: dict[str, Tool] = {}
    for named in names:
        tool = (
            built_in[named]()
            if named in built_in
            else find_in_file(named, "env.tools", "tool", f"tool; use {', '.join(built_in)}")
        )
        if tool.__name__ in found:
            raise UserError(
                f"env.tools={named}: another tool is called {tool.__name__}, too; rename one"
            )
        found[tool.__name__] = tool
    return found


def tool_schemas(tools: Mapping[str, Tool]) -> list[dict[str, Any]]:
    """The tools as a chat template gets them, in JSON schema. Raises UserError if a function lacks
    a type hint or its docstring's words on a parameter."""
    from transformers.utils import get_json_schema  # workers do without transformers

    schemas = []
    for name, tool in tools.items():
        try:
            schemas.append(get_json_schema(tool))
        except Exception as error:  # transformers has several errors of its own
            raise UserError(
                f"env.tools: {name} has no schema ({one_line(str(error))}); give each parameter a "
                "type hint, and a line under `Args:` in the docstring"
            ) from error
    return schemas


def instructions(schemas: Sequence[Mapping[str, Any]], call_format: str = "auto") -> str:
    """What tells a model about the tools whose chat template does not read `tools`. How to write a
    call of another format is the user's to say (`data.system`)."""
    text = "\n".join(
        ["You may call these functions:", *(json.dumps(schema["function"]) for schema in schemas)]
    )
    if call_format not in ("auto", "hermes"):
        return text
    return (
        f"{text}\nTo call one, write its name and arguments as JSON:\n"
        '<tool_call>{"name": "...", "arguments": {...}}</tool_call>'
    )


def call_reader(
    tokenizer: Any, schemas: Sequence[dict[str, Any]], call_format: str = "auto"
) -> CallReader:
    """What reads an assistant's message and its calls from what was sampled.

    With a tokenizer that has a response template, `tokenizer.parse_response` reads it; else
    `call_format` does: a name of `FORMATS`, a regular expression whose first group is the JSON of a
    call; `auto` is the format that the chat template names, else the first. A regular expression
    goes before the response template. Raises UserError if it is none.
    """
    marked = (name for name, (mark, _) in FORMATS.items() if mark in str(tokenizer.chat_template))
    chosen = next(marked, "hermes") if call_format == "auto" else call_format
    by_template = call_format == "auto" and getattr(tokenizer, "response_template", None)
    try:
        pattern = re.compile(FORMATS.get(chosen, ("", chosen))[1], re.DOTALL)
    except re.error as error:
        raise UserError(
            f"env.call_format={chosen} is no regular expression ({error}); "
            f"use auto, {', '.join(FORMATS)} or one with a group for the JSON of a call"
        ) from error
    if not pattern.groups:
        raise UserError(
            f"env.call_format={chosen} has no group; put the JSON of a call into brackets"
        )

    def read(before: Sequence[int], sampled: Sequence[int]) -> Message:
        shown = tokenizer.decode(sampled, skip_special_tokens=True)
        if not by_template:
            matches = pattern.finditer(tokenizer.decode(sampled, skip_special_tokens=False))
            calls = (call for match in matches for call in _calls((match[1] or "").strip()))
            return Message("assistant", shown, tuple(calls))
        try:
            parsed = tokenizer.parse_response(list(sampled), prefix=list(before), tools=schemas)
        except ValueError as error:
            return Message("assistant", shown, (Call("", error=one_line(str(error))[:200]),))
        return Message(
            "assistant",
            str(parsed.get("content") or ""),
            tuple(map(_call, parsed.get("tool_calls") or ())),
        )

    return read


def _calls(text: str) -> list[Call]:
    """The calls in a text that begins with their JSON: one call or a list."""
    found: list[Call] = []
    while not found or text.startswith(("{", "[")):
        try:
            value, end = json.JSONDecoder().raw_decode(text)
        except (ValueError, RecursionError) as error:
            return [*found, Call("", error=f"the call is no JSON: {error}")]
        found += map(_call, value if isinstance(value, list) else [value])
        # what follows may be more calls (Llama's semicolon), or the end of the turn
        text = text[end:].lstrip("; \n")
    return found


def _call(value: Any) -> Call:
    """A call from its JSON: `name`, and `arguments` or `parameters`, an object or its text."""
    try:
        given = value.get("function", value)
        arguments = given.get("arguments", given.get("parameters", {}))
        found = json.loads(arguments) if isinstance(arguments, str) else arguments
        return Call(str(given["name"]), {**found}, str(value.get("id") or NO_ID))
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        return Call("", error='a call is {"name": "...", "arguments": {...}} in JSON')


class ToolEnv:
    """The environment of a row with tools: runs the calls in a message, and answers each with a
    `tool` message. It is over when a message has no call.

    An error of a call (its text, name or arguments, or what the function raises) is an answer that
    the policy can read. `format_reward` is for the first turn of the row whose calls all parse:
    once, or calling would pay without end.
    """

    def __init__(self, tools: Mapping[str, Tool], format_reward: float = 0.0):
        self.tools = tools
        self.format_reward = format_reward

    async def step(self, message: Message) -> Turn:
        calls = message.tool_calls
        if not calls:
            return Turn(done=True)
        answers = [await self._answer(call) for call in calls]
        reward = 0.0 if any(call.error for call in calls) else self.format_reward
        self.format_reward -= reward
        return Turn(
            [
                Message("tool", text, name=call.name, tool_call_id=call.id)
                for call, text in zip(calls, answers, strict=True)
            ],
            reward,
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
            for name, value in call.arguments.items():
                kind = typing.get_type_hints(tool).get(name)
                # what JSON may hold for a float; to Python, true is an integer
                fits = type(value) is kind or (kind is float and type(value) is int)
                if kind in (int, float, str, bool, list, dict) and not fits:
                    raise TypeError(f"{name} must be {kind.__name__}, not {json.dumps(value)[:80]}")
            # plain functions in a thread: a process may run other rows meanwhile
            run = tool if is_async(tool) else partial(asyncio.to_thread, tool)
            result = await awaited(run(**call.arguments))
        except Exception as error:  # also of the user's function, by what the policy gave it
            return f"error: {type(error).__name__}: {one_line(str(error))[:300]}"
        return result if isinstance(result, str) else json.dumps(result, default=str)


def calculator(expression: str) -> str:
    """Evaluates an arithmetic expression.

    Args:
        expression: numbers, brackets and the operators + - * / // % **, for example "(3 + 4) * 5".

    Returns:
        The result.
    """
    if len(expression) > LONGEST:
        raise ValueError(f"the expression has more than {LONGEST} characters")
    try:
        tree = ast.parse(expression.strip().replace("^", "**"), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{expression!r} is no arithmetic expression") from error
    value = _value(tree.body)
    # a quotient without a remainder as people write it
    return str(int(value) if isinstance(value, float) and value.is_integer() else value)


def _value(node: ast.expr) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            value = number
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            value = _OPERATORS[type(op)](_value(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            first = _value(left)
            second = _value(right)
            # before the power is worked out
            if isinstance(op, ast.Pow) and math.log2(abs(first) + 1) * abs(second) > BITS:
                raise ValueError(f"the power has more than {BITS} bits")
            value = _OPERATORS[type(op)](first, second)
        case _:
            raise ValueError(f"{ast.unparse(node)[:80]!r} is no arithmetic; use + - * / // % **")
    if isinstance(value, complex) or abs(value) >= 1 << BITS:
        raise ValueError("the result is no real number, or too large")
    return value
