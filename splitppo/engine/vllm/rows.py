"""The rows that a vLLM engine generates: what it is asked for, and what it gives back."""

# pyright: reportMissingImports=false
# (vLLM is not installed everywhere)

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from splitppo.engine import Sampling, row_seed
from splitppo.rollout import Request, Sample


@dataclass
class OpenRow:
    """A row that is being generated for a rank: what it has so far."""

    rank: int
    request: Request
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class GoneOn:
    """What rows got that each got one token and goes on: one among vLLM's outputs, in place of one for each row."""

    names: list[str]  # request ids
    tokens: list[int]
    logprobs: list[float]


class Rows:
    """The open rows of an engine.

    They are taken from vLLM's core as it gives them, a few tokens at a time: what its front end does to each token
    takes longer than the GPU takes for a small model. Only where strings end a row it is needed, since it makes the
    text in which they are found.

    Args:
        eos: ids that end a response.
    """

    def __init__(self, llm: Any, eos: Sequence[int]):
        self.llm, self.eos = llm, list(eos)
        self.open: dict[str, OpenRow] = {}  # by request id
        self._text = False

    def add(self, rank: int, requests: Sequence[Request], sampling: Sampling, seed: int, step: int) -> None:
        """Asks for rows."""
        self._text = bool(sampling.stop)
        for request in requests:
            name, noise = f"{rank}/{request.row}", row_seed(seed, step, request.row)
            params = params_of(sampling, seed=noise, eos=self.eos, length=request.length)
            own = self.llm.add_request(name, {"prompt_token_ids": request.prompt}, params)
            if not self._text:
                self.llm.output_processor.abort_requests([own], internal=True)
            self.open[name if self._text else own] = OpenRow(rank, request)

    def abort(self, rank: int) -> None:
        """Breaks off a rank's rows."""
        names = [name for name, row in self.open.items() if row.rank == rank]
        (self.llm.abort_request if self._text else self.llm.engine_core.abort_requests)(names)
        for name in names:
            del self.open[name]

    def step(self) -> list[tuple[int, Sample]]:
        """Runs vLLM's next step: the rows that have ended with it, each with its rank."""
        ended = self._ended_by_text() if self._text else self._ended()
        return [(row.rank, sample_of(row, reason)) for row, reason in ended]

    def ranks(self) -> set[int]:
        """Those that have rows open."""
        return {row.rank for row in self.open.values()}

    def _ended(self) -> list[tuple[OpenRow, str]]:
        ended, rows = [], self.open
        for output in self.llm.engine_core.get_output().outputs:
            if isinstance(output, GoneOn):
                for name, token, logprob in zip(output.names, output.tokens, output.logprobs, strict=True):
                    row = rows[name]
                    row.tokens.append(token)
                    row.logprobs.append(logprob)
                continue
            row = rows.get(output.request_id)
            if row is None:
                continue  # late, of a row that was broken off
            row.tokens += output.new_token_ids
            if output.new_logprobs is not None:
                row.logprobs += output.new_logprobs.logprobs[:, 0].tolist()
            if output.finish_reason is not None:
                ended.append((self.open.pop(output.request_id), str(output.finish_reason)))
        return ended

    def _ended_by_text(self) -> list[tuple[OpenRow, str]]:
        ended = []
        for output in self.llm.step():
            if output.finished and (row := self.open.pop(output.request_id, None)):
                told = output.outputs[0]
                row.tokens, row.logprobs = list(told.token_ids), list(told.logprobs.logprobs)
                ended.append((row, told.finish_reason))
        return ended


def params_of(sampling: Sampling, *, seed: int, eos: Sequence[int], length: int | None = None) -> Any:
    """vLLM's name for how a row is drawn.

    Args:
        seed: of the row's noise. length: that the row is to have, whatever it says; None: until it ends.
    """
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    return SamplingParams(
        temperature=0.0 if sampling.greedy else sampling.temperature,
        top_p=1.0 if sampling.greedy else sampling.top_p,
        top_k=0 if sampling.greedy else sampling.top_k,
        seed=seed,
        max_tokens=length or sampling.max_new_tokens,
        stop=list(sampling.stop),
        include_stop_str_in_output=True,
        detokenize=bool(sampling.stop),
        skip_special_tokens=False,
        ignore_eos=True,  # all that end a response are named here
        stop_token_ids=[] if length else list(eos),
        logprobs=0,  # of the drawn token alone
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def sample_of(row: OpenRow, reason: str) -> Sample:
    """A finished row as the trainer has it."""
    request = row.request
    if len(row.logprobs) != len(row.tokens) or reason not in ("stop", "length"):
        why = f"ended by {reason} with {len(row.tokens)} tokens and {len(row.logprobs)} log-probs"
        raise RuntimeError(f"row {request.row} {why}")
    if not all(map(math.isfinite, row.logprobs)):
        raise FloatingPointError(f"row {request.row}: the policy's logits are not finite")
    return Sample(request.row, request.prompt, row.tokens, row.logprobs, reason == "stop")
