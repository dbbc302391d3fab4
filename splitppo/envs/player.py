"""Runs the environments of a rank's rows: starts them, passes them each turn's message, and turns
their answers into tokens. The sampler decides when, and appends the tokens."""

import itertools
import json
import math
import sys
import time
from array import array
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from splitppo.config import Config
from splitppo.envs import Message, Turn
from splitppo.envs.pool import EnvPool
from splitppo.envs.single import SINGLE_TURN, SingleTurn
from splitppo.envs.tools import load_tools, tool_schemas
from splitppo.envs.turns import Turns
from splitppo.errors import UserError, one_line
from splitppo.rollout import IDS, LOGPROBS, End, Episode, Prompt, Segment
from splitppo.workers import FAILING_STEPS, FLOAT32_MAX, Failure, describe, say_failures


def turns_of(config: Config, tokenizer: Any) -> Turns | None:
    """The converter between an environment's messages and tokens; None without environments. Raises
    UserError if the tools or the chat template can't be used."""
    env = config.env
    if not config.has_env:
        return None
    return Turns(
        tokenizer,
        tools=tool_schemas(load_tools(env.tools, network=env.network)),
        call_format=env.call_format,
        arguments=json.loads(config.data.chat_kwargs),
    )


def rehearse(config: Config, prompt: Prompt) -> list[str]:
    """Makes a prompt's environment, if there is one, and takes a step with an empty message.
    Returns the failure of the step, if any. Raises UserError if the environment can't be made."""
    if not config.has_env:
        return []
    with closing(EnvPool(config.environment, 1)) as pool:
        began, said = (
            pool.play(0, _columns(prompt), config.seed, messages).result()
            for messages in ([], [Message("assistant", "")])
        )
    if isinstance(began, Failure):
        raise UserError(f"the environment {pool.name} does not start: {began.text}; fix it")
    return (
        [f"the environment {pool.name} fails on an empty message: {said.text}"]
        if isinstance(said, Failure)
        else []
    )


def check_turns(config: Config, turns: Turns | None, messages: Sequence[Any] | None) -> list[str]:
    """Tries the chat template on turns after a prompt's messages, if rows have turns and prompts
    have messages. Returns notes about what the template needed. Raises UserError if it can't be
    used."""
    if turns and messages:
        turns.check(messages, "tool" if config.env.tools else "user", config.env.rewritten)
    return turns.notes if turns else []


def room_for_turns(config: Config, longest_prompt: int, most: int) -> int | None:
    """`rollout.max_context` of rows with turns, by default the models' context length (`most`);
    None for rows without turns. Raises UserError if it leaves no room after the longest prompt."""
    context = config.rollout.max_context or most
    if config.has_env and longest_prompt >= context:
        raise UserError(
            f"rollout.max_context={context} leaves no room after the longest prompt of "
            f"{longest_prompt} tokens; raise it, or set rollout.max_prompt_tokens and data.overlong"
        )
    return context if config.has_env else None


def players_of(config: Config, tokenizer: Any) -> "list[Player] | list[SingleTurn]":
    """The players of a rank's rows and of its held-out rows, which share the workers."""
    if not (turns := turns_of(config, tokenizer)):
        return [SINGLE_TURN, SINGLE_TURN]
    pool = EnvPool(config.environment, config.reward.workers)
    return [Player(pool, turns, config) for _ in range(2)]


NOTHING = Segment(array(IDS), None)  # that is observed


class Reply(NamedTuple):
    """An environment's answer to the last turn of a row, or its prompt.

    Attributes:
        row: the row's number.
        observed: the answer, or the prompt if no turn waits for an answer.
        reward: reward of the turn, or of the whole row if the environment failed.
        end: the reason why the row has ended, if it has.
    """

    row: int
    observed: Segment
    reward: float = 0.0
    end: End | None = None


@dataclass
class _Row:
    """A row whose environment is here.

    Attributes:
        said: what it has heard. answer: what it says to that.
        broken: why it did not begin, or not go on from where it was elsewhere.
        key: the pool's; no two rows have the same one, also of several players.
    """

    said: list[Message] = field(default_factory=list)
    answer: Future[list[Any] | Failure] = field(default_factory=Future)
    broken: Failure | None = None
    key: int = field(default_factory=itertools.count().__next__)


class Player:
    """The environments of a rank's rows.

    An environment that fails to start fails at the end of the row's first turn, because a row
    without tokens can't be trained on. When an environment is made again, because its row has moved
    here or its worker has ended, the row's turns are replayed; it fails if its answers differ.
    Tools only get the last turn.

    Attributes:
        pool: has the environments; perhaps also those of another player.
        failures: (row, failure) of the rows that failed.
        turns: makes tokens of messages, and messages of tokens.
        answers: whether turns are answered. render: messages -> the text of a row's prompt.
        seeds: what an environment's seed follows from, as `env.seed` has it.
        max_turn_tokens: most tokens of a turn.
    """

    answers = True

    def __init__(self, pool: EnvPool, turns: Turns, config: Config):
        self.failures: list[tuple[int, Failure]] = []
        self.failing = 0  # steps, to the last, in which no environment has answered
        self.pool = pool
        self.turns = turns
        self.render = turns.render
        self.seeds = config.env.seed
        self.max_turn_tokens = config.env.max_turn_tokens or sys.maxsize
        self._config = config
        self._rows: dict[int, _Row] = {}
        self._figures: list[dict[str, float]] = []  # of each turn, answer and wait

    def ask(self, row: Episode, prompt: Prompt, seed: int) -> bool:
        """Sends the row's environment the turns that have ended, if it has not read them yet;
        starts the environment if necessary. Returns whether the row waits for a reply."""
        ended = row.turns if row.awaits else row.turns[:-1]
        if row.segments and not (row.awaits or self._config.env.path):
            return False  # tools have no state: the row's record is all that it needs
        if row.row in self._rows and len(self._rows[row.row].said) == len(ended):
            return row.awaits
        one = self._rows.setdefault(row.row, _Row())
        before = [*row.prompt]
        try:
            for number, (said, heard) in enumerate(ended):
                if number == len(one.said):
                    one.said.append(self.turns.spoken(before, said))
                before += [*said, *heard]
        except Exception as error:  # what the policy said can't be read
            one.broken = self._invalid(error)
        if one.broken:
            one.answer = Future()  # the environment does not hear this
            one.answer.set_result(one.broken)
        else:
            one.answer = self.pool.play(one.key, _columns(prompt), seed, one.said)
        return True

    def poll(self, rows: Mapping[int, Episode], timeout: float) -> list[Reply]:
        """The replies for these waiting rows. Waits up to this many seconds for the first reply."""
        answers = {number: self._rows[number].answer for number in rows}
        began = time.monotonic()
        wait(answers.values(), timeout, FIRST_COMPLETED)
        self._figures.append({"perf/env_wait_s": time.monotonic() - began})
        return [self._reply(rows[row]) for row, answer in answers.items() if answer.done()]

    def end(self, row: int) -> None:
        """The row has ended, or moves to another rank. A call in progress is waited for."""
        if one := self._rows.pop(row, None):
            one.answer.add_done_callback(lambda _: self.pool.end(one.key))

    def keep(self, rows: Set[int]) -> None:
        """A step begins with these rows: ends the environments of all others."""
        for row in self._rows.keys() - rows:
            self.end(row)

    def close(self) -> None:
        """Ends the workers."""
        self.pool.close()

    def take(self) -> tuple[dict[str, float], list[tuple[int, Failure]]]:
        """Sums and failures since the last call. `turns` counts answered turns, `perf/env_wait_s`
        is the time in which the engine had no row."""
        figures = self._figures
        failures = self.failures
        self._figures = []
        self.failures = []
        # exact: they do not depend on the order in which answers came
        sums = {
            name: math.fsum(part.get(name, 0.0) for part in figures)
            for name in sorted({name for part in figures for name in part})
        }
        return sums, failures

    def metrics(self, group: Any) -> dict[str, float]:
        """Metrics of the environments since the last call, over all ranks of a `Group`, which call
        it. The first rank prints failures. Raises UserError if no environment has answered for some
        steps."""
        sets = group.all_gather(group.gather_set(self.take()))
        sums, failures = zip(*(part for ranks in sets for part in ranks), strict=True)
        waited = max(of_rank.pop("perf/env_wait_s", 0.0) for of_rank in sums)
        total = Counter[str]()
        for of_rank in sums:
            total.update(of_rank)
        failed = [failure for of_rank in failures for failure in of_rank]
        turns = total.pop("turns", 0)
        if group.is_first:
            say_failures("[actor]  ", failed, "environments")
        self.failing = self.failing + 1 if failed and not turns else 0
        if self.failing == FAILING_STEPS:
            raise UserError(
                f"no environment answered in {FAILING_STEPS} steps: {failed[0][1].text}; fix it"
            )
        return {
            "env/turns": turns,
            "env/failures": len(failed),
            "perf/env_wait_s": waited,
            **{name: part / turns for name, part in total.items()},
        }

    def _reply(self, row: Episode) -> Reply:
        """What the row's environment says. What can't be read, rendered or tokenised fails the
        row."""
        one = self._rows[row.row]
        heard = one.broken or one.answer.result()
        if not isinstance(heard, Failure):
            try:
                heard = self._read(row, heard, again=len(heard) > len(one.said))
            except Exception as error:  # of the template or the tokenizer, by whatever text
                heard = self._invalid(error)
        if isinstance(heard, Reply):
            return heard
        if row.awaits:
            self.failures.append((row.row, heard))
            return Reply(row.row, NOTHING, self._config.reward.failed_score, "failed")
        one.broken = heard
        return Reply(row.row, Segment(row.prompt, None, spans=row.spans))

    def _read(self, row: Episode, heard: list[Any], *, again: bool) -> Reply | Failure:
        """The reply in what an environment said: to the row's last turn; to all, `again`, if it was
        made here."""
        prompt = Segment(row.prompt, None, spans=row.spans)
        if again:
            messages, *turns = heard
            if messages:
                prompt = self._observed(self.turns.prompt(messages), messages)
            if wrong := self._wrong(row, prompt.ids, turns):
                return Failure(self.pool.name, "replay" if row.segments else "invalid", wrong)
        return self._answer(row, heard[-1]) if row.awaits else Reply(row.row, prompt)

    def _invalid(self, error: Exception) -> Failure:
        text = str(error) if isinstance(error, UserError) else describe(error)
        return Failure(self.pool.name, "invalid", one_line(text)[:400])

    def _wrong(self, row: Episode, ids: array, turns: Sequence[Turn]) -> str:
        """Why a row can't go on from a prompt and the answers to its turns; "": it can."""
        if not 0 < len(ids) < (self._config.rollout.max_context or math.inf):
            return f"its prompt has {len(ids)} tokens; use 1 to rollout.max_context - 1"
        again = "replayed, it {}; make it depend on row, seed and messages alone"
        if row.segments and ids != row.prompt:
            return again.format("began otherwise")
        for number, (turn, (said, answered)) in enumerate(zip(turns, row.turns[:-1], strict=False)):
            if turn.done or self._observe(turn, said).ids != answered:
                return again.format(f"answered turn {number + 1} differently")
        return ""

    def _answer(self, row: Episode, turn: Turn) -> Reply:
        """The reply to the row's last turn."""
        full = turn.truncated or len(row.turns) == self._config.env.max_turns
        end: End | None = "limit" if full else None
        if turn.done and not turn.truncated:
            end = "environment"
        reward = turn.reward
        if self._config.env.tools and any(row.rewards):
            reward = 0.0  # `env.format_reward` is paid once
        if abs(total := sum(row.rewards) + reward) > FLOAT32_MAX:
            raise ValueError(f"the row's rewards sum up to {total}, which overflows float32")
        observed = NOTHING if end else self._observe(turn, row.turns[-1][0])
        figures = {f"env/{name}/mean": number for name, number in turn.metrics.items()}
        self._figures.append({"turns": 1, **figures})
        # the reward as a message holds it
        return Reply(row.row, observed, array(LOGPROBS, [reward])[0], end)

    def _observe(self, turn: Turn, said: array) -> Segment:
        messages = self.turns.cut(turn.messages, said, self._config.env.max_observation_tokens)
        return self._observed(self.turns.observation(messages, said), messages)

    def _observed(self, ids: Sequence[int], messages: Sequence[Message]) -> Segment:
        return Segment(array(IDS, ids), None, spans=self.turns.spans(ids, messages))


def _columns(prompt: Prompt) -> dict[str, Any]:
    """A data row, as its environment gets it."""
    return {
        "prompt": prompt.column,
        "data_source": prompt.data_source,
        "ground_truth": prompt.ground_truth,
        "extra_info": prompt.extra_info,
    }
