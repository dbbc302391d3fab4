"""A model on one group: sharded forward passes, PPO updates, full weights for the engine."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from splitppo import algo
from splitppo.config import Config, Offload, OptimConfig
from splitppo.models.batching import Cut, Fields, MicroBatch, MiniBatches, dummy_rollout, to_device
from splitppo.models.names import buffers_of
from splitppo.models.offload import HostShards, HostState, Offloaded, state_of
from splitppo.models.runner import Outputs, Runner
from splitppo.models.sequence import sequence_of
from splitppo.models.sharding import gradient_norm, local
from splitppo.models.trainable import Trainable
from splitppo.placement import Role, StepPlan
from splitppo.rollout import Rollout

# figures of the work; they depend on the placement
WORK = ("update_tflop",)
# full weights gathered in one message, at least: with a message per tensor, latency dominates
GATHER_BYTES = 2**27
WHOLE = Trainable("policy")

# (model, rows, fields `[N]`) -> (loss, metrics averaged over tokens)
Objective = Callable[[nn.Module, MicroBatch, Fields], tuple[Tensor, dict[str, Tensor]]]


class Learner:
    """A sharded model with its optimizer.

    Args:
        model: sharded by `parallelize` and filled.
        optim: AdamW and its schedule over the run's `steps`.
        flops: of a token's forward and backward pass.
        aggregate: how token losses become one number (`algo.aggregate_loss`).
        offload: what is in host memory while it is not needed, as in `policy.offload`.
        trainable: what of the model is trained. The rest may be another learner's, too.
    """

    def __init__(
        self,
        model: nn.Module,
        runner: Runner,
        optim: OptimConfig,
        *,
        steps: int,
        aggregate: algo.Aggregate,
        offload: Offload = "none",
        trainable: Trainable = WHOLE,
        flops: float = 0.0,
    ):
        self.model = model
        self.trainable = trainable
        self.flops = flops
        self.runner = runner
        self.optim = optim
        self.steps = steps
        self.aggregate: algo.Aggregate = aggregate
        trained = trainable.trained(model).values()
        # some versions of torch run the fused kernel on one mesh only
        alike: dict[Any, list[nn.Parameter]] = {}
        for p in sorted(trained, key=lambda p: p.ndim < 2):
            alike.setdefault((p.ndim < 2, getattr(p, "device_mesh", None)), []).append(p)
        decay = {True: 0.0, False: optim.weight_decay}  # True: biases and norms
        groups = [{"params": p, "weight_decay": decay[plain]} for (plain, _), p in alike.items()]
        self.optimizer = torch.optim.AdamW(
            groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True
        )
        self.updates = 0
        # steps of the run before the model's first update: its schedule begins after them
        self.waited = 0
        self.host_state = HostState(self.optimizer, runner.device) if offload != "none" else None
        self.shards = HostShards(model, runner.device) if offload == "all" else Offloaded()
        self.release_memory(changed=True)

    def release_memory(self, *, changed: bool = False) -> None:
        """Gives back the weights' memory on the device if they are offloaded. `changed` is as in
        `HostShards`."""
        self.shards.release(changed=changed)

    def forward(self, rollout: Rollout, outputs: Outputs) -> list[Tensor]:
        """`Runner.forward` of the model. Its weights stay on the device."""
        self.shards.fetch()
        return self.runner.forward(self.model, rollout, outputs)

    def state_of(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """AdamW's state of a parameter: the tensors themselves, not copies."""
        if self.host_state:
            self.host_state.finish()
            return self.host_state.state[parameter]
        return state_of(self.optimizer, parameter)

    def learning_rate(self, step: int) -> float:
        """The learning rate of a step, counted from 1; not one of those in which the model
        waits."""
        return learning_rate(step - self.waited, self.steps - self.waited, self.optim)

    def warm_up(
        self,
        outputs: Outputs,
        objective: Objective,
        *,
        columns: Callable[[Rollout, Tensor], Fields],
    ) -> None:
        """Compiles what a step runs, over dummy rows. `columns` gives what the objective needs of a
        rollout and of zeros `[N]`."""
        rollout = dummy_rollout(min(self.runner.budget, 4096))
        self.forward(rollout, outputs)
        batch = self.runner.micro_batch(self.model, rollout.episodes)
        by_name = columns(rollout, torch.zeros(rollout.tokens))
        loss, _ = objective(
            self.model,
            batch,
            {name: to_device(column, self.runner.device) for name, column in by_name.items()},
        )
        loss.backward()
        self.optimizer.zero_grad()
        self.release_memory()

    def update(
        self,
        rollout: Rollout,
        mini_batches: MiniBatches,
        fields: Fields,
        objective: Objective,
        step: int,
        epochs: int,
    ) -> list[dict[str, float]]:
        """One optimizer step for each mini-batch and epoch. Losses are normalised by the whole
        mini-batch over all ranks, so gradients don't depend on how it is cut.

        Args:
            mini_batches: the places of this rank's rows of each mini-batch. A mini-batch that is
                empty on all ranks is no step.
            fields: packed tensors `[N, ...]` that the objective needs.

        Returns:
            For each optimizer step, over the whole mini-batch: `loss`, `grad_norm` before clipping,
            `skipped` (1 if the gradient was not finite), the objective's metrics. For the whole
            update: `update_tflop`, a rank's model FLOPs in 10^12 (`Cost.flops`).
        """
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = self.learning_rate(step)
        rollout, mini_batches, fields = self.runner.balance(
            self.model, rollout, mini_batches, fields
        )
        lengths = rollout.sequence_lengths
        # behind those of the rows what none of them is
        pieces = {name: packed.split([*lengths, 0]) for name, packed in fields.items()}
        plans, totals = self._plan(rollout, mini_batches)
        sums = []
        norms = []
        self.shards.fetch()
        load = cast(Any, self.model).load
        load.clear()
        for _ in range(epochs):
            for plan, total in zip(plans, totals, strict=True):
                sums.append(self._accumulate(rollout, plan, pieces, objective, total))
                norms.append(self._optimizer_step())
        self.updates += 1
        self.release_memory(changed=True)
        if not sums:
            return []
        tokens = torch.tensor([metrics.pop("tokens") for metrics in sums], dtype=torch.float64)
        trained = self.runner.group.all_sum(tokens).sum().item() / self.runner.group.dp_size
        # of all steps in one message
        parts = [[float(part) for part in metrics.values()] for metrics in sums]
        rows = self.runner.group.all_sum(torch.tensor(parts, dtype=torch.float64)).tolist()
        steps = [dict(zip(sums[0], row, strict=True)) for row in rows]
        sequence = sequence_of(self.model)
        work_metrics = {
            "update_tflop": 1e-12 * self.flops * trained / (sequence.size if sequence else 1)
        } | load.figures(self.runner.group)
        return [
            step | {"grad_norm": norm, "skipped": float(not math.isfinite(norm))} | work_metrics
            for step, norm in zip(steps, map(float, norms), strict=True)
        ]

    def sharded(
        self, select: Callable[[nn.Module], dict[str, nn.Parameter]] | None = None
    ) -> dict[str, nn.Parameter]:
        """This rank's shards of the weights, by Hugging Face name, on the device. `select`: the
        method of `trainable` that says which, by default `parameters`."""
        self.shards.fetch()
        # a forward without a backward leaves the root's weights gathered
        cast(FSDPModule, self.model).reshard()
        return (select or self.trainable.parameters)(self.model)

    def set_weight(self, name: str, value: Tensor) -> None:
        """Fills a weight, by Hugging Face name, with a number `[]`."""
        local(self.sharded()[name]).fill_(value)
        self.release_memory(changed=True)

    def check_finite(self) -> None:
        """Raises a FloatingPointError on all ranks of the group, which must call it, if a weight is
        not finite."""
        named = self.sharded()
        bad = torch.stack([~local(parameter).isfinite().all() for parameter in named.values()])
        on_any_rank = self.runner.group.all_max(bad.int().tolist())
        wrong = [name for name, count in zip(named, on_any_rank, strict=True) if count]
        if wrong:
            raise FloatingPointError(
                f"weights are not finite: {len(wrong)} tensors, the first of them {wrong[0]}"
            )

    def weights(self, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
        """The full weights, with adapters merged into them, and persistent buffers, by Hugging Face
        name. All ranks of the group must consume them. A tensor may be a view of the weight, and is
        valid until the next one is asked for. In the end the weights' memory is released."""
        gather = self.trainable.gather
        names = cast(Any, self.model).folder_names
        sent = self.sharded(self.trainable.sent)
        exact: dict[str, Tensor] = {name: sent.pop(name) for name in [*sent] if names.exact(name)}
        yield from gather(self.model, exact, torch.float32)
        named: dict[str, Tensor] = {}
        for name, parameter in sent.items():
            named[name] = parameter
            if sum(weight.numel() for weight in named.values()) * dtype.itemsize >= GATHER_BYTES:
                yield from gather(self.model, named, dtype)
                named = {}
        yield from gather(self.model, named, dtype)
        for name, buffer in buffers_of(self.model).items():
            yield name, buffer.to(torch.float32 if names.exact(name) else dtype)
        self.release_memory()

    def _plan(
        self, rollout: Rollout, mini_batches: MiniBatches
    ) -> tuple[list[Cut], list[list[float]]]:
        """For each mini-batch: its micro-batches, as many on every rank; its loss weight and tokens
        over the group."""
        whole = [[rollout.totals[i] for i in places] for places in mini_batches]
        cuts = self.runner.cut(self.model, whole)
        sums = []
        for places in mini_batches:
            lengths = torch.tensor([rollout.sequence_lengths[i] for i in places], dtype=torch.int64)
            weight = algo.aggregate_weight(lengths, self.aggregate)
            sums.append([float(weight), float(lengths.sum())])
        totals = self.runner.group.all_sum(torch.tensor(sums)).tolist()
        # one may be without rows
        trained = [i for i, (weight, _) in enumerate(totals) if weight > 0]
        plans = [[[mini_batches[i][k] for k in micro] for micro in cuts[i]] for i in trained]
        return plans, [totals[i] for i in trained]

    def _accumulate(
        self,
        rollout: Rollout,
        plan: Cut,
        pieces: Mapping[str, Sequence[Tensor]],
        objective: Objective,
        total: Sequence[float],
    ) -> dict[str, Any]:
        """Forward and backward over a mini-batch; returns this rank's part of its metrics, still on
        the device."""
        sums: dict[str, Any] = {}
        for rows in plan:
            episodes = [rollout.episodes[i] for i in rows]
            batch = self.runner.micro_batch(self.model, episodes)
            fields = {
                name: to_device(torch.cat([tensors[i] for i in (*rows, -1)]), self.runner.device)
                for name, tensors in pieces.items()
            }
            loss, metrics = objective(self.model, batch, fields)
            loss = loss * (algo.aggregate_weight(batch.lengths, self.aggregate) / total[0])
            loss.backward()
            fraction = batch.lengths.sum() / total[1]
            parts: dict[str, Any] = {name: value * fraction for name, value in metrics.items()}
            parts["loss"] = loss.detach()
            parts["tokens"] = sum(rollout.totals[i] for i in rows)
            sums = {name: sums.get(name, 0.0) + part for name, part in parts.items()}
        return sums

    def _optimizer_step(self) -> Tensor:
        """Clips, steps, clears. A step whose gradient is not finite is skipped: its norm is the
        group's, so all ranks agree. Returns the norm, still on the device: nothing here waits for
        the GPU."""
        norm = gradient_norm(self.model)
        if self.optim.max_grad_norm > 0:
            scale = (self.optim.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
            torch._foreach_mul_(
                [local(p.grad) for p in self.model.parameters() if p.grad is not None], scale
            )
        # a loss scaler's flag for fused optimizers: 1 leaves weights and state as they are
        cast(Any, self.optimizer).found_inf = (~norm.isfinite()).float()
        self.host_state.step() if self.host_state else self.optimizer.step()
        self.optimizer.zero_grad()
        return norm


def learning_rate(step: int, steps: int, optim: OptimConfig) -> float:
    """Learning rate of a step; steps count from 1 to `steps`.

    Warm-up step s <= w has `lr * s / w`. From the first step at the peak (w, or 1 without a
    warm-up) `linear` and `cosine` (half a period) go down to `min_lr_ratio * lr` at step `steps`; a
    run of one step keeps the peak.
    """
    if step <= optim.warmup_steps:
        return optim.lr * step / optim.warmup_steps
    top = max(optim.warmup_steps, 1)
    if optim.schedule == "constant" or step == top:
        return optim.lr
    progress = min((step - top) / (steps - top), 1.0) if steps > top else 1.0
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    share = 1 - progress if optim.schedule == "linear" else cosine
    return optim.lr * (optim.min_lr_ratio + (1 - optim.min_lr_ratio) * share)


def trainable_rows(
    config: Config, plan: StepPlan, rollout: Rollout, role: Role, rank: int, count: int = 0
) -> list[list[int]]:
    """The places of the rows of each mini-batch that the losses are over; the last arguments are
    those of `StepPlan.slots`."""
    masked = config.ppo.mask_truncated
    trained = [not (masked and episode.is_unfinished) for episode in rollout.episodes]
    mini_batches = (plan.places(slots, rollout.rows) for slots in plan.slots(role, rank, count))
    return [[place for place in places if trained[place]] for places in mini_batches]


def learning_metrics(
    role: str, loss: str, figures: Sequence[dict[str, float]], names: Sequence[str]
) -> dict[str, Any]:
    """Means over a step's optimizer steps (`figures`, of `Learner.update`), those that were
    skipped, and the bare figures of each. A step that trained on no row has 0 for every mean.
    `names`: of the objective's metrics."""
    metrics: dict[str, Any] = {}
    for name in figures[0] if figures else (*names, "loss", "grad_norm", "skipped", *WORK):
        total = sum((figure[name] for figure in figures), 0.0)
        full = f"perf/{name}" if name in WORK else f"{role}/{loss if name == 'loss' else name}"
        metrics[full] = total if name == "skipped" else total / max(1, len(figures))
    metrics["optimizer_steps"] = [
        {name: figure[name] for name in ("loss", "grad_norm")} for figure in figures
    ]
    return metrics
