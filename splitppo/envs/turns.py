"""What stands between two turns of a row, in tokens.

Ids that were sampled stay as they were sampled: nothing is decoded and tokenised again. What the
chat template puts between the end of an assistant's text and the start of the next one is the
difference of its output around a placeholder. It is tokenised once, on its own, and appended.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate, zip_longest
from typing import Any

from splitppo.envs import ROLES, Message
from splitppo.envs.calls import written_calls
from splitppo.envs.tools import call_reader, instructions
from splitppo.errors import UserError, one_line

SPOKEN = "sampled-by-the-policy"  # the placeholder
ASKED = {"role": "user", "content": "asked"}
SAID = {"role": "assistant", "content": SPOKEN}
# of a model that has no chat template: the messages' contents, one behind the other
PLAIN = "{% for message in messages %}{{ message.content }}{% endfor %}"
CUT = "\n[cut]"  # stands behind an answer that was too long


class Turns:
    """Renders dialogues by a tokenizer's chat template, or without one as `PLAIN` does.

    Args:
        tools: schemas for the template's `tools`.
        call_format: as for `call_reader`.
        arguments: `data.chat_kwargs`.

    Attributes:
        spoken: reads what the policy said, and its calls.
        instructions: for a template that does not read `tools`: text about them, which goes to the
            system message.
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
        self.instructions = ""
        self._takes_system = False
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
            with suppress(UserError):
                shown = self._render([{**ASKED, "role": "system", "content": SPOKEN}, ASKED])
                self._takes_system = SPOKEN in shown
            self.notes.append(
                "the chat template does not read tools: their schemas stand in the system message"
            )
        written = None
        if tokenizer.chat_template and not self.instructions:
            written = written_calls(self._render)
        elif self.instructions and call_format == "auto":
            call_format = "hermes"  # as the instructions have it
        self.spoken = call_reader(tokenizer, tools, call_format, written)
        # around an assistant's text: the space that it samples first, and the ids up to the control
        # token that ends its turn
        before, _, after = self._render([ASKED, SAID], add_generation_prompt=False).partition(
            SPOKEN
        )
        lead = before.removeprefix(self._render([ASKED]))
        self._lead = lead if lead.isspace() else ""
        ids = self._ids(after)
        controls = [at for at, token in enumerate(ids) if token in tokenizer.added_tokens_decoder]
        self._end = ids[: controls[0] + 1] if controls else []
        self._frames = {role: self._frame(role) for role in ROLES}

    def render(self, messages: Sequence[Message | Mapping[str, Any]]) -> str:
        """The text of a row's prompt, with the tools, up to where the policy speaks."""
        return self._render(self._instructed(messages))

    def prompt(self, messages: Sequence[Message | Mapping[str, Any]]) -> list[int]:
        """The ids of a row's prompt."""
        plain = not self.tokenizer.chat_template
        ids = self.tokenizer(self.render(messages), add_special_tokens=plain)["input_ids"]
        # some tokenizers end each text, and a policy has nothing to say behind the end
        return list(ids[:-1] if plain and ids[-1:] == [self.tokenizer.eos_token_id] else ids)

    def observation(
        self, messages: Sequence[Message], sampled: Sequence[int], limit: int | None = None
    ) -> list[int]:
        """The ids between a turn and the next. `sampled` is the turn: the token that ends it may be
        among them (then it is not repeated; the line end that a template puts behind it comes
        first) or not (a stop string ended it: the template's end of a turn comes first). The
        longest texts are cut until there are at most `limit` ids, or nothing of them is left."""

        def shortened(size: int) -> list[int]:
            short = [
                replace(message, content=message.content[:size] + CUT)
                if len(message.content) > size
                else message
                for message in messages
            ]
            ids = self._ids(self._tail(short))
            ended = [*sampled[-1:]] == self._end[-1:] and ids[: len(self._end)] == self._end
            return ids[len(self._end) :] if ended else ids

        longest = max((len(message.content) for message in messages), default=0)
        ids = shortened(longest)
        if limit is None or len(ids) <= limit:
            return ids
        fitting = bisect_right(range(longest), limit, key=lambda size: len(shortened(size)))
        return shortened(max(fitting - 1, 0))

    def read(self, ids: Sequence[int]) -> list[dict[str, Any]]:
        """The messages whose ids these are, as `observation` made them: one of each text that the
        template frames as it does those of a role. Ids that it does not frame so are a user's
        message."""
        text = self.tokenizer.decode(list(ids))
        for role, frame in self._frames.items():
            head, *between, foot = frame or ("", "")
            if head and foot and head in text and text.endswith(foot):
                content = text.partition(head)[2].removesuffix(foot)
                texts = content.split(*between) if between else [content]
                return [{"role": role, "content": part} for part in texts]
        text = self.tokenizer.decode(list(ids), skip_special_tokens=True)
        return [{"role": "user", "content": text}]

    def check(
        self, messages: Sequence[Mapping[str, Any]], role: str, rewritten: str = "refuse"
    ) -> None:
        """Renders a dialogue that begins with a row's prompt, with two turns that think and two
        answers of a `role`. Raises UserError if the template refuses it, or renders a message in
        another way once others follow: the policy would then not read what it sampled. `keep`
        allows that: the row goes on behind what was sampled."""
        dialogue = self._instructed(messages)
        first = len(dialogue)
        parts = [self._render(dialogue)]  # of the prompt and each message behind it
        for number in (1, 2):
            said = f"<think>\nthought {number}\n</think>\n\nsaid {number}"
            answer = Message(role, f"answer {number}", name="tool", tool_call_id=f"{number:09d}")
            dialogue += [{"role": "assistant", "content": said}, *self._answers([answer])]
            parts += [self._lead + said, self._tail([answer])]
        kept = "".join(parts)
        whole = self._render(dialogue)
        if whole != kept and rewritten == "refuse":
            same = next(i for i, (a, b) in enumerate(zip_longest(whole, kept)) if a != b)
            at = first + bisect_right([*accumulate(map(len, parts[:-1]))], same)
            raise UserError(
                f"env.rewritten=refuse: the chat template rewrites message {at} "
                f"({dialogue[at - 1]['role']}) once more follow: {kept[same:][:40]!r} becomes "
                f"{whole[same:][:40]!r}; set data.chat_kwargs or another template so that it does "
                "not, or --env.rewritten keep (the policy then reads what it sampled)"
            )

    def _tail(self, messages: Sequence[Message]) -> str:
        """What the template puts behind an assistant's text when these messages follow."""
        _, found, tail = self._render([ASKED, SAID, *self._answers(messages)]).partition(SPOKEN)
        if not found:
            raise UserError(
                "the chat template does not show what the assistant said before others answered; "
                "a row of several turns needs one that does"
            )
        return tail

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

    def _frame(self, role: str) -> list[str]:
        """What the template puts before an answer's text, between two, and behind it; before and
        behind it if it refuses two of the role; [] if it does not show the role."""
        answer = _plain(Message(role, SPOKEN, name="tool"))
        for answers in ([answer, answer], [answer]):
            with suppress(UserError):
                parts = self._render([ASKED, SAID, *answers]).split(SPOKEN)
                if len(parts) == len(answers) + 2:
                    parts[1] = parts[1].removeprefix(self.tokenizer.decode(self._end))
                    return parts[1:]
        return []

    def _answers(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """An environment's messages. Tools answer as the user if the template knows no tools."""
        if self._frames["tool"] or all(message.role != "tool" for message in messages):
            return [_plain(message) for message in messages]
        return [{"role": "user", "content": "\n".join(message.content for message in messages)}]

    def _instructed(self, messages: Sequence[Message | Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The messages with the instructions in the first system message, or a new one; in the
        first message if the template knows no system."""
        found = [_plain(message) for message in messages]
        if not self.instructions:
            return found
        first = found[0]
        if self._takes_system and first["role"] not in ("system", "developer"):
            return [{"role": "system", "content": self.instructions}, *found]
        return [{**first, "content": f"{first['content']}\n\n{self.instructions}"}, *found[1:]]


def _plain(message: Message | Mapping[str, Any]) -> dict[str, Any]:
    """A message as a template reads it."""
    if not isinstance(message, Message):
        return dict(message)
    # without what is empty: templates ask whether it is there
    return {name: part for name, part in vars(message).items() if part or name == "content"}
