"""What a step costs the host of one rank, beside the formulas that splitppo had before rows were
arrays.

    PYTHONPATH=tests/helpers python tests/bench/host_cost.py [--sizes 64k:2 256k:2 1M:8 4M:32
    16M:128]

Seconds of CPU time of rank 0, which plays both roles, for TOKENS:RANKS of many short rows (250
tokens on average) and of few long ones (4,000). The ranks are threads, and take turns with the
collectives; what they gather is pickled, as between processes. The old side runs on rank 0 alone
and reads what the others would have sent; open rows of four ranks, times the rest. Decoding and
samples are not in it: a thread does them.
"""

import argparse
import pickle
import random
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import ranks
import torch
from episodes import episode
from ranks import run_threads
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig

from splitppo import algo
from splitppo.generator.sampler import Sampler
from splitppo.job.collectives import Group
from splitppo.models.batching import cut_lengths
from splitppo.models.runner import Runner
from splitppo.placement import Streams, make_step_plan, piece
from splitppo.rollout import Episode, Prompt, Rollout
from splitppo.rollout.wire import pack_rows, unpack_rows

PROMPT, MINI, FIELDS, BUDGET = [7] * 128, 4, 3, 32_768
PASSES = 4  # forward passes over a row: policy and value model, before and in the update
MODEL: Any = SimpleNamespace(config=LlamaConfig(hidden_size=1536, num_attention_heads=12))
K = {"k": 1000, "M": 1_000_000}


class Clock:
    """CPU seconds of each piece on each side."""

    def __init__(self) -> None:
        self.seconds: dict[str, dict[str, float]] = {"before": {}, "now": {}}

    def __call__(self, side: str, piece: str, work: Callable[[], Any], times: float = 1) -> Any:
        start = time.thread_time()
        found = work()
        spent = times * (time.thread_time() - start)
        self.seconds[side][piece] = self.seconds[side].get(piece, 0.0) + spent
        return found


def lengths_of(tokens: int, mean: int, ranks: int) -> list[int]:
    """Log-normal lengths of about so many tokens, in a multiple of the ranks and mini-batches."""
    draw = random.Random(tokens)
    rows = max(1, round(tokens / mean / ranks / MINI)) * ranks * MINI
    return [max(1, round(mean * draw.lognormvariate(-0.18, 0.6))) for _ in range(rows)]


def sample_of(row: int, length: int) -> Episode:
    steps = [1] * (length // 2) + [2] * -(-length // 2)
    return episode(row, PROMPT, range(length), [-0.5] * length, steps=steps)


# ---- before: rows as lists, `[B, T]` padding, every rank gets every row


def old_gae(rewards: Tensor, values: Tensor, mask: Tensor, lam: float) -> tuple[Tensor, Tensor]:
    following = advantage = values.new_zeros(len(values))
    advantages = torch.zeros_like(values)
    for t in reversed(range(values.shape[1])):
        step = rewards[:, t] + following - values[:, t] + lam * advantage
        advantages[:, t] = step
        following = torch.where(mask[:, t], values[:, t], following)
        advantage = torch.where(mask[:, t], step, advantage)
    advantages = torch.where(mask, advantages, 0.0)
    return advantages, advantages + torch.where(mask, values, 0.0)


def old_advantages(
    lengths: list[int], scores: Tensor, old: Tensor, ref: Tensor, values: Tensor
) -> list[Tensor]:
    def pad(packed: Tensor) -> Tensor:
        return pad_sequence(list(packed.split(lengths)), batch_first=True)

    mask = pad(torch.ones(len(old))).bool()
    kl = algo.kl_estimate(pad(old), pad(ref), "k1")
    last = mask & (mask.flip(1).cumsum(1).flip(1) == 1)
    rewards = torch.where(mask, kl, 0.0) * -0.1 + torch.where(
        last, scores[:, None].expand_as(kl), 0.0
    )
    padded = pad(values)
    _, returns = old_gae(rewards, padded, mask, 0.95)
    advantages, _ = old_gae(rewards, padded, mask, 0.95)
    wide = torch.where(mask, advantages.double(), 0.0)
    mean = wide.sum() / mask.sum()
    variance = torch.where(mask, (wide - mean).square(), 0.0).sum() / mask.sum()
    white = torch.where(mask, ((wide - mean) * torch.rsqrt(variance + 1e-8)).float(), 0.0)
    return [x[pad(torch.ones(len(old))).bool()] for x in (white, returns, advantages, rewards)]


def old_unpack(header: list[int], ids: list[int]) -> list[Any]:
    rows, at = [], 0
    for row, prompt, response in zip(header[::3], header[1::3], header[2::3], strict=True):
        size = prompt + response
        part = ids[at : at + size]
        rows.append(
            SimpleNamespace(
                row=row, prompt=part[:prompt], response=part[prompt : prompt + response]
            )
        )
        at += size
    return rows


def old_pack(rows: list[Any]) -> list[int]:
    ids = []
    for row in rows:
        ids += [*row.prompt, *row.response]
    return ids


def old_balance(
    header: list[int], ids: Tensor, values: Tensor, mini: list[list[int]], ranks: int
) -> list[Any]:
    rows = {row.row: row for row in old_unpack(header, ids.tolist())}
    parts = dict(zip(rows, values.split([len(row.response) for row in rows.values()]), strict=True))
    kept = []
    for some in mini:
        work = [
            MODEL.config.get_text_config(decoder=True).hidden_size * len(rows[row].response)
            for row in some
        ]
        bins: list[list[int]] = [[] for _ in range(ranks)]
        cost, filled = [0.0] * ranks, [0] * ranks
        for i in sorted(range(len(some)), key=lambda i: (-work[i], i)):
            fit = [k for k in range(ranks) if not bins[k] or filled[k] <= 0]
            k = min(fit, key=lambda k: (cost[k], k))
            bins[k].append(some[i])
            cost[k] += work[i]
        kept += bins[0]
    return [torch.cat([parts[row] for row in kept]), [rows[row] for row in kept]]


def old_deal(mini: list[list[int]], contexts: list[int], ranks: int) -> list[int]:
    sums, order = [0] * ranks, []
    for slots in mini:
        pieces: list[list[int]] = [[] for _ in range(ranks)]
        room = [len(piece(slots, ranks, rank)) for rank in range(ranks)]
        for slot in sorted(slots, key=lambda slot: -contexts[slot]):
            rank = min((i for i in range(ranks) if len(pieces[i]) < room[i]), key=lambda i: sums[i])
            pieces[rank].append(slot)
            sums[rank] += contexts[slot]
        order += [slot for part in pieces for slot in part]
    return [
        slot
        for _ in range(2)
        for _ in range(ranks)
        for part in [piece(order, ranks, i) for i in range(ranks)][:1]
        for slot in part
    ]


def before(clock: Clock, lengths: list[int], ranks: int) -> None:
    count = len(lengths) // ranks

    def listed(row: int) -> Any:
        ids, logprobs = list(range(lengths[row])), [-0.5 - 1e-9 * i for i in range(lengths[row])]
        return SimpleNamespace(row=row, prompt=PROMPT, response=ids, logprobs=logprobs)

    mine = [listed(row) for row in range(0, len(lengths), ranks)]
    own_lengths = [len(row.response) for row in mine]
    packed = [torch.randn(sum(own_lengths)) for _ in range(3)]
    every = [x for row, length in enumerate(lengths) for x in (row, len(PROMPT), length)]
    ids = torch.zeros(sum(lengths) + len(PROMPT) * len(lengths), dtype=torch.int64)
    values = torch.zeros(sum(lengths), FIELDS)
    mini = [list(range(i, len(lengths), MINI)) for i in range(MINI)]
    clock("before", "advantages", lambda: old_advantages(own_lengths, torch.zeros(count), *packed))
    clock("before", "tensors", lambda: torch.tensor([x for row in mine for x in row.logprobs]), 2)
    ages = lambda: torch.tensor([age for n in own_lengths for age in (0, 1) for _ in range(n // 2)])  # noqa: E731
    clock("before", "ages", ages, 2)
    sent = clock("before", "wire", lambda: torch.tensor(old_pack(mine), dtype=torch.int32))
    header = [x for row in mine for x in (row.row, len(PROMPT), len(row.response))]
    clock("before", "wire", lambda: old_unpack(header, sent.tolist()))
    clock(
        "before",
        "micro-batches",
        lambda: [torch.tensor(row.prompt + row.response) for row in mine],
        PASSES,
    )

    def plan() -> list[torch.Tensor]:
        return [pad_sequence([torch.ones(n) for n in own_lengths[i::MINI]]) for i in range(MINI)]

    clock("before", "plan", plan, 2)
    clock(
        "before",
        "plan",
        lambda: cut_lengths([n + len(PROMPT) for n in own_lengths], BUDGET, packed=True),
        2,
    )
    clock("before", "balance", lambda: torch.tensor(old_pack(mine), dtype=torch.int64), 2)
    clock("before", "balance", lambda: old_balance(every, ids, values, mini, ranks), 2)
    clock("before", "ownership", lambda: old_deal(mini, lengths, ranks))

    def shown(rank: int) -> bytes:
        rows = [listed(row) for row in range(rank, len(lengths), ranks)]
        return pickle.dumps(
            {row.row: (row.row, row.prompt, row.response, row.logprobs) for row in rows}
        )

    clock("before", "share", lambda: pickle.dumps({row.row: vars(row) for row in mine}))
    some = [shown(rank) for rank in range(min(ranks, 4))]  # the others are like them
    clock("before", "share", lambda: [pickle.loads(part) for part in some], ranks / len(some))


# ---- now


def now(clock: Clock, lengths: list[int], ranks: int) -> None:
    samples = [
        [sample_of(row, lengths[row]) for row in range(rank, len(lengths), ranks)]
        for rank in range(ranks)
    ]
    rollout = Rollout(samples[0])
    packed = [torch.randn(rollout.tokens) for _ in range(3)]
    clock(
        "now",
        "advantages",
        lambda: new_advantages(rollout.episode_lengths, torch.zeros(len(rollout.rows)), *packed),
    )
    clock("now", "tensors", rollout.logprobs, 2)
    clock("now", "ages", rollout.ages, 2)
    message = clock("now", "wire", lambda: pack_rows(samples[0]))
    clock("now", "wire", lambda: unpack_rows(message))
    clock("now", "micro-batches", lambda: [sample.ids.long() for sample in samples[0]], PASSES)
    clock(
        "now",
        "plan",
        lambda: [torch.tensor(rollout.episode_lengths[i::MINI]).sum() for i in range(MINI)],
        2,
    )
    clock("now", "plan", lambda: cut_lengths(rollout.totals, BUDGET, packed=True), 2)
    sizes = {"actor": ranks, "critic": ranks}
    given: Any = {"seed": 0, "step": 1, "mini_batches": MINI, "sizes": sizes}
    owned = make_step_plan(Streams(len(lengths)), **given, contexts=lengths)
    clock(
        "now",
        "ownership",
        lambda: make_step_plan(Streams(len(lengths)), **given, contexts=lengths).between(
            "actor", 0, "critic", 0
        ),
    )
    run_threads(ranks, exchange, clock, samples, owned)


def new_advantages(
    lengths: list[int], scores: Tensor, old: Tensor, ref: Tensor, values: Tensor
) -> list[Tensor]:
    rewards = algo.token_rewards(scores, algo.kl_estimate(old, ref, "k1"), lengths, kl_coef=0.1)
    advantages, returns = algo.gae(rewards, values, lengths, gamma=1.0, lam=0.95)
    return [algo.whiten(advantages), returns, advantages, rewards]


def exchange(group: Group, clock: Clock, samples: list[list[Episode]], owned: Any) -> None:
    """Balance and share on each rank; rank 0's time counts."""
    rank = group.dp_rank
    watch = clock if rank == 0 else Clock()
    pickling: Any = SimpleNamespace(
        dp_rank=rank, dp_size=group.dp_size, all_to_all=group.all_to_all
    )
    pickling.all_gather = lambda value: list(
        map(pickle.loads, group.all_gather(pickle.dumps(value)))
    )
    rollout = Rollout(samples[rank])
    fields = {str(i): torch.zeros(rollout.tokens) for i in range(FIELDS)}
    places = list(range(len(rollout.rows)))
    mini = [places[i::MINI] for i in range(MINI)]
    runner = Runner(pickling, torch.device("cpu"), BUDGET)
    watch("now", "balance", lambda: runner.balance(MODEL, rollout, mini, fields), 2)
    sampler = Sampler(
        owned.streams.slots, lambda row: Prompt("", PROMPT, "", "", {}), limit=10**9, window=1
    )
    for s in samples[rank]:
        sampler._keep(replace(s, end=None))
    slots = owned.of_ranks("actor")
    watch("now", "share", lambda: sampler.gather_open(pickling))
    watch("now", "share", lambda: sampler.move_open(pickling, slots))


def long_row() -> None:
    """One row of 32k tokens among a thousand of 20: seconds, and what the process's memory grew
    by."""
    lengths = [32_768] + [20] * 1000
    packed = [torch.randn(sum(lengths)) for _ in range(3)]
    scores = torch.zeros(len(lengths))
    new_advantages([3, 2], torch.zeros(2), *(torch.zeros(5) for _ in range(3)))
    for side, work in (("now", new_advantages), ("before", old_advantages)):
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        start = time.thread_time()
        found = work(lengths, scores, *packed)
        spent = time.thread_time() - start
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) / 2**20
        print(
            f"one row of 32k among 1,000 of 20, advantages {side}: {spent:.2f} s, {grown:.2f} GiB",
            flush=True,
        )
        del found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--sizes", nargs="+", default=["64k:2", "256k:2", "1M:8", "4M:32", "16M:128"]
    )
    cases = [size.split(":") for size in parser.parse_args().sizes]
    torch.set_num_threads(1)
    long_row()
    ranks.PATIENCE = 3600
    print("| tokens, ranks, mean length | before, s | now, s | |\n|---|---|---|---|")
    for tokens, count in cases:
        for mean in (250, 4000):
            clock = Clock()
            lengths = lengths_of(int(tokens[:-1]) * K[tokens[-1]], mean, int(count))
            before(clock, lengths, int(count))
            now(clock, lengths, int(count))
            old, new = clock.seconds.values()
            totals = sum(old.values()), sum(new.values())
            print(
                f"| {tokens}, {count}, {mean:,} | {totals[0]:.2f} | {totals[1]:.2f} | "
                f"{totals[0] / totals[1]:.0f}x |"
            )
            pieces = [f"{name} {old[name]:.3f} / {new[name]:.3f}" for name in old]
            print(f"    {'; '.join(pieces)}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
