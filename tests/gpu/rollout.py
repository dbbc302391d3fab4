"""How fast an engine's process decodes, alone: rollouts of so many rows, and the median decode step
by rows left, each both as vLLM's scheduler has it and with our loop, and the ratio. With
--profile, what the device is busy with in a step, over one more rollout of each size. With
--window, instead, where the seconds of a step with windows go: each row goes on from a part of its
response, as in a long run, and gets so many tokens.

    VLLM_USE_V2_MODEL_RUNNER=1 python tests/gpu/rollout.py MODEL [flags below]

MODEL is a folder with a config.json and a tokenizer; weights are drawn. Runs on the CPU, too, where
vLLM does.
"""

import argparse
import importlib
import json
import os
import pickle
import random
import re
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity
from transformers import AutoConfig

from splitppo.config import Config, EngineConfig, RolloutConfig
from splitppo.engine import Ask
from splitppo.engine.vllm.host import SETTINGS, start_llm
from splitppo.engine.vllm.plan import Plan, kv_bytes_per_token
from splitppo.engine.vllm.rows import Rows
from splitppo.tools.bench import lengths_of

PROFILED = 64  # decode steps
KERNELS = (  # what a kernel's name says it is of; the first that fits
    (
        "sampling",
        "sampl|softmax|topk|top_k|sort|multinomial|exponential|gumbel|argmax|logprob|random",
    ),
    ("attention", "flash|attention|fmha|reshape_and_cache"),
    ("products", "gemm|cutlass|nvjet|matmul|cublas|splitk"),
)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, nargs="+", default=[171, 128, 1])
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument(
        "--lengths", default="lognormal:240:1024", help="as splitppo.tools.bench has them"
    )
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument(
        "--vocabulary", type=int, help="ids that may be drawn, as a tokenizer has; else the model's"
    )
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--window", type=int, default=0, help="tokens that each row gets")
    parser.add_argument(
        "--engine", type=json.loads, default={}, help="JSON: vLLM's settings, in place of ours"
    )
    parser.add_argument(
        "--kernels", type=int, default=0, help="so many, of --window's decode steps"
    )
    return parser.parse_args()


def start(options: argparse.Namespace, longest: int) -> tuple[Any, Plan]:
    device, config = (
        "cuda" if torch.cuda.is_available() else "cpu",
        AutoConfig.from_pretrained(options.model),
    )
    rows, tokens = max(options.rows), options.prompt + longest
    per_token = kv_bytes_per_token(config, torch.bfloat16)
    plan = Plan(
        config=Config(
            engine=EngineConfig(sleep="off"), rollout=RolloutConfig(max_new_tokens=longest)
        ),
        folder=options.model,
        log=os.devnull,
        address=f"{tempfile.mkdtemp(prefix='splitppo-')}/engine",
        dtype="bfloat16",
        max_rows=rows,
        max_tokens=tokens,
        kv_bytes=(rows + 1) * (tokens + 256) * per_token,
        eos=(0,),
        vocabulary=options.vocabulary or config.vocab_size,
        routes=False,
        device=device,
        threads=torch.get_num_threads(),
    )
    arguments: Any = importlib.import_module("vllm.engine.arg_utils")
    make = arguments.EngineArgs
    arguments.EngineArgs = lambda **ours: make(**(ours | options.engine))
    rows, facts = start_llm(plan)
    runner = "second" if getattr(rows.llm.vllm_config, "use_v2_model_runner", False) else "first"
    print(f"{facts}, {runner} runner", flush=True)
    return rows, plan


def rollout(
    rows: Rows, plan: Plan, lengths: list[int], prompt: int, seed: int
) -> tuple[float, dict[int, list[float]]]:
    """Seconds of a rollout, and those of its decode steps by the rows left, up to a power of
    two."""
    draw, llm, steps = random.Random(seed), rows.llm, {}
    prompts = [[draw.randrange(1, plan.vocabulary) for _ in range(prompt)] for _ in lengths]
    asks = [
        Ask(row, ids, 0, tokens, False)
        for row, (ids, tokens) in enumerate(zip(prompts, lengths, strict=True))
    ]
    began = last = time.perf_counter()
    rows.add(0, asks, plan.config.rollout, seed)
    while rows.open:
        left = 1 << (len(rows.open) - 1).bit_length()
        rows.step()
        now = time.perf_counter()
        steps.setdefault(left, []).append(now - last)
        last = now
    while not llm.reset_prefix_cache():
        llm.step()  # what is under way of rows that have ended
    return last - began, steps


def compare(
    rows: Rows, plan: Plan, lengths: list[int], prompt: int, seed: int
) -> tuple[float, float]:
    """Seconds of a rollout all scheduled by vLLM, and of the same one with our loop."""
    scheduler, names = (
        rows.llm.engine_core.engine_core.scheduler,
        ("schedule", "update_from_output"),
    )
    ours = {name: getattr(scheduler, name) for name in names}
    for name in names:
        vars(scheduler).pop(name, None)  # what `steady` has put there
    both = {"vLLM": {name: getattr(scheduler, name) for name in names}, "steady": ours}
    seconds = []
    for how, methods in both.items():
        spent: dict[str, list[float]] = {name: [] for name in names}
        vars(scheduler).update(
            {name: timed(method, spent[name]) for name, method in methods.items()}
        )
        took, steps = rollout(rows, plan, lengths, prompt, seed)
        medians = ", ".join(
            f"<= {n}: {1e3 * statistics.median(part):.2f}" for n, part in sorted(steps.items())
        )
        # in the first tenth of the steps most rows are left
        first = 1e3 * sum(statistics.median(each[: len(each) // 10]) for each in spent.values())
        print(
            f"{len(lengths)} rows, {how}: {took:.2f} s; ms a step by rows left: {medians}", end="; "
        )
        print(f"scheduling {first:.2f} of it at first", flush=True)
        seconds.append(took)
    vars(scheduler).update(ours)
    return seconds[0], seconds[1]


def timed(method: Callable[..., Any], spent: list[float]) -> Callable[..., Any]:
    """`method`, whose seconds are added to `spent`."""

    def call(*args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        result = method(*args, **kwargs)
        spent.append(time.perf_counter() - began)
        return result

    return call


def profile(rows: Rows, plan: Plan, lengths: list[int], prompt: int) -> None:
    """Prints the kernels (on the CPU: operators) that take longest, in microseconds of a step."""
    on_gpu = plan.device == "cuda"
    with torch.profiler.profile(
        activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]
    ) as profiler:
        _, steps = rollout(rows, plan, lengths, prompt, seed=99)
    count, events = sum(map(len, steps.values())), profiler.key_averages()
    spent = {
        event.key: event.self_device_time_total if on_gpu else event.self_cpu_time_total
        for event in events
    }
    calls = {event.key: event.count for event in events}
    print(
        f"{len(lengths)} rows, {count} steps: {sum(spent.values()) / count:.0f} us of a step the "
        f"device is busy",
        flush=True,
    )
    for name, total in sorted(spent.items(), key=lambda item: -item[1])[:25]:
        print(
            f"  {total / count:8.1f} us  {calls[name] / count:6.1f} calls  {name[:110]}", flush=True
        )


def open_prompts(lengths: list[int], rows: int, prompt: int, ids: int) -> list[list[int]]:
    """Prompts with what the rows have sampled so far, as slots have them in a long run: a row is
    met by its length, anywhere in it."""
    draw = random.Random(0)
    found = draw.choices(lengths, weights=lengths, k=rows)
    sizes = [prompt + draw.randrange(length) for length in found]
    return [[draw.randrange(1, ids) for _ in range(size)] for size in sizes]


def window(rows: Rows, plan: Plan, prompts: list[list[int]], tokens: int, kernels: int) -> None:
    """Prints the seconds of a rollout in which each row gets `tokens` tokens, by their use."""
    llm = rows.llm
    scheduler = llm.engine_core.engine_core.scheduler
    spent: dict[str, list[float]] = {"schedule": [], "update_from_output": []}
    for name, seconds in spent.items():
        setattr(scheduler, name, timed(getattr(scheduler, name), seconds))
    asks = [Ask(row, ids, 0, tokens, False) for row, ids in enumerate(prompts)]
    sent = time.perf_counter()
    submitted = pickle.loads(pickle.dumps((asks, plan.config.rollout, 1)))
    began = time.perf_counter()
    rows.add(0, *submitted)
    while not all(row.tokens for row in rows.open.values()):
        rows.step()
    prefixes = time.perf_counter() - began
    for seconds in spent.values():
        seconds.clear()
    steps = 0
    busy: dict[str, float] = {}
    pieces = []
    began = time.perf_counter()
    while rows.open:
        pieces += rows.step()
        steps += 1
    decoding = time.perf_counter() - began
    scheduling = sum(map(sum, spent.values()))
    answered = time.perf_counter()
    pickle.loads(pickle.dumps([piece for _, piece in pieces]))
    messages = began - sent - prefixes + time.perf_counter() - answered
    while not llm.reset_prefix_cache():
        llm.step()
    rows.add(0, *submitted)
    while not all(row.tokens for row in rows.open.values()):
        rows.step()
    on_gpu = plan.device == "cuda"
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as profiler:
        for _ in range(PROFILED):
            rows.step()
    rows.abort(0)
    for event in profiler.key_averages():
        part = next((name for name, sign in KERNELS if re.search(sign, event.key, re.I)), "other")
        spent_us = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        busy[part] = busy.get(part, 0.0) + spent_us / 1e6 / PROFILED
    print(f"{len(prompts)} rows, {sum(map(len, prompts)):,} tokens of prompts and prefixes")
    print(f"  prefixes computed again {prefixes:.2f} s; {steps} decode steps {decoding:.2f} s")
    print(
        f"  a decode step {1e3 * decoding / steps:.2f} ms; scheduling "
        f"{1e3 * scheduling / steps:.2f}"
    )
    print(f"  messages, there and back, pickled and read: {messages:.3f} s in all")
    for part, seconds in sorted(busy.items(), key=lambda item: -item[1]):
        print(f"  kernels of {part}: {1e3 * seconds:.2f} ms a step", flush=True)
    averages = sorted(profiler.key_averages(), key=lambda event: -event.self_device_time_total)
    for event in averages[:kernels]:
        millis = event.self_device_time_total / 1e3 / PROFILED
        print(f"    {millis:7.3f} ms {event.count / PROFILED:6.1f} calls  {event.key[:110]}")


def main() -> None:
    options = parse()
    os.environ.update(SETTINGS)
    lengths = lengths_of(options.lengths)
    longest = max(lengths) + options.window
    rows, plan = start(options, longest)
    if options.window:
        for count in options.rows:
            prompts = open_prompts(lengths, count, options.prompt, plan.vocabulary)
            window(rows, plan, prompts, options.window, options.kernels)
        return
    for count in options.rows:
        own = [lengths[row % len(lengths)] for row in range(count)] if count > 1 else [longest]
        both = [
            compare(rows, plan, own, options.prompt, repeat) for repeat in range(options.repeats)
        ]
        ratio = statistics.median(plain / steady for plain, steady in both)
        print(
            f"{count} rows: {ratio:.2f} times as fast with our loop (the median of {len(both)})",
            flush=True,
        )
        if options.profile:
            profile(rows, plan, own, options.prompt)


if __name__ == "__main__":
    main()
    os._exit(0)  # no waiting for the threads of libraries
