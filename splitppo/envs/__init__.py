"""Environments: what answers the policy between the turns of a row, and rewards them.

An environment is a class of the user's, a set of tools (tools.py), or built in: one object a row,

    Name(row, seed)    of a data row and a seed
    reset()            the prompt, a list of messages; None: the row's own
    step(message)      a Turn, the answer to an assistant's message; may be `async def`
    close()            frees what the episode holds; called once, also after a failure

What it says must follow from row, seed and messages alone: a row that goes on elsewhere is played
again there. It runs in a worker process, so this package imports neither torch nor numpy;
player.py and turns.py alone belong to the rank, which has the tokenizer.
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
    """A call of a tool in an assistant's message.

    Attributes:
        name: of the tool. arguments: by the names of its parameters.
        id: what the model called it, if its format has ids.
        error: why the text is no call; "": it is one.
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
        content: its text, without the tokens that end a turn.
        tool_calls: of an assistant's message, in their order.
        name, tool_call_id: of a `tool` message, the function that answers and the `Call.id`.
    """

    role: str
    content: str
    tool_calls: tuple[Call, ...] = ()
    name: str = ""
    tool_call_id: str = NO_ID


@dataclass(frozen=True)
class Turn:
    """What an environment says to an assistant's message.

    Attributes:
        messages: what the policy reads next.
        reward: of the assistant's message.
        done: whether the episode ends here; the policy does not read the messages then.
        truncated: whether it ends because it was cut off, and not because it is over.
        metrics: numbers by name. They may tell a time: turns are equal if the rest is.
    """

    messages: list[Message] = field(default_factory=list)
    reward: float = 0.0
    done: bool = False
    truncated: bool = False
    metrics: dict[str, float] = field(default_factory=dict, compare=False)


def read_messages(messages: Any) -> list[Message]:
    """The messages that an environment returned, each a `Message` or a dict of its fields; None:
    none. Half characters become U+FFFD. Raises TypeError if they are no messages."""
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
    """What `Env.step` returned, checked: a worker must not send on what the sampler can't read.
    Raises TypeError or ValueError."""
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
