"""Formats of tool calls, and their parsers. No list of formats is complete, so the chat template
first writes some calls, and a format must parse them."""

import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from jsonschema import Draft202012Validator

from splitppo.envs import NO_ID, Call, Message
from splitppo.errors import UserError, one_line

# reads a turn: the ids of the row so far, and those that were sampled then
CallReader = Callable[[Sequence[int], Sequence[int]], Message]
# some calls, and the ways to write them: the text before the turn, and the text of the turn
Written = tuple[Sequence[Call], list[tuple[str, str]]]

# How models write a call: a pattern whose first group is JSON, one call or a list, or whose groups
# are `name`, `arguments` and perhaps `id`; and the pattern of a parameter and its value where the
# arguments are no JSON. The first is also that of the instructions for models whose template knows
# no tools.
FORMATS = {
    "hermes": (r"<tool_call>(.*?)(?:</tool_call>|\Z)", ""),  # Qwen 2.5 and 3
    "llama": (r"(?:(?:\A|(?<=</think>))\s*(?=\{)|<\|python_tag\|>)(.*)", ""),  # Llama 3
    "mistral": (r"\[TOOL_CALLS\](.*)", ""),
    "mistral_args": (  # Mistral's later ones
        r"\[TOOL_CALLS\](?P<name>\w*)(?:\[CALL_ID\](?P<id>\w+))?(?:\[ARGS\])?"
        r"(?P<arguments>.*?)(?=\[TOOL_CALLS\]|\Z)",
        "",
    ),
    "qwen_xml": (  # Qwen3-Coder, Qwen 3.5, Nemotron 3
        r"<(?:tool_call>\s*<)?function=(?P<name>[^\s<>]*)>(?P<arguments>.*?)(?:</function>|\Z)"
        r"|<tool_call>",
        r"<parameter=([^\s<>]+)>\n?((?:(?!<parameter=).)*?)\n?</parameter>",
    ),
    "glm": (
        r"<tool_call>\s*(?P<name>[^\s<]*)(?P<arguments>.*?)(?:</tool_call>|\Z)",
        r"<arg_key>([^<]*)</arg_key>\s*<arg_value>((?:(?!<arg_key>).)*?)</arg_value>",
    ),
    "deepseek": (
        r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?(?P<name>\w*)(?:<｜tool▁sep｜>|\s*```json)?"
        r"(?P<arguments>.*?)(?:<｜tool▁call▁end｜>|\Z)",
        "",
    ),
    "kimi": (
        r"<\|tool_call_begin\|>\s*(?P<id>(?:functions\.)?(?P<name>\w*)(?::\d+)?)\s*"
        r"(?:<\|tool_call_argument_begin\|>)?(?P<arguments>.*?)(?:<\|tool_call_end\|>|\Z)",
        "",
    ),
    "minimax": (
        r'<invoke name="(?P<name>[^"<>]*)">(?P<arguments>.*?)(?:</invoke>|\Z)',
        r'<parameter name="([^"<>]+)">((?:(?!<parameter ).)*?)</parameter>',
    ),
    "harmony": (  # gpt-oss
        r"\bto=functions\.(?P<name>\w*).*?(?:<\|message\|>|\Z)(?P<arguments>.*?)(?:<\|call\|>|\Z)",
        "",
    ),
}
# What begins a thought, and what ends it. The chat template may have begun it; one without an end
# lasts to the end of the turn.
THOUGHTS = {
    "<think>": "</think>",
    "<thinking>": "</thinking>",
    "<thought>": "</thought>",
    "<seed:think>": "</seed:think>",
    "[THINK]": "[/THINK]",
    "◁think▷": "◁/think▷",
    "<|channel|>analysis": "<|end|>",
}
_THOUGHT = "|".join(
    rf"{re.escape(begin)}.*?(?:{re.escape(end)}|\Z)" for begin, end in THOUGHTS.items()
)
ASKED = {"role": "user", "content": "asked"}
# what a format must read as the chat template writes it
_PROBES = [
    Call("probe", {"text": 'alpha "é"\n12', "count": 3, "flag": True, "parts": [1, "a"]}),
    Call("probe", {"text": "beta"}),
]
PROBE_SCHEMA: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "probe",
        "description": "",
        "parameters": {
            "type": "object",
            "properties": {
                "text": {"type": "string"},
                "count": {"type": "integer"},
                "flag": {"type": "boolean"},
                "parts": {"type": "array"},
            },
        },
    },
}


def written_calls(render: Callable[..., str]) -> list[Written]:
    """No call, one call and two calls as a chat template writes them; [] if it does not show calls.
    `render` renders a dialogue; it takes `add_generation_prompt` and raises UserError."""
    prompt = render([ASKED])
    begun = prompt.rstrip()
    # the template may begin a thought that it does not show in a turn without one
    heads = [prompt, begun.removesuffix(_opening(begun))]
    written: list[Written] = []
    for calls in ([], _PROBES[:1], _PROBES):
        texts = []
        for message in _messages(calls):
            with suppress(UserError):
                whole = render([ASKED, message], add_generation_prompt=False)
                head = next(filter(whole.startswith, heads), "")
                text = whole.removeprefix(head)
                # some templates leave out the second call
                if all(call.arguments["text"][:4] in text for call in calls):
                    texts.append((head, text))
        if texts:
            written.append((calls, texts))
    return written if len(written) > 1 else []


def _messages(calls: Sequence[Call]) -> list[dict[str, Any]]:
    """The assistant's message with these calls, in each way in which a chat template may want it:
    arguments as an object or as JSON, ids of nine digits or with the name, an empty text or none.
    """
    if not calls:
        return [{"role": "assistant", "content": "said"}]
    messages = []
    for write, name, content in itertools.product(
        (dict, json.dumps), ("{1:09d}", "functions.{0}:{1}"), ("", None)
    ):
        shown = [
            {
                "type": "function",
                "id": name.format(call.name, number),
                "function": {"name": call.name, "arguments": write(call.arguments)},
            }
            for number, call in enumerate(calls)
        ]
        messages.append({"role": "assistant", "content": content, "tool_calls": shown})
    return messages


def reads_all(read: CallReader, tokenizer: Any, written: Sequence[Written]) -> bool:
    """Whether all calls are parsed as they were written, each in at least one of its forms."""

    def reads(calls: Sequence[Call], head: str, text: str) -> bool:
        ids = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in (head, text))
        said = read(*ids)
        # but for the ids, which the template may leave out
        return [replace(call, id=NO_ID) for call in said.tool_calls] == [*calls]

    return all(any(reads(calls, *text) for text in texts) for calls, texts in written)


def template_reader(tokenizer: Any, schemas: list[dict[str, Any]]) -> CallReader:
    """Parses turns with the tokenizer's response template."""

    def read(before: Sequence[int], sampled: Sequence[int]) -> Message:
        try:
            parsed = tokenizer.parse_response(list(sampled), prefix=list(before), tools=schemas)
        except Exception as error:  # of whatever parses what the policy wrote
            shown = tokenizer.decode(sampled, skip_special_tokens=True)
            return Message("assistant", shown, (Call("", error=one_line(str(error))[:200]),))
        calls = tuple(map(_call, parsed.get("tool_calls") or ()))
        return Message("assistant", str(parsed.get("content") or ""), calls)

    return read


def text_reader(
    tokenizer: Any, schemas: list[dict[str, Any]], pattern: str, pair: str
) -> CallReader:
    """Parses turns with a format's patterns. Raises UserError if `pattern` can't be used for
    calls."""
    try:
        call = re.compile(pattern)
        # the thoughts behind it: so its groups have the numbers, and flags stand first
        scan = re.compile(f"{pattern}|(?P<thought>{_THOUGHT})", re.DOTALL)
        if not call.groups or ("name" in call.groupindex) != ("arguments" in call.groupindex):
            raise re.error("it has no group for a call")
    except re.error as error:
        raise UserError(
            f"env.call_format={pattern} is not a regular expression for calls ({error}); use auto, "
            f"{', '.join(FORMATS)}, or one with a group for the JSON of a call, or with the groups "
            "`name` and `arguments`"
        ) from error
    parameters = {
        schema["function"]["name"]: schema["function"]["parameters"].get("properties", {})
        for schema in schemas
    }

    def calls_in(match: re.Match[str]) -> list[Call]:
        parts = match.groupdict()
        if "name" not in parts:
            return _calls((match[1] or "").strip())
        arguments: Any = (parts["arguments"] or "").strip()
        if pair:
            types = parameters.get(parts["name"], {})
            pairs = re.findall(pair, arguments, re.DOTALL)
            if re.sub(pair, "", arguments, flags=re.DOTALL).strip():
                return [Call("", error="the call holds what is no argument")]
            arguments = {name: _typed(text, types.get(name, {})) for name, text in pairs}
        return [_call({**parts, "arguments": arguments})]

    def read(before: Sequence[int], sampled: Sequence[int]) -> Message:
        text = tokenizer.decode(sampled, skip_special_tokens=False)
        begun = _opening(tokenizer.decode(before[-32:], skip_special_tokens=False))
        matches = scan.finditer(begun + text)
        calls = [call for match in matches if not match["thought"] for call in calls_in(match)]
        shown = tokenizer.decode(sampled, skip_special_tokens=True)
        return Message("assistant", shown, tuple(calls))

    return read


def _opening(prompt: str) -> str:
    """What begins the thought that the end of a prompt begins; "": it begins none."""
    return next(filter(prompt.rstrip().endswith, THOUGHTS), "")


def _typed(text: str, schema: dict[str, Any]) -> Any:
    """The value of an argument that is written as a plain text: that text if the schema allows it,
    else its JSON."""
    if Draft202012Validator(_standard(schema)).is_valid(text):
        return text
    with suppress(ValueError, RecursionError):
        # some templates write Python's words
        return json.loads({"True": "true", "False": "false", "None": "null"}.get(text, text))
    return text


def _calls(text: str) -> list[Call]:
    """The calls in a text that begins with their JSON: one call or a list."""
    calls: list[Call] = []
    while not calls or text.startswith(("{", "[")):
        try:
            value, end = json.JSONDecoder().raw_decode(text)
        except (ValueError, RecursionError) as error:
            return [*calls, Call("", error=f"the call is no JSON: {error}")]
        calls += map(_call, value if isinstance(value, list) else [value])
        # what follows may be more calls (Llama's semicolon), or the end of the turn
        text = text[end:].lstrip("; \n")
    return calls


def _call(value: Any) -> Call:
    """A call from its JSON: `name`, and `arguments` or `parameters`, an object or its text."""
    try:
        call = value.get("function", value)
        name = call["name"]
        arguments = call.get("arguments", call.get("parameters", {}))
        if isinstance(arguments, str):
            arguments, _ = json.JSONDecoder().raw_decode(arguments)
        if not name:
            raise ValueError("no name")
        return Call(str(name), {**arguments}, str(value.get("id") or NO_ID))
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        return Call("", error='a call is {"name": "...", "arguments": {...}} in JSON')


def validator(schema: Mapping[str, Any]) -> Draft202012Validator:
    """Checks arguments against a tool's schema, the one that the policy is shown."""
    return Draft202012Validator(_standard(schema["function"]["parameters"]))


def _standard(schema: Any) -> Any:
    """A schema of transformers as JSON schema, which does not know `nullable`."""
    if isinstance(schema, list):
        return [_standard(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    parts = {name: _standard(part) for name, part in schema.items()}
    # not True: a parameter of this name
    return {"anyOf": [parts, {"type": "null"}]} if parts.get("nullable") is True else parts
