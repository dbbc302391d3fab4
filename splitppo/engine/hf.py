"""The embedded engine: an unsharded copy of the policy and the library's own generate(), in a thread of this process.

The library runs the model, the cache and the loop. Two hooks of it are ours: a logits processor that draws the token
(so that the noise of a row is a function of the row) and a stopping criterion that hands a row over when it finishes.
"""

import copy
import json
import math
import queue
import threading
import time
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, GenerationConfig, PretrainedConfig
from transformers.generation.logits_process import LogitsProcessor, LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList, StopStringCriteria
from transformers.initialization import no_init_weights

from splitppo.engine import Sampling, check_requests
from splitppo.models.build import known_ids
from splitppo.rollout import Request, Sample

THREAD_NAME = "splitppo-generate"
# Not cuDNN's: it plans anew for each length of the cache, that is at each token, and a new thread has no plans yet
# (H200, torch 2.11, 28 layers, 8 rows: 0.9 ms a call, 0.05 with the plans at hand). Process-wide while rows come.
ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
DRAW_ROWS = 128  # rows drawn at once: bounds the float64 work to 128 V numbers (156 MB at V = 152k)


def eos_ids(config: PretrainedConfig, tokenizer: Any, folder: Path | None) -> set[int]:
    """Every id that ends a response: the model config's, the tokenizer's, generation_config.json's in `folder`.

    Chat models need them all: one names the end of a turn, another the end of a text.
    """
    owners = (config, config.get_text_config(decoder=True), tokenizer)
    named = [getattr(owner, "eos_token_id", None) for owner in owners]
    if folder is not None and (file := folder / "generation_config.json").is_file():
        named.append(json.loads(file.read_text()).get("eos_token_id"))
    return {token for ids in named for token in ([ids] if isinstance(ids, int) else ids or [])}


def uniforms(seed: int, step: int, rows: np.ndarray, position: int) -> np.ndarray:
    """One number in [0, 1) with 53 random bits for each row, a pure function of its four coordinates.

    `rows` is [R], indices in the step's batch; `position` is the token's in the response. Returns [R] float64.
    """
    word = np.zeros(1, dtype=np.uint64)
    for part in (seed, step, rows, position):
        part = np.atleast_1d(np.asarray(part)).astype(np.int64).view(np.uint64)
        word = (word ^ part) + np.uint64(0x9E3779B97F4A7C15)  # splitmix64; arrays wrap modulo 2**64
        word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        word = word ^ (word >> np.uint64(31))
    return (word >> np.uint64(11)) * 2.0**-53


def draw(logits: Tensor, noise: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Draw a token a row by inverting the cumulative distribution, or take the likeliest if greedy.

    `logits` are [R, V] float32, `noise` [R] float64 in [0, 1). Returns [R] int64 tokens and [R] float32 log-probs of
    them under the distribution drawn from: softmax(logits / temperature) of the tokens that top-k and top-p leave.
    """
    if sampling.greedy:
        tokens, logprobs = logits.argmax(dim=-1), torch.log_softmax(logits, dim=-1)
    else:
        logprobs = torch.log_softmax(_truncate(logits / sampling.temperature, sampling), dim=-1)
        probs = logprobs.exp()
        # A parallel sum need not be monotone to the last bit: without the fill, a token of probability 0 could win.
        cdf = probs.cumsum(dim=-1, dtype=torch.float64).masked_fill_(probs == 0, 0.0)
        passed = cdf > noise[:, None] * cdf.amax(dim=-1, keepdim=True)
        tokens = passed.to(torch.uint8).argmax(dim=-1)  # the first of the ones
    return tokens, logprobs.gather(-1, tokens[:, None])[:, 0]


def _truncate(logits: Tensor, sampling: Sampling) -> Tensor:
    """-inf for the tokens that top-k and top-p leave out; `[R, V]`."""
    if 0 < sampling.top_k < logits.shape[-1]:
        least = logits.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -math.inf)
    if sampling.top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True)
        probs = ordered.softmax(dim=-1)
        before = probs.cumsum(dim=-1) - probs  # of the likelier ones: the token that passes top_p is still in
        ordered = ordered.masked_fill(before >= sampling.top_p, -math.inf)
        logits = torch.empty_like(logits).scatter_(-1, order, ordered)
    return logits


@dataclass(frozen=True)
class _Job:
    """One call of `generate`: what its thread reads, the queue it fills, and the flag that nobody wants the rest."""

    requests: Sequence[Request]
    sampling: Sampling
    seed: int
    step: int
    out: "queue.SimpleQueue[list[Sample] | BaseException | None]" = field(default_factory=queue.SimpleQueue)
    halt: threading.Event = field(default_factory=threading.Event)


class _Draw(LogitsProcessor):
    """Draws each row's token and lets the library's argmax find it: score 0 there, -inf elsewhere."""

    def __init__(self, job: _Job, batch: Sequence[Request], width: int, vocabulary: int):
        self.job, self.width, self.vocabulary = job, width, vocabulary
        self.rows = np.asarray([request.row for request in batch])
        self.logprobs: list[Tensor] = []  # one [R] float32 for each position

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        job, position = self.job, input_ids.shape[1] - self.width
        noise = torch.from_numpy(uniforms(job.seed, job.step, self.rows, position))
        noise = noise.to(scores.device, non_blocking=True)  # else the copy waits for the forward
        pieces = zip(scores[:, : self.vocabulary].split(DRAW_ROWS), noise.split(DRAW_ROWS), strict=True)
        drawn = [draw(logits, numbers, job.sampling) for logits, numbers in pieces]
        tokens = torch.cat([part[0] for part in drawn])
        self.logprobs.append(torch.cat([part[1] for part in drawn]))
        return scores.fill_(-math.inf).scatter_(1, tokens[:, None], 0.0)  # the scores are the library's copy for us


class _Finish(StoppingCriteria):
    """Watches the new tokens of a batch ([R, width] prompts) and hands a row over at the step at which it finishes."""

    def __init__(self, job: _Job, batch: Sequence[Request], drawn: _Draw, eos: Tensor, stop: StoppingCriteria | None):
        self.job, self.batch, self.drawn, self.eos, self.stop = job, batch, drawn, eos, stop
        lengths = [request.length or job.sampling.max_new_tokens for request in batch]
        self.lengths = torch.tensor(lengths, device=eos.device)
        self.free = torch.tensor([request.length is None for request in batch], device=eos.device)
        self.done = torch.zeros(len(batch), dtype=torch.bool, device=eos.device)

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        if self.job.halt.is_set():
            return torch.ones_like(self.done)
        response = input_ids[:, self.drawn.width :]
        ended = torch.isin(response[:, -1], self.eos)
        if self.stop is not None:
            ended = ended | self.stop(response, scores)  # the response alone: a prompt can't begin a stop string
        ended = ended & self.free
        new = (ended | (response.shape[1] >= self.lengths)) & ~self.done
        self.done = self.done | new
        new_here, ended_here = torch.stack([new, ended]).tolist()  # our one wait for the device in a step
        if rows := [index for index, is_new in enumerate(new_here) if is_new]:
            self.job.out.put(self._collect(response, rows, ended_here))
        return self.done

    def _collect(self, response: Tensor, rows: list[int], ended: list[bool]) -> list[Sample]:
        index = torch.tensor(rows, device=response.device)
        tokens = response[index].tolist()
        logprobs = torch.stack([position[index] for position in self.drawn.logprobs], dim=1).tolist()
        samples = []
        for row, row_tokens, row_logprobs in zip(rows, tokens, logprobs, strict=True):
            request = self.batch[row]
            if not all(map(math.isfinite, row_logprobs)):
                raise FloatingPointError(f"row {request.row}: the policy's logits are not finite")
            samples.append(Sample(request.row, request.prompt, row_tokens, row_logprobs, ended[row]))
        return samples


class HFEngine:
    """An unsharded copy of the policy on this rank; see `RolloutEngine` for what its methods promise.

    Args:
        config: the policy's; not its attention implementation, since generate() needs one of the library's.
        tokenizer: for the padding id, the end ids, the stop strings and the ids that may be drawn.
        max_rows: rows generated at once; more are done one batch after the other, shortest prompts first.
        folder: the model's, for the end ids in its generation_config.json (nothing else of that is used).
        tick: seconds between two empty lists of `generate`.
    """

    def __init__(
        self,
        config: PretrainedConfig,
        tokenizer: Any,
        *,
        device: torch.device,
        dtype: torch.dtype,
        max_rows: int,
        folder: Path | None = None,
        tick: float = 0.005,
    ):
        config = copy.deepcopy(config)  # the library writes into it
        with no_init_weights(), device:
            self.model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=None).eval()
        self.model.tie_weights()  # no_init_weights leaves this out, too
        self.model.generation_config = GenerationConfig()  # what a call leaves unset is taken from here
        ends = eos_ids(config, tokenizer, folder)
        self.pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(ends, default=0)
        self.eos = torch.tensor(sorted(ends), dtype=torch.long, device=device)
        self.tokenizer, self.device, self.max_rows, self.tick = tokenizer, device, max_rows, tick
        self.vocabulary = known_ids(tokenizer)
        self._stop: dict[tuple[str, ...], StopStringCriteria | None] = {(): None}
        self.loaded = self._running = False
        self.step_ms = 0.0

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See `RolloutEngine`. Of tied weights, the stream may hold any of the names or all of them."""
        if self._running:
            raise RuntimeError("load_weights while rows are being generated: finish or close the iterator first")
        self.loaded = False
        own = self.model.state_dict(keep_vars=True)
        missing = {id(tensor): name for name, tensor in own.items()}  # tied names share one tensor
        with torch.no_grad():
            for name, tensor in weights:
                if name not in own:
                    raise ValueError(f"unknown weight {name}: {type(self.model).__name__} has no tensor of this name")
                if own[name].shape != tensor.shape:
                    raise ValueError(f"weight {name} has shape {tuple(tensor.shape)}, not {tuple(own[name].shape)}")
                own[name].copy_(tensor)
                missing.pop(id(own[name]), None)
        if names := sorted(missing.values()):
            raise ValueError(f"{len(names)} weights are missing, among them {', '.join(names[:5])}")
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the caller may have copied on a stream of its own
        self.loaded = True

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, *, seed: int, step: int
    ) -> Generator[list[Sample], None, None]:
        """See `RolloutEngine`. The arguments are checked here and now; the work begins with the first `next`."""
        check_requests(requests, loaded=self.loaded)
        if sampling.stop not in self._stop:
            # Not in the thread: a fast tokenizer refuses to be used by two threads at once.
            self._stop[sampling.stop] = StopStringCriteria(self.tokenizer, list(sampling.stop))
        return self._stream(_Job(sorted(requests, key=lambda request: len(request.prompt)), sampling, seed, step))

    def rest(self, *, trained: bool) -> None:
        """It stays: its memory is the trainer's own allocator's."""

    def close(self) -> None:
        self.loaded = False
        self.model.to("meta")

    def _stream(self, job: _Job) -> Generator[list[Sample], None, None]:
        """The consumer's side: pass on what the thread puts into the queue, and stop the thread on the way out."""
        if self._running:
            raise RuntimeError("generate while rows are being generated: finish or close the first iterator")
        self._running = True
        thread = threading.Thread(target=self._work, args=(job,), name=THREAD_NAME, daemon=True)
        thread.start()
        try:
            while True:
                try:
                    item = job.out.get(timeout=self.tick)
                except queue.Empty:
                    item = []
                if item is None:
                    return
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            job.halt.set()
            thread.join()
            self._running = False

    def _work(self, job: _Job) -> None:
        """The thread: one batch after the other, then None; or the exception that ended it."""
        try:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)  # the current device is a thread's own
            steps, begun = 0, time.monotonic()
            with torch.inference_mode(), sdpa_kernel(ATTENTION):
                for start in range(0, len(job.requests), self.max_rows):
                    if not job.halt.is_set():
                        steps += self._generate_batch(job, job.requests[start : start + self.max_rows])
            self.step_ms = 1e3 * (time.monotonic() - begun) / steps if steps else 0.0
            job.out.put(None)
        except BaseException as error:
            job.out.put(error)

    def _generate_batch(self, job: _Job, batch: Sequence[Request]) -> int:
        """Returns how many steps it took."""
        rows = [torch.tensor(request.prompt) for request in batch]
        prompts = pad_sequence(rows, batch_first=True, padding_value=-1, padding_side="left").to(self.device)
        mask = prompts >= 0
        drawn = _Draw(job, batch, width=prompts.shape[1], vocabulary=self.vocabulary)
        finish = _Finish(job, batch, drawn, self.eos, self._stop[job.sampling.stop])
        limit = job.sampling.max_new_tokens
        self.model.generate(
            prompts.where(mask, self.pad),
            attention_mask=mask.long(),
            generation_config=GenerationConfig(max_new_tokens=limit, do_sample=False, use_cache=True),
            logits_processor=LogitsProcessorList([drawn]),
            stopping_criteria=StoppingCriteriaList([finish]),
            synced_gpus=False,  # else the library's guess could call a collective
        )
        if not (job.halt.is_set() or bool(finish.done.all())):
            raise RuntimeError("the library's generate() came back before every row had finished")
        return len(drawn.logprobs)
