"""A model on one group: sharded forward passes, PPO updates, the stream of full weights."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from splitppo import algo
from splitppo.config import OptimConfig
from splitppo.models.attention import is_packed
from splitppo.models.balance import balance
from splitppo.models.build import clean
from splitppo.models.sharding import all_max, all_sum, gather_full, keep_gathered, local, shard_again
from splitppo.models.weights import persistent_buffers
from splitppo.rollout import ROUND, MicroBatch, Rollout, Sample, cut_lengths, deal, micro_batch, pad_rows, to_device

GATHER_BYTES = 2**27  # of full weights gathered in one message, at least: a message a tensor would mostly be waits

# (model, rows) -> `[B, T]` tensors
Outputs = Callable[[nn.Module, MicroBatch], Sequence[Tensor]]
# (model, rows, per-token fields `[B, T]`) -> (loss, token means)
Objective = Callable[[nn.Module, MicroBatch, dict[str, Tensor]], tuple[Tensor, dict[str, Tensor]]]


@dataclass(frozen=True)
class Runner:
    """How a group runs forward passes over rows of any lengths.

    Attributes:
        mesh: the group; its ranks run in lockstep, micro-batch by micro-batch.
        budget: tokens of a micro-batch at most, padding counted.
    """

    mesh: DeviceMesh
    device: torch.device
    budget: int

    @torch.no_grad()
    def forward(self, model: nn.Module, rollout: Rollout, outputs: Outputs, *, fields: int) -> list[Tensor]:
        """Runs the model over this rank's rows; all ranks of the group must call it, even those without rows.

        Returns:
            `fields` packed tensors `[N]`, float32 on the CPU.
        """
        by_row: list[dict[int, Tensor]] = [{} for _ in range(fields)]
        (cut,) = self.cut(model, [rollout.totals])
        found = []
        for rows in cut:
            batch = micro_batch([rollout.samples[i] for i in rows], self.device, packed=is_packed(model))
            found.append([out.float() for out in outputs(model, batch)])
        for rows, outs in zip(cut, found, strict=True):  # only now: reading waits for the GPU, which would then idle
            for field, out in zip(by_row, outs, strict=True):
                for i, line in zip(rows, out.cpu(), strict=False):
                    field[rollout.rows[i]] = line[: rollout.lengths[i]]
        return [rollout.pack(field) for field in by_row]

    def cut(self, model: nn.Module, rows: Sequence[Sequence[int]]) -> list[list[list[int]]]:
        """Cuts sets of rows, given by their tokens, into micro-batches of about the same work, as many of each set on
        every rank of the group: indices into the set. All ranks of the group must call it."""
        packed = is_packed(model)
        cuts = [cut_lengths(lengths, self.budget, packed=packed) for lengths in rows]
        counts = all_max([len(cut) for cut in cuts], self.mesh)
        if packed:
            even = [
                deal([work(model, n) for n in lengths], count, sizes=lengths, room=self.budget)
                for lengths, count in zip(rows, counts, strict=True)
            ]
            cuts = [dealt or cut for dealt, cut in zip(even, cuts, strict=True)]
        return [padded(cut, count) for cut, count in zip(cuts, counts, strict=True)]


def work(model: nn.Module, tokens: int) -> float:
    """The work of a row, in tokens of a short one: a layer's matrices have about 12 H^2 numbers, and a token attends to
    half the row, H numbers twice for each token of it."""
    return tokens * (1 + tokens / (12 * _width(model)))


def _width(model: nn.Module) -> int:
    return cast(Any, model).config.get_text_config(decoder=True).hidden_size


class Learner:
    """A sharded model with its optimizer.

    Args:
        model: sharded by `parallelize` and filled.
        runner: how its group runs.
        optim: AdamW and its schedule.
        steps: training steps of the run, for the schedule.
        aggregate: how token losses become one number (`algo.aggregate_loss`).
        gather_once: gather weights and reduce gradients once a mini-batch.
    """

    def __init__(
        self,
        model: nn.Module,
        runner: Runner,
        optim: OptimConfig,
        *,
        steps: int,
        aggregate: algo.Aggregate,
        gather_once: bool = False,
    ):
        self.model, self.runner, self.optim, self.steps = model, runner, optim, steps
        self.gather_once = gather_once
        self.aggregate: algo.Aggregate = aggregate
        decay = [p for p in model.parameters() if p.ndim >= 2]
        plain = [p for p in model.parameters() if p.ndim < 2]
        groups = [{"params": decay, "weight_decay": optim.weight_decay}, {"params": plain, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True
        )
        self.updates = 0

    def learning_rate(self, step: int) -> float:
        """Of a step, counted from 1."""
        optim = self.optim
        return algo.learning_rate(
            step,
            steps=self.steps,
            peak=optim.lr,
            schedule=optim.schedule,
            warmup_steps=optim.warmup_steps,
            min_lr_ratio=optim.min_lr_ratio,
        )

    def warm_up(self, outputs: Outputs, objective: Objective, *, fields: int, given: Sequence[str]) -> None:
        """Runs all that a step runs, once, over made-up rows: layers are compiled in the first pass.

        Args:
            fields: what `outputs` gives. given: names of the fields that the objective needs.
        """
        rollout = made_up(min(self.runner.budget, 4096))
        self.runner.forward(self.model, rollout, outputs, fields=fields)
        batch = micro_batch(rollout.samples, self.runner.device, packed=is_packed(self.model))
        nothing = torch.zeros(batch.mask.shape, device=self.runner.device)
        loss, _ = objective(self.model, batch, dict.fromkeys(given, nothing))
        loss.backward()
        self.optimizer.zero_grad()

    def update(
        self,
        rollout: Rollout,
        mini_batches: Sequence[Sequence[int]],
        fields: dict[str, Tensor],
        objective: Objective,
        *,
        step: int,
        epochs: int,
    ) -> list[dict[str, float]]:
        """One optimizer step for each mini-batch and epoch.

        Losses are normalised by the whole mini-batch over all ranks: gradients don't depend on how it is cut.

        Args:
            rollout: this rank's rows.
            mini_batches: this rank's rows of each mini-batch; may be empty. One that is empty on all ranks is no step.
            fields: packed tensors `[N]` that the objective needs.

        Returns:
            For each optimizer step: `loss`, `grad_norm` (before clipping), `skipped` (1 if its gradient was not
            finite) and the objective's metrics, over the whole mini-batch. Of the whole update: `padding`, the share of
            the tokens run that are padding, `imbalance`, by how much the rank with the most tokens has more than the
            mean, and `update_tflop`, a rank's 10^12 model FLOPs (6 for each token and parameter).
        """
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(step)
        rollout, mini_batches, fields = self._balanced(rollout, mini_batches, fields)
        pieces = {name: rollout.split(packed) for name, packed in fields.items()}
        plans, totals = self._plan(rollout, mini_batches)
        share = self._shares(rollout, plans, epochs)
        sums, norms = [], []
        for _ in range(epochs):
            for plan, total in zip(plans, totals, strict=True):
                sums.append(self._accumulate(rollout, plan, pieces, objective, total))
                norms.append(self._optimizer_step())
        self.updates += 1
        steps = [{"grad_norm": norm, "skipped": float(not math.isfinite(norm))} for norm in map(float, norms)]
        return [figures | step | share for figures, step in zip(self._over_group(sums), steps, strict=True)]

    def sharded(self) -> dict[str, nn.Parameter]:
        """The weights by Hugging Face name, each rank's shards of them."""
        cast(FSDPModule, self.model).reshard()  # a forward without a backward leaves the outermost weights whole
        return {clean(name): parameter for name, parameter in self.model.named_parameters()}

    def check_finite(self) -> None:
        """Of the weights; all ranks of the group must call it.

        Raises:
            FloatingPointError: on all of them, if one has a number that is not finite.
        """
        named = self.sharded()
        bad = torch.stack([~local(parameter).isfinite().all() for parameter in named.values()]).int().tolist()
        wrong = [name for name, found in zip(named, all_max(bad, self.runner.mesh), strict=True) if found]
        if wrong:
            raise FloatingPointError(f"weights are not finite: {len(wrong)} tensors, the first of them {wrong[0]}")

    def weights(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """The full weights and what belongs to them untrained, by Hugging Face name, in `dtype`. All ranks of the group
        must consume it.

        A tensor may share memory with the weight, and is good until the next is asked for: copy what is to be kept.
        """
        named: list[tuple[str, Tensor]] = []
        for name, parameter in self.sharded().items():
            named.append((name, parameter))
            if sum(weight.numel() for _, weight in named) * dtype.itemsize >= GATHER_BYTES:
                yield from self._gathered(named, dtype)
                named = []
        yield from self._gathered(named, dtype)
        yield from ((name, buffer.to(dtype)) for name, buffer in persistent_buffers(self.model).items())

    def _gathered(self, named: list[tuple[str, Tensor]], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        if named:
            full = gather_full([weight for _, weight in named], dtype)
            yield from zip([name for name, _ in named], full, strict=True)

    def _balanced(
        self, rollout: Rollout, mini_batches: Sequence[Sequence[int]], fields: dict[str, Tensor]
    ) -> tuple[Rollout, Sequence[Sequence[int]], dict[str, Tensor]]:
        mesh, device = self.runner.mesh, self.runner.device
        if mesh.size() == 1:
            return rollout, mini_batches, fields
        return balance(rollout, mini_batches, fields, partial(work, self.model), mesh, device)

    def _plan(
        self, rollout: Rollout, mini_batches: Sequence[Sequence[int]]
    ) -> tuple[list[list[list[int]]], list[tuple[float, float]]]:
        """For each mini-batch: its micro-batches (as many on every rank) as indices of rows, and over the group its
        loss weight and its tokens."""
        held = [[rollout.index[row] for row in rows] for rows in mini_batches]
        cuts = self.runner.cut(self.model, [[rollout.totals[i] for i in rows] for rows in held])
        plans = [[[rows[i] for i in micro] for micro in cut] for rows, cut in zip(held, cuts, strict=True)]
        sums = []
        for rows in held:
            mask = pad_rows([torch.ones(rollout.lengths[i]) for i in rows]) if rows else torch.zeros(1, 1)
            sums.append([float(algo.aggregate_weight(mask, self.aggregate)), float(mask.sum())])
        totals = all_sum(torch.tensor(sums), self.runner.mesh)
        kept = [i for i, (weight, _) in enumerate(totals) if weight > 0]  # no rank may have a row to learn from
        return [plans[i] for i in kept], [(float(totals[i][0]), float(totals[i][1])) for i in kept]

    def _shares(self, rollout: Rollout, plans: list[list[list[int]]], epochs: int) -> dict[str, float]:
        micro_batches = [[rollout.totals[i] for i in rows] for plan in plans for rows in plan if rows]
        tokens = [sum(rollout.totals[i] for micro in plan for i in micro) for plan in plans]
        packed = is_packed(self.model)
        run = sum(-(-sum(rows) // ROUND) * ROUND if packed else len(rows) * max(rows) for rows in micro_batches)
        all_tokens, all_run = all_sum(torch.tensor([float(sum(tokens)), float(run)]), self.runner.mesh).tolist()
        most = sum(all_max(tokens, self.runner.mesh)) if tokens else 0
        mean = all_tokens / self.runner.mesh.size()
        if not all_run:
            return {}
        tflop = 6e-12 * mean * epochs * sum(parameter.numel() for parameter in self.model.parameters())
        return {"padding": 1 - all_tokens / all_run, "imbalance": most / mean - 1, "update_tflop": tflop}

    def _accumulate(
        self,
        rollout: Rollout,
        plan: list[list[int]],
        pieces: dict[str, list[Tensor]],
        objective: Objective,
        total: tuple[float, float],
    ) -> dict[str, Any]:
        """Forward and backward over a mini-batch; returns this rank's part of its figures, still on the device."""
        sums: dict[str, Any] = {}
        for number, rows in enumerate(plan, 1):
            if self.gather_once:
                keep_gathered(self.model, last=number == len(plan))
            samples = [rollout.samples[i] for i in rows]
            batch = micro_batch(samples, self.runner.device, packed=is_packed(self.model))
            packed = {name: [split[i] for i in rows] or [torch.zeros(1)] for name, split in pieces.items()}
            padded = {name: to_device(pad_rows(tensors), self.runner.device) for name, tensors in packed.items()}
            loss, metrics = objective(self.model, batch, padded)
            loss = loss * (algo.aggregate_weight(batch.mask, self.aggregate) / total[0])
            loss.backward()
            share = batch.mask.sum() / total[1]
            parts = {name: value * share for name, value in metrics.items()} | {"loss": loss.detach()}
            sums = {name: sums.get(name, 0.0) + part for name, part in parts.items()}
        if self.gather_once:
            shard_again(self.model)
        return sums

    def _optimizer_step(self) -> Tensor:
        """Clips, steps, clears. A gradient that isn't finite is dropped: its norm, over the group, tells every rank
        alike. Returns that norm, still on the device: nothing here waits for the GPU."""
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        norm: Any = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if self.optim.max_grad_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(parameters, self.optim.max_grad_norm, norm)
        # what a loss scaler tells a fused optimizer: 1 leaves weights and state as they are
        cast(Any, self.optimizer).found_inf = (~norm.isfinite()).float()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def _over_group(self, sums: list[dict[str, Any]]) -> list[dict[str, float]]:
        """Sums the ranks' parts of the figures of all optimizer steps in one message."""
        parts = [[float(part) for part in figures.values()] for figures in sums]
        totals = all_sum(torch.tensor(parts, dtype=torch.float64), self.runner.mesh).tolist() if parts else []
        return [dict(zip(sums[0], row, strict=True)) for row in totals]


def made_up(tokens: int = 4096) -> Rollout:
    """Rows to compile with, of so many tokens or a few more, and of sizes that no dimension of a model has, since equal
    ones are taken for one."""
    rows = -(-tokens // 106) | 1
    return Rollout([Sample(row, [0] * 7, [0] * 99, [0.0] * 99, True) for row in range(rows)])


def padded(cut: list[list[int]], count: int) -> list[list[int]]:
    """As many micro-batches as every rank runs; the added ones have no rows."""
    return cut + [[] for _ in range(count - len(cut))]
