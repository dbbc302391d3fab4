"""Calls as the chat templates of many families write them, and what reads them."""

import json
import random
import re
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from templates import CHATML, tokenizer_of_bytes

from splitppo.envs import Call
from splitppo.envs.calls import FORMATS, text_reader
from splitppo.envs.tools import tool_schemas
from splitppo.envs.turns import Turns
from splitppo.errors import UserError


def search(query: str, limit: int = 3, exact: bool = False, kinds: list[str] | None = None):
    """Searches.

    Args:
        query: the words.
        limit: most results.
        exact: whether all words must be there.
        kinds: of what.
    """


SCHEMAS = tool_schemas({"search": search})
BASE = (
    "{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}{% for m in messages %}"
    "<|{{ m.role }}|>{{ m.content or '' }}CALLS<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>BEGUN{% endif %}"
)
EACH = "{% for c in m.tool_calls or [] %}{% set f = c.function %}CALL{% endfor %}"
PAIRS = "{% for k, v in f.arguments.items() %}PAIR{% endfor %}"
PYTHON = "{{ v | tojson if v is iterable and v is not string else v | string }}"
JSON = "{{ v if v is string else v | tojson }}"
TEXT = "{{ f.arguments if f.arguments is string else f.arguments | tojson }}"
OBJECT = "{{ {'name': f.name, 'arguments': f.arguments} | tojson }}"
A = '{"query": "two \\"words\\"", "limit": 5, "exact": true, "kinds": ["a"]}'
SAID = {"query": 'two "words"', "limit": 5, "exact": True, "kinds": ["a"]}
# family -> what reads its calls; the template's part for the calls of a message `m`, or for one
# call `c` whose function is `f`; a call with the arguments `SAID`
FAMILIES = {
    "Qwen 2.5": (
        "hermes",
        f"<tool_call>\n{OBJECT}\n</tool_call>\n",
        f'<tool_call>\n{{"name": "search", "arguments": {A}}}\n</tool_call>',
    ),
    "Llama 3": (
        "llama",
        "{% if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('one call') }}"
        "{% endif %}" + EACH.replace("CALL", OBJECT.replace("'arguments'", "'parameters'")),
        f'{{"name": "search", "parameters": {A}}}',
    ),
    "Mistral 0.3": (
        "mistral",
        "{% if m.tool_calls %}[TOOL_CALLS] [{% for c in m.tool_calls %}"
        "{% if c.id | length != 9 %}{{ raise_exception('nine letters') }}{% endif %}"
        '{{ (c.function | tojson)[:-1] }}, "id": "{{ c.id }}"}'
        "{{ ', ' if not loop.last }}{% endfor %}]{% endif %}",
        f'[TOOL_CALLS] [{{"name": "search", "arguments": {A}, "id": "000000000"}}]',
    ),
    "Mistral 3.2": (
        "mistral_args",
        f"[TOOL_CALLS]{{{{ f.name }}}}[CALL_ID]{{{{ c.id }}}}[ARGS]{TEXT}",
        f"[TOOL_CALLS]search[CALL_ID]000000000[ARGS]{A}",
    ),
    "Qwen 3 Coder": (
        "qwen_xml",
        "<tool_call>\n<function={{ f.name }}>\n"
        + PAIRS.replace("PAIR", f"<parameter={{{{ k }}}}>\n{PYTHON}\n</parameter>\n")
        + "</function>\n</tool_call>\n",
        '<tool_call>\n<function=search>\n<parameter=query>\ntwo "words"\n</parameter>\n'
        "<parameter=limit>\n5\n</parameter>\n<parameter=exact>\nTrue\n</parameter>\n"
        '<parameter=kinds>\n["a"]\n</parameter>\n</function>\n</tool_call>',
    ),
    "GLM 4.5": (
        "glm",
        "\n<tool_call>{{ f.name }}\n"
        + PAIRS.replace("PAIR", f"<arg_key>{{{{ k }}}}</arg_key>\n<arg_value>{JSON}</arg_value>\n")
        + "</tool_call>",
        '\n<tool_call>search\n<arg_key>query</arg_key>\n<arg_value>two "words"</arg_value>\n'
        "<arg_key>limit</arg_key>\n<arg_value>5</arg_value>\n"
        "<arg_key>exact</arg_key>\n<arg_value>true</arg_value>\n"
        '<arg_key>kinds</arg_key>\n<arg_value>["a"]</arg_value>\n</tool_call>',
    ),
    "MiniMax 2": (
        "minimax",
        '<minimax:tool_call>\n<invoke name="{{ f.name }}">\n'
        + PAIRS.replace("PAIR", f'<parameter name="{{{{ k }}}}">{JSON}</parameter>\n')
        + "</invoke>\n</minimax:tool_call>",
        '<minimax:tool_call>\n<invoke name="search">\n<parameter name="query">two "words"'
        '</parameter>\n<parameter name="limit">5</parameter>\n<parameter name="exact">true'
        '</parameter>\n<parameter name="kinds">["a"]</parameter>\n</invoke>\n</minimax:tool_call>',
    ),
    "DeepSeek 3": (  # adds text to arguments, and shows calls of a message without content alone
        "deepseek",
        "{% if m.tool_calls and m.content is not string %}"
        "<｜tool▁calls▁begin｜>{% for c in m.tool_calls %}"
        "<｜tool▁call▁begin｜>{{ c.type + '<｜tool▁sep｜>' + c.function.name + '\n```json\n' "
        "+ c.function.arguments }}\n```<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>"
        "{% endif %}",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>search\n```json\n"
        f"{A}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "DeepSeek 3.1": (
        "deepseek",
        "<｜tool▁call▁begin｜>{{ f.name + '<｜tool▁sep｜>' + f.arguments }}<｜tool▁call▁end｜>",
        f"<｜tool▁call▁begin｜>search<｜tool▁sep｜>{A}<｜tool▁call▁end｜>",
    ),
    "Kimi 2": (
        "kimi",
        f"<|tool_call_begin|>{{{{ c.id }}}}<|tool_call_argument_begin|>{TEXT}<|tool_call_end|>",
        f"<|tool_call_begin|>functions.search:0<|tool_call_argument_begin|>{A}<|tool_call_end|>",
    ),
    "gpt-oss": (  # leaves out the second call
        "harmony",
        "{% if m.tool_calls %}{% set f = m.tool_calls[0].function %} to=functions.{{ f.name }}"
        "<|channel|>commentary json<|message|>{{ f.arguments | tojson }}<|call|>{% endif %}",
        f"<|channel|>commentary to=functions.search <|constrain|>json<|message|>{A}<|call|>",
    ),
}
# templates whose calls no format reads
UNREAD = {
    "as in Python": "<|tool_call_start|>[{{ f.name }}({% for k, v in f.arguments.items() %}"
    "{{ k }}={{ v | tojson }}, {% endfor %})]<|tool_call_end|>",
    "in another mark": f"<TOOLCALL>[{OBJECT}]</TOOLCALL>",
    "by other names": "<tool_call>{{ {'tool': f.name, 'with': f.arguments} | tojson }}</tool_call>",
    "in part": "<tool_call>{{ (f | tojson)[:60] }}</tool_call>",
    "without names": "<tool_call>{% for k, v in f.arguments.items() %}{{ v }}|{% endfor %}",
    "with other values": "<tool_call>{{ {'name': f.name, 'arguments': {'text': 'alpha beta'}} | "
    "tojson }}</tool_call>",
    "not at all": "",
    "never": "{% if c %}{{ raise_exception('no tools') }}{% endif %}",
}


def template_of(calls: str, begun: str = "") -> str:
    shown = calls if "m." in calls else EACH.replace("CALL", calls)
    return BASE.replace("CALLS", shown).replace("BEGUN", begun)


def reading(turns: Turns, text: str) -> list[Call]:
    """The calls in a turn behind a prompt."""
    ids = turns.tokenizer(text, add_special_tokens=False)["input_ids"]
    before = turns.prompt([{"role": "user", "content": "asked"}])
    return list(turns.spoken(before, ids).tool_calls)


def parts(calls: list[Call]) -> list[tuple[str, dict[str, Any]]]:
    assert not [call.error for call in calls if call.error]
    return [(call.name, call.arguments) for call in calls]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_format_is_one_that_reads_what_the_template_writes(family: str):
    _, calls, text = FAMILIES[family]
    turns = Turns(tokenizer_of_bytes(template_of(calls)), tools=SCHEMAS)
    assert parts(reading(turns, f"I search. {text}" if family != "Llama 3" else text)) == [
        ("search", SAID)
    ]
    assert reading(turns, "It is 5.") == []
    assert reading(turns, f"<think>I could say\n{text}\nor not.</think>It is 5.") == []
    if family not in ("Llama 3", "Mistral 0.3"):  # the first has one call, the second one list
        assert parts(reading(turns, text + text)) == [("search", SAID)] * 2


def test_the_probes_words_in_a_tools_description_are_no_calls():
    """A template that shows one call, and refuses to show two."""
    _, calls, text = FAMILIES["Llama 3"]
    schemas = json.loads(
        json.dumps(SCHEMAS).replace("of what", "the alphabet, or the beta function")
    )
    assert schemas != SCHEMAS
    first = calls.replace("{{ raise_exception('one call') }}", "").replace(
        "m.tool_calls or []", "(m.tool_calls or [])[:1]"
    )
    turns = Turns(tokenizer_of_bytes(template_of(first)), tools=schemas)
    assert parts(reading(turns, text)) == [("search", SAID)]


@pytest.mark.parametrize("family", FAMILIES)
def test_another_format_than_the_templates_is_refused(family: str):
    fitting, calls, _ = FAMILIES[family]
    for name in FORMATS:
        made = Turns if name == fitting else refused
        made(tokenizer_of_bytes(template_of(calls)), tools=SCHEMAS, call_format=name)


def refused(*arguments: Any, **more: Any) -> str:
    with pytest.raises(UserError, match=r"env\.call_format=") as caught:
        Turns(*arguments, **more)
    return str(caught.value)


@pytest.mark.parametrize("how", UNREAD)
def test_calls_that_nothing_reads_are_refused(how: str):
    said = refused(tokenizer_of_bytes(template_of(UNREAD[how])), tools=SCHEMAS)
    assert "regular expression" in said
    assert "\n" not in said
    # an environment may do without
    Turns(tokenizer_of_bytes(template_of(UNREAD[how])))


def test_a_format_of_the_users():
    template = template_of(UNREAD["in another mark"])
    for expression in (
        "<TOOLCALL>(.*?)</TOOLCALL>",
        r'<TOOLCALL>.*?"name": "(?P<name>\w+)", "arguments": (?P<arguments>.*?)\}\]',
        r"(?i)<toolcall>(.*?)</TOOLCALL>",
    ):
        turns = Turns(tokenizer_of_bytes(template), tools=SCHEMAS, call_format=expression)
        text = f'<TOOLCALL>[{{"name": "search", "arguments": {A}}}]</TOOLCALL>'
        assert parts(reading(turns, text)) == [("search", SAID)]
        assert reading(turns, f"<think>{text}</think>") == []
    # what the template does not show can't be refused
    unshown = tokenizer_of_bytes(template_of(UNREAD["not at all"]))
    turns = Turns(unshown, tools=SCHEMAS, call_format="qwen_xml")
    assert parts(reading(turns, FAMILIES["Qwen 3 Coder"][2])) == [("search", SAID)]


def test_a_template_without_tools_reads_what_the_instructions_say():
    """Whatever it holds for other calls."""
    for template in (CHATML, "{# [TOOL_CALLS] #}" + CHATML):
        turns = Turns(tokenizer_of_bytes(template), tools=SCHEMAS)
        assert parts(reading(turns, FAMILIES["Qwen 2.5"][2])) == [("search", SAID)]


CALL = FAMILIES["Qwen 2.5"][2]


@pytest.mark.parametrize(
    ("begun", "text", "calls"),
    [
        ("", f"<think>{CALL}</think>\n\nIt is 5.", 0),
        ("", f"<think>{CALL}</think>\n\n{CALL}", 1),
        ("", f"<think>a</think>{CALL}<think>{CALL}</think>{CALL}", 2),
        ("", f"<think>never ends {CALL}", 0),
        ("", "<think>Is <tool_call> right here?</think>It is 5.", 0),
        ("", f"[THINK]{CALL}[/THINK]5", 0),
        ("", f"<thought>{CALL}</thought>{CALL}", 1),
        ("", f"<seed:think>{CALL}</seed:think>{CALL}", 1),
        ("", f"◁think▷{CALL}◁/think▷{CALL}", 1),
        ("", f"<|channel|>analysis<|message|>{CALL}<|end|>{CALL}", 1),
        ("<think>\n", f"{CALL}</think>It is 5.", 0),
        ("<think>\n", f"{CALL}</think>{CALL}", 1),
        ("<think>", f"never ends {CALL}", 0),
        ("[THINK]", f"{CALL}[/THINK]{CALL}", 1),
        ("<think></think>", CALL, 1),
        # the text of an argument is no thought
        ("", CALL.replace("two", "<think> two"), 1),
    ],
)
def test_thoughts_are_not_read_for_calls(begun: str, text: str, calls: int):
    template = template_of(FAMILIES["Qwen 2.5"][1], begun)
    turns = Turns(tokenizer_of_bytes(template), tools=SCHEMAS)
    assert len(parts(reading(turns, text))) == calls


@pytest.mark.parametrize("begun", ["", "<think>\n", "<think>\n\n</think>\n\n"])
def test_what_the_prompt_says_of_calls_is_no_call(begun: str):
    """Also where it begins a thought that the template does not show in a turn without one."""
    template = template_of(FAMILIES["Qwen 2.5"][1], "BEGUN").replace(
        "{{ tools", "Write <tool_call>your call</tool_call>. {{ tools"
    )
    shown = "{% if m.role == 'assistant' %}" + begun + "{% endif %}" if "/" in begun else ""
    template = template.replace("|>{{ m.content", f"|>{shown}{{{{ m.content")
    turns = Turns(tokenizer_of_bytes(template.replace("BEGUN", begun)), tools=SCHEMAS)
    assert "</think>" in begun or len(parts(reading(turns, f"</think>{CALL}"))) == 1


def test_bare_json_behind_a_thought():
    turns = Turns(tokenizer_of_bytes(template_of(FAMILIES["Llama 3"][1])), tools=SCHEMAS)
    text = FAMILIES["Llama 3"][2]
    assert parts(reading(turns, f"<think>a</think>\n{text}")) == [("search", SAID)]


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        # what is a text stays one
        ("query>\n12\n<", {"query": "12"}),
        ("query>\ntrue\n<", {"query": "true"}),
        ("query>\n\n a\n\n<", {"query": "\n a\n"}),
        ("kinds>\nNone\n<", {"kinds": None}),
        ('kinds>\n["b", "1"]\n<', {"kinds": ["b", "1"]}),
        ("limit>\nmany\n<", {"limit": "many"}),  # for the tool to refuse
        ("unknown>\n3\n<", {"unknown": "3"}),
    ],
)
def test_what_is_no_json_is_typed_by_the_schema(text: str, arguments: dict[str, Any]):
    template = template_of(FAMILIES["Qwen 3 Coder"][1])
    turns = Turns(tokenizer_of_bytes(template), tools=SCHEMAS)
    call = f"<function=search>\n<parameter={text}/parameter>\n</function>"
    assert parts(reading(turns, call)) == [("search", arguments)]


BROKEN = [
    ("Qwen 3 Coder", "<tool_call>\nsearch"),
    ("Qwen 3 Coder", "<tool_call>\n<function=>\n</function>"),
    ("Qwen 3 Coder", '<tool_call><function=search>{"query": "a"}</function>'),
    ("Qwen 3 Coder", "<tool_call><function=search><parameter=query>a</function></tool_call>"),
    ("Qwen 3 Coder", "<function=search><parameter=query>a<parameter=limit>3</parameter>"),
    ("GLM 4.5", "<tool_call></tool_call>"),
    ("GLM 4.5", "<tool_call>search <arg_key>query</arg_key>a</tool_call>"),
    ("Mistral 3.2", "[TOOL_CALLS][ARGS]{}"),
    ("Mistral 3.2", "[TOOL_CALLS]search[ARGS]{"),
    ("Mistral 3.2", "[TOOL_CALLS]search"),
    ("Kimi 2", "<|tool_call_begin|>functions.search:0"),
    ("gpt-oss", "<|channel|>commentary to=functions.search <|constrain|>json"),
    ("Kimi 2", "<|tool_call_begin|><|tool_call_argument_begin|>{}<|tool_call_end|>"),
    ("DeepSeek 3.1", "<｜tool▁call▁begin｜>search<｜tool▁sep｜>query: a<｜tool▁call▁end｜>"),
    ("gpt-oss", "<|channel|>commentary to=functions.search<|message|>[]<|call|>"),
]


@pytest.mark.parametrize(("family", "text"), BROKEN)
def test_what_is_no_whole_call_is_an_error(family: str, text: str):
    turns = Turns(tokenizer_of_bytes(template_of(FAMILIES[family][1])), tools=SCHEMAS)
    assert [bool(call.error) for call in reading(turns, text)] == [True]


# parts of calls of all families, of thoughts and of JSON
TEXTS = " ".join(text for _, _, text in FAMILIES.values())
BITS = [
    *re.findall(r"\w+|[^\w\s]+|\s+", TEXTS),
    "<think>", "</think>", "[THINK]", "\ud800", "\0", "NaN",
    "1" * 5000, "[" * 2000, "<|end|>",
]  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_whatever_is_said_is_read(name: str):
    """As whole calls, or with an error each."""
    tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: "".join(ids))
    read: Any = text_reader(tokenizer, SCHEMAS, *FORMATS[name])
    draw = random.Random(name)
    outcomes = Counter[bool]()
    whole = next(text for reads, _, text in FAMILIES.values() if reads == name)
    for _ in range(1000):
        said = draw.choices(BITS, k=draw.randint(0, 30))
        said.insert(draw.choice([0, len(said)]), whole[: draw.choice([0, 50, len(whole)])])
        for call in read(draw.choice([[], ["<think>\n"]]), said).tool_calls:
            assert isinstance(call.arguments, dict)
            assert bool(call.name) != bool(call.error)
            outcomes[bool(call.error)] += 1
    assert min(outcomes[False], outcomes[True]) > 10


@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_without_arguments(family: str):
    """Those of a tool that has none, or none that must be there."""
    _, calls, _ = FAMILIES[family]
    turns = Turns(tokenizer_of_bytes(template_of(calls)), tools=SCHEMAS)
    render = turns._render
    for content, arguments in (("", {}), (None, {}), (None, "{}"), ("", "{}")):
        for name in ("000000000", "functions.search:0"):
            shown = [
                {"type": "function", "id": name,
                 "function": {"name": "search", "arguments": arguments}}
            ]  # fmt: skip
            message = {"role": "assistant", "content": content, "tool_calls": shown}
            try:
                text = render([message], add_generation_prompt=False).partition("<|assistant|>")[2]
            except UserError:
                continue
            if "search" in text:
                assert parts(reading(turns, text)) == [("search", {})]
                return
    raise AssertionError("no call is shown")
