"""A step's spans as trace events, the JSON that Perfetto (ui.perfetto.dev) and chrome://tracing open.

The format is that of "Trace Event Format" (Duffin et al., Google, 2016): complete events, `ph` "X", with `ts` and `dur`
in microseconds, and metadata events, `ph` "M", which name the process and its threads.
"""

from typing import Any

from splitppo.tools.timeline import Column

PROCESS = 1
THREADS = {"actor": 1, "critic": 2}


def trace_name(step: int) -> str:
    """The file that a step's trace is written to."""
    return f"trace_step_{step:06d}.json"


def trace_events(actor: Column, critic: Column, step: int) -> dict[str, Any]:
    """Every span of either column that reaches into the time in which the actor did `step`, whichever step it belongs
    to, so that the critic's update of the step before is seen under this step's rollout.

    Both columns share a clock: `ts` counts from the start of the earliest of these spans, whose Unix seconds are
    `otherData.origin_unix_s`. An event's `args.step` is the step that the span belongs to; `cat` is work or wait.

    Args:
        step: one that has spans of the actor.
    """
    low = min(start for _, start, _ in actor[step].spans)
    high = max(end for _, _, end in actor[step].spans)
    found = [
        (lane, number, span)
        for lane, column in (("actor", actor), ("critic", critic))
        for number, record in sorted(column.items())
        for span in record.spans
        if span[1] < high and span[2] > low
    ]
    origin = min(start for _, _, (_, start, _) in found)
    events: list[dict[str, Any]] = [_metadata("process_name", 0, name="splitppo")]
    for lane, thread in THREADS.items():
        events += [
            _metadata("thread_name", thread, name=lane),
            _metadata("thread_sort_index", thread, sort_index=thread),
        ]
    for lane, number, (name, start, end) in found:
        begun, ended = _micros(start - origin), _micros(end - origin)  # rounded alike, so that neighbours don't overlap
        place = {"pid": PROCESS, "tid": THREADS[lane], "ts": begun, "dur": round(ended - begun, 3)}
        kind = "wait" if name.startswith("wait_") else "work"
        events.append({"name": name, "cat": kind, "ph": "X", **place, "args": {"step": number}})
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"step": step, "origin_unix_s": origin}}


def _micros(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _metadata(event: str, thread: int, **args: Any) -> dict[str, Any]:
    return {"name": event, "ph": "M", "pid": PROCESS, "tid": thread, "args": args}
