"""The rows that a vLLM engine draws tokens for: from asks to pieces."""

# pyright: reportMissingImports=false

from collections.abc import Sequence
from typing import Any

from splitppo.config import RolloutConfig
from splitppo.engine import Ask, OpenPiece, Piece, row_seed
from splitppo.rollout import End

# vLLM's reason for the end of a row -> ours. `string` is ours: vLLM says `stop` for end ids and
# stop strings.
ENDS_BY: dict[str, End] = {"stop": "eos", "string": "stop", "length": "limit"}


class Rows:
    """The open rows of an engine; `eos`: ids that end a response.

    Tokens are taken directly from vLLM's core, those of steady rows from its scheduler
    (scheduler.py). The front end needs more time for each token than the GPU does with a small
    model. Only rows with stop strings go through the front end, which
    makes the text to search.
    """

    def __init__(self, llm: Any, eos: Sequence[int]):
        self.llm = llm
        self.eos = list(eos)
        self.open: dict[str, OpenPiece] = {}  # by request id
        self._text = False  # whether stop strings may end these rows

    def add(self, rank: int, asks: Sequence[Ask], sampling: RolloutConfig, seed: int) -> None:
        """Begins a rank's rows."""
        self._text = bool(sampling.stop)
        for ask in asks:
            params = params_of(
                sampling,
                seed=row_seed(seed, ask.row, ask.begun),
                eos=self.eos,
                tokens=ask.tokens,
                fixed=not ask.may_stop,
            )
            name = f"{rank}/{ask.row}"
            core_name = self.llm.add_request(name, {"prompt_token_ids": list(ask.ids)}, params)
            if not self._text:  # in the front end only
                self.llm.output_processor.abort_requests([core_name], internal=True)
            self.open[name if self._text else core_name] = OpenPiece(ask, rank=rank)

    def abort(self, rank: int) -> None:
        """Aborts a rank's rows."""
        names = [name for name, row in self.open.items() if row.rank == rank]
        (self.llm.abort_request if self._text else self.llm.engine_core.abort_requests)(names)
        for name in names:
            del self.open[name]

    def step(self) -> list[tuple[int, Piece]]:
        """Runs vLLM's next step. Returns what ended with it, each with its rank."""
        return [
            (row.rank, piece_of(row, reason))
            for row, reason in (self._ended_by_text() if self._text else self._ended())
        ]

    def _ended(self) -> list[tuple[OpenPiece, str]]:
        ended = []
        rows = self.open
        for output in self.llm.engine_core.get_output().outputs:
            if row := rows.get(output.request_id):  # else it is late, of an aborted row
                row.tokens += output.new_token_ids
                if output.new_logprobs is not None:
                    row.logprobs += output.new_logprobs.logprobs[:, 0].tolist()
                if output.finish_reason is not None:
                    ended.append((rows.pop(output.request_id), str(output.finish_reason)))
        return ended

    def _ended_by_text(self) -> list[tuple[OpenPiece, str]]:
        ended = []
        for output in self.llm.step():
            if output.finished and (row := self.open.pop(output.request_id, None)):
                whole = output.outputs[0]
                row.tokens = list(whole.token_ids)
                row.logprobs = list(whole.logprobs.logprobs)
                by_string = whole.finish_reason == "stop" and isinstance(whole.stop_reason, str)
                ended.append((row, "string" if by_string else whole.finish_reason))
        return ended


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


def piece_of(row: OpenPiece, reason: str) -> Piece:
    """What was drawn for a row. Raises RuntimeError if vLLM ended it in another way than `ENDS_BY`
    knows."""
    number = row.ask.row
    if len(row.logprobs) != len(row.tokens) or reason not in ENDS_BY:
        raise RuntimeError(
            f"row {number} ended by {reason!r} with {len(row.tokens)} tokens and "
            f"{len(row.logprobs)} log-probs"
        )
    return Piece(number, row.tokens, row.logprobs, ENDS_BY[reason])
