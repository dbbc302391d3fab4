"""Makes vLLM's scheduler faster. With small models it takes longer than the GPU.

In most decode steps each row gets one token and nothing else happens. Here two short loops handle
these steady rows. vLLM's own methods handle all others: rows that start, end, lack cache blocks or
are aborted.
"""

# pyright: reportMissingImports=false

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import CachedRequestData
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.engine import EngineCoreOutputs

from splitppo.engine.vllm.rows import TokenBatch


class Steady:
    """Replaces `schedule` and `update_from_output` of a scheduler.

    A row is steady if it is decoding, has a cache block for its token and does not end. All tokens
    of steady rows leave as one TokenBatch. Rows with stop strings are scheduled with the others,
    but vLLM takes their tokens.
    """

    def __init__(self, vllm: Any, ends: Sequence[int]):
        self.vllm = vllm
        self.ends = frozenset(ends)

        self.schedule_all = vllm.schedule
        self.update_all = vllm.update_from_output
        vllm.schedule = self.schedule
        vllm.update_from_output = self.update_from_output

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """The rows of the next step."""
        vllm = self.vllm
        rows = self._steady_rows()
        blocks = self._new_blocks(rows)
        if not rows or blocks is None:
            return self.schedule_all(*args, **kwargs)
        cached = self._cached_request_data(rows, blocks)
        counts = dict.fromkeys(cached.req_ids, 1)
        running = vllm.running
        waiting = vllm.waiting
        vllm.running = []
        vllm.waiting = type(waiting)()
        output = self.schedule_all(*args, **kwargs)  # everything in a step but its rows
        vllm.running = running
        vllm.waiting = waiting
        output.num_scheduled_tokens = counts
        output.total_num_scheduled_tokens = len(counts)
        output.scheduled_cached_reqs = cached
        if not vllm.use_v2_model_runner:
            vllm.prev_step_scheduled_req_ids.update(counts)
        vllm._update_after_schedule(output)
        return output

    def update_from_output(self, scheduled: Any, drawn: Any) -> Any:
        """Appends the tokens of a step to its rows. Returns the outputs."""
        counts = scheduled.num_scheduled_tokens
        scheduled.num_scheduled_tokens, batch = self._update_steady(counts, drawn)
        answer = self.update_all(scheduled, drawn)
        scheduled.num_scheduled_tokens = counts
        if batch.names:
            client = answer.setdefault(0, EngineCoreOutputs())
            client.outputs = [batch, *client.outputs]
        return answer

    def _update_steady(
        self, counts: Mapping[str, int], drawn: Any
    ) -> tuple[dict[str, int], TokenBatch]:
        """Appends the tokens of the steady rows. Returns the other rows' part of `counts`, and the
        tokens."""
        requests = self.vllm.requests
        ends = self.ends
        # whether a step is scheduled before the previous step's tokens are known
        ahead = isinstance(self.vllm, AsyncScheduler)
        longest = self.vllm.max_model_len
        hashed = self.vllm.hash_block_size
        others = {}
        batch = TokenBatch([], [], [])
        tokens = drawn.sampled_token_ids
        places = drawn.req_id_to_index
        logprobs = drawn.logprobs.logprobs[:, 0].tolist() if drawn.logprobs else None
        for name, count in counts.items():
            row = requests.get(name)
            place = places.get(name, -1)
            sampled: Any = tokens[place] if tokens and place >= 0 else ()
            if (
                logprobs is None
                or row is None
                or row.sampling_params.detokenize  # vLLM's front end needs its own outputs
                # it may be waiting again, with earlier tokens still in flight
                or row.num_preemptions
                or len(sampled) != 1
                or sampled[0] in ends
                # vLLM's output of the first token has more fields
                or not 0 < len(row._output_token_ids) < row.max_tokens - 1
                or (length := len(row._all_token_ids) + 1) >= longest
            ):
                others[name] = count
                continue
            row.num_in_flight_tokens -= 1
            row._output_token_ids.append(sampled[0])
            row._all_token_ids.append(sampled[0])
            if length % hashed == 0:
                row.update_block_hashes()
            if ahead:
                row.num_output_placeholders -= 1
            batch.names.append(name)
            batch.tokens.append(sampled[0])
            batch.logprobs.append(logprobs[place])
        return others, batch

    def _steady_rows(self) -> list[Any]:
        """The rows of the next step if all are steady; else []."""
        vllm = self.vllm
        rows = []
        running, waiting = vllm.get_request_counts()
        if running == vllm.max_num_running_reqs:
            waiting -= len(vllm.waiting)  # they cannot start yet
        if (
            waiting
            or running > vllm.max_num_scheduled_tokens
            or vllm._pause_state != PauseState.UNPAUSED
        ):
            return []
        for row in vllm.running:
            unseen = row.num_output_placeholders
            computed = row.num_computed_tokens
            if unseen and computed + 2 - unseen >= row.num_prompt_tokens + row.max_tokens:
                continue  # its last token is in flight
            if row.num_tokens + unseen - computed != 1 or computed + 2 > vllm.max_model_len:
                return []
            rows.append(row)
        return rows

    def _new_blocks(self, rows: Sequence[Any]) -> dict[str, Any] | None:
        """Allocates KV-cache blocks for the rows that need one, by row; None if too few are
        free."""
        manager = self.vllm.kv_cache_manager
        size = manager.coordinator.single_type_managers[0].block_size
        at_end = [row for row in rows if row.num_computed_tokens % size == 0]
        if len(at_end) > manager.block_pool.get_num_free_blocks():
            return None
        return {row.request_id: manager.allocate_slots(row, 1).get_block_ids() for row in at_end}

    def _cached_request_data(
        self, rows: Sequence[Any], blocks: Mapping[str, Any]
    ) -> CachedRequestData:
        """The message to the workers about rows that they have already."""
        names = [row.request_id for row in rows]
        new = (
            ()
            if self.vllm.use_v2_model_runner
            else [r for r in rows if r.request_id not in self.vllm.prev_step_scheduled_req_ids]
        )
        return CachedRequestData(
            req_ids=names,
            resumed_req_ids=set(),
            new_token_ids=[],
            all_token_ids={row.request_id: row._all_token_ids.copy() for row in new},
            new_block_ids=[*map(blocks.get, names)],
            num_computed_tokens=[row.num_computed_tokens for row in rows],
            num_output_tokens=[
                len(row._output_token_ids) + row.num_output_placeholders for row in rows
            ],
        )


def steady(scheduler: Any, ends: Sequence[int]) -> bool:
    """Makes one of vLLM's schedulers faster; `ends`: ids that may end rows. False: its kind is not
    supported."""
    managers = [
        type(manager) for manager in scheduler.kv_cache_manager.coordinator.single_type_managers
    ]
    # with other managers, a row may lose blocks before it ends
    if type(scheduler) not in (Scheduler, AsyncScheduler) or managers != [FullAttentionManager]:
        return False
    Steady(scheduler, ends)
    return True
