"""Forward passes of a sharded model over rows of any lengths; moving rows between its ranks; frozen
models."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn

from splitppo.job.collectives import Group, ranks_of
from splitppo.models.attention import is_packed
from splitppo.models.batching import (
    Cut,
    Fields,
    MicroBatch,
    MiniBatches,
    cut_lengths,
    micro_batch,
    partition,
)
from splitppo.models.heads import adapters_off
from splitppo.models.offload import HostShards, Offloaded
from splitppo.models.sequence import sequence_of
from splitppo.rollout import Episode, Rollout
from splitppo.rollout.wire import exchange_rows, exchange_tensors, pack

# (model, rows) -> `[N, ...]` tensors
Outputs = Callable[[nn.Module, MicroBatch], Sequence[Tensor]]


@dataclass(frozen=True)
class Runner:
    """How a group runs forward passes: in lockstep, micro-batch by micro-batch. `budget` is the
    number of tokens that a rank may have of a micro-batch, padding counted."""

    group: Group
    device: torch.device
    budget: int

    @torch.no_grad()
    def forward(self, model: nn.Module, rollout: Rollout, outputs: Outputs) -> list[Tensor]:
        """Runs the model over this rank's rows. All ranks of the group must call it, even those
        without rows. Returns the `outputs` of all response tokens, packed, on the CPU."""
        (cut,) = self.cut(model, [rollout.totals])
        # where no rank has rows, a dummy shows what the outputs are
        cut = cut or [[]]
        computed = []
        for places in cut:
            batch = self.micro_batch(model, [rollout.episodes[place] for place in places])
            computed.append(outputs(model, batch))
        pieces: list[list[Tensor]] = [[] for _ in computed[0]]
        # in a loop of its own: reading a result waits for the GPU, which would then be idle
        for places, outs in zip(cut, computed, strict=True):
            lengths = [rollout.sequence_lengths[place] for place in places]
            for field, out in zip(pieces, outs, strict=True):
                field += out.cpu().split(lengths)
        return [
            pack(field, chain(*cut), out[:0].cpu())
            for field, out in zip(pieces, computed[0], strict=True)
        ]

    def micro_batch(self, model: nn.Module, episodes: Sequence[Episode]) -> MicroBatch:
        """The rows in the form that the model takes."""
        return micro_batch(
            episodes, self.device, packed=is_packed(model), sequence=sequence_of(model)
        )

    def cut(self, model: nn.Module, rows: Sequence[Sequence[int]]) -> list[Cut]:
        """Cuts sets of rows, given by their tokens, into micro-batches of about equal work. A set
        has equally many on all ranks of the group, which must all call it; some may be without
        rows. Returns indices into the sets."""
        packed = is_packed(model)
        sequence = sequence_of(model)
        budget = self.budget * (sequence.size if sequence else 1)
        cuts = [cut_lengths(lengths, budget, packed=packed) for lengths in rows]
        counts = self.group.all_max([len(cut) for cut in cuts])
        if packed:
            for i, (lengths, count) in enumerate(zip(rows, counts, strict=True)):
                cuts[i] = (
                    partition(work(model, lengths), count, sizes=lengths, room=budget) or cuts[i]
                )
        return [
            cut + [[] for _ in range(count - len(cut))]
            for cut, count in zip(cuts, counts, strict=True)
        ]

    def balance(
        self, model: nn.Module, rollout: Rollout, mini_batches: MiniBatches, fields: Fields
    ) -> tuple[Rollout, MiniBatches, Fields]:
        """Spreads the rows of each mini-batch over the group's ranks, all of which must call it, so
        that all have about equal work. All learn the rows' lengths; a row itself goes to the rank
        that trains on it alone. `mini_batches` are places in the rollout, `fields` packed tensors
        `[N, ...]`. Returns what this rank trains on, in the form of the arguments; the episodes
        have no log-probs."""
        group = self.group
        if group.dp_size == 1:
            return rollout, mini_batches, fields
        held = [{rollout.rows[i]: rollout.totals[i] for i in part} for part in mini_batches]
        trained: list[list[int]] = []  # by this rank: the rows of each mini-batch
        sent: list[list[int]] = [[] for _ in range(group.dp_size)]  # to each rank
        for part, parts in zip(held, zip(*group.all_gather(held), strict=True), strict=True):
            # row of the mini-batch -> its tokens
            tokens = {row: total for of_rank in parts for row, total in of_rank.items()}
            rows = sorted(tokens)
            bins = partition(work(model, [tokens[row] for row in rows]), group.dp_size) or []
            trained.append([rows[i] for i in bins[group.dp_rank]])
            for to_rank, items in zip(sent, bins, strict=True):
                to_rank += rollout.places(rows[i] for i in items if rows[i] in part)
        episodes = exchange_rows(group, [[rollout.episodes[i] for i in part] for part in sent])
        balanced = Rollout(episodes)
        places = balanced.places(episode.row for episode in episodes)
        values = exchange_tensors(group, list(fields.values()), rollout, sent, balanced, places)
        trained_places = [balanced.places(rows) for rows in trained]
        return balanced, trained_places, dict(zip(fields, values, strict=True))


def work(model: nn.Module, tokens: Sequence[int]) -> list[float]:
    """The costs of rows, in tokens of a short row. A layer's matrices have about 12 H^2 numbers.
    Attention costs a token 2 H for each token that it sees, half the row on average."""
    width = cast(Any, model).config.get_text_config(decoder=True).hidden_size
    return [count * (1 + count / (12 * width)) for count in tokens]


class Frozen:
    """A sharded model that runs and is never trained. With `offload`, its shards are in host memory
    between uses. `shards`: those of a learner that has the same model."""

    def __init__(
        self,
        model: nn.Module,
        runner: Runner,
        outputs: Outputs,
        *,
        offload: bool = False,
        shards: Offloaded | None = None,
    ):
        self.model = model
        self.runner = runner
        self.outputs = outputs
        self.shards = shards or (HostShards(model, runner.device) if offload else Offloaded())
        self.release_memory()

    def run(self, episodes: Sequence[Episode]) -> list[Tensor]:
        """The outputs (`Runner.forward`) of these rows, in their order, packed. All ranks of the
        group must call it. The model runs also the rows of the other ranks with which it shares
        layers."""
        peers = ranks_of(self.model).peers
        whole = Rollout(exchange_rows(peers, [episodes] * peers.dp_size) if peers else episodes)
        self.shards.fetch()
        computed = self.runner.forward(self.model, whole, self.outputs)
        places = whole.places(episode.row for episode in episodes)
        return [whole.select(out, places) for out in computed]

    def release_memory(self) -> None:
        """With `offload`, gives back the shards' memory on the device."""
        self.shards.release(changed=False)


class Reference(Frozen):
    """The frozen model of the KL penalty; `outputs` are the policy's, without entropies. It may be
    the policy with its adapters off (lora.py)."""

    def logprobs(self, rollout: Rollout) -> Tensor:
        """`[N]` log-probs of the response tokens. All ranks of the group must call it, even those
        without rows."""
        with adapters_off(self.model):
            return self.run(rollout.episodes)[0]
