"""Rows of several turns in tokens: what was sampled stays as it was sampled, and the row's text is
what the chat template makes of the whole dialogue."""

import random
from typing import Any

import pytest
from templates import CHATML, GEMMA, LLAMA, MISTRAL, QWEN, TEMPLATES, WORDS, tokenizer_of
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from splitppo.envs import Call, Message
from splitppo.envs.tools import instructions
from splitppo.envs.turns import CUT, Turns
from splitppo.errors import UserError
from splitppo.models.tiny import build_tokenizer

SCHEMA = {"type": "function", "function": {"name": "multiply", "parameters": {}}}


def sampled_by(draw: random.Random, tokenizer: Any, lead: str) -> list[int]:
    """Ids in any order, as a policy may sample them: not what the tokenizer makes of their text."""
    special = set(tokenizer.all_special_ids)
    usual = [i for i in range(len(tokenizer)) if i not in special]
    while True:
        ids = draw.choices(usual, k=draw.randint(1, 8))
        text = tokenizer.decode(ids)
        if text == text.strip() != "":
            return [*tokenizer(lead, add_special_tokens=False)["input_ids"], *ids]


@pytest.mark.parametrize("name", TEMPLATES)
def test_200_dialogues(name: str):
    template, end, roles = TEMPLATES[name]
    tokenizer = tokenizer_of(template, end)
    turns = Turns(tokenizer)
    (end_id,) = tokenizer(end, add_special_tokens=False)["input_ids"]
    lead = " " if name == "mistral" else ""
    draw = random.Random(name)
    tokenised_otherwise = 0
    for _ in range(200):
        dialogue: list[dict[str, Any]] = [
            {"role": "user", "content": "".join(draw.choices(WORDS, k=5)).strip()}
        ]
        ids = turns.prompt(dialogue)
        due = list(ids)
        sampled: list[tuple[int, list[int]]] = []
        for _ in range(draw.randint(2, 5)):
            said = sampled_by(draw, tokenizer, lead)
            # a stop string ends some turns: the end is not sampled, and is part of the observation
            stopped = draw.random() < 0.3
            said += [] if stopped else [end_id]
            sampled.append((len(ids), said))
            ids += said
            due += said
            content = tokenizer.decode(said, skip_special_tokens=True)[len(lead) :]
            dialogue.append({"role": "assistant", "content": content})
            role = draw.choice(roles)
            count = draw.randint(1, 2) if role == "tool" else 1
            messages = [
                Message(
                    role, "".join(draw.choices(WORDS, k=4)).strip() + ".", tool_call_id="123456789"
                )
                for _ in range(count)
            ]
            ids += turns.observation(messages, said)
            dialogue += [
                {"role": role, "content": message.content, "tool_call_id": message.tool_call_id}
                for message in messages
            ]
        # every sampled id stands where it was sampled
        for at, said in sampled:
            assert ids[at : at + len(said)] == said
        whole = tokenizer.apply_chat_template(dialogue, tokenize=False, add_generation_prompt=True)
        assert tokenizer.decode(ids) == whole
        tokenised_otherwise += tokenizer(whole, add_special_tokens=False)["input_ids"] != ids
    assert tokenised_otherwise > 150  # so ids that are decoded and tokenised again would differ


THINKING = Message("user", "and?")


def test_the_line_end_behind_a_turn_is_observed():
    tokenizer = tokenizer_of(CHATML, "<|im_end|>")
    turns = Turns(tokenizer)
    end = tokenizer.eos_token_id
    said = [5, 6, end]
    observed = turns.observation([THINKING], said)
    assert (
        tokenizer.decode(observed) == "\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"
    )
    # by a stop string, which may stand behind the template's end, too
    for other in ([5, 6], [], [5, *tokenizer("\n")["input_ids"]]):
        assert turns.observation([THINKING], other) == [end, *observed]


@pytest.mark.parametrize(
    ("template", "end", "role", "message"),
    [
        (QWEN, "<|im_end|>", "user", r"rewrites .*: .*thought 1.*' becomes '.*said 1"),
        (QWEN, "<|im_end|>", "tool", ""),
        (CHATML, "<|im_end|>", "user", ""),
        (CHATML, "<|im_end|>", "tool", ""),
        (LLAMA, "<|eot|>", "tool", ""),
        (GEMMA, "<end_of_turn>", "user", ""),
        (GEMMA, "<end_of_turn>", "tool", ""),  # answers as the user
        (GEMMA, "<end_of_turn>", "system", "refuses a dialogue of user, assistant, system"),
        (MISTRAL, "</s>", "user", ""),
        (MISTRAL, "</s>", "tool", ""),
        # only the last message is shown, what was said is not
        ("{{ messages[-1].content }}", "</s>", "user", "drops earlier messages"),
        # what begins an answer stays only in the last
        (CHATML.replace("assistant\n{% endif %}", "assistant\nFirst:{% endif %}"), "<|im_end|>",
         "user", "rewrites .*: 'First:"),
    ],
)  # fmt: skip
def test_a_template_that_rewrites_is_refused(template: str, end: str, role: str, message: str):
    turns = Turns(tokenizer_of(template, end))
    prompt = [{"role": "user", "content": "asked"}]
    if message:
        with pytest.raises(UserError, match=message):
            turns.check(prompt, role)
    else:
        turns.check(prompt, role)
    if "rewrites" in message:
        turns.check(prompt, role, "keep")


def test_tools_that_move_in_the_template_are_refused():
    """Mistral's tools stand before the last message of the user."""
    turns = Turns(tokenizer_of(MISTRAL, "</s>"), tools=[SCHEMA])
    prompt = [{"role": "user", "content": "asked"}]
    turns.check(prompt, "tool")
    with pytest.raises(UserError, match=r"rewrites .* becomes"):
        turns.check(prompt, "user")


# In the manner of thinking models: the prompt opens a thought. Some keep it as it was, some write
# other space around it, some drop it.
OPEN = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
SPACED = OPEN.replace(
    "{{ m.content }}",
    "{% if '</think>' in m.content %}<think>{{ m.content.split('</think>')[0].split('<think>')[1]"
    " | trim }}</think>{{ m.content.split('</think>')[1] | trim }}{% else %}{{ m.content }}"
    "{% endif %}",
)
DROPPED = OPEN.replace("m.content", "m.content.split('</think>')[-1]")
QWEN_OPEN = QWEN.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")


@pytest.mark.parametrize(
    ("template", "role", "accepted"),
    [
        (OPEN, "user", True),
        (OPEN.replace("think>", "seed:think>"), "tool", True),
        (SPACED, "user", True),
        (SPACED, "tool", True),
        (DROPPED, "user", False),
        (DROPPED.replace("think>", "reason>"), "tool", False),
        (QWEN_OPEN, "user", False),  # kept behind the last question alone
        (QWEN_OPEN, "tool", True),
        # an empty thought, without which the policy would think
        (OPEN.replace("assistant\n<think>\n", "assistant\n<think>\n\n</think>\n\n"), "tool", True),
        (DROPPED.replace("assistant\n<think>", "assistant\n<think></think>"), "tool", False),
        # what looks like a thought is the name of the role
        ("{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
         "{% if add_generation_prompt %}<assistant>{% endif %}", "user", True),
    ],
)  # fmt: skip
def test_a_prompt_that_opens_a_thought(template: str, role: str, accepted: bool):
    turns = Turns(tokenizer_of(template, "<|im_end|>"))
    prompt = [{"role": "user", "content": "asked <b>"}]
    if accepted:
        turns.check(prompt, role)
    else:
        with pytest.raises(UserError, match=r"rewrites .* becomes"):
            turns.check(prompt, role)


@pytest.mark.parametrize(
    ("template", "end", "other"),
    [(LLAMA, "<|eot|>", "<|eom|>"), (CHATML, "<|im_end|>", "<|endoftext|>")],
)
def test_a_turn_that_ends_otherwise_gets_one_end(template: str, end: str, other: str):
    tokenizer = tokenizer_of(template, end)
    tokenizer.add_special_tokens({"extra_special_tokens": [other]})
    tokenizer.add_tokens(["</call>"])
    turns = Turns(tokenizer)
    said = [5, tokenizer.convert_tokens_to_ids(other)]
    observed = turns.observation([THINKING], said)
    assert observed == turns.observation([THINKING], [5, tokenizer.eos_token_id])
    assert not tokenizer.decode(observed).startswith(end)
    # ended by a stop string whose last token is in the vocabulary by itself
    call = tokenizer.convert_tokens_to_ids("</call>")
    assert turns.observation([THINKING], [5, call]) == [tokenizer.eos_token_id, *observed]


def test_a_turn_that_ends_by_the_next_one_s_head():
    """As GLM's do: nothing stands behind a turn, and the next one's head ends it."""
    tokenizer = tokenizer_of(
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
        "<|user|>",
    )
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|tool|>"]})
    turns = Turns(tokenizer)
    tool = tokenizer.convert_tokens_to_ids("<|tool|>")
    whole = turns.observation([Message("tool", "12")], [5])
    assert whole[0] == tool
    assert turns.observation([Message("tool", "12")], [5, tool]) == whole[1:]
    assert turns.observation([Message("tool", "12")], [5, tokenizer.eos_token_id]) == whole


CONTROLS = ["<|call|>", "<tool>", "ab<tool>b", "l|><tool>"]  # two of them overlap


def guarded(name: str) -> tuple[Any, Turns, set[int]]:
    """A tokenizer with control tokens that a template may show, and the ids of all."""
    template, end, _ = TEMPLATES[name]
    tokenizer = tokenizer_of(template + "{# <tool> ab<tool>b l|><tool> #}", end)
    tokenizer.add_special_tokens({"extra_special_tokens": CONTROLS[:1]})
    tokenizer.add_tokens([*CONTROLS[1:], "\n\n", "<h1>"])
    controls = {tokenizer.convert_tokens_to_ids(text) for text in ("<s>", end, *CONTROLS)}
    return tokenizer, Turns(tokenizer), controls - {None}


@pytest.mark.parametrize("name", TEMPLATES)
def test_control_tokens_come_from_the_template_alone(name: str):
    tokenizer, turns, controls = guarded(name)
    draw = random.Random(name)
    texts = [*CONTROLS, tokenizer.eos_token]

    def text() -> str:
        return "".join(draw.choices([*texts, *WORDS, "\n\n", "<h1>"], k=draw.randint(1, 8)))

    def frame(ids: list[int]) -> list[int]:
        return [token for token in ids if token in controls]

    for role in TEMPLATES[name][2]:
        plain = [Message(role, "a", name="f")]
        for number in range(50):
            # now and then a control token that two messages make together
            halves = ["a<|ca", "ll|>b"] if role == "tool" and not number % 5 else [f"({text()})"]
            messages = [Message(role, half, name=text()) for half in halves]
            ids = turns.observation(messages, [])
            due = turns.observation(plain * len(messages), [])
            assert frame(ids) == frame(due)
            assert tokenizer.decode(ids) == turns._tail(messages)
            if len(messages) == 1:
                assert frame(turns.prompt([Message("user", text())])) == frame(
                    turns.prompt([Message("user", "a")])
                )


@pytest.mark.parametrize("name", TEMPLATES)
def test_texts_without_control_tokens_are_tokenised_with_what_stands_around_them(name: str):
    tokenizer, turns, _ = guarded(name)
    draw = random.Random(name)
    for role in TEMPLATES[name][2]:
        for _ in range(40):
            words = [*WORDS, "\n\n", "<h1>", "<|im", "_end|"]
            messages = [Message(role, "".join(draw.choices(words, k=draw.randint(0, 8))))]
            whole = tokenizer(
                tokenizer.eos_token + turns._tail(messages), add_special_tokens=False
            )["input_ids"]
            assert turns.observation(messages, []) == whole[1:]


def test_two_texts_make_no_control_token():
    """Without a chat template nothing stands between them."""
    tokenizer = tokenizer_of(None, "<|im_end|>")
    turns = Turns(tokenizer)
    messages = [Message("user", " a<|im"), Message("user", "_end|>b ")]
    for ids in (turns.observation(messages, []), turns.prompt(messages)):
        assert tokenizer.eos_token_id not in ids
        assert tokenizer.decode(ids) == " a<|im_end|>b "


def test_what_stays_a_control_token_is_refused():
    tokenizer = tokenizer_of(CHATML, "<|im_end|>")
    tokenizer.add_special_tokens({"extra_special_tokens": ["~"]})  # can't be cut
    with pytest.raises(ValueError, match="control token"):
        Turns(tokenizer).observation([Message("tool", "a~b")], [])


def test_half_characters_in_calls():
    """The policy may write them into JSON as escapes."""
    tokenizer = tokenizer_of(CHATML, "<|im_end|>")
    text = r'{"name": "a\udc00", "arguments": {"\ud800": ["\ud83d\ude00\udfff"]}}'
    ids = tokenizer(f"<tool_call>{text}</tool_call>")["input_ids"]
    (call,) = Turns(tokenizer).spoken([], ids).tool_calls
    assert call == Call("a\ufffd", {"\ufffd": ["\U0001f600\ufffd"]})


def test_what_was_thought_stays_with_keep():
    tokenizer = tokenizer_of(QWEN, "<|im_end|>")
    turns = Turns(tokenizer)
    said = tokenizer("<think>\na\n</think>\n\nb<|im_end|>", add_special_tokens=False)["input_ids"]
    prompt = turns.prompt([{"role": "user", "content": "asked"}])
    row = prompt + said + turns.observation([THINKING], said)
    start = "<|im_start|>user\nasked<|im_end|>\n<|im_start|>assistant\n"
    between = "\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(row) == f"{start}<think>\na\n</think>\n\nb<|im_end|>{between}"


@pytest.mark.parametrize(
    ("template", "before", "text"),
    [
        (LLAMA, [], '"name": "multiply"'),
        (CHATML, [], "<|im_start|>system\nSAID<|im_end|>\n<|im_start|>user\nasked<|im_end|>"),
        (CHATML, [{"role": "system", "content": "Be"}], "system\nBe\n\nSAID<|im_end|>"),
        (GEMMA, [], "user\nasked\n\nSAID<end_of_turn>"),
    ],
)
def test_tools_in_the_prompt(template: str, before: list[dict[str, str]], text: str):
    tokenizer = tokenizer_of(template, "</s>")
    turns = Turns(tokenizer, tools=[SCHEMA])
    prompt = tokenizer.decode(turns.prompt([*before, {"role": "user", "content": "asked"}]))
    assert text.replace("SAID", instructions([SCHEMA])) in prompt
    assert prompt.count("multiply") == 1
    assert len(turns.notes) == (template is not LLAMA)


def test_without_a_chat_template():
    tokenizer: Any = build_tokenizer()
    turns = Turns(tokenizer)
    turns.check([{"role": "user", "content": "a"}], "user")
    assert tokenizer.decode(turns.prompt([Message("user", "0-9?\n")])) == "0-9?\n"
    said = [7, tokenizer.eos_token_id]
    observed = turns.observation([Message("user", "lower\n"), Message("user", "x")], said)
    assert tokenizer.decode(observed) == "lower\nx"
    text = tokenizer.decode(observed)
    messages = [Message("user", "lower\n"), Message("user", "x")]
    assert [text[a:b] for _, a, b in turns.spans(observed, messages)] == ["lower\n", "x"]
    with pytest.raises(UserError, match="needs a chat template"):
        Turns(tokenizer, tools=[SCHEMA])


def test_no_space_comes_before_an_observation():
    """Tokenizers in the manner of SentencePiece put one before a text."""
    letters = {letter: i for i, letter in enumerate(["</s>", "\u2581", *"lower"[:-1], "r"])}
    backend = Tokenizer(BPE(vocab=letters, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    assert tokenizer("lo")["input_ids"][0] == letters["\u2581"]
    observed = Turns(tokenizer).observation([Message("user", "lower")], [0])
    assert observed == [letters[letter] for letter in "lower"]


def test_an_observation_is_cut():
    tokenizer = tokenizer_of(CHATML, "<|im_end|>")
    turns = Turns(tokenizer)
    messages = [Message("tool", "b" * 5000), Message("tool", "short")]
    said = [5, tokenizer.eos_token_id]
    whole = turns.observation(messages, said)
    for limit in (100, 200, len(whole) - 1):
        shortened = turns.cut(messages, said, limit)
        ids = turns.observation(shortened, said)
        text = tokenizer.decode(ids)
        assert 0.8 * limit - 15 < len(ids) <= limit
        assert f"b{CUT}<|im_end|>" in text
        assert text.endswith("short<|im_end|>\n<|im_start|>assistant\n")
    assert list(turns.cut(messages, said, len(whole))) == messages
    # the template's own tokens are over the limit
    assert {message.content for message in turns.cut(messages, said, 3)} == {CUT}


@pytest.mark.parametrize("name", TEMPLATES)
def test_an_observation_is_read_as_its_messages(name):
    turns = Turns(tokenizer_of(*TEMPLATES[name][:2]))
    for role in TEMPLATES[name][2]:
        for texts in (["ab b"], ["a", "b ab", "a b"][: 1 if role == "system" else 3]):
            messages = [Message(role, text, name="f") for text in texts]
            try:
                ids = turns.observation(messages, [])
            except UserError:  # Gemma's: no two of a role
                continue
            whole = turns.tokenizer.decode(ids, skip_special_tokens=True)
            spans = turns.spans(ids, messages)
            assert "|".join(whole[span.begin : span.end] for span in spans) == "|".join(texts)
            assert {span.role for span in spans} <= {role, "user"}


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        ("{{ m.content | trim }}", "a  b"),
        ("{{ m.content | tojson }}", '"  a  b\\n"'),
        ("{{ m.content.replace('  ', '_') }}", "<|im_start|>tool\n_a_b\n\n<|im_start|>assistant\n"),
    ],
)
def test_where_a_message_stands_that_the_template_shows_otherwise(shown: str, expected: str):
    turns = Turns(tokenizer_of(CHATML.replace("{{ m.content }}", shown), "<|im_end|>"))
    messages = [Message("tool", "  a  b\n")]
    ids = turns.observation(messages, [5, turns.tokenizer.eos_token_id])
    ((role, begin, end),) = turns.spans(ids, messages)
    text = turns.tokenizer.decode(ids, skip_special_tokens=True)
    assert (role, text[begin:end].lstrip("\n")) == ("tool", expected)
