"""Makes vLLM's scheduler faster. With small models and many rows it takes longer than the GPU.

In most decode steps each row gets one token and nothing else happens. Here a short loop takes the
tokens of these steady rows. vLLM's own method takes those of all others: rows that start or end.
"""

# pyright: reportMissingImports=false

from collections.abc import Mapping, Sequence
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from splitppo.engine import OpenPiece


def steady(scheduler: Any, ends: Sequence[int], rows: Mapping[str, OpenPiece]) -> bool:
    """Replaces a scheduler's `update_from_output`, so that steady rows among `rows`, by the ids of
    their requests, get their tokens at once. `ends`: ids that may end rows. False: the scheduler's
    kind is not supported."""
    if type(scheduler) not in (Scheduler, AsyncScheduler):
        return False
    update_all = scheduler.update_from_output

    def is_steady(request: Any, sampled: Sequence[int]) -> bool:
        return (
            len(sampled) == 1
            and sampled[0] not in ends
            # vLLM's output of the first token has more fields
            and 0 < request.num_output_tokens < request.max_tokens - 1
            and request.num_tokens + 1 < scheduler.max_model_len
            # it may be waiting again, with earlier tokens still in flight
            and not request.num_preemptions
        )

    def update_from_output(scheduled: Any, drawn: Any) -> Any:
        logprobs = drawn.logprobs.logprobs[:, 0].tolist() if drawn.logprobs else []
        # beside the token's id, its experts (routes.py)
        table = drawn.logprobs.logprob_token_ids[:, 1:] if drawn.logprobs else None
        experts = [row.tobytes() for row in table] if table is not None and table.size else []
        counts = scheduled.num_scheduled_tokens
        others = {}
        for name, count in counts.items():
            request = scheduler.requests.get(name)
            place = drawn.req_id_to_index.get(name, len(logprobs))
            sampled = drawn.sampled_token_ids[place] if place < len(logprobs) else []
            if request and name in rows and is_steady(request, sampled):
                rows[name].tokens.append(sampled[0])
                rows[name].logprobs.append(logprobs[place])
                if experts:
                    rows[name].experts += experts[place]
                request.append_output_token_ids(sampled[0])
                request.num_in_flight_tokens -= 1
                request.num_output_placeholders -= isinstance(scheduler, AsyncScheduler)
            else:
                others[name] = count
        scheduled.num_scheduled_tokens = others
        outputs = update_all(scheduled, drawn)
        scheduled.num_scheduled_tokens = counts
        return outputs

    scheduler.update_from_output = update_from_output
    return True
