"""Forward passes of a sharded model over rows of any lengths; frozen models."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from splitppo.job.collectives import Group
from splitppo.models.attention import is_packed
from splitppo.models.balance import gather_samples
from splitppo.models.batching import Cut, MicroBatch, cut_lengths, micro_batch, partition
from splitppo.models.heads import PolicyOutputs
from splitppo.models.offload import HostShards
from splitppo.models.tensor import parts_of
from splitppo.rollout import Rollout, Sample

Outputs = Callable[[nn.Module, MicroBatch], Sequence[Tensor]]  # (model, rows) -> `[B, T]` tensors


@dataclass(frozen=True)
class Runner:
    """How a group runs forward passes: in lockstep, micro-batch by micro-batch. `budget` is the number of tokens that a
    micro-batch may have, padding counted."""

    group: Group
    device: torch.device
    budget: int

    @torch.no_grad()
    def forward(self, model: nn.Module, rollout: Rollout, outputs: Outputs, *, fields: int) -> list[Tensor]:
        """Runs the model over this rank's rows. All ranks of the group must call it, even those without rows. Returns
        packed tensors `[N]`, float32 on the CPU, as many as `fields`."""
        (cut,) = self.cut(model, [rollout.totals])
        found = []
        for rows in cut:
            batch = micro_batch([rollout.samples[i] for i in rows], self.device, packed=is_packed(model))
            found.append([out.float() for out in outputs(model, batch)])
        by_row: list[dict[int, Tensor]] = [{} for _ in range(fields)]
        # in a loop of its own: reading a result waits for the GPU, which would then be idle
        for rows, outs in zip(cut, found, strict=True):
            for field, out in zip(by_row, outs, strict=True):
                for i, line in zip(rows, out.cpu(), strict=False):
                    field[rollout.rows[i]] = line[: rollout.lengths[i]]
        return [rollout.pack(field) for field in by_row]

    def cut(self, model: nn.Module, rows: Sequence[Sequence[int]]) -> list[Cut]:
        """Cuts sets of rows, given by their tokens, into micro-batches of about equal work. A set has equally many on
        all ranks of the group, which must all call it. Returns indices into the sets."""
        packed = is_packed(model)
        cuts = [cut_lengths(lengths, self.budget, packed=packed) for lengths in rows]
        counts = self.group.all_max([len(cut) for cut in cuts])
        if packed:
            for i, (lengths, count) in enumerate(zip(rows, counts, strict=True)):
                costs = [work(model, tokens) for tokens in lengths]
                cuts[i] = partition(costs, count, sizes=lengths, room=self.budget) or cuts[i]
        return [padded(cut, count) for cut, count in zip(cuts, counts, strict=True)]


def work(model: nn.Module, tokens: int) -> float:
    """The cost of a row, in tokens of a short row. A layer's matrices have about 12 H^2 numbers. Attention costs a
    token 2 H for each token that it sees, half the row on average."""
    width = cast(Any, model).config.get_text_config(decoder=True).hidden_size
    return tokens * (1 + tokens / (12 * width))


def padded(cut: Cut, count: int) -> Cut:
    """Appends micro-batches without rows, up to `count`."""
    return cut + [[] for _ in range(count - len(cut))]


class Frozen:
    """A sharded model that runs and is never trained. With `offload`, its shards are in host memory between uses. If
    ranks that share its layers own different rows, all of them run all these rows."""

    def __init__(self, model: nn.Module, runner: Runner, *, offload: bool):
        self.model, self.runner = model, runner
        self.shards = HostShards(model, runner.device) if offload else None
        ranks = parts_of(model).ranks
        self.peers = ranks.peers if ranks else None
        self.release_memory()

    def with_peers(self, samples: Sequence[Sample]) -> list[Sample]:
        """The rows that the model must run for these: also those of the other ranks with which it shares layers."""
        return gather_samples(samples, self.peers, self.runner.device) if self.peers else list(samples)

    def to_device(self) -> nn.Module:
        """Returns the model after bringing its shards to the device."""
        if self.shards:
            self.shards.fetch()
        return self.model

    def release_memory(self) -> None:
        """With `offload`, gives back the shards' memory on the device."""
        if self.shards:
            self.shards.release(changed=False)


class Reference(Frozen):
    """The frozen model of the KL penalty; `outputs` are the policy's."""

    def __init__(self, model: nn.Module, runner: Runner, outputs: PolicyOutputs, *, offload: bool):
        super().__init__(model, runner, offload=offload)
        self.outputs = partial(outputs, entropy=False)

    def logprobs(self, rollout: Rollout) -> Tensor:
        """`[N]` log-probs of the response tokens. All ranks of the group must call it, even those without rows."""
        whole = Rollout(self.with_peers(rollout.samples))
        return whole.select(self.runner.forward(self.to_device(), whole, self.outputs, fields=2)[0], rollout.rows)
