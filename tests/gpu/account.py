"""Where the time of an update goes: milliseconds by part, of one mini-batch of rows.

    torchrun --nproc_per_node N tests/gpu/account.py SHAPE [flags below]

SHAPE is a folder with a config.json; weights are drawn. Seconds and the share of PEAK come from
updates without a profiler, by 6 N a token and with the attention counted, too. Parts come from
profiled updates: kernels by their names, matrix products by their shapes. What NCCL does under
other kernels is no part: `communication` is what nothing hides, and `idle` what is left.

--check compares FlashAttention 4 and torch's kernel with the same computation in float64, and does
nothing else.
"""

import argparse
import json
import random
import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import update
from episodes import episode
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from splitppo.config import PlacementConfig
from splitppo.job.launch import Launch
from splitppo.job.runtime import Runtime
from splitppo.models import attention
from splitppo.models.trainable import count
from splitppo.placement import Role, place
from splitppo.rollout import Rollout
from splitppo.tools.bench import lengths_of

PARTS = (  # what a kernel's name says it is of; the first that fits
    ("communication", "nccl"),
    (
        "attention, backward",
        r"bwd|backward.*(flash|sdpa)|(flash|sdpa).*backward|dot_do_o|dq_convert",
    ),
    ("attention, forward", r"flash|fmha|sdpa|cudnn"),
    ("matrix products", r"gemm|nvjet|cutlass|cublas|splitk"),
    ("optimizer", r"adam"),
    ("logits, elementwise", r"triton.*(logsumexp|gather|scatter|softmax)"),
    ("layers, elementwise", r"triton"),
)
REPEATS = 3


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shape")
    parser.add_argument("--role", choices=("policy", "value"), default="policy")
    parser.add_argument("--lengths", default="lognormal:2000:8192", help="as splitppo bench")
    parser.add_argument("--total", type=int, default=32768, help="tokens of each rank")
    parser.add_argument("--tokens", type=int, default=16384, help="of a micro-batch at most")
    parser.add_argument("--torch-attention", action="store_true", help="no FlashAttention 4")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--checkpointing", action="store_true")
    return parser.parse_args()


def rows_of(options: argparse.Namespace, vocabulary: int, seed: int) -> Rollout:
    """Rows of about `total` tokens: prompts of 128, responses as `lengths` has them."""
    draw = random.Random(seed)
    lengths = lengths_of(options.lengths)
    rows: list[int] = []
    while sum(rows) + 128 * len(rows) < options.total:
        left = options.total - sum(rows) - 128 * (len(rows) + 1)
        rows.append(max(1, min(draw.choice(lengths), left)))
    return Rollout(
        episode(
            1000 * seed + i,
            [draw.randrange(2, vocabulary) for _ in range(128)],
            [draw.randrange(2, vocabulary) for _ in range(n)],
            [-1.0] * n,
            "eos",
        )
        for i, n in enumerate(rows)
    )


def attention_flop(rollout: Rollout, config: Any) -> float:
    """Of a forward and a backward pass: 7 products of half a square a head, two of them forward."""
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    squares = sum(total**2 / 2 for total in rollout.totals)
    return 7 * 2 * squares * width * config.num_attention_heads * config.num_hidden_layers


def update_seconds(run: Callable[[], Any]) -> float:
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    began = time.monotonic()
    for _ in range(REPEATS):
        run()
    torch.cuda.synchronize()
    return (time.monotonic() - began) / REPEATS


def covered(spans: list[tuple[float, float]]) -> float:
    """Microseconds in which at least one of the spans is."""
    total, end = 0.0, float("-inf")
    for first, last in sorted(spans):
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    return total


def kernels_of(run: Callable[[], Any]) -> list[tuple[str, float, float]]:
    """(name, begin, end) of one run's kernels and copies, in microseconds."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    kinds = ("kernel", "gpu_memcpy", "gpu_memset")
    return [(e["name"], e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") in kinds]


def ranked(sums: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(sums.items(), key=lambda item: -item[1])


def part_of(name: str) -> str:
    return next((part for part, sign in PARTS if re.search(sign, name, re.I)), "other")


def products(run: Callable[[], Any], vocabulary: int) -> list[tuple[str, float, float]]:
    """(shapes, milliseconds, TFLOP/s) of the matrix products, by shapes, longest first."""
    with profile(
        activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True
    ) as profiler:
        run()
        torch.cuda.synchronize()
    found = []
    for event in profiler.key_averages(group_by_input_shape=True):
        shapes = [shape for shape in event.input_shapes if len(shape) == 2]
        if event.key not in ("aten::mm", "aten::addmm") or not event.self_device_time_total:
            continue
        (m, k), (_, n) = shapes[-2:]
        micros = event.self_device_time_total
        rate = 2 * m * k * n * event.count / micros / 1e6
        head = "head: " if vocabulary in (m, k, n) else ""
        found.append((f"{head}[{m}, {k}] x [{k}, {n}] x {event.count}", micros / 1e3, rate))
    return sorted(found, key=lambda item: -item[1])


def attend(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
    """Causal attention within rows, written out."""
    group = q.shape[1] // k.shape[1]
    rows = []
    for parts in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
        of_q, of_k, of_v = (x.transpose(0, 1) for x in parts)
        of_k, of_v = (x.repeat_interleave(group, 0) for x in (of_k, of_v))
        scores = of_q @ of_k.transpose(1, 2) * q.shape[-1] ** -0.5
        later = torch.ones(scores.shape[1:], device=q.device, dtype=torch.bool).triu(1)
        rows.append((scores.masked_fill(later, float("-inf")).softmax(-1) @ of_v).transpose(0, 1))
    return torch.cat(rows)


def torch_kernel(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int, _: float) -> Any:
    return attention.varlen_attn(
        q, k, v, starts, starts, longest, longest, window_size=(-1, 0), **attention._GROUPED
    ), None


def check(device: torch.device) -> None:
    """Prints the errors of outputs and gradients, relative to those of float64, of rows of one
    token and more, for heads in groups of 1, 4 and 6."""
    lengths = [1, 37, 1000, 2500, 129, 1, 64]
    starts = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    for heads, groups, width in ((12, 2, 128), (14, 2, 64), (4, 4, 128), (9, 3, 64)):
        torch.manual_seed(heads)
        shapes = ((heads, width), (groups, width), (groups, width))
        tensors = [torch.randn(sum(lengths), *shape, device=device) for shape in shapes]
        tensors = [x.bfloat16().requires_grad_() for x in tensors]
        gradient = torch.randn(sum(lengths), heads, width, device=device).bfloat16()
        exact = [x.detach().double().requires_grad_() for x in tensors]
        right = attend(*exact, lengths)
        wanted = [right, *torch.autograd.grad(right, exact, gradient.double())]
        longest = max(lengths)
        kernels: dict[str, Callable[..., Any]] = {
            "torch": torch_kernel,
            "FlashAttention 4": attention.flash4,
        }
        for name, kernel in kernels.items():
            out = kernel(*tensors, starts, longest, width**-0.5)[0]
            results = [out, *torch.autograd.grad(out, tensors, gradient)]
            errors = [
                float((a.double() - b).norm() / b.norm())
                for a, b in zip(results, wanted, strict=True)
            ]
            shown = ", ".join(f"{error:.2e}" for error in errors)
            print(f"{heads} heads, {groups} of keys, width {width}, {name}: {shown}", flush=True)
            assert max(errors) < 0.01, name


def main() -> None:
    options, launch = parse(), Launch.from_env()
    device = torch.device("cuda", launch.local_rank)
    torch.cuda.set_device(device)
    if options.check:
        check(device)
        return
    if options.torch_attention:
        attention._finds_flash4 = lambda: False  # pyright: ignore[reportAttributeAccessIssue]
    kernel = "FlashAttention 4" if attention.has_flash4() else "torch's attention"
    placement = place(
        PlacementConfig(mode="colocated"), world=launch.world, local_world=launch.world
    )
    runtime = Runtime(launch, placement, device, 100.0)
    role: Role = "actor" if options.role == "policy" else "critic"
    options.mini_batches = 1
    learner, outputs = update.make(options, runtime, role)
    config = cast(Any, learner.model).config
    rollouts = [rows_of(options, config.vocab_size, seed) for seed in range(launch.world)]
    rollout = rollouts[launch.rank]
    tokens = sum(sum(each.totals) for each in rollouts) / launch.world
    parameters = count(config, learner.trainable).parameters
    run = update.update_of(options, role, learner, outputs, rollout)
    entropies = partial(outputs, entropy=True)
    took = update_seconds(run)
    forward = (
        update_seconds(lambda: learner.runner.forward(learner.model, rollout, entropies))
        if role == "actor"
        else 0.0
    )
    kernels = kernels_of(run)
    by_shape = products(run, config.vocab_size)
    if launch.rank == 0:
        flop = 6 * parameters * tokens
        more = sum(attention_flop(each, config) for each in rollouts) / launch.world
        busy: dict[str, float] = defaultdict(float)
        for name, begin, end in kernels:
            busy[part_of(name)] += (end - begin) / 1e3
        computing = covered([(a, b) for n, a, b in kernels if part_of(n) != "communication"]) / 1e3
        whole = covered([(a, b) for _, a, b in kernels]) / 1e3
        hidden = busy.pop("communication", 0.0)
        head = sum(millis for shapes, millis, _ in by_shape if shapes.startswith("head"))
        busy["matrix products"] -= head
        busy["matrix products of the head"] = head
        busy["communication"] = whole - computing
        busy["idle"] = 1e3 * took - whole
        print(
            f"{torch.cuda.get_device_name()}, {options.role}, {kernel}, {parameters / 1e9:.2f}B, "
            f"{launch.world} GPUs, {tokens:.0f} tokens each, micro-batches of {options.tokens}: "
            f"update {1e3 * took:.0f} ms, "
            f"{flop / took / update.PEAK:.1%} by 6N, {(flop + more) / took / update.PEAK:.1%} with "
            f"attention; log-probs {1e3 * forward:.0f} ms; "
            f"{torch.cuda.max_memory_allocated() / 2**30:.0f} GiB"
        )
        for part, millis in ranked(busy):
            print(f"  {part:32} {millis:8.1f} ms  {millis / took / 1e3:6.1%}")
        print(f"  {'(communication, hidden or not)':32} {hidden:8.1f} ms")
        for shapes, millis, rate in by_shape[:16]:
            print(f"    {shapes:48} {millis:8.1f} ms {rate:6.0f} TFLOP/s")
        rest: dict[str, float] = defaultdict(float)
        for name, begin, end in kernels:
            if part_of(name) in ("other", "layers, elementwise", "attention, backward"):
                rest[f"{part_of(name)}: {name[:90]}"] += (end - begin) / 1e3
        for name, millis in ranked(rest)[:14]:
            print(f"    {name:104} {millis:8.1f} ms", flush=True)
    runtime.close()


if __name__ == "__main__":
    main()
