"""Environments answer the policy between the turns of a row, and reward the turns.

An environment is a user's class, a set of tools (tools.py), or built in. Each row has one object:

    Name(row, seed)    made from a data row and a seed
    reset()            returns the prompt, a list of messages; None: the row's own prompt
    step(message)      answers an assistant's message by a Turn; may be `async def`
    close()            frees the episode's resources; called once, also after a failure

Its answers must depend on row, seed and messages alone: when a row moves to another process, the
environment is made again there and its messages are replayed. Environments run in worker
processes, so this package imports neither torch nor numpy; only player.py and turns.py run in the
rank, which has the tokenizer.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from splitppo.errors import one_line, well_formed
from splitppo.workers import read_number, read_numbers

ROLES = ("tool", "user", "system")  # in which an environment answers
NO_ID = "0" * 9  # of a call; some templates refuse other ids than nine letters or digits


@dataclass(frozen=True)
class Call:
    """A tool call in an assistant's message.

    Attributes:
        name: name of the tool.
        arguments: values by parameter name.
        id: the model's id of the call, if the call format has ids.
        error: why the call can't be parsed; "" if it can.
    """

    name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    id: str = NO_ID
    error: str = ""


@dataclass(frozen=True)
class Message:
    """One message of a dialogue.

    Attributes:
        role: `assistant` is the policy; an environment answers as `user`, `tool` or `system`.
        content: the text, without the tokens that end a turn.
        tool_calls: the calls in an assistant's message, in order.
        name: the function that answers, in a `tool` message.
        tool_call_id: the `Call.id` that a `tool` message answers.
    """

    role: str
    content: str
    tool_calls: tuple[Call, ...] = ()
    name: str = ""
    tool_call_id: str = NO_ID


@dataclass(frozen=True)
class Turn:
    """An environment's answer to an assistant's message.

    Attributes:
        messages: the messages that the policy reads next.
        reward: reward of the assistant's message.
        done: whether the episode ends here. The policy then does not read the messages.
        truncated: whether the episode was cut off, rather than finished.
        metrics: numbers by name. They may differ when a turn is replayed.
    """

    messages: list[Message] = field(default_factory=list)
    reward: float = 0.0
    done: bool = False
    truncated: bool = False
    metrics: dict[str, float] = field(default_factory=dict, compare=False)


def read_messages(messages: Any) -> list[Message]:
    """The messages that an environment returned: each a `Message` or a dict of its fields, or None
    for no message. Lone surrogates become U+FFFD. Raises TypeError for anything else."""
    listed = messages if isinstance(messages, list | tuple) else [messages] * (messages is not None)
    converted = [Message(**m) if isinstance(m, Mapping) else m for m in listed]
    for m in converted:
        if not (isinstance(m, Message) and isinstance(m.content, str) and m.role in ROLES):
            raise TypeError(
                f"{one_line(repr(m)[:120])} is not a message of an environment; return a list of "
                f"splitppo.envs.Message with role user, tool or system and a text"
            )
    # as plain values: the trainer can't read those of the user's classes
    return [
        Message(
            well_formed(m.role), well_formed(m.content), (), well_formed(str(m.name)),
            well_formed(str(m.tool_call_id)),
        )
        for m in converted
    ]  # fmt: skip


def read_turn(result: Any) -> Turn:
    """Checks what `step` returned, since the sampler can't read anything else. Raises TypeError or
    ValueError."""
    if not isinstance(result, Turn):
        raise TypeError(
            f"step returned {one_line(repr(result)[:120])}; return splitppo.envs.Turn(...)"
        )
    return Turn(
        read_messages(result.messages),
        read_number("reward", result.reward),
        bool(result.done),
        bool(result.truncated),
        read_numbers(result.metrics),
    )
