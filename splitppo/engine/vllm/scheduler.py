"""Makes vLLM's scheduler faster. With small models and many rows it takes longer than the GPU.

In most decode steps each row gets one token and nothing else happens. Here a short loop takes the
tokens of these steady rows. vLLM's own method takes those of all others: rows that start or end.
"""

# pyright: reportMissingImports=false

from collections.abc import Sequence
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutputs

from splitppo.engine.vllm.rows import TokenBatch


def steady(scheduler: Any, ends: Sequence[int]) -> bool:
    """Replaces a scheduler's `update_from_output`; `ends`: ids that may end rows. All tokens of
    steady rows leave as one TokenBatch. False: the scheduler's kind is not supported."""
    if type(scheduler) not in (Scheduler, AsyncScheduler):
        return False
    update_all = scheduler.update_from_output

    def is_steady(row: Any, sampled: Sequence[int]) -> bool:
        return (
            len(sampled) == 1
            and sampled[0] not in ends
            # vLLM's output of the first token has more fields
            and 0 < row.num_output_tokens < row.max_tokens - 1
            and row.num_tokens + 1 < scheduler.max_model_len
            and not row.sampling_params.detokenize  # vLLM's front end needs its own outputs
            # it may be waiting again, with earlier tokens still in flight
            and not row.num_preemptions
        )

    def update_from_output(scheduled: Any, drawn: Any) -> Any:
        batch = TokenBatch([], [], [])
        logprobs = drawn.logprobs.logprobs[:, 0].tolist() if drawn.logprobs else ()
        counts = scheduled.num_scheduled_tokens
        others = {}
        for name, count in counts.items():
            row = scheduler.requests.get(name)
            place = drawn.req_id_to_index.get(name, len(logprobs))
            if row and place < len(logprobs) and is_steady(row, drawn.sampled_token_ids[place]):
                token = drawn.sampled_token_ids[place][0]
                batch.names.append(name)
                batch.tokens.append(token)
                batch.logprobs.append(logprobs[place])
                row.append_output_token_ids(token)
                row.num_in_flight_tokens -= 1
                row.num_output_placeholders -= isinstance(scheduler, AsyncScheduler)
            else:
                others[name] = count
        scheduled.num_scheduled_tokens = others
        answer = update_all(scheduled, drawn)
        scheduled.num_scheduled_tokens = counts
        if batch.names:
            client = answer.setdefault(0, EngineCoreOutputs())
            client.outputs = [batch, *client.outputs]
        return answer

    scheduler.update_from_output = update_from_output
    return True
