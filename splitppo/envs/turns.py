"""The tokens between two turns of a row.

Sampled ids stay as they are: nothing is decoded and tokenised again. The text that the chat
template puts between the end of an assistant's text and the start of the next one is the difference
of the template's output around a placeholder. It is tokenised once, on its own, and appended.

Only the template may write control tokens: their text in an environment's answer becomes ordinary
tokens.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

from splitppo.envs import Call, Message
from splitppo.envs.calls import written_calls
from splitppo.envs.tools import call_reader, instructions
from splitppo.errors import UserError, one_line, well_formed
from splitppo.rollout import Span

SPOKEN = "sampled-by-the-policy"  # the placeholder
ASKED = {"role": "user", "content": "asked"}
SAID = {"role": "assistant", "content": SPOKEN}
# of a model that has no chat template: the messages' contents, one behind the other
PLAIN = "{% for message in messages %}{{ message.content }}{% endfor %}"
TEXTS = ("content", "name", "tool_call_id")  # that an environment writes into a message
ENDS = re.compile(r"\S(.*\S)?", re.DOTALL)  # a text without the space around it
# what a thinking model's prompt ends with: a thought's first tag, perhaps its last one, too
OPENED = re.compile(r"<([\w:]+)>\s*(</\1>)?\s*\Z")
Messages = Sequence[Message | Mapping[str, Any]]
CUT = "\n[cut]"  # stands behind an answer that was too long


class Turns:
    """Renders dialogues by a tokenizer's chat template, or without one as `PLAIN` does.

    Args:
        tools: schemas, for the template's `tools`.
        call_format: as for `call_reader`.
        arguments: `data.chat_kwargs`.

    Attributes:
        instructions: text about the tools for the system message, if the template takes no `tools`.
        notes: lines for the user about what this template needed.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        tools: Sequence[dict[str, Any]] = (),
        call_format: str = "auto",
        arguments: Mapping[str, Any] | None = None,
    ):
        self.tokenizer = tokenizer
        self.arguments = dict(arguments or {})
        template = str(self.arguments.get("chat_template", tokenizer.chat_template))
        added = tokenizer.added_tokens_decoder
        # id -> text of the control tokens: not of tokens that stand for spaces or tags of HTML
        self._controls = {
            token: part.content
            for token, part in added.items()
            if part.special or (part.content in template and not part.content.isspace())
        }
        names = "|".join(map(re.escape, self._controls.values())) or "(?!)"
        self._control_start = re.compile(f"(?={names})(.)", re.DOTALL)
        self.instructions = ""
        self.notes: list[str] = []
        if tools and not tokenizer.chat_template:
            raise UserError(
                f"env.tools needs a chat template, and the tokenizer {tokenizer.name_or_path} "
                "has none; use an instruct model, or an environment (env.path)"
            )
        if tools and self._render([ASKED], tools=list(tools)) != self._render([ASKED]):
            self.arguments["tools"] = list(tools)
        elif tools:
            self.instructions = instructions(tools, call_format)
            self.notes.append(
                "the chat template takes no tools: their schemas go into the system message"
            )
        self._takes_system = self._shown({"role": "system", "content": SPOKEN}, ASKED) == 1
        answer = _plain(Message("tool", SPOKEN, name="tool"))
        self._takes_tools = self._shown(ASKED, SAID, answer) == 2
        written = None
        if tokenizer.chat_template and not self.instructions:
            written = written_calls(self._render)
        elif self.instructions and call_format == "auto":
            call_format = "hermes"  # as the instructions have it
        self._read_calls = call_reader(tokenizer, tools, call_format, written)
        # the ids behind an assistant's text, up to the control token that ends its turn
        whole = self._render([ASKED, SAID], add_generation_prompt=False)
        ids = self._ids(whole.partition(SPOKEN)[2])
        controls = [at for at, token in enumerate(ids) if token in added]
        self._end = ids[: controls[0] + 1] if controls else []
        special = {token for token, part in added.items() if part.special}
        self._ends = {*special, *self._end[-1:]}  # ids that may end a turn

    def render(self, messages: Messages, **columns: Any) -> str:
        """The text of a row's prompt, with the tools, up to the policy's turn. Raises UserError if
        the row has `columns` that the template would show there."""
        if columns:
            raise UserError(
                f"the row has a column {min(columns)}, which the environment (env.tools, env.path) "
                "provides; drop one of the two"
            )
        return self._render(self._instructed(messages))

    def prompt(self, messages: Messages) -> list[int]:
        """The ids of a row's prompt. Raises UserError or ValueError as `observation` does."""
        return self._encode(messages, self.render, self._first_ids)

    def spoken(self, before: Sequence[int], sampled: Sequence[int]) -> Message:
        """The policy's message in a turn, with its calls. `before`: the row's ids up to the turn.
        Lone surrogates become U+FFFD."""
        said = self._read_calls(before, sampled)
        calls = [(call.name, call.arguments, call.id, call.error) for call in said.tool_calls]
        text = json.dumps([said.content, calls], ensure_ascii=False)
        content, calls = json.loads(well_formed(text))
        return Message(said.role, content, tuple(Call(*call) for call in calls))

    def observation(self, messages: Messages, sampled: Sequence[int]) -> list[int]:
        """The ids between a turn and the next. `sampled` is the turn: the token that ends it may be
        among them (then it is not repeated; the line end that a template puts behind it comes
        first) or not (a stop string ended it: the template's end of a turn comes first).

        Raises UserError if the template refuses the messages, ValueError if a control token comes
        out of their texts all the same.
        """
        ids = self._encode(messages, self._tail, self._ids)
        last = [*sampled[-1:]]
        # GLM's policies end a turn by the token that begins the next one
        end = self._end or last
        ended = ids[: len(end)] == end and not self._ends.isdisjoint(last)
        return ids[len(end) * ended :]

    def cut(
        self, messages: Sequence[Message], sampled: Sequence[int], limit: int
    ) -> Sequence[Message]:
        """The messages with their longest texts cut by an eighth at a time, until `observation` has
        at most `limit` ids of them, or nothing is left of the texts."""
        # more characters are cut even if their tokens would fit: megabytes take seconds
        size = min(max((len(message.content) for message in messages), default=0), 16 * limit)
        while True:
            shortened = [
                replace(message, content=message.content[:size] + CUT)
                if len(message.content) > size
                else message
                for message in messages
            ]
            if not size or len(self.observation(shortened, sampled)) <= limit:
                return shortened
            size = size * 7 // 8

    def spans(self, ids: Sequence[int], messages: Messages) -> tuple[Span, ...]:
        """Where these messages stand in the text of their ids; one message with all of it if the
        template shows one of them in a form that is not known."""
        text = self.tokenizer.decode(list(ids), skip_special_tokens=True)
        spans = []
        end = 0
        for message in self._answers(messages):
            content = message["content"]
            # some templates write JSON, some leave out the space around it
            forms = (content, json.dumps(content, ensure_ascii=False), content.strip())
            shown = next((form for form in forms if form in text[end:]), None)
            if shown is None:
                return (Span(message["role"], 0, len(text)),)
            begin = text.index(shown, end)
            end = begin + len(shown)
            spans.append(Span(message["role"], begin, end))
        return tuple(spans)

    def check(
        self, messages: Sequence[Mapping[str, Any]], role: str, rewritten: str = "refuse"
    ) -> None:
        """Renders a dialogue that begins with a row's prompt, with two turns and two answers of a
        `role`. Raises UserError if the template refuses it, or renders a message in another way
        once others follow: the policy would then not read what it sampled. `keep` allows that: the
        row goes on behind what was sampled. The turns think, unless the prompt ends with an empty
        thought. Space is not compared: models differ in what they put around a thought."""
        dialogue = self._instructed(messages)
        prompt = self._render(dialogue)
        before = self._render(dialogue, add_generation_prompt=False)
        thoughts = [("", "<think>\nthought {}\n</think>\n\n")]
        if opened := OPENED.search(prompt.removeprefix(before)):
            tag, closed = opened.groups()
            thoughts.append((opened[0], "" if closed else f"thought {{}}\n</{tag}>\n\n"))
        rewriting = [self._rewriting(dialogue, prompt, role, *thought) for thought in thoughts]
        if rewritten == "refuse" and all(rewriting):
            raise UserError(
                "env.rewritten=refuse: the chat template rewrites earlier messages when more "
                f"follow: {rewriting[-1]}; set data.chat_kwargs or another template so that it "
                "does not, or --env.rewritten keep (the policy then reads what it sampled)"
            )

    def _rewriting(
        self, messages: Sequence[dict[str, Any]], prompt: str, role: str, begun: str, thought: str
    ) -> str:
        """What the template rewrites in a dialogue of two turns, and how; "": nothing. The policy
        thinks and speaks behind `prompt` and a further one, which have `begun` its thought."""
        dialogue = [*messages]
        appended = prompt
        for number in (1, 2):
            said = f"{thought.format(number)}said {number}"
            answer = Message(role, f"answer {number}", name="tool", tool_call_id=f"{number:09d}")
            dialogue += [{"role": "assistant", "content": begun + said}, *self._answers([answer])]
            appended += said + self._tail([answer])
        before = appended.split()
        after = self._render(dialogue).split()
        if "".join(before) == "".join(after):
            return ""
        same = next(i for i, (a, b) in enumerate(zip_longest(before, after)) if a != b)
        return f"{' '.join(before[same:][:6])!r} becomes {' '.join(after[same:][:6])!r}"

    def _tail(self, messages: Messages) -> str:
        """What the template puts behind an assistant's text when these messages follow."""
        _, spoken, tail = self._render([ASKED, SAID, *self._answers(messages)]).partition(SPOKEN)
        if not spoken:
            raise UserError(
                "the chat template drops earlier messages of the assistant; "
                "use one that keeps them, which rows of several turns need"
            )
        return tail

    def _encode(
        self,
        messages: Messages,
        render: Callable[[Messages], str],
        first_ids: Callable[[str], list[int]],
    ) -> list[int]:
        """The ids of what `render` makes of an environment's messages; `first_ids` makes those of
        its beginning. A text in which the tokenizer sees a control token is cut there, and the
        parts are tokenised one by one."""
        plain = [_plain(message) for message in messages]
        texts = "".join(message.get(name, "") for name in TEXTS for message in plain)
        if not self._has_controls(texts):
            return first_ids(render(plain))
        cut = next(char for char in map(chr, range(0xF0000, 0x110000)) if char not in texts)
        for message in plain:
            message |= {
                name: self._split_controls(message[name], cut) for name in TEXTS if name in message
            }
            # at both ends, too: what follows might complete a control token
            message["content"] = ENDS.sub(rf"{cut}\g<0>{cut}", message["content"], count=1)
        first, *others = render(plain).split(cut)
        return [*first_ids(first), *(token for part in others for token in self._ids(part))]

    def _split_controls(self, text: str, cut: str) -> str:
        """A text with a `cut` behind the first character of each control token. Raises ValueError
        if the tokenizer still sees one."""
        text = self._control_start.sub(rf"\1{cut}", text)
        for part in text.split(cut):
            if self._has_controls(part):
                raise ValueError(f"the tokenizer makes a control token out of {part[:80]!a}")
        return text

    def _has_controls(self, text: str) -> bool:
        return not self._controls.keys().isdisjoint(self._ids(text))

    def _first_ids(self, text: str) -> list[int]:
        """The ids of a text that begins a row."""
        plain = not self.tokenizer.chat_template
        ids = self.tokenizer(text, add_special_tokens=plain)["input_ids"]
        # some tokenizers end each text, and a policy has nothing to say behind the end
        return list(ids[:-1] if plain and ids[-1:] == [self.tokenizer.eos_token_id] else ids)

    def _ids(self, text: str) -> list[int]:
        """The ids of a text that stands in the middle of a row: behind a token, so that no
        tokenizer puts a space before it."""
        before = self.tokenizer.eos_token or ""
        ids = self.tokenizer(before + text, add_special_tokens=False)["input_ids"]
        return list(ids[1:] if before else ids)

    def _render(self, messages: Sequence[Mapping[str, Any]], **more: Any) -> str:
        arguments = {"add_generation_prompt": True, **self.arguments, **more}
        try:
            return self.tokenizer.apply_chat_template(
                list(messages),
                tokenize=False,
                chat_template=None if self.tokenizer.chat_template else PLAIN,
                **arguments,
            )
        except Exception as error:  # templates raise errors of every kind
            roles = ", ".join(str(message["role"]) for message in messages)
            raise UserError(
                f"the chat template refuses a dialogue of {roles} ({one_line(str(error))}); "
                "use another template, or an environment that answers in other roles"
            ) from error

    def _shown(self, *messages: Mapping[str, Any]) -> int:
        """How many of a dialogue's placeholders the template shows; 0 if it refuses it."""
        try:
            return self._render(messages).count(SPOKEN)
        except UserError:
            return 0

    def _answers(self, messages: Messages) -> list[dict[str, Any]]:
        """An environment's messages. Tools answer as the user if the template knows no tools."""
        plain = [_plain(message) for message in messages]
        if self._takes_tools or all(message["role"] != "tool" for message in plain):
            return plain
        return [{"role": "user", "content": "\n".join(message["content"] for message in plain)}]

    def _instructed(self, messages: Messages) -> list[dict[str, Any]]:
        """The messages with the instructions in the first system message, or a new one; in the
        first message if the template knows no system."""
        dialogue = [_plain(message) for message in messages]
        if not self.instructions:
            return dialogue
        first = dialogue[0]
        if self._takes_system and first["role"] not in ("system", "developer"):
            return [{"role": "system", "content": self.instructions}, *dialogue]
        return [{**first, "content": f"{first['content']}\n\n{self.instructions}"}, *dialogue[1:]]


def _plain(message: Message | Mapping[str, Any]) -> dict[str, Any]:
    """A message as a template reads it."""
    if not isinstance(message, Message):
        return dict(message)
    # without what is empty: templates ask whether it is there
    return {name: part for name, part in vars(message).items() if part or name == "content"}
