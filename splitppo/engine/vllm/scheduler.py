"""Fewer microseconds for each row and decode step in vLLM's scheduler, which with small models is slower than the GPU.

In most steps of a rollout all that happens is that each row gets a token. vLLM's scheduler is ready for much else in
each row of each step. Here the rows to which nothing else happens are handled in two short loops, and all others, their
beginnings, ends, shortages and aborts, by vLLM's own methods, which are told of those alone.
"""

# pyright: reportMissingImports=false
# (vLLM is not installed everywhere)

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import CachedRequestData
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs

from splitppo.engine.vllm.rows import GoneOn


class Steady:
    """Stands before `schedule` and `update_from_output` of a scheduler.

    A row goes on if it is decoding, there is a place for its token, and it doesn't end. What such rows got is told as
    one GoneOn, but what vLLM is to make text of as vLLM tells it.

    Args:
        vllm: the scheduler.
        ends: ids that end rows, or may.
    """

    def __init__(self, vllm: Any, ends: Sequence[int]):
        self.vllm, self.ends = vllm, frozenset(ends)
        # whether a step is scheduled before the tokens of the one before it are known
        self.ahead = isinstance(vllm, AsyncScheduler)
        self.schedule_all, self.update_all = vllm.schedule, vllm.update_from_output
        vllm.schedule, vllm.update_from_output = self.schedule, self.update_from_output

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Who gets a token in the next step."""
        vllm, rows = self.vllm, self._rows()
        blocks = self._blocks(rows)
        if not rows or blocks is None:
            return self.schedule_all(*args, **kwargs)
        cached = self._told(rows, blocks)
        counts = dict.fromkeys(cached.req_ids, 1)
        running, waiting = vllm.running, vllm.waiting
        vllm.running, vllm.waiting = [], type(waiting)()
        try:
            output = self.schedule_all(*args, **kwargs)  # what a step has beside its rows
        finally:
            vllm.running, vllm.waiting = running, waiting
        output.num_scheduled_tokens, output.total_num_scheduled_tokens = counts, len(counts)
        output.scheduled_cached_reqs = cached
        if not vllm.use_v2_model_runner:
            vllm.prev_step_scheduled_req_ids.update(counts)
        vllm._update_after_schedule(output)
        return output

    def update_from_output(self, scheduled: Any, drawn: Any) -> Any:
        """Hands out the tokens of a step."""
        whole = scheduled.num_scheduled_tokens
        scheduled.num_scheduled_tokens, outputs = self._hand_out(whole, drawn)
        try:
            answer = self.update_all(scheduled, drawn)
        finally:
            scheduled.num_scheduled_tokens = whole
        if outputs:
            told = answer.setdefault(0, EngineCoreOutputs())
            told.outputs = outputs + told.outputs
        return answer

    def _hand_out(self, counts: Mapping[str, int], drawn: Any) -> tuple[dict[str, int], list[Any]]:
        """Gives the rows that go on their tokens. Returns the others' part of `counts`, and what is told."""
        requests, ends, ahead, longest = self.vllm.requests, self.ends, self.ahead, self.vllm.max_model_len
        hashed, rest, outputs, on = self.vllm.hash_block_size, {}, [], GoneOn([], [], [])
        tokens, places = drawn.sampled_token_ids, drawn.req_id_to_index
        logprobs = drawn.logprobs.logprobs[:, 0].tolist() if drawn.logprobs else None
        for name, count in counts.items():
            row, place = requests.get(name), places.get(name, -1)
            own: Any = tokens[place] if tokens and place >= 0 else ()
            if (
                logprobs is None
                or row is None
                or row.num_preemptions  # it may wait again, and tokens of before may be under way
                or len(own) != 1
                or own[0] in ends
                or not 0 < len(row._output_token_ids) < row.max_tokens - 1  # with the first one vLLM tells more
                or (length := len(row._all_token_ids) + 1) >= longest
            ):
                rest[name] = count
                continue
            row.num_in_flight_tokens -= 1
            row._output_token_ids.append(own[0])
            row._all_token_ids.append(own[0])
            if length % hashed == 0:
                row.update_block_hashes()
            if ahead:
                row.num_output_placeholders -= 1
            if row.sampling_params.detokenize:
                of = drawn.logprobs.slice_request(place, 1)
                outputs.append(EngineCoreOutput(request_id=name, new_token_ids=own, new_logprobs=of))
                continue
            on.names.append(name)
            on.tokens.append(own[0])
            on.logprobs.append(logprobs[place])
        return rest, [*outputs, on] if on.names else outputs

    def _rows(self) -> list[Any]:
        """Those that get a token in the next step, if it is a step of rows that go on and of nothing else; or none."""
        vllm, rows = self.vllm, []
        running, waiting = vllm.get_request_counts()
        if running == vllm.max_num_running_reqs:
            waiting -= len(vllm.waiting)  # for which there is no place
        if waiting or running > vllm.max_num_scheduled_tokens or vllm._pause_state != PauseState.UNPAUSED:
            return []
        for row in vllm.running:
            unseen, computed = row.num_output_placeholders, row.num_computed_tokens
            if unseen and computed + 2 - unseen >= row.num_prompt_tokens + row.max_tokens:
                continue  # its last token is under way
            if row.num_tokens + unseen - computed != 1 or computed + 2 > vllm.max_model_len:
                return []
            rows.append(row)
        return rows

    def _blocks(self, rows: Sequence[Any]) -> dict[str, Any] | None:
        """The new blocks of the KV cache, by row, for those that need one; None, if there aren't enough."""
        manager = self.vllm.kv_cache_manager
        size = manager.coordinator.single_type_managers[0].block_size
        at_end = [row for row in rows if row.num_computed_tokens % size == 0]
        if len(at_end) > manager.block_pool.get_num_free_blocks():
            return None
        return {row.request_id: manager.allocate_slots(row, 1).get_block_ids() for row in at_end}

    def _told(self, rows: Sequence[Any], blocks: Mapping[str, Any]) -> CachedRequestData:
        """What workers are told of rows that they know."""
        names, before = [row.request_id for row in rows], self.vllm.prev_step_scheduled_req_ids
        new = () if self.vllm.use_v2_model_runner else [row for row in rows if row.request_id not in before]
        return CachedRequestData(
            req_ids=names,
            resumed_req_ids=set(),
            new_token_ids=[],
            all_token_ids={row.request_id: row._all_token_ids.copy() for row in new},
            new_block_ids=[*map(blocks.get, names)],
            num_computed_tokens=[row.num_computed_tokens for row in rows],
            num_output_tokens=[len(row._output_token_ids) + row.num_output_placeholders for row in rows],
        )


def steady(scheduler: Any, ends: Sequence[int]) -> bool:
    """Makes a scheduler of vLLM's quicker with rows that go on, if it is one of which it is known how.

    Args:
        ends: ids that end rows, or may.

    Returns:
        whether it is.
    """
    managers = scheduler.kv_cache_manager.coordinator.single_type_managers
    if type(scheduler) not in (Scheduler, AsyncScheduler) or len(managers) != 1:
        return False
    if type(managers[0]) is not FullAttentionManager:  # a row is not to lose blocks before it ends
        return False
    Steady(scheduler, ends)
    return True
