"""What a rank of each group holds and can do: the verbs of the loops in train.py."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from splitppo import algo
from splitppo.config import Config
from splitppo.engine import RolloutEngine, Sampling
from splitppo.learner import Learner, Runner
from splitppo.models import policy_outputs, value_outputs
from splitppo.parallel import all_objects, all_sum
from splitppo.placement import Ownership
from splitppo.rewards import RewardFunction
from splitppo.rewards import score as call_reward
from splitppo.rollout import MicroBatch, Prompt, Request, Rollout, Sample

# the rows of a validation draw their noise (if any) apart from those of training
VALIDATION_STEP = 0
PROGRESS_S = 15.0  # seconds between two words on a rollout that takes long


@dataclass(frozen=True)
class Shared:
    """What both roles know of the run.

    Attributes:
        ownership: step -> who owns which row.
        batch: step -> the prompts of its rows.
        held_out: prompts of the validation.
        decode: token ids of a response -> its text.
    """

    config: Config
    ownership: Callable[[int], Ownership]
    batch: Callable[[int], Sequence[Prompt]]
    held_out: Sequence[Prompt]
    reward: RewardFunction
    decode: Callable[[list[int]], str]

    def score(self, prompt: Prompt, response: list[int]) -> tuple[float, dict[str, float]]:
        return call_reward(self.reward, prompt, self.decode(response))


class Reference:
    """The frozen model of the KL penalty; with `offload`, its shards sit on the CPU between its uses."""

    def __init__(self, model: nn.Module, runner: Runner, *, temperature: float, offload: bool):
        self.model, self.runner, self.temperature, self.offload = model, runner, temperature, offload
        if offload:
            model.to("cpu")

    def logprobs(self, rollout: Rollout) -> Tensor:
        """`[N]` log-probs of the response tokens."""
        if self.offload:
            self.model.to(self.runner.device)
        outputs = partial(policy_outputs, temperature=self.temperature, entropy=False)
        logprobs, _ = self.runner.forward(self.model, rollout, outputs, fields=2)
        if self.offload:
            self.model.to("cpu")
        return logprobs


class Actor:
    """A rank of the actor group: policy, reference, rollout engine.

    Args:
        rank: in the group.
        reference: None if no KL coefficient asks for one.
    """

    def __init__(
        self,
        shared: Shared,
        policy: Learner,
        reference: Reference | None,
        engine: RolloutEngine,
        *,
        engine_dtype: torch.dtype,
    ):
        self.shared, self.policy, self.reference, self.engine = shared, policy, reference, engine
        self.mesh: DeviceMesh = policy.runner.mesh
        self.rank = self.mesh.get_local_rank()
        self.engine_dtype = engine_dtype
        self.synced = -1
        self.metrics: dict[str, Any] = {}

    def sync(self) -> None:
        """Brings the policy's weights into the engine, unless it has them."""
        if self.synced != self.policy.updates or not self.engine.loaded:
            self.engine.load_weights(self.policy.weights(self.engine_dtype))
            self.synced = self.policy.updates

    def generate(self, step: int) -> Iterator[list[Sample]]:
        """This rank's rows as they finish; empty lists in between. Says how far it is if it takes long."""
        rollout, batch = self.shared.config.rollout, self.shared.batch(step)
        rows = self.shared.ownership(step).all_rows("actor", self.rank)
        requests = [Request(row, batch[row].tokens) for row in rows]
        limits = {"top_p": rollout.top_p, "top_k": rollout.top_k}
        sampling = Sampling(rollout.temperature, rollout.max_new_tokens, rollout.stop, **limits)
        done, told = 0, time.monotonic()
        for finished in self.engine.generate(requests, sampling, seed=self.shared.config.seed, step=step):
            done += len(finished)
            if self.rank == 0 and time.monotonic() > told + PROGRESS_S:
                print(f"[actor]  step {step:>4}  rollout: {done} of this rank's {len(rows)} rows", flush=True)
                told = time.monotonic()
            yield finished
        self.engine.rest()

    def logprobs(self, rollout: Rollout) -> tuple[Tensor, Tensor]:
        """Old and reference log-probs `[N]`; without a reference, the old ones twice: a KL of 0."""
        outputs = partial(policy_outputs, temperature=self.shared.config.rollout.temperature, entropy=True)
        old, entropy = self.policy.runner.forward(self.policy.model, rollout, outputs, fields=2)
        ref = self.reference.logprobs(rollout) if self.reference else old
        self.metrics = self._rollout_metrics(rollout, old, ref, entropy)
        return old, ref

    def update(self, step: int, rollout: Rollout, old: Tensor, ref: Tensor, advantages: Tensor) -> dict[str, Any]:
        """PPO's policy update; returns the step's metrics."""
        fields = {"old": old, "ref": ref, "advantages": advantages}
        mini_batches = self.shared.ownership(step).rows("actor", self.rank)
        epochs = self.shared.config.ppo.epochs
        figures = self.policy.update(rollout, mini_batches, fields, self._objective, step=step, epochs=epochs)
        metrics = self.metrics | learning_metrics("actor", "pg_loss", figures)
        return metrics | {"actor/lr": self.policy.learning_rate(step)}

    def validate(self, step: int) -> dict[str, float]:
        """The greedy score on the held-out prompts, if one is due after this step."""
        every, prompts = self.shared.config.log.validate_every, self.shared.held_out
        if not every or not prompts or (step % every and step != self.shared.config.steps):
            return {}
        self.sync()
        mine = range(self.rank, len(prompts), self.mesh.size())
        rollout = self.shared.config.rollout
        sampling = Sampling(rollout.temperature, rollout.max_new_tokens, rollout.stop, greedy=True)
        requests = [Request(i, prompts[i].tokens) for i in mine]
        done = self.engine.generate(requests, sampling, seed=self.shared.config.seed, step=VALIDATION_STEP)
        scores = [self.shared.score(prompts[s.row], s.response)[0] for finished in done for s in finished]
        total, count = all_sum(torch.tensor([sum(scores), len(scores)]), self.mesh).tolist()
        return {"val/score/mean": total / count, "val/rows": count}

    def _objective(
        self, model: nn.Module, batch: MicroBatch, fields: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        ppo, mask = self.shared.config.ppo, batch.mask
        with_entropy = ppo.entropy_coef > 0
        temperature = self.shared.config.rollout.temperature
        logprobs, entropy = policy_outputs(model, batch, temperature=temperature, entropy=with_entropy)
        loss, metrics = algo.policy_loss(
            logprobs,
            fields["old"],
            fields["advantages"],
            mask,
            clip_low=ppo.clip_low,
            clip_high=ppo.clip_high,
            dual_clip=ppo.dual_clip,
            aggregate=ppo.aggregate,
        )
        if ppo.kl_loss_coef > 0:
            kl = algo.kl_estimate(logprobs, fields["ref"], ppo.kl_loss_kind)
            loss = loss + ppo.kl_loss_coef * algo.aggregate_loss(kl, mask, ppo.aggregate)
            metrics["kl_loss"] = algo.masked_mean(kl.detach(), mask)
        if with_entropy:
            loss = loss - ppo.entropy_coef * algo.aggregate_loss(entropy, mask, ppo.aggregate)
        return loss, metrics

    def _rollout_metrics(self, rollout: Rollout, old: Tensor, ref: Tensor, entropy: Tensor) -> dict[str, float]:
        engine = torch.tensor([logprob for sample in rollout.samples for logprob in sample.logprobs])
        difference = (engine - old).abs()
        ratio = (old - engine).exp()
        k3 = algo.kl_estimate(engine, old, "k3")
        kl = algo.kl_estimate(old, ref, self.shared.config.ppo.kl_kind)
        prompts = sum(len(sample.prompt) for sample in rollout.samples)
        cut = sum(not sample.finished for sample in rollout.samples)
        counts = [len(rollout.rows), rollout.tokens, prompts, cut]
        sums = [entropy.sum(), difference.sum(), ratio.sum(), k3.sum(), kl.sum()]
        rows, tokens, prompts, cut, entropy_sum, difference_sum, ratio_sum, k3_sum, kl_sum = all_sum(
            torch.tensor([float(part) for part in counts + sums]), self.mesh
        ).tolist()
        longest = all_objects(
            (max(rollout.lengths, default=0), float(difference.max()) if len(difference) else 0.0), self.mesh
        )
        return {
            "response_length/mean": tokens / rows,
            "response_length/max": max(length for length, _ in longest),
            "response_length/clip_ratio": cut / rows,
            "prompt_length/mean": prompts / rows,
            "actor/entropy": entropy_sum / tokens,
            "actor/mismatch_mean": difference_sum / tokens,
            "actor/mismatch_ratio": ratio_sum / tokens,
            "actor/mismatch_k3": k3_sum / tokens,
            "actor/mismatch_max": max(worst for _, worst in longest),
            "tokens": tokens + prompts,
        } | ({"actor/ref_kl": kl_sum / tokens} if self.reference else {})


@dataclass(frozen=True)
class Scored:
    """Rows with the critic's first look: values `[N]`, scores `[B]`, and the reward's further figures by name."""

    rollout: Rollout
    values: Tensor
    scores: Tensor
    extra: dict[str, list[float]]


class Critic:
    """A rank of the critic group: value model and reward. It owns judgement: scores, values, KL rewards, advantages."""

    def __init__(self, shared: Shared, value: Learner):
        self.shared, self.value = shared, value
        self.mesh: DeviceMesh = value.runner.mesh
        self.rank = self.mesh.get_local_rank()
        self.metrics: dict[str, Any] = {}

    def score(self, step: int, rollout: Rollout) -> Scored:
        """Values and reward scores of some rows of a step; all ranks of the group take part."""
        batch = self.shared.batch(step)
        (values,) = self.value.runner.forward(self.value.model, rollout, lambda m, b: [value_outputs(m, b)], fields=1)
        results = [self.shared.score(batch[sample.row], sample.response) for sample in rollout.samples]
        extra: dict[str, list[float]] = {}
        for _, figures in results:
            for name, figure in figures.items():
                extra.setdefault(name, []).append(figure)
        return Scored(rollout, values, torch.tensor([score for score, _ in results]), extra)

    def judge(self, scored: Scored, old: Tensor, ref: Tensor) -> tuple[Tensor, Tensor]:
        """Advantages, whitened over the whole batch, and returns, both `[N]`."""
        ppo, rollout, mask = self.shared.config.ppo, scored.rollout, scored.rollout.mask()
        kl = algo.kl_estimate(rollout.pad(old), rollout.pad(ref), ppo.kl_kind)
        rewards = algo.token_rewards(scored.scores, kl, mask, kl_coef=ppo.kl_coef)
        advantages, returns = algo.gae(rewards, rollout.pad(scored.values), mask, gamma=ppo.gamma, lam=ppo.lam)
        moments = algo.merge_moments(all_objects(algo.moments(advantages, mask), self.mesh))
        white = algo.masked_whiten(advantages, mask, moments) if ppo.whiten else advantages
        packed_returns = rollout.unpad(returns)
        figures = {
            "critic/score": scored.scores,
            "critic/rewards": (rewards * mask).sum(-1),
            "critic/advantages": rollout.unpad(advantages),
            "critic/returns": packed_returns,
            "critic/values": scored.values,
            "error": packed_returns - scored.values,
        }
        extra = {f"critic/{name}": torch.tensor(values) for name, values in scored.extra.items()}
        # the trainer's own figures win over a reward's of the same name
        self.metrics = self._judged_metrics(extra | figures)
        return rollout.unpad(white), packed_returns

    def update(self, step: int, scored: Scored, returns: Tensor) -> dict[str, Any]:
        """The value model's update; returns the step's metrics."""
        fields = {"old": scored.values, "returns": returns}
        mini_batches = self.shared.ownership(step).rows("critic", self.rank)
        epochs = self.shared.config.ppo.epochs
        figures = self.value.update(scored.rollout, mini_batches, fields, self._objective, step=step, epochs=epochs)
        rate = {"critic/lr": self.value.learning_rate(step)}
        return self.metrics | learning_metrics("critic", "vf_loss", figures) | rate

    def samples(self, step: int, scored: Scored) -> list[dict[str, Any]]:
        """The first rows held here, as they are written to the run's folder."""
        batch = self.shared.batch(step)
        kept = list(zip(scored.rollout.samples, scored.scores.tolist(), strict=True))[: self.shared.config.log.samples]
        return [
            {
                "step": step,
                "row": sample.row,
                "score": round(score, 6),
                "prompt": batch[sample.row].text,
                "response": self.shared.decode(sample.response),
                "finished": sample.finished,
                "data_source": batch[sample.row].data_source,
                "ground_truth": batch[sample.row].ground_truth,
            }
            for sample, score in kept
        ]

    def _objective(
        self, model: nn.Module, batch: MicroBatch, fields: dict[str, Tensor]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        ppo = self.shared.config.ppo
        return algo.value_loss(
            value_outputs(model, batch),
            fields["old"],
            fields["returns"],
            batch.mask,
            clip=ppo.value_clip,
            aggregate=ppo.aggregate,
        )

    def _judged_metrics(self, figures: dict[str, Tensor]) -> dict[str, float]:
        """Mean, spread and range over the whole batch of figures that each rank has for its rows."""
        local = {
            name: (algo.moments(x[None], torch.ones_like(x[None])), float(x.min()), float(x.max()))
            for name, x in figures.items()
            if len(x)
        }
        gathered = all_objects(local, self.mesh)
        metrics, spread = {}, {}
        for name in dict.fromkeys(name for part in gathered for name in part):
            parts = [part[name] for part in gathered if name in part]
            whole = algo.merge_moments([moments for moments, _, _ in parts])
            spread[name] = float(whole.variance)
            metrics[f"{name}/mean"] = float(whole.mean)
            metrics[f"{name}/min"] = min(low for _, low, _ in parts)
            metrics[f"{name}/max"] = max(high for _, _, high in parts)
        total = spread["critic/returns"]
        metrics["critic/vf_explained_var"] = 1 - spread["error"] / total if total > 0 else 0.0
        return {name: value for name, value in metrics.items() if not name.startswith("error/")}


def join(parts: Sequence[Scored]) -> Scored:
    """The chunks of a step as one."""
    rollout = Rollout([sample for part in parts for sample in part.rollout.samples])
    values = {
        row: v for part in parts for row, v in zip(part.rollout.rows, part.rollout.split(part.values), strict=True)
    }
    scores = {row: s for part in parts for row, s in zip(part.rollout.rows, part.scores.tolist(), strict=True)}
    names = dict.fromkeys(name for part in parts for name in part.extra)
    extra = {name: [figure for part in parts for figure in part.extra.get(name, [])] for name in names}
    return Scored(rollout, rollout.pack(values), torch.tensor([scores[row] for row in rollout.rows]), extra)


def learning_metrics(role: str, loss: str, figures: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Means over the step's optimizer steps, the steps that were skipped, and the bare figures of each."""
    metrics: dict[str, Any] = {}
    for name in figures[0]:
        total = sum(figure[name] for figure in figures)
        metrics[f"{role}/{loss if name == 'loss' else name}"] = total if name == "skipped" else total / len(figures)
    metrics["optimizer_steps"] = [{name: figure[name] for name in ("loss", "grad_norm")} for figure in figures]
    return metrics
