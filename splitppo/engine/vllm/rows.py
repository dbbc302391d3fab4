"""The rows that a vLLM engine draws tokens for: from asks to pieces."""

# pyright: reportMissingImports=false

import functools
from collections.abc import Sequence
from typing import Any

from splitppo.config import RolloutConfig
from splitppo.engine import Ask, OpenPiece, Piece, find_stops, row_seed
from splitppo.rollout import End

# vLLM's reason for the end of a row -> ours; `string` is not vLLM's
ENDS_BY: dict[str, End] = {"stop": "eos", "string": "stop", "length": "limit"}


class Rows:
    """The open rows of an engine.

    Tokens are taken directly from vLLM's core, those of steady rows from its scheduler
    (scheduler.py). The front end needs more time for each token than the GPU does with a small
    model.

    Args:
        eos: ids that end a response. tokenizer: for stop strings; None: there are none.
    """

    def __init__(self, llm: Any, eos: Sequence[int], tokenizer: Any = None):
        self.llm = llm
        self.eos = list(eos)
        self.open: dict[str, OpenPiece] = {}  # by request id
        self._find_stops = functools.cache(functools.partial(find_stops, tokenizer))

    def add(self, rank: int, asks: Sequence[Ask], sampling: RolloutConfig, seed: int) -> None:
        """Begins a rank's rows."""
        self._stops = self._find_stops(sampling.stop)
        for ask in asks:
            params = params_of(
                sampling,
                seed=row_seed(seed, ask.row, ask.begun),
                eos=self.eos,
                tokens=ask.tokens,
                fixed=not ask.may_stop,
            )
            prompt = {"prompt_token_ids": list(ask.ids)}
            name = self.llm.add_request(f"{rank}/{ask.row}", prompt, params)
            self.llm.output_processor.abort_requests([name], internal=True)  # in the front end only
            self.open[name] = OpenPiece(ask, rank=rank)

    def abort(self, rank: int) -> None:
        """Aborts a rank's rows."""
        names = [name for name, row in self.open.items() if row.rank == rank]
        self.llm.engine_core.abort_requests(names)
        for name in names:
            del self.open[name]

    def step(self) -> list[tuple[int, Piece]]:
        """Runs vLLM's next step. Returns what ended with it, each with its rank."""
        ended = {}  # vLLM's reasons
        for output in self.llm.engine_core.get_output().outputs:
            if row := self.open.get(output.request_id):  # else it is late, of an aborted row
                row.tokens += output.new_token_ids
                if output.new_logprobs is not None:
                    row.logprobs += output.new_logprobs.logprobs[:, 0].tolist()
                    row.experts += output.new_logprobs.logprob_token_ids[:, 1:].tobytes()
                if output.finish_reason is not None:
                    ended[output.request_id] = str(output.finish_reason)
        free = {
            name: row
            for name, row in self.open.items()
            if row.ask.may_stop and ended.get(name) != "stop"
        }
        stops = zip(free, self._stops([*free.values()]), strict=True)
        if stopped := [name for name, stop in stops if stop]:
            self.llm.engine_core.abort_requests(stopped)
            ended |= dict.fromkeys(stopped, "string")
        rows = [(self.open.pop(name), reason) for name, reason in ended.items()]
        return [(row.rank, piece_of(row, reason)) for row, reason in rows]


def params_of(
    sampling: RolloutConfig, *, seed: int, eos: Sequence[int], tokens: int, fixed: bool = False
) -> Any:
    """vLLM's SamplingParams of a row. It gets at most `tokens` tokens, and with `fixed` no
    fewer."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    return SamplingParams(
        temperature=sampling.temperature,  # vLLM leaves out top_p and top_k at 0, too
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=seed,
        max_tokens=tokens,
        detokenize=False,
        ignore_eos=True,  # stop_token_ids has all of them
        stop_token_ids=[] if fixed else list(eos),
        logprobs=0,  # only of the drawn token
        flat_logprobs=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def piece_of(row: OpenPiece, reason: str) -> Piece:
    """What was drawn for a row. Raises RuntimeError if vLLM ended it in another way than `ENDS_BY`
    knows."""
    number = row.ask.row
    if len(row.logprobs) != len(row.tokens) or reason not in ENDS_BY:
        raise RuntimeError(
            f"row {number} ended by {reason!r} with {len(row.tokens)} tokens and "
            f"{len(row.logprobs)} log-probs"
        )
    return row.piece(ENDS_BY[reason])
