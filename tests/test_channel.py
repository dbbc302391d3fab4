"""The wire without processes: every rank is a thread, the store is real, the copy is a queue. Only
a rank that is stopped needs processes."""

import os
import queue
import random
import re
import signal
import threading
import time
from functools import lru_cache

import pytest
import torch
import torch.distributed as dist
from episodes import episode
from ranks import run_ranks, run_threads, thread_collectives, thread_groups

from splitppo.channel import Exchange, Links
from splitppo.config import PlacementConfig
from splitppo.job.collectives import Group
from splitppo.job.launch import Launch
from splitppo.job.runtime import Runtime
from splitppo.job.wire import Hop, Wire, WireError
from splitppo.placement import Placement, Role, Streams, make_step_plan, place
from splitppo.rollout import Rollout


class QueueWire(Wire):
    """Posts into queues in place of NCCL, and notes who posted what, and whether the peer was there
    at once."""

    def __init__(self, rank, store, queues, record, timeout=20.0):
        super().__init__(
            rank=rank,
            group=None,
            store=store,
            device=torch.device("cpu"),
            timeout=timeout,
            describe=lambda r: f"rank {r} (in 'phase of {r}')",
        )
        self.queues, self.record = queues, record

    def transfer_out(self, payload, receiver):
        # the peer must be at its recv, or nearly: a send that waits would spin on a GPU
        deadline = time.monotonic() + 0.5
        while ("ready", self.rank, receiver) not in self.record:
            if time.monotonic() > deadline:
                raise AssertionError(
                    f"rank {self.rank} posted to rank {receiver}, which does not receive"
                )
            time.sleep(0.001)
        self.record.remove(("ready", self.rank, receiver))
        self.record.append(("send", self.rank, receiver, payload.numel()))
        self.queues[self.rank, receiver].put(payload.clone())

    def transfer_in(self, numel, dtype, sender):
        self.record.append(("ready", sender, self.rank))
        payload = self.queues[sender, self.rank].get(timeout=self.timeout)
        self.record.append(("recv", sender, self.rank, payload.numel()))
        assert payload.numel() == numel
        assert payload.dtype == dtype
        return payload


def make_samples(rows, step):
    """Every third row has two turns with an environment's answer between them."""
    samples = []
    for row in rows:
        generator = random.Random(f"{row}/{step}")
        prompt = [generator.randrange(1000) for _ in range(generator.randint(1, 5))]
        response = [generator.randrange(1000) for _ in range(generator.randint(1, 9))]
        sample = episode(row, prompt, response, end="eos" if row % 2 else "limit")
        if row % 3 == 0 and len(response) > 2:
            mask = [True, False, *[True] * (len(response) - 2)]
            sample = episode(row, prompt, response, end="environment", mask=mask)
        samples.append(sample)
    return samples


def signals_of(column):
    """What a critic with a teacher sends: columns of three types, of one number a token and of
    several."""
    ids = column[:, None].int() + torch.tensor([0, 2**30, 7], dtype=torch.int32)
    return [column + 0.5, ids, torch.stack([column, -column], 1).half()]


def same(tensors, others):
    return all(
        x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(tensors, others, strict=True)
    )


def play(actor_size, critic_size, *, chunks, batch=17, mini=1, steps=2, slow="none", sets=(1, 1)):
    """Runs both columns' wire for some steps; returns what each side saw, and the record of posts.

    Args:
        actor_size, critic_size: data-parallel ranks. sets: how many ranks hold the same rows, of
            each group.
    """
    sizes: dict[Role, int] = {"actor": actor_size, "critic": critic_size}
    first_critic, world = actor_size * sets[0], actor_size * sets[0] + critic_size * sets[1]
    ranks = tuple(range(world))
    placement = Placement(
        "per_node", {"actor": ranks[:first_critic], "critic": ranks[first_critic:]}
    )
    store, record = dist.HashStore(), []
    queues = {(a, b): queue.Queue() for a in range(world) for b in range(world)}
    shapes = [
        (size,) if width == 1 else (size, width)
        for size, width in zip(sizes.values(), sets, strict=True)
    ]
    groups, frees = zip(*(thread_groups(*shape) for shape in shapes), strict=True)
    groups = [group for part in groups for group in part]  # by global rank

    @lru_cache
    def plan(step):
        return make_step_plan(Streams(batch), seed=3, step=step, mini_batches=mini, sizes=sizes)

    seen, errors = {}, []

    def links_of(rank):
        return Links(QueueWire(rank, store, queues, record), placement, groups[rank], chunks=chunks)

    def actor(rank):
        links = links_of(rank)
        for step in range(1, steps + 1):
            rows = plan(step).all_slots("actor", groups[rank].dp_rank)
            finishing = make_samples(rows, step)
            random.Random(f"{rank}/{step}").shuffle(finishing)
            time.sleep(0.8 if slow == "first actor" and rank == 0 else 0)
            for sample in finishing:
                links.rollouts.offer(plan(step), [sample])
                links.rollouts.offer(plan(step), [])
                time.sleep(0.004 if slow == "actor" else 0)
            links.rollouts.flush(plan(step)).result()
            rollout = Rollout(finishing)
            index = torch.tensor(
                [
                    row
                    for row, n in zip(rollout.rows, rollout.episode_lengths, strict=True)
                    for _ in range(n)
                ]
            )
            links.logprobs.send(plan(step), rollout, [index.float(), -index.float()])
            signals, flag = links.advantages.recv(plan(step), rollout, signals_of(torch.zeros(0)))
            seen[rank, step] = same(signals, signals_of(index.float()))
            seen[rank, step] &= flag == (step == 1 and bool(rows))

    def critic(rank):
        links = links_of(rank)
        for step in range(1, steps + 1):
            samples = []
            for chunk in range(chunks):
                samples += links.rollouts.recv(plan(step), chunk)
                time.sleep(0.02 if slow == "critic" else 0)
            rollout = Rollout(samples)
            (old, ref), flag = links.logprobs.recv(plan(step), rollout, [torch.zeros(0)] * 2)
            links.advantages.send(plan(step), rollout, signals_of(old), flag=step == 1)
            due = make_samples(plan(step).all_slots("critic", groups[rank].dp_rank), step)
            index = [float(sample.row) for sample in due for _ in range(sample.tokens)]
            seen[rank, step] = (
                rollout.episodes == due
                and old.tolist() == index
                and torch.equal(old, -ref)
                and not flag
            )

    def guarded(function, rank):
        try:
            function(rank)
        except BaseException as error:
            errors.append(error)
            for free in frees:
                free()

    threads = [
        threading.Thread(
            target=guarded, args=(actor if rank < first_critic else critic, rank), daemon=True
        )
        for rank in ranks
    ]
    with thread_collectives():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=40)
    assert not any(thread.is_alive() for thread in threads), "dead-lock"
    if errors:
        raise errors[0]
    return seen, record, store


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize(("actor", "critic"), [(1, 1), (2, 1), (1, 3), (3, 2), (5, 3), (4, 7)])
def test_sends_and_receives_match_for_any_sizes(actor, critic, chunks):
    seen, record, store = play(actor, critic, chunks=chunks, mini=1)
    assert len(seen) == 2 * (actor + critic)
    assert all(seen.values())
    sends = sorted(hop[1:] for hop in record if hop[0] == "send")
    assert sends == sorted(hop[1:] for hop in record if hop[0] == "recv")
    assert store.num_keys() <= 1, "the handshake's keys are left in the store"


@pytest.mark.parametrize(
    ("actor", "critic", "sets"), [(1, 1, (2, 2)), (2, 1, (2, 2)), (2, 3, (2, 2)), (3, 2, (1, 2))]
)
def test_the_first_of_a_set_speaks_and_all_of_it_have_the_same(actor, critic, sets):
    """Whatever the set, every rank has its rows and tensors; messages are as many as without
    sets."""
    seen, record, store = play(actor, critic, chunks=3, sets=sets)
    assert len(seen) == 2 * (actor * sets[0] + critic * sets[1])
    assert all(seen.values())
    _, plain, _ = play(actor, critic, chunks=3)
    sends = [hop for hop in record if hop[0] == "send"]
    assert len(sends) == len([hop for hop in plain if hop[0] == "send"])
    first_critic = actor * sets[0]
    speakers = {
        *range(0, first_critic, sets[0]),
        *range(first_critic, first_critic + critic * sets[1], sets[1]),
    }
    assert {rank for hop in sends for rank in hop[1:3]} == speakers
    assert store.num_keys() <= 1, "the handshake's keys are left in the store"


def exchanging_rank(group, critics, windows):
    """A rank of both roles for three steps: whether it has in each role what is due there.
    `critics`: the group of each rank as a critic."""
    groups: dict[Role, Group] = {
        "actor": group,
        "critic": critics[group.dp_rank * group.set_size + group.set_rank],
    }
    sizes: dict[Role, int] = {role: found.dp_size for role, found in groups.items()}

    @lru_cache
    def plan(step):
        contexts = [(5 * slot + step) % 11 for slot in range(12)] if windows else []
        return make_step_plan(
            Streams(12, 2), seed=3, step=step, mini_batches=2, sizes=sizes, contexts=contexts
        )

    def rows(step, role):
        """With windows a slot has no row, one or two; in the last step none has one."""
        slots = plan(step).all_slots(role, groups[role].dp_rank) if step < 3 else []
        numbers = [
            slot + 12 * turn
            for slot in slots
            for turn in range((slot + step) % 3 if windows else 1)
        ]
        return Rollout(make_samples(numbers, step))

    def numbered(rollout):
        """Another number for each token."""
        return torch.tensor([s.row + i / 16 for s in rollout.episodes for i in range(s.tokens)])

    exchange, seen = Exchange(groups), []
    for step in (1, 2, 3):
        rollout, scored = rows(step, "actor"), rows(step, "critic")
        found = exchange.rollouts(plan(step), rollout)
        seen.append(found.episodes == scored.episodes)
        seen.append((found is rollout) == (sizes["actor"] == sizes["critic"]))
        both = [numbered(rollout), -numbered(rollout)]
        old, ref = exchange.logprobs(plan(step), rollout, scored, both)
        seen += [torch.equal(old, numbered(scored)), torch.equal(ref, -old)]
        given = signals_of(numbered(scored))
        signals = exchange.advantages(plan(step), scored, rollout, given)
        seen.append(same(signals, signals_of(numbered(rollout))))
    return seen


@pytest.mark.parametrize("windows", [False, True])
@pytest.mark.parametrize("sets", [(2, 1), (1, 2), (4, 2), (1, 4), (2, 3), (2, 2)])
def test_roles_on_the_same_ranks_have_sets_of_their_own(sets, windows):
    """12 ranks. Each has in each role the rows that are dealt to its set there, and their tensors
    in their order."""
    critics, _ = thread_groups(12 // sets[1], sets[1])
    found = run_threads((12 // sets[0], sets[0]), exchanging_rank, critics, windows)
    assert found == [[True] * 15] * 12


@pytest.mark.parametrize("slow", ["actor", "critic", "first actor"])
def test_a_slow_column_changes_nothing_and_leaves_no_send_waiting(slow):
    seen, _, _ = play(3, 1 if slow == "first actor" else 2, chunks=3, slow=slow, steps=2)
    assert all(seen.values())


def test_random_sizes_never_dead_lock():
    generator = random.Random(5)
    for _ in range(12):
        actor, critic = generator.randint(1, 5), generator.randint(1, 5)
        seen, _, _ = play(
            actor, critic, chunks=generator.randint(1, 6), batch=generator.randint(1, 30), steps=1
        )
        assert all(seen.values())


def pair(batch, *, chunks, window=0, timeout=20.0):
    """The links of an actor and a critic rank that share all rows, the record of posts, and a
    step's plan."""
    placement, store, record = (
        Placement("per_node", {"actor": (0,), "critic": (1,)}),
        dist.HashStore(),
        [],
    )
    queues = {(a, b): queue.Queue() for a in range(2) for b in range(2)}

    def plan(step):
        return make_step_plan(
            Streams(batch), seed=0, step=step, mini_batches=1, sizes={"actor": 1, "critic": 1}
        )

    wires = [QueueWire(rank, store, queues, record, timeout=timeout) for rank in range(2)]
    groups = [thread_groups(1)[0][0] for _ in wires]
    sizes = {"chunks": chunks, "window": window}
    links = (
        Links(wire, placement, group, **sizes) for wire, group in zip(wires, groups, strict=True)
    )
    return *links, record, plan


def test_chunks_leave_before_the_rollout_is_over():
    sender, receiver, record, plan = pair(8, chunks=4)
    samples = make_samples(range(8), 1)
    sender.rollouts.offer(plan(1), samples[:4])
    assert record == [], "posted before the receiver was clear"
    got = []
    thread = threading.Thread(target=lambda: got.append(receiver.rollouts.recv(plan(1), 0)))
    thread.start()
    deadline = time.monotonic() + 10
    while not any(hop[0] == "send" for hop in record) and time.monotonic() < deadline:
        sender.rollouts.offer(plan(1), [])
    thread.join(timeout=10)
    assert [sample.row for sample in got[0]] == [0, 1, 2, 3]


def test_what_is_left_of_a_rollout_leaves_by_itself():
    sender, receiver, _, plan = pair(8, chunks=4)
    sender.rollouts.offer(plan(1), make_samples(range(8), 1))
    posted = sender.rollouts.flush(plan(1))
    assert not posted.done()
    rows = [sample.row for chunk in range(4) for sample in receiver.rollouts.recv(plan(1), chunk)]
    assert sorted(rows) == list(range(8))
    posted.result(timeout=10)


@pytest.mark.parametrize(("word", "waits_for"), [("clear", "clear-to-send"), ("go", "a message")])
def test_a_wait_that_runs_out_names_everything(word, waits_for):
    sender, receiver, _, plan = pair(2, chunks=1, timeout=0.2)
    if word == "clear":
        sender.rollouts.offer(plan(7), make_samples([0, 1], 7))
    with pytest.raises(WireError) as caught:
        _ = (
            sender.rollouts.flush(plan(7)).result()
            if word == "clear"
            else receiver.rollouts.recv(plan(7), 0)
        )
    text = str(caught.value)
    for part in (
        "step 7",
        "rollouts",
        "chunk 0",
        "rank 0",
        "rank 1",
        "phase of",
        "0.2 s",
        waits_for,
        "--timeout",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("broken", "due"),
    [(RuntimeError("closed by peer"), WireError), (torch.OutOfMemoryError("full"), RuntimeError)],
)
def test_a_copy_that_breaks_off_names_both_ranks_and_want_of_memory_stays_what_it_is(
    monkeypatch, broken, due
):
    sender, receiver, _, plan = pair(2, chunks=1, timeout=5)

    monkeypatch.setattr(receiver.wire, "transfer_in", lambda *_: (_ for _ in ()).throw(broken))
    sender.rollouts.offer(plan(7), make_samples([0, 1], 7))
    _ = sender.rollouts.flush(plan(7))
    with pytest.raises(due) as caught:
        receiver.rollouts.recv(plan(7), 0)
    if due is WireError:
        said = (
            "copy between rank 1 (in 'phase of 1') and rank 0 (in 'phase of 0') failed: closed by "
            "peer"
        )
        assert said in str(caught.value)
    else:
        assert caught.value is broken


def test_a_message_of_another_size_than_is_due_is_refused(monkeypatch):
    sender, receiver, _, _ = pair(2, chunks=1, timeout=5)
    hop = Hop("logprobs", 1, 0, 0, 1)
    monkeypatch.setattr(sender.wire, "transfer_out", lambda *_: None)
    threading.Thread(target=sender.wire.send, args=(hop, torch.zeros(3)), daemon=True).start()
    with pytest.raises(WireError, match=f"{hop}: 3 elements announced where 4 are due"):
        receiver.wire.recv(hop, torch.float32, lambda _: 4)


def test_rows_that_were_not_offered_are_missed():
    sender, _, _, plan = pair(4, chunks=1)
    sender.rollouts.offer(plan(1), make_samples([0, 1], 1))
    with pytest.raises(WireError, match="not offered"):
        sender.rollouts.flush(plan(1))


class Woken(Exception):
    """The rank was stopped, and goes on."""


class StoppingWire(Wire):
    """Stops its process at a place."""

    def __init__(self, at, *args):
        super().__init__(*args)
        self.at = at

    def here(self, at):
        if at == self.at:
            os.kill(os.getpid(), signal.SIGSTOP)
            raise Woken

    def _wait(self, hop, word, peer):
        self.here(f"{word} is due")
        super()._wait(hop, word, peer)
        self.here(f"{word} has come")

    def _copy(self, hop, peer, transfer, *args):
        self.here("copy")
        return super()._copy(hop, peer, transfer, *args)

    def transfer_out(self, payload, receiver):
        self.here("post")
        super().transfer_out(payload, receiver)

    def transfer_in(self, numel, dtype, sender):
        self.here("post")
        return super().transfer_in(numel, dtype, sender)


STOPS = [
    (victim, at)
    for victim, places in enumerate(
        (["clear is due", "clear has come", "copy", "post"], ["go is due", "copy", "post"])
    )
    for at in places
]


def stopping_rank(rank):
    """What the other rank is told of each stop, and whether it was in time."""
    found, cpu = [], torch.device("cpu")
    runtime = Runtime(
        Launch(rank, 2, rank, 2), place(PlacementConfig(), world=2, local_world=2), cpu, 30.0
    )
    large = torch.zeros(10**7)  # more than the kernel takes off a sender's hands
    for step, (victim, at) in enumerate(STOPS):
        runtime.status.set_phase(f"phase {step} of {rank}")
        at = at if rank == victim else ""
        wire = StoppingWire(
            at, rank, dist.new_group(), runtime.wire_store, cpu, 0.4, runtime.status.describe
        )
        hop = Hop("rollouts", step, 3, 0, 1)
        runtime.all_gather(f"stop {step}", "")
        began = time.monotonic()
        try:
            if rank == 0:
                wire.send(hop, large, [])
            else:
                wire.recv(hop, torch.float32, lambda _: len(large))
            found.append("it came")
        except Woken:
            pass
        except WireError as error:
            took = time.monotonic() - began
            while (
                not (stopped := runtime.status.suspended_ranks()) and time.monotonic() < began + 20
            ):
                time.sleep(0.01)
            found.append((str(error), took, stopped, runtime.status.phases()))
            os.kill(runtime.status.pids[victim], signal.SIGCONT)
    return found


def test_a_rank_that_is_stopped_anywhere_on_the_wire_is_named_with_the_other_in_time():
    said = run_ranks(2, stopping_rank)
    for step, (victim, at) in enumerate(STOPS):
        text, took, stopped, phases = said[1 - victim].pop(0)
        for part in (
            f"step {step} rollouts chunk 3",
            f"phase {step} of 0",
            f"phase {step} of 1",
            "waited 0.4 s",
        ):
            assert part in text, (victim, at)
        assert re.search(f"(from|to) {('actor', 'critic')[victim]} rank {victim} on ", text), (
            victim,
            at,
        )
        assert took < 10, (victim, at)
        assert re.fullmatch(
            rf"\w+ rank {victim} on \S+ \(in 'phase {step} of {victim}'\) is suspended .*", stopped
        )
        assert phases == f"rank 0 in 'phase {step} of 0'; rank 1 in 'phase {step} of 1'"
    assert said == [[], []]
