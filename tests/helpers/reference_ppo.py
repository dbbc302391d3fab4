"""PPO on one process, written from the papers and nothing else: the yardstick of the trainer's
whole program.

It imports nothing of the trainer. A row is one forward pass, without padding; a mini-batch is one
backward pass. Slow and literal on purpose. Papers: Schulman et al. 2017 (PPO), Schulman et al. 2016
(GAE), Ye et al. 2020 (dual clip), Schulman 2020 (KL estimators), Loshchilov & Hutter 2019 (AdamW);
of critics: VC-PPO (2503.01491), VAPO (2504.05118), SAO (2607.07508); Hu et al.
2021 (LoRA); Agarwal et al. 2024 (on-policy distillation, 2306.13649); Fedus et al. 2021 (Switch,
2101.03961).
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Row:
    prompt: list[int]
    response: list[int]
    score: float
    engine: list[float]  # log-probs of the response as they were when it was sampled
    finished: bool
    # of a dialogue: the places in `response` that an environment filled; what it gave, by action;
    # and whether it spoke last
    observed: frozenset[int] = frozenset()
    rewards: list[float] = field(default_factory=list)
    answered: bool = False
    paid: list[float] = field(default_factory=list)  # of the score, by action, on the way
    hint: list[int] | None = None  # the prompt that a teacher reads, if it is another
    # of a mixture, by action and layer: the experts that sampled it, `[actions, layers, k]`
    experts: Tensor | None = None

    @property
    def actions(self) -> list[int]:
        """Where in `response` the policy chose."""
        return [i for i in range(len(self.response)) if i not in self.observed]


@dataclass(frozen=True)
class Step:
    rows: list[Row]
    # indices into rows, in the order of the optimizer's steps; the same each epoch
    mini_batches: list[list[int]]
    value_mini_batches: list[list[int]]


@dataclass(frozen=True)
class Hyper:
    gamma: float = 1.0
    lam: Any = 0.95
    lam_alpha: float = 0.05
    clip_mode: str = "clip"
    baseline: str = "value"
    samples: int = 1
    policy_frozen: str = ""  # found in the names of weights that are not trained
    value_frozen: str = ""
    pretrain_steps: int = 0
    pretrain_epochs: int = 4
    kl_coef: float = 0.0
    kl_kind: str = "k1"
    kl_loss_coef: float = 0.0
    kl_loss_kind: str = "k3"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    value_clip: float | None = 0.2
    value_range: tuple[float, float] | None = None
    entropy_coef: float = 0.0
    whiten: bool = True
    epochs: int = 1
    aggregate: str = "token_mean"
    temperature: float = 1.0
    policy_lr: float = 1e-6
    schedule: str = "constant"  # of the policy's learning rate
    warmup_steps: int = 0
    min_lr_ratio: float = 0.0
    steps: int = 3  # of the run
    value_lr: float = 1e-5
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    lam_value: float | None = None
    value_epochs: int | None = None
    importance: str = "off"
    importance_cap: float = 2.0
    mask_truncated: bool = False
    kl_target: float | None = None
    kl_horizon: int = 10000
    old_logprobs: str = "trainer"
    coef: float = 0.0  # of what a teacher says
    top_k: int = 0
    divergence: str = "forward"
    replays: bool = False  # whether a mixture's experts are those that sampled
    balance: float = 0.0  # weight of the routers' load-balancing loss over a mini-batch
    loss: Any = None  # a user's, of a row: log-probs, new and old, advantages, the reference's
    estimate: Any = None  # a user's advantages of all rows: rewards, values


@dataclass
class StepResult:
    # one entry an optimizer step; gradient norms are those before clipping
    policy_losses: list[float]
    value_losses: list[float]  # of several value models: those of the first come first
    policy_grad_norms: list[float]
    value_grad_norms: list[float]
    kl: float  # mean over the rows of the KL to the reference, summed over a row's tokens
    ratios: list[Tensor] = field(default_factory=list)  # of the tokens of each optimizer step

    @property
    def ess(self) -> float:
        """Effective sample size, a share of the tokens; an optimizer step counts as another."""
        means = torch.stack([r.mean() for r in self.ratios])
        squares = torch.stack([(r * r).mean() for r in self.ratios])
        return float(means.mean() ** 2 / squares.mean())


@contextmanager
def routed(model: Any, row: Row, experts: Tensor | None) -> Iterator[list[int]]:
    """The positions before each action. There, a mixture uses these experts (`Row.experts`) while
    the context is open; None: those that it chooses."""
    at = [len(row.prompt) - 1 + i for i in row.actions]

    def force(router: Any, _: Any, out: Any, layer: int) -> Any:
        logits, _, ids = out
        ids[at] = experts[:, layer]  # type: ignore[index]
        weights = torch.softmax(logits, dim=-1).gather(-1, ids)
        if router.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights, ids

    routers = [m for m in model.modules() if hasattr(m, "norm_topk_prob") and hasattr(m, "weight")]
    hooks = [
        router.register_forward_hook(partial(force, layer=layer))
        for layer, router in enumerate(routers if experts is not None else [])
    ]
    yield at
    for hook in hooks:
        hook.remove()


def run(model: Any, row: Row, experts: Tensor | None = None) -> Tensor:
    """The model's outputs at the position before each action: the state that it was chosen in."""
    tokens = torch.tensor(row.prompt + row.response, device=next(model.parameters()).device)
    with routed(model, row, experts) as at:
        return model(input_ids=tokens[None]).logits[0, at]


def choose(model: Any, row: Row) -> Tensor:
    """The experts of each action that a mixture chooses by itself, as `Row.experts`."""
    tokens = torch.tensor(row.prompt + row.response)
    routed = model(input_ids=tokens[None], output_router_logits=True).router_logits
    at = [len(row.prompt) - 1 + i for i in row.actions]
    k = model.config.num_experts_per_tok
    return torch.stack([logits[at].topk(k, dim=-1).indices for logits in routed], dim=1)


def act(
    model: Any, row: Row, temperature: float, experts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Log-prob of each action, and entropy of the distribution it was drawn from."""
    log_p = torch.log_softmax(run(model, row, experts) / temperature, dim=-1)
    chosen = torch.stack([log_p[i, row.response[at]] for i, at in enumerate(row.actions)])
    return chosen, -(log_p.exp() * log_p).sum(dim=-1)


def say(teacher: Any, row: Row, temperature: float) -> Tensor:
    """A teacher's log-probs of all tokens at each action."""
    read = replace(row, prompt=row.hint or row.prompt)
    return torch.log_softmax(run(teacher, read) / temperature, dim=-1)


def divergence_of(policy: Tensor, teacher: Tensor, h: Hyper) -> Tensor:
    """Of all actions of a row, given the log-probs of all tokens: over the teacher's likeliest
    tokens and the others as one, of a probability of at least 1e-6. What the teacher says travels
    as float16 and is made to sum up to 1 again."""
    top, ids = teacher.topk(h.top_k, dim=-1)
    sides = []
    for named in (policy.gather(-1, ids), top):
        rest = torch.clip(1 - named.exp().sum(-1, keepdim=True), min=1e-6)
        sides.append(torch.cat([named, rest.log()], dim=-1))
    p, q = sides
    q = torch.log_softmax(q.half().float(), dim=-1)
    forward = (q.exp() * (q - p)).sum(-1)
    reverse = (p.exp() * (p - q)).sum(-1)
    m = ((p.exp() + q.exp()) / 2).log()
    jsd = (p.exp() * (p - m) + q.exp() * (q - m)).sum(-1) / 2
    return {"forward": forward, "reverse": reverse, "jsd": jsd}[h.divergence]


def balance_of(model: Any, rows: list[Row], routes: list[Tensor | None]) -> Tensor:
    """Fedus et al. 2021 (Switch, eq. 4 to 6), as the mixtures' own code has it: f, the choices that
    an expert gets of a token, and P, its mean probability, are means over tokens and layers."""
    chosen, probabilities = [], []
    for row, experts in zip(rows, routes, strict=True):
        tokens = torch.tensor(row.prompt + row.response)
        with routed(model, row, experts) as at:
            every = model(input_ids=tokens[None], output_router_logits=True).router_logits
        for logits in every:
            p = torch.softmax(logits[at], dim=-1)
            places = p.topk(model.config.num_experts_per_tok, dim=-1).indices
            chosen.append(torch.zeros_like(p).scatter(1, places, 1.0))
            probabilities.append(p)
    f, p = torch.cat(chosen).mean(0), torch.cat(probabilities).mean(0)
    return len(p) * (f * p).sum()


def bounded(log_ratio: Tensor) -> Tensor:
    """At most 20 nats on either side, for what is then the exponent."""
    return torch.clip(log_ratio, -20, 20)


def kl(logp: Tensor, ref_logp: Tensor, kind: str) -> Tensor:
    log_r = ref_logp - logp
    k3 = (bounded(log_r).exp() - 1) - bounded(log_r)
    return {"k1": -log_r, "k2": log_r**2 / 2, "k3": k3}[kind]


def rounding(error: Tensor, size: Tensor) -> Tensor:
    """Where an error is no more than eight roundings of float32 numbers of a size: such tokens have
    no error, and their values no gradient."""
    return error.detach().abs() < 8 * 2.0**-23 * size


def advantages_of(rewards: Tensor, values: Tensor, gamma: float, lam: float) -> Tensor:
    """A_t = sum over l >= 0 of (gamma lam)^l (r_{t+l} + gamma V_{t+l+1} - V_{t+l}), with V = 0
    after the end."""
    after = torch.cat([values[1:], values.new_zeros(1)])
    delta = rewards + gamma * after - values
    delta = torch.where(rounding(delta, torch.maximum(rewards.abs(), values.abs())), 0.0, delta)
    weights = (gamma * lam) ** torch.arange(len(delta), dtype=delta.dtype, device=delta.device)
    return torch.stack([(weights[: len(delta) - t] * delta[t:]).sum() for t in range(len(delta))])


def lambda_of(row: Row, h: Hyper) -> float:
    """VAPO: 1 - 1 / (alpha l), where that is positive."""
    if h.lam != "adaptive":
        return h.lam
    return max(0.0, 1 - 1 / (h.lam_alpha * len(row.actions)))


def rewards_of(row: Row, penalty: Tensor, kl_coef: float) -> Tensor:
    """Of each action: the KL's, the environment's, what was paid on the way, and at the last one
    what is left of the score."""
    rewards = -kl_coef * penalty
    for line in (row.rewards, row.paid):
        for i, reward in enumerate(line):
            rewards[i] += reward
    rewards[-1] += row.score - sum(row.paid)
    return rewards


def paid_to_go(row: Row, gamma: float, t: int) -> float:
    """What is still paid on the way from an action on; nothing behind the end."""
    return sum(gamma ** (k - t) * reward for k, reward in enumerate(row.paid) if k >= t)


def aggregate(losses: list[Tensor], how: str) -> Tensor:
    """One number from a mini-batch's token losses, one tensor a row."""
    if how == "token_mean":
        return torch.cat(losses).mean()
    rows = {
        "seq_mean_token_sum": [x.sum() for x in losses],
        "seq_mean_token_mean": [x.mean() for x in losses],
    }[how]
    return torch.stack(rows).mean()


def policy_loss(logp: Tensor, old: Tensor, adv: Tensor, h: Hyper) -> Tensor:
    ratio = torch.exp(bounded(logp - old))
    if h.clip_mode == "mask":  # SAO, eq. 3
        inside = [1 - h.clip_low < r < 1 + h.clip_high for r in ratio.tolist()]
        return torch.stack(
            [-r * a if keep else r * 0 for r, a, keep in zip(ratio, adv, inside, strict=True)]
        )
    objective = torch.minimum(ratio * adv, torch.clip(ratio, 1 - h.clip_low, 1 + h.clip_high) * adv)
    if h.dual_clip is not None:
        objective = torch.where(adv < 0, torch.maximum(objective, h.dual_clip * adv), objective)
    return -objective


def value_of(output: Tensor, h: Hyper) -> Tensor:
    """What the value model says of a state: its head's output, or between two bounds."""
    if h.value_range is None:
        return output
    low, high = h.value_range
    return low + (high - low) / (1 + torch.exp(-output))


def zero_head(
    value: Any, values: list[Tensor], step: Step, h: Hyper, old: Any, ref: Any, kl_coef: float
) -> None:
    """A head that is all zero gets a bias: what makes its values the mean of all rewards-to-go."""
    *_, head = value.modules()  # the last module: the linear layer
    if any(parameter.any() for parameter in head.parameters()):
        return
    to_go = []
    for i, row in enumerate(step.rows):
        rewards = rewards_of(row, kl(old[i], ref[i], h.kl_kind), kl_coef)
        to_go.append(advantages_of(rewards, torch.zeros_like(rewards), h.gamma, 1.0))
    mean = torch.cat(to_go).mean()
    if h.value_range is not None:
        low, high = h.value_range
        p = (mean - low) / (high - low)
        mean = torch.log(p / (1 - p))
    head.bias.fill_(mean)
    for row in values:
        row.fill_(value_of(mean, h))


def value_loss(output: Tensor, old: Tensor, target: Tensor, h: Hyper) -> Tensor:
    v = value_of(output, h)
    if h.value_range is not None:  # cross-entropy
        low, high = h.value_range
        p, y = (v - low) / (high - low), (target - low) / (high - low)
        errors = -(y * torch.log(p) + (1 - y) * torch.log(1 - p))
        size = torch.full_like(target, max(abs(low), abs(high)))
        return torch.where(rounding(v - target, size), errors.detach(), errors)
    errors = (v - target) ** 2
    if h.value_clip is not None:
        errors = torch.maximum(
            errors, (old + torch.clip(v - old, -h.value_clip, h.value_clip) - target) ** 2
        )
    return torch.where(rounding(v - target, target.abs()), 0.0, errors / 2)


def learning_rate(number: int, count: int, h: Hyper) -> float:
    """Of step `number` of the `count` steps from the policy's first update to the run's last
    step."""
    if number <= h.warmup_steps:
        return h.policy_lr * number / h.warmup_steps
    top = max(1, h.warmup_steps)
    if h.schedule == "constant" or number == top:
        return h.policy_lr
    return h.policy_lr * (1 - (1 - h.min_lr_ratio) * (number - top) / (count - top))  # linear


class Adapted(torch.nn.Module):
    """A linear layer with adapters beside it: h = W x + alpha / rank B A x (Hu et al. 2021)."""

    def __init__(self, linear: Any, a: Tensor, b: Tensor, alpha: float):
        super().__init__()
        self.linear = linear
        self.lora_A = torch.nn.Parameter(a.clone())
        self.lora_B = torch.nn.Parameter(b.clone())
        self.scale = alpha / len(a)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.scale * (x @ self.lora_A.T @ self.lora_B.T)


ADAPTERS_ALONE = r"^(?!.*lora_|score)"  # as what is frozen: all but adapters and head


def adapt(model: Any, adapters: dict[str, tuple[Tensor, Tensor]], alpha: float) -> None:
    """Puts (A, B) beside the layers of these names."""
    for name, (a, b) in adapters.items():
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, Adapted(model.get_submodule(name), a, b, alpha))


def merged(model: Any) -> dict[str, Tensor]:
    """The weights of a model, W + alpha / rank B A where there are adapters."""
    found = {}
    for name, weight in model.state_dict().items():
        layer, _, last = name.rpartition(".")
        module = model.get_submodule(layer.removesuffix(".linear"))
        if isinstance(module, Adapted) and last in ("lora_A", "lora_B"):
            continue
        if isinstance(module, Adapted) and last == "weight":
            weight = weight + module.scale * (module.lora_B @ module.lora_A).detach()
        found[name.replace(".linear.", ".") if isinstance(module, Adapted) else name] = weight
    return found


def adamw(model: Any, lr: float, h: Hyper, frozen: str) -> torch.optim.AdamW:
    for name, p in model.named_parameters():
        p.requires_grad_(not frozen or not re.search(frozen, name))
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() >= 2], "weight_decay": h.weight_decay},
        {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=lr, betas=h.betas, eps=h.eps)


def descend(model: Any, optimizer: torch.optim.AdamW, loss: Tensor, h: Hyper) -> float:
    """One optimizer step; returns the gradient's norm before clipping."""
    optimizer.zero_grad()
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.sqrt(sum(((g**2).sum() for g in gradients), loss.new_zeros(())))
    if h.max_grad_norm > 0:
        for g in gradients:
            g.mul_(torch.clip(h.max_grad_norm / (norm + 1e-6), max=1.0))
    optimizer.step()
    return norm.item()


def truncated_weights(old: Tensor, engine: Tensor, h: Hyper) -> Tensor:
    """min(trainer's / engine's probability, cap) of each token, or of the response as a whole."""
    log = old - engine
    kinds = {
        "off": torch.zeros_like(log),
        "token": log,
        "sequence": log.sum() * torch.ones_like(log),
    }
    return torch.clip(bounded(kinds[h.importance]).exp(), max=h.importance_cap)


def ppo_step(
    policy: Any,
    reference: Any,
    value: Any,
    optimizers: Any,
    step: Step,
    h: Hyper,
    *,
    kl_coef: float,
    learns: bool,
    pretrains: bool,
    teacher: Any = None,
) -> StepResult:
    with torch.no_grad():
        # which experts a token meets is that of the policy that sampled it, also in later updates
        routes: list[Tensor | None] = [row.experts for row in step.rows]
        if h.replays and not any(experts is not None for experts in routes):
            routes = [choose(policy, row) for row in step.rows]
        old = [
            act(policy, row, h.temperature, experts)[0]
            for row, experts in zip(step.rows, routes, strict=True)
        ]
        if h.old_logprobs == "engine":
            old = [torch.tensor(row.engine) for row in step.rows]
        ref = [act(reference, row, h.temperature)[0] for row in step.rows]
        old_values = [torch.zeros_like(x) for x in old]
        if value:
            old_values = [value_of(run(value, row)[:, 0], h) for row in step.rows]
            zero_head(value, old_values, step, h, old, ref, kl_coef)
        adv, returns, kls, earned = [], [], [], []
        for i, row in enumerate(step.rows):
            penalty = kl(old[i], ref[i], h.kl_kind)
            kls.append(penalty.sum().item())
            rewards = rewards_of(row, penalty, kl_coef)
            earned.append(rewards)
            lam = lambda_of(row, h)
            lam = lam if h.baseline == "value" else 1.0  # without values: the rewards-to-go
            adv.append(advantages_of(rewards, old_values[i], h.gamma, lam))
            lam_value = lam if h.lam_value is None else h.lam_value
            lam_value = 1.0 if pretrains else lam_value
            returns.append(
                advantages_of(rewards, old_values[i], h.gamma, lam_value) + old_values[i]
            )
        # a row's reward-to-go at its start, where values are 0, without what is paid on the way;
        # of that, what is paid from the same action on
        firsts = [a[0] - paid_to_go(row, h.gamma, 0) for a, row in zip(adv, step.rows, strict=True)]
        for i, row in enumerate(step.rows) if h.baseline in ("batch", "group") else ():
            every = range(len(step.rows))
            others = [j for j in every if j // h.samples == i // h.samples and j != i]
            others = [*every] if h.baseline == "batch" else others
            mean = sum(firsts[j] for j in others) / len(others)
            for t in range(len(row.response)):
                at = others if h.baseline == "group" else []
                at = at or [j for j in every if t < len(step.rows[j].response)]
                paid = sum(paid_to_go(step.rows[j], h.gamma, t) for j in at) / len(at)
                adv[i][t] = adv[i][t] - mean - paid
        adv = h.estimate(earned, old_values) if h.estimate else adv
        if h.whiten:
            every = torch.cat(adv)
            variance = every.var() if len(every) > 1 else torch.zeros_like(every[0])
            adv = [(a - every.mean()) / torch.sqrt(variance + 1e-8) for a in adv]
        if teacher:
            said = [say(teacher, row, h.temperature) for row in step.rows]
            if not h.top_k:
                ahead = [
                    torch.stack([s[i, row.response[at]] for i, at in enumerate(row.actions)]) - o
                    for s, row, o in zip(said, step.rows, old, strict=True)
                ]
                mean = torch.cat(ahead).mean()
                adv = [a + h.coef * (d - mean) for a, d in zip(adv, ahead, strict=True)]

    weights = [
        truncated_weights(o, torch.tensor(row.engine), h)
        for o, row in zip(old, step.rows, strict=True)
    ]
    result = StepResult([], [], [], [], sum(kls) / len(kls))
    for rows in step.mini_batches * h.epochs if learns else []:
        token_losses, ratios = [], []
        if not kept(rows, step, h):
            continue
        for i in kept(rows, step, h):
            logp, entropy = act(policy, step.rows[i], h.temperature, routes[i])
            bonus = h.kl_loss_coef * kl(logp, ref[i], h.kl_loss_kind) - h.entropy_coef * entropy
            if h.top_k:
                every = torch.log_softmax(run(policy, step.rows[i]) / h.temperature, dim=-1)
                bonus = bonus + h.coef * divergence_of(every, said[i], h)
            of_row = logp, old[i], adv[i]
            ratios.append(torch.exp(bounded(logp - old[i])).detach())
            surrogate = h.loss(*of_row, ref[i]) if h.loss else policy_loss(*of_row, h)
            token_losses.append(surrogate * weights[i] + bonus)
        loss = aggregate(token_losses, h.aggregate)
        result.ratios.append(torch.cat(ratios))
        if h.balance:
            at = kept(rows, step, h)
            balance = balance_of(policy, [step.rows[i] for i in at], [routes[i] for i in at])
            loss = loss + h.balance * balance
        result.policy_losses.append(loss.item())
        result.policy_grad_norms.append(descend(policy, optimizers[0], loss, h))
    epochs = h.pretrain_epochs if pretrains else h.value_epochs or h.epochs
    for rows in step.value_mini_batches * epochs if value else []:
        value_losses = [
            value_loss(run(value, step.rows[i])[:, 0], old_values[i], returns[i], h)
            for i in kept(rows, step, h)
        ]
        if not value_losses:
            continue
        loss = aggregate(value_losses, h.aggregate)
        result.value_losses.append(loss.item())
        result.value_grad_norms.append(descend(value, optimizers[1], loss, h))
    return result


def windows(
    policy: Any,
    streams: list[list[Row]],
    cuts: Iterable[tuple[list[list[int]], list[list[int]]]],
    size: int,
    h: Hyper,
) -> Iterator[Step]:
    """The steps of a run in which each slot samples `size` tokens a step: a row that ends is
    followed at once by its slot's next one, a row that has not ended goes on in the next step, and
    a row is trained on in the step it ends.

    A step is made when it is asked for, so what samples is the policy as it is then.

    Args:
        streams: the rows of each slot, whole, in order; those that never end in the run are left
            out.
        cuts: for each step, the slots of the policy's mini-batches and of the value model's.
    """
    # of each slot: which row of its stream is open, and how many tokens it has
    place = [(0, 0) for _ in streams]
    # log-probs of the open rows, by the policies that sampled them
    sampled: list[list[float]] = [[] for _ in streams]
    chosen: list[list[Tensor]] = [[] for _ in streams]  # their experts
    for cut, value_cut in cuts:
        ended: list[tuple[int, Row]] = []
        for slot, stream in enumerate(streams):
            left, (number, have) = size, place[slot]
            while left and number < len(stream):
                row = stream[number]
                now = min(left, len(row.actions) - have)
                with torch.no_grad():
                    sampled[slot] += act(policy, row, h.temperature)[0][have : have + now].tolist()
                    if h.replays:
                        chosen[slot].append(choose(policy, row)[have : have + now])
                left, have = left - now, have + now
                # an answer to a slot's last token of a step is heard in the next one
                if have == len(row.actions) and (left or not row.answered):
                    experts = torch.cat(chosen[slot]) if h.replays else None
                    ended.append((slot, replace(row, engine=sampled[slot], experts=experts)))
                    number, have, sampled[slot], chosen[slot] = number + 1, 0, [], []
            place[slot] = (number, have)
        minis = [
            [
                [i for slot in slots for i, (of, _) in enumerate(ended) if of == slot]
                for slots in part
            ]
            for part in (cut, value_cut)
        ]
        yield Step([row for _, row in ended], *minis)


def kept(rows: list[int], step: Step, h: Hyper) -> list[int]:
    """The rows that the losses are over."""
    return [i for i in rows if step.rows[i].finished or not h.mask_truncated]


def reference_ppo(
    policy: Any,
    reference: Any,
    value: Any,
    steps: Iterable[Step],
    hyper: Hyper,
    teacher: Any = None,
) -> list[StepResult]:
    """Train `policy` and `value` in place on given rollouts, one result a step.

    `policy`, `reference`: Hugging Face causal language models; `value`: a token classification
    model with one label, or None; `teacher`: a causal language model, or None. Rows need a prompt
    and a response of at least one token each.
    """
    for model in filter(None, (policy, reference, value, teacher)):
        model.eval()  # no dropout
    optimizers = [adamw(policy, hyper.policy_lr, hyper, hyper.policy_frozen)]
    if value:
        optimizers.append(adamw(value, hyper.value_lr, hyper, hyper.value_frozen))
    results, kl_coef = [], hyper.kl_coef
    waited = 0
    for number, step in enumerate(steps, 1):
        if not all(row.prompt and row.response for row in step.rows):
            raise ValueError("every row needs a prompt and a response")
        if not step.rows:
            results.append(StepResult([], [], [], [], 0.0))
            waited = number if waited == number - 1 else waited
            continue
        pretrains = number <= hyper.pretrain_steps
        for group in optimizers[0].param_groups:
            group["lr"] = learning_rate(number - waited, hyper.steps - waited, hyper)
        phase: Any = {"learns": not pretrains, "pretrains": pretrains, "teacher": teacher}
        results.append(
            ppo_step(policy, reference, value, optimizers, step, hyper, kl_coef=kl_coef, **phase)
        )
        if waited == number - 1 and not results[-1].policy_losses:
            waited = number
        if hyper.kl_target is not None and not pretrains:  # Ziegler et al. 2019, section 2.2
            error = max(-0.2, min(0.2, results[-1].kl / hyper.kl_target - 1))
            kl_coef *= 1 + error * len(step.rows) / hyper.kl_horizon
    return results
