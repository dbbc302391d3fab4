"""The loops: memory is released after the last use in a step and before what needs it."""

from unittest.mock import MagicMock

import pytest

from splitppo import train

ACTOR = [
    "run.plan",
    "generator.move_open_rows",
    "generator.generate",
    "generator.release_engine",
    "policy.logprobs",
    "policy.release_reference",
    "policy.update",
]
CRITIC = ["run.plan", "critic.score", "critic.release_models", "critic.advantages", "critic.update"]


def calls(loop: str) -> list[str]:
    """The verbs of a step, in order."""
    every = MagicMock()
    every.run.steps.return_value = [1]
    every.generator.generate.return_value = iter([[]])
    every.policy.logprobs.return_value = ["old"], {}
    every.links.chunks, every.links.rollouts.recv.return_value = 2, []
    every.links.advantages.recv.return_value = ["advantages"], False
    every.links.logprobs.recv.return_value = ["old"], False
    every.exchange.advantages.return_value = ["advantages"]
    given = {"actor_loop": ["generator", "policy", "links"], "critic_loop": ["critic", "links"]}
    given["colocated_loop"] = ["generator", "policy", "critic", "exchange"]
    getattr(train, loop)(every.run, *(getattr(every, name) for name in given[loop]))
    return [name for name, _, _ in every.mock_calls]


@pytest.mark.parametrize(
    ("loop", "due"),
    [
        ("actor_loop", ACTOR),
        ("critic_loop", CRITIC),
        ("colocated_loop", ACTOR),
        ("colocated_loop", CRITIC),
    ],
)
def test_rows_move_and_memory_is_released_where_the_step_needs_it(
    loop: str, due: list[str], monkeypatch
):
    monkeypatch.setattr(train, "join", MagicMock())
    done = calls(loop)
    last = [max(i for i, name in enumerate(done) if name == verb) for verb in due]
    assert last == sorted(last)
