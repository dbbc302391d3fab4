"""The rows that a vLLM engine generates: from requests to finished samples."""

# pyright: reportMissingImports=false
# (vLLM is not installed everywhere)

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from splitppo.engine import Sampling, check_logprobs, row_seed
from splitppo.rollout import End, Request, Sample

# vLLM's reason for the end of a row -> ours. `string` is ours: vLLM says `stop` for end ids and stop strings.
ENDS_BY: dict[str, End] = {"stop": "eos", "string": "stop", "length": "limit"}


@dataclass
class OpenRow:
    """A row that is being generated for a rank."""

    rank: int
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
    """The open rows of an engine.

    Tokens are taken directly from vLLM's core. Its front end needs more time for each token than the GPU does with a
    small model. Only rows with stop strings go through the front end, which makes the text to search.

    Args:
        eos: ids that end a response.
    """

    def __init__(self, llm: Any, eos: Sequence[int]):
        self.llm, self.eos = llm, list(eos)
        self.open: dict[str, OpenRow] = {}  # by request id
        self._text = False  # whether stop strings may end these rows

    def add(self, rank: int, requests: Sequence[Request], sampling: Sampling, seed: int, step: int) -> None:
        self._text = bool(sampling.stop)
        for request in requests:
            name, noise = f"{rank}/{request.row}", row_seed(seed, step, request.row)
            params = params_of(sampling, seed=noise, eos=self.eos, length=request.length)
            core_name = self.llm.add_request(name, {"prompt_token_ids": request.prompt}, params)
            if not self._text:
                self.llm.output_processor.abort_requests([core_name], internal=True)  # in the front end only
            self.open[name if self._text else core_name] = OpenRow(rank, request)

    def abort(self, rank: int) -> None:
        """Aborts a rank's rows."""
        names = [name for name, row in self.open.items() if row.rank == rank]
        (self.llm.abort_request if self._text else self.llm.engine_core.abort_requests)(names)
        for name in names:
            del self.open[name]

    def step(self) -> list[tuple[int, Sample]]:
        """Runs vLLM's next step. Returns the rows that ended with it, each with its rank."""
        ended = self._ended_by_text() if self._text else self._ended()
        return [(row.rank, sample_of(row, reason)) for row, reason in ended]

    def ranks(self) -> set[int]:
        """The ranks that have open rows."""
        return {row.rank for row in self.open.values()}

    def _ended(self) -> list[tuple[OpenRow, str]]:
        ended, rows = [], self.open
        for output in self.llm.engine_core.get_output().outputs:
            if isinstance(output, TokenBatch):
                for name, token, logprob in zip(output.names, output.tokens, output.logprobs, strict=True):
                    row = rows[name]
                    row.tokens.append(token)
                    row.logprobs.append(logprob)
                continue
            row = rows.get(output.request_id)
            if row is None:
                continue  # late output of an aborted row
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
                whole = output.outputs[0]
                row.tokens, row.logprobs = list(whole.token_ids), list(whole.logprobs.logprobs)
                by_string = whole.finish_reason == "stop" and isinstance(whole.stop_reason, str)
                ended.append((row, "string" if by_string else whole.finish_reason))
        return ended


def params_of(sampling: Sampling, *, seed: int, eos: Sequence[int], length: int | None = None) -> Any:
    """vLLM's SamplingParams of a row.

    Args:
        seed: of the row's noise. length: exact length of the response; None: until the row ends.
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
        ignore_eos=True,  # stop_token_ids has all of them
        stop_token_ids=[] if length else list(eos),
        logprobs=0,  # only of the drawn token
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def sample_of(row: OpenRow, reason: str) -> Sample:
    """The finished row. Raises RuntimeError if vLLM ended it in another way than `ENDS_BY` knows."""
    request = row.request
    if len(row.logprobs) != len(row.tokens) or reason not in ENDS_BY:
        counts = f"{len(row.tokens)} tokens and {len(row.logprobs)} log-probs"
        raise RuntimeError(f"row {request.row} ended by {reason!r} with {counts}")
    check_logprobs(request.row, row.logprobs)
    return Sample(request.row, request.prompt, row.tokens, row.logprobs, ENDS_BY[reason])
