"""The rows that a vLLM engine generates: from requests to finished samples."""

# pyright: reportMissingImports=false

import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from splitppo.config import RolloutConfig
from splitppo.engine import extend, row_seed
from splitppo.rollout import End, Request, Sample

# vLLM's reason for the end of a row -> ours. `string` is ours: vLLM says `stop` for end ids and stop strings.
ENDS_BY: dict[str, End] = {"stop": "eos", "string": "stop", "length": "limit"}


@dataclass
class Slot:
    """A slot of a rank: tokens left to decode; whether it goes on after a row; the next rows; whether it waits."""

    rank: int
    sampling: RolloutConfig
    seed: int = 0
    left: int = sys.maxsize
    refills: bool = False
    rows: deque[Request] = field(default_factory=deque)
    idle: bool = False


@dataclass
class OpenRow:
    """A row that is being generated, and its new tokens."""

    slot: Slot
    request: Request
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class TokenBatch:
    """One token for each of several rows that did not end. Replaces one of vLLM's outputs for each row."""

    names: list[str]  # request ids
    tokens: list[int]
    logprobs: list[float]


class Rows:
    """The open rows of an engine; `eos`: ids that end a response.

    Tokens are taken directly from vLLM's core. Its front end needs more time for each token than the GPU does with a
    small model. Only rows with stop strings go through the front end, which makes the text to search.
    """

    def __init__(self, llm: Any, eos: Sequence[int]):
        self.llm, self.eos = llm, list(eos)
        self.open: dict[str, OpenRow] = {}  # by request id
        self.slots: dict[tuple[int, int], Slot] = {}  # by rank and number; those that have tokens left
        self._text = False  # whether stop strings may end these rows

    def add(self, rank: int, slots: Mapping[int, Sequence[Request]], sampling: RolloutConfig, *rest: Any) -> None:
        """Starts a rank's slots, by number, with their rows; `rest` are further fields of `Slot`."""
        self._text = bool(sampling.stop)
        for number, requests in slots.items():
            self.slots[rank, number] = slot = Slot(rank, sampling, *rest, rows=deque(requests))
            self._start(slot)

    def add_more(self, rank: int, more: Sequence[tuple[int, Request]]) -> None:
        """Further rows of slots, by number. A slot that has no tokens left is not there any more."""
        for number, request in more:
            if slot := self.slots.get((rank, number)):
                slot.rows.append(request)
                if slot.idle:
                    self._start(slot)

    def abort(self, rank: int) -> None:
        """Aborts a rank's rows."""
        names = [name for name, row in self.open.items() if row.slot.rank == rank]
        (self.llm.abort_request if self._text else self.llm.engine_core.abort_requests)(names)
        for name in names:
            del self.open[name]
        self.slots = {place: slot for place, slot in self.slots.items() if slot.rank != rank}

    def step(self) -> list[tuple[int, Sample]]:
        """Runs vLLM's next step. Returns the rows that ended with it, each with its rank."""
        ended = self._ended_by_text() if self._text else self._ended()
        samples = [(row.slot.rank, sample_of(row, reason)) for row, reason in ended]
        for row, _ in ended:
            row.slot.left -= len(row.tokens)
            if row.slot.refills and row.slot.left:
                self._start(row.slot)
            else:
                self.slots = {place: slot for place, slot in self.slots.items() if slot is not row.slot}
        return samples

    def ranks(self) -> set[int]:
        """The ranks that have slots with tokens left."""
        return {slot.rank for slot in self.slots.values()}

    def _start(self, slot: Slot) -> None:
        """Starts the slot's next row. Without one, the slot waits."""
        slot.idle = not slot.rows
        if slot.idle:
            return
        request = slot.rows.popleft()
        most = min(request.left(slot.sampling.max_new_tokens), slot.left)
        noise = row_seed(slot.seed, request.row, len(request.response))
        params = params_of(slot.sampling, seed=noise, eos=self.eos, tokens=most, fixed=request.length is not None)
        name, ids = f"{slot.rank}/{request.row}", [*request.prompt, *request.response]
        core_name = self.llm.add_request(name, {"prompt_token_ids": ids}, params)
        if not self._text:
            self.llm.output_processor.abort_requests([core_name], internal=True)  # in the front end only
        self.open[name if self._text else core_name] = OpenRow(slot, request)

    def _ended(self) -> list[tuple[OpenRow, str]]:
        ended, rows = [], self.open
        for output in self.llm.engine_core.get_output().outputs:
            if isinstance(output, TokenBatch):
                for name, token, logprob in zip(output.names, output.tokens, output.logprobs, strict=True):
                    rows[name].tokens.append(token)
                    rows[name].logprobs.append(logprob)
            elif row := rows.get(output.request_id):  # else it is late, of an aborted row
                row.tokens += output.new_token_ids
                if output.new_logprobs is not None:
                    row.logprobs += output.new_logprobs.logprobs[:, 0].tolist()
                if output.finish_reason is not None:
                    ended.append((rows.pop(output.request_id), str(output.finish_reason)))
        return ended

    def _ended_by_text(self) -> list[tuple[OpenRow, str]]:
        ended = []
        for output in self.llm.step():
            if output.finished and (row := self.open.pop(output.request_id, None)):
                whole = output.outputs[0]
                row.tokens, row.logprobs = list(whole.token_ids), list(whole.logprobs.logprobs)
                by_string = whole.finish_reason == "stop" and isinstance(whole.stop_reason, str)
                ended.append((row, "string" if by_string else whole.finish_reason))
        return ended


def params_of(sampling: RolloutConfig, *, seed: int, eos: Sequence[int], tokens: int, fixed: bool = False) -> Any:
    """vLLM's SamplingParams of a row. It gets at most `tokens` tokens, and with `fixed` no fewer."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    return SamplingParams(
        temperature=sampling.temperature,  # vLLM leaves out top_p and top_k at 0, too
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=seed,
        max_tokens=tokens,
        stop=list(sampling.stop),
        include_stop_str_in_output=True,
        detokenize=bool(sampling.stop),
        skip_special_tokens=False,
        ignore_eos=True,  # stop_token_ids has all of them
        stop_token_ids=[] if fixed else list(eos),
        logprobs=0,  # only of the drawn token
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def sample_of(row: OpenRow, reason: str) -> Sample:
    """The row as far as it goes. Raises RuntimeError if vLLM ended it in another way than `ENDS_BY` knows."""
    request = row.request
    if len(row.logprobs) != len(row.tokens) or reason not in ENDS_BY:
        counts = f"{len(row.tokens)} tokens and {len(row.logprobs)} log-probs"
        raise RuntimeError(f"row {request.row} ended by {reason!r} with {counts}")
    end, drawn = ENDS_BY[reason], len(row.tokens)
    if end == "limit" and drawn == row.slot.left and drawn < request.left(row.slot.sampling.max_new_tokens):
        end = "window"
    return extend(request, row.tokens, row.logprobs, end)
