"""What a step costs the host of one rank, the store and the wire with many ranks, by simulation.

    PYTHONPATH=tests/helpers python tests/bench/many_ranks.py [--ranks 128 1024 4096]

64k rows of 4,000 tokens on average (256M tokens), 16 mini-batches, partial rollouts, every rank
plays both roles. The first rank's code runs as in a run; a process group that only copies (torch's
`fake`) stands for the network, and what the other ranks would send is made beforehand. So seconds
are CPU time of one rank, without the network's. The store is a real one, in another process; its
seconds are the time of a request times the requests of all ranks. Models and engines are not
simulated. For a checkpoint: hybrid sharding over nodes of eight ranks, a 7B model with AdamW's
state.
"""

import argparse
import gc
import multiprocessing
import pickle
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from episodes import episode
from host_cost import MODEL, PROMPT
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import Qwen2Config

from splitppo import algo
from splitppo.channel import RolloutLink
from splitppo.critic.calibration import summaries
from splitppo.generator.sampler import OpenRow, Sampler
from splitppo.job.collectives import Group
from splitppo.job.heartbeat import Heartbeat
from splitppo.models.batching import partition
from splitppo.models.runner import Runner, work
from splitppo.placement import Placement, Streams, make_step_plan
from splitppo.rollout import Episode, Prompt, Rollout
from splitppo.rollout.wire import pack_rows

ROWS = 65_536
MEAN = 4_000
MINI = 16
NODE = 8  # ranks of a node
CHUNKS = 4
FIELDS = 3
WINDOW = 1_024
SPANS = 24  # phases that a rank publishes in a step, both roles together
GATHERS = 14  # small figures that a step gathers over a group, both roles together
SIZES_7B: dict[str, Any] = {
    "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
}  # fmt: skip


class Traffic:
    """Bytes that a rank sends and receives."""

    sent = 0
    received = 0


class FirstRank(Group):
    """The first of many data-parallel ranks. `theirs` is what all ranks say in the next
    `all_gather`, None: the same as this rank; `parts` what this rank gets in the next
    `all_to_all`s, by rank."""

    def __init__(self, ranks: int):
        self.mesh: Any = SimpleNamespace(get_group=lambda _: dist.group.WORLD)
        self.sizes = {"rows": ranks}
        self.set_axes = []
        self.dp_rank = self.set_rank = 0
        self.dp_size = ranks
        self.set_size = 1
        self.speaks = self.is_first = True
        self.theirs: list[Any] | None = None
        self.parts: list[dict[int, Tensor]] = []
        self.traffic = Traffic()

    def all_gather(self, value: Any) -> list[Any]:
        size = len(pickle.dumps(value))
        self.traffic.sent += size
        self.traffic.received += size * self.dp_size
        gathered = super().all_gather(value)
        answer = self.theirs or gathered
        self.theirs = None
        return answer

    def all_to_all(self, parts: Any) -> list[Tensor]:
        super().all_to_all(parts)
        due = self.parts.pop(0)
        answer = [due[rank] if rank in due else parts[0][:0] for rank in range(self.dp_size)]
        self.traffic.sent += sum(part.nbytes for part in parts[1:]) + 8 * self.dp_size
        self.traffic.received += sum(part.nbytes for part in answer[1:]) + 8 * self.dp_size
        return answer


class Table:
    """Lines: what, then a figure for each number of ranks."""

    def __init__(self) -> None:
        self.lines: dict[str, list[str]] = {}

    def add(self, what: str, figure: str) -> None:
        self.lines.setdefault(what, []).append(figure)
        print(f"    {what}: {figure}", flush=True)

    def timed(self, what: str, work: Callable[[], Any], group: FirstRank | None = None) -> Any:
        """CPU seconds of some work, and the bytes that `group` moves in it."""
        if group:
            group.traffic = Traffic()
        gc.freeze()  # the objects of the other ranks, which a run has not
        start = time.thread_time()
        result = work()
        figure = f"{time.thread_time() - start:.3f} s"
        if group:
            figure += f", {size_of(group.traffic.sent)} out, {size_of(group.traffic.received)} in"
        self.add(what, figure)
        return result


def size_of(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


def rows_of_numbers(rows: Iterable[int], lengths: list[int]) -> list[Episode]:
    return [
        episode(row, PROMPT, range(lengths[row]), [-0.5] * lengths[row], steps=[1] * lengths[row])
        for row in rows
    ]


def host(table: Table, ranks: int, lengths: list[int]) -> None:
    """Plan, channels, balance, open rows, figures."""
    group = FirstRank(ranks)
    streams = Streams(len(lengths))
    sizes = {"actor": ranks, "critic": ranks}
    rollout = Rollout(rows_of_numbers(range(0, len(lengths), ranks), lengths))
    contexts = [len(PROMPT) + length for length in lengths]
    options: Any = {"seed": 0, "mini_batches": MINI, "sizes": sizes, "contexts": contexts}
    plan = table.timed("plan", lambda: make_step_plan(streams, step=1, **options))
    table.timed("slots of the ranks", lambda: plan.of_ranks("actor"))
    # both groups of a split run have half of the ranks
    half = {"actor": ranks // 2, "critic": ranks // 2}
    split = make_step_plan(streams, step=1, **options | {"sizes": half})
    of_rank: Any = {"actor": tuple(range(ranks // 2)), "critic": tuple(range(ranks // 2, ranks))}
    wire: Any = SimpleNamespace(rank=0)
    link = RolloutLink(wire, Placement("per_node", of_rank), group, chunks=CHUNKS, window=WINDOW)
    table.timed("peers of a channel, once a message", lambda: link._peers(split))

    fields = {str(i): torch.zeros(rollout.tokens) for i in range(FIELDS)}
    places = list(range(len(rollout.rows)))
    held = [
        [
            {row: contexts[row] for row in range(rank, len(lengths), ranks)[i::MINI]}
            for i in range(MINI)
        ]
        for rank in range(ranks)
    ]
    runner = Runner(group, torch.device("cpu"), 32_768)

    def balance() -> None:
        group.theirs = held
        runner.balance(MODEL, rollout, [places[i::MINI] for i in range(MINI)], fields)

    due: dict[int, list[int]] = {}  # rank -> its rows that this one trains on
    for row in of_first(held, ranks):
        due.setdefault(row % ranks, []).append(row)
    group.parts = [
        {rank: pack_rows(rows_of_numbers(rows, lengths)) for rank, rows in due.items()},
        {
            rank: torch.zeros(4 * FIELDS * sum(lengths[row] for row in rows), dtype=torch.uint8)
            for rank, rows in due.items()
        },
    ]
    table.timed("balance, of each model", balance, group)

    sampler = Sampler(
        len(lengths), lambda row: Prompt("", PROMPT, "", "", {}), limit=10**9, window=WINDOW
    )
    for row in rollout.episodes:
        sampler._keep(replace(row, end=None))
    group.theirs = [
        (
            {
                row: OpenRow(row, lengths[row], WINDOW, contexts[row])
                for row in range(rank, len(lengths), ranks)
            },
            {},
        )
        for rank in range(ranks)
    ]
    table.timed("open rows: numbers and lengths", lambda: sampler.gather_open(group), group)
    messages = [pack_rows([row], logprobs=True) for row in rollout.episodes]
    group.parts = [dict(enumerate(messages))]
    owned = plan.of_ranks("actor")
    table.timed("open rows: contents", lambda: sampler.move_open(group, owned), group)

    figures = {f"figure/{i}": torch.randn(64) for i in range(4)}
    table.timed(
        "a gather of four figures' moments",
        lambda: algo.all_moments(group.all_gather, [*figures.values()]),
        group,
    )
    table.timed("a gather of four figures' extremes", lambda: summaries(figures, group), group)
    table.timed(
        f"{GATHERS} gathers of a few numbers",
        lambda: [group.all_gather((1.0, 2.0)) for _ in range(GATHERS)],
        group,
    )


def of_first(held: list[list[dict[int, int]]], ranks: int) -> list[int]:
    """The rows that the first rank trains on."""
    trained: list[int] = []
    for parts in zip(*held, strict=True):
        tokens = {row: total for part in parts for row, total in part.items()}
        rows = sorted(tokens)
        bins = partition(work(MODEL, [tokens[row] for row in rows]), ranks) or []
        trained += [rows[i] for i in bins[0]]
    return sorted(trained)


# ---- the store


def serve(pipe: Any) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    pipe.recv()


def request_times(hosts: int, text: str) -> dict[str, float]:
    """Seconds of the store's process for each request. Eight connections keep it busy."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(there,))
    process.start()
    port = here.recv()
    client = dist.TCPStore("127.0.0.1", port, timeout=timedelta(seconds=60))
    keys = [f"heartbeat/{host}" for host in range(hosts)]
    for key in keys:
        client.set(key, "0")
    client.set("contexts", text)
    requests: dict[str, tuple[int, Callable[[int], Any]]] = {
        "set": (4000, lambda i: client.set(f"phase/{i % 64}", "actor step 12 rollout")),
        "check": (4000, lambda i: client.check(["failed"])),
        "add": (4000, lambda i: client.add(keys[0], 1)),
        "counters": (200, lambda i: client.multi_get(keys)),
        "contexts": (50, lambda i: client.get("contexts")),
    }
    seconds = {}
    for name, (count, request) in requests.items():
        before = cpu_of(process.pid)
        for i in range(count):
            request(i)
        seconds[name] = (cpu_of(process.pid) - before) / count
    here.send(None)
    process.join()
    return seconds


def cpu_of(pid: int | None) -> float:
    """Seconds that the threads of a process have run."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


def store(table: Table, ranks: int, lengths: list[int]) -> None:
    text = str([len(PROMPT) + length for length in lengths])
    peers: Any = [
        SimpleNamespace(machine=str(rank // NODE), host=str(rank // NODE)) for rank in range(ranks)
    ]
    beat = Heartbeat(FakeStore(), peers, 0, 300)
    seconds = request_times(len(beat.seen), text)
    share = ranks * (seconds["add"] + seconds["counters"]) / beat.period
    table.add("heartbeats: share of the store's time", f"{100 * share:.1f} %")
    table.add("phases, a step: of the store", f"{ranks * SPANS * seconds['set']:.3f} s")
    table.add("whether the run stops, a step: of the store", f"{ranks * seconds['add']:.3f} s")
    asked = ranks / max(0.01, 1e-4 * ranks)  # a second, as in Status.stopped_by
    table.add("a wait for that: share of the store's time", f"{100 * asked * seconds['add']:.0f} %")
    critics = ranks // 4
    table.add(
        "contexts to a critic group of a quarter, a step: of the store",
        f"{critics * seconds['contexts']:.3f} s, {size_of(len(text) * critics)}",
    )


# ---- checkpoints


def checkpoint(table: Table, ranks: int) -> None:
    """What torch.distributed.checkpoint plans: each rank for itself, then the first for all."""
    from transformers import Qwen2ForCausalLM

    with torch.device("meta"):
        model = Qwen2ForCausalLM(Qwen2Config(**SIZES_7B, tie_word_embeddings=False))
    mesh = DeviceMesh(
        "cpu", torch.arange(ranks).view(-1, NODE), mesh_dim_names=("replica", "shard"),
        _init_backend=False,
    )  # fmt: skip
    state = {
        kind: {
            name: DTensor.from_local(
                torch.empty(-(-p.shape[0] // NODE), *p.shape[1:], device="meta"),
                mesh, [Replicate(), Shard(0)], run_check=False, shape=p.shape, stride=p.stride(),
            )
            for name, p in model.named_parameters()
        }
        for kind in ("model", "exp_avg", "exp_avg_sq")
    }  # fmt: skip
    planner = dcp.DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=True)
    gc.freeze()
    start = time.thread_time()
    plan = planner.create_local_plan()
    alone = time.thread_time() - start
    messages = [pickle.dumps(of_shard(plan, shard)) for shard in range(NODE)]
    table.add("checkpoint: a rank's plan", f"{alone:.3f} s, {size_of(len(messages[0]))}")
    start = time.thread_time()
    planner.create_global_plan([pickle.loads(message) for message in messages])
    table.add(
        "checkpoint: the first rank's plan for its replica",
        f"{time.thread_time() - start:.2f} s, {size_of(sum(map(len, messages)))} in",
    )


def of_shard(plan: Any, number: int) -> Any:
    """The plan of the first shard's rank, as another shard's rank would make it."""

    def moved(item: Any) -> Any:
        data = item.tensor_data
        offsets = torch.Size([number * data.chunk.sizes[0], *data.chunk.offsets[1:]])
        index = replace(item.index, offset=offsets)
        return replace(
            item, index=index, tensor_data=replace(data, chunk=replace(data.chunk, offsets=offsets))
        )

    return replace(plan, items=[moved(item) for item in plan.items])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", nargs="+", type=int, default=[128, 1024, 4096])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    draw = random.Random(0)
    lengths = [max(1, round(MEAN * draw.lognormvariate(-0.18, 0.6))) for _ in range(ROWS)]
    table = Table()
    for ranks in arguments.ranks:
        print(f"{ranks} ranks", flush=True)
        dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
        host(table, ranks, lengths)
        store(table, ranks, lengths)
        checkpoint(table, ranks)
        dist.destroy_process_group()
    for what, figures in table.lines.items():
        print(f"| {what} | {' | '.join(figures)} |")


if __name__ == "__main__":
    main()
