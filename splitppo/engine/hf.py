"""The embedded engine: an unsharded replica of the policy and the transformers library's generate(), in a thread.

Two hooks are ours: a logits processor draws the token, so that a row's noise depends on the row alone, and a stopping
criterion hands each row over when it ends. The library can't fill a row's place. With windows a call ends when a
quarter of its slots wait, and the next one computes prefixes again.
"""

import copy
import functools
import math
import queue
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, GenerationConfig, PretrainedConfig
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteriaList, StopStringCriteria
from transformers.initialization import no_init_weights

from splitppo.config import RolloutConfig
from splitppo.engine import TICK, RolloutEngine, Window, check_weights, extend, weight_names
from splitppo.models.build import code_of
from splitppo.models.tokenizer import eos_ids, vocabulary_size
from splitppo.rollout import End, Request, Sample

Slot = tuple[Request, int]  # a slot's row, and the tokens that the slot has left to decode
THREAD_NAME = "splitppo-generate"
# cuDNN is left out: it plans again for each length of the cache, so at each token (H200, torch 2.11: 0.9 ms a call).
# Applies to the process during `generate`.
ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
REFILL = 4  # a batch is made anew when one in so many of its slots waits for its next row
DRAW_ROWS = 128  # rows drawn at once: limits the float64 tensors to 128 V numbers (156 MB at V = 152k)


def uniforms(seed: int, rows: np.ndarray, positions: np.ndarray | int) -> np.ndarray:
    """`[R]` float64 numbers in [0, 1) with 53 random bits, a pure function of seed, rows `[R]` (numbers in the data
    order) and positions of the token in each row's response."""
    word = np.zeros(1, dtype=np.uint64)
    for part in (seed, rows, positions):
        part = np.atleast_1d(np.asarray(part)).astype(np.int64).view(np.uint64)
        word = (word ^ part) + np.uint64(0x9E3779B97F4A7C15)  # splitmix64; arrays wrap modulo 2**64
        word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        word = word ^ (word >> np.uint64(31))
    return (word >> np.uint64(11)) * 2.0**-53


def draw(logits: Tensor, noise: Tensor, sampling: RolloutConfig) -> tuple[Tensor, Tensor]:
    """Draws a token for each row by inverting the cumulative distribution; at temperature 0, takes the likeliest.

    Takes `[R, V]` float32 logits and `[R]` float64 noise in [0, 1). Returns `[R]` int64 tokens and their `[R]` float32
    log-probs under softmax(logits / temperature), truncated by top-k and top-p.
    """
    if not sampling.temperature:
        tokens, logprobs = logits.argmax(dim=-1), torch.log_softmax(logits, dim=-1)
    else:
        logprobs = torch.log_softmax(_truncate(logits / sampling.temperature, sampling), dim=-1)
        probs = logprobs.exp()
        # A parallel sum may be non-monotone in the last bit. Without the fill, a token of probability 0 could win.
        cdf = probs.cumsum(dim=-1, dtype=torch.float64).masked_fill_(probs == 0, 0.0)
        passed = cdf > noise[:, None] * cdf.amax(dim=-1, keepdim=True)
        tokens = passed.to(torch.uint8).argmax(dim=-1)  # the first of the ones
    return tokens, logprobs.gather(-1, tokens[:, None])[:, 0]


def _truncate(logits: Tensor, sampling: RolloutConfig) -> Tensor:
    """Sets the logits `[R, V]` of the tokens outside top-k and top-p to -inf."""
    if 0 < sampling.top_k < logits.shape[-1]:
        least = logits.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -math.inf)
    if sampling.top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True)
        probs = ordered.softmax(dim=-1)
        before = probs.cumsum(dim=-1) - probs  # of the likelier tokens: the token that passes top_p is kept
        ordered = ordered.masked_fill(before >= sampling.top_p, -math.inf)
        logits = torch.empty_like(logits).scatter_(-1, order, ordered)
    return logits


@dataclass(frozen=True)
class _Job:
    """One call of `generate`: what its thread reads, the queue that it fills, and whether the caller has left."""

    requests: Sequence[Request]
    sampling: RolloutConfig
    seed: int
    window: Window
    stop: StopStringCriteria | None
    out: queue.SimpleQueue[list[Sample]] = field(default_factory=queue.SimpleQueue)
    halt: threading.Event = field(default_factory=threading.Event)


class _Batch:
    """Rows that are generated at once. The library calls `draw` and then `finish` for each new token.

    Attributes:
        logprobs: of the drawn tokens; one `[R]` float32 for each position.
        done: `[R]`, the rows that have ended or have no tokens left.
        waiting: the slots whose row has ended, with their next row.
    """

    def __init__(self, engine: "HFEngine", job: _Job, slots: Sequence[Slot], width: int):
        self.engine, self.job, self.slots, self.width = engine, job, slots, width
        requests = [request for request, _ in slots]
        self.rows = np.asarray([request.row for request in requests])
        self.begun = np.asarray([len(request.response) for request in requests])
        self.waiting: list[Slot] = []
        self.eos = set(engine.eos.tolist())
        lengths = [min(request.left(job.sampling.max_new_tokens), left) for request, left in slots]
        self.lengths = torch.tensor(lengths, device=engine.device)
        self.free = torch.tensor([request.length is None for request in requests], device=engine.device)
        self.done = torch.zeros(len(requests), dtype=torch.bool, device=engine.device)
        self.logprobs: list[Tensor] = []

    def draw(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Draws each row's token. The library takes the argmax: the drawn token's score is 0, all others -inf."""
        job, position = self.job, input_ids.shape[1] - self.width
        noise = torch.from_numpy(uniforms(job.seed, self.rows, self.begun + position))
        noise = noise.to(scores.device, non_blocking=True)  # else the copy waits for the forward pass
        parts = zip(scores[:, : self.engine.vocabulary].split(DRAW_ROWS), noise.split(DRAW_ROWS), strict=True)
        tokens, logprobs = zip(*(draw(logits, numbers, job.sampling) for logits, numbers in parts), strict=True)
        self.logprobs.append(torch.cat(logprobs))
        # the library made these scores for the processor, so they may be overwritten
        return scores.fill_(-math.inf).scatter_(1, torch.cat(tokens)[:, None], 0.0)

    def finish(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        """Hands over the rows that end with this token. Returns `[R]`, those that have ended."""
        if self.job.halt.is_set():
            return torch.ones_like(self.done)
        response = input_ids[:, self.width :]
        ended = torch.isin(response[:, -1], self.engine.eos)
        if self.job.stop is not None:
            ended = ended | self.job.stop(response, scores)  # only the response: a prompt can't begin a stop string
        ended = ended & self.free
        new = (ended | (response.shape[1] >= self.lengths)) & ~self.done
        self.done = self.done | new
        new_here, ended_here = torch.stack([new, ended]).tolist()  # the only wait for the device in a step
        if rows := [index for index, is_new in enumerate(new_here) if is_new]:
            self.job.out.put(self._collect(response, rows, ended_here))
        if len(self.waiting) * REFILL >= len(self.slots):
            return torch.ones_like(self.done)
        return self.done

    def rest(self, response: Tensor) -> list[Slot]:
        """The slots that have tokens left, those that wait and those of open rows, after the library's `[R, T]`."""
        rows, drawn = (~self.done).nonzero()[:, 0].tolist(), response.shape[1]
        samples = self._collect(response, rows, [False] * len(self.slots)) if rows else []
        slots = zip((self.slots[row] for row in rows), samples, strict=True)
        goes_on = [(replace(r, response=s.response, logprobs=s.logprobs), left - drawn) for (r, left), s in slots]
        return self.waiting + goes_on

    def _collect(self, response: Tensor, rows: list[int], ended: list[bool]) -> list[Sample]:
        index, window = torch.tensor(rows, device=response.device), self.job.window
        tokens, drawn = response[index].tolist(), response.shape[1]
        logprobs = torch.stack([position[index] for position in self.logprobs], dim=1).tolist()
        samples = []
        for row, row_tokens, row_logprobs in zip(rows, tokens, logprobs, strict=True):
            request, left = self.slots[row]
            end: End = "limit" if drawn >= request.left(self.job.sampling.max_new_tokens) else "window"
            if ended[row]:
                end = "eos" if row_tokens[-1] in self.eos else "stop"
            samples.append(extend(request, row_tokens, row_logprobs, end))
            if window.following and end != "window" and left > drawn:
                self.waiting.append((window.following(request.row), left - drawn))
        return samples


class HFEngine(RolloutEngine):
    """An unsharded replica of the policy on this rank. Its memory belongs to the trainer's own allocator.

    Args:
        config: the policy's. Its attention implementation is ignored: generate() needs one of the library's.
        max_rows: rows generated at once. More rows run as several batches, shortest prompts first.
        folder: the model's, for the end ids in generation_config.json. Its other settings are ignored.
    """

    def __init__(
        self, config: PretrainedConfig, tokenizer: Any, *,
        device: torch.device, dtype: torch.dtype, max_rows: int, folder: Path | None = None,
    ):  # fmt: skip
        super().__init__()
        config = copy.deepcopy(config)  # the library writes into it
        with no_init_weights(), device:
            options: Any = {"attn_implementation": None, "trust_remote_code": bool(code_of(config))}
            self.model = AutoModelForCausalLM.from_config(config, dtype=dtype, **options).eval()
        self.model.tie_weights()  # no_init_weights leaves this out, too
        self.model.generation_config = GenerationConfig()  # the defaults of every call
        eos = eos_ids(config, tokenizer, folder)
        self.pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(eos, default=0)
        self.eos = torch.tensor(sorted(eos), dtype=torch.long, device=device)
        self.device, self.max_rows = device, max_rows
        self.vocabulary = vocabulary_size(tokenizer)
        self.stop_criteria = functools.cache(lambda strings: StopStringCriteria(tokenizer, list(strings)))

    def connect(self) -> str:
        return "generate() of the transformers library"

    def close(self) -> None:
        self.loaded = False
        self.model.to("meta")

    def _load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        own = self.model.state_dict(keep_vars=True)
        with torch.no_grad():
            for name, tensor in check_weights(weights, weight_names(self.model)):
                own[name].copy_(tensor)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the caller may have copied on its own stream

    def _rows(
        self, requests: Sequence[Request], sampling: RolloutConfig, seed: int, window: Window
    ) -> Iterator[list[Sample]]:
        """The caller's side: passes on what the thread puts into the queue, and stops the thread at the end."""
        # made here: two threads can't use a fast tokenizer at once
        stop = self.stop_criteria(sampling.stop) if sampling.stop else None
        ordered = sorted(requests, key=lambda request: len(request.prompt) + len(request.response))
        job, thread = _Job(ordered, sampling, seed, window, stop), ThreadPoolExecutor(1, THREAD_NAME)
        work = thread.submit(self._work, job)
        work.add_done_callback(lambda _: job.out.put([]))  # ends the wait for rows
        try:
            while not (work.done() and job.out.empty()):
                try:
                    yield job.out.get(timeout=TICK)
                except queue.Empty:
                    yield []
            work.result()  # raises the thread's exception
        finally:
            job.halt.set()
            thread.shutdown()

    def _work(self, job: _Job) -> None:
        """The thread: runs one batch after the other."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # each thread has its own current device
        steps, start = 0, time.monotonic()
        with torch.inference_mode(), sdpa_kernel(ATTENTION):
            for first in range(0, len(job.requests), self.max_rows):
                some = job.requests[first : first + self.max_rows]
                slots = [(request, job.window.tokens) for request in some]
                while slots and not job.halt.is_set():
                    slots, taken = self._generate_batch(job, slots)
                    steps += taken
        self.step_ms = 1e3 * (time.monotonic() - start) / steps if steps else 0.0

    def _generate_batch(self, job: _Job, slots: Sequence[Slot]) -> tuple[list[Slot], int]:
        """One call of the library. Returns the slots that have tokens left, and the number of decode steps."""
        rows = [torch.tensor([*request.prompt, *request.response]) for request, _ in slots]
        prompts = pad_sequence(rows, batch_first=True, padding_value=-1, padding_side="left").to(self.device)
        mask = prompts >= 0
        batch: Any = _Batch(self, job, slots, width=prompts.shape[1])
        most = job.sampling.max_new_tokens
        ids: Any = self.model.generate(
            prompts.where(mask, self.pad),
            attention_mask=mask.long(),
            generation_config=GenerationConfig(max_new_tokens=most, do_sample=False, use_cache=True),
            logits_processor=LogitsProcessorList([batch.draw]),
            stopping_criteria=StoppingCriteriaList([batch.finish]),
            synced_gpus=False,  # else the library may decide to call a collective
        )
        return batch.rest(ids[:, batch.width :]), len(batch.logprobs)
