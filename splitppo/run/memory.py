"""Estimates the memory of a rank's GPU in each phase of a step, and finds what makes a run fit."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch

from splitppo.config import rules
from splitppo.config.toml import as_flag
from splitppo.engine.build import most_rows
from splitppo.engine.vllm import client, plan
from splitppo.errors import UserError
from splitppo.models.cost import GB, USABLE, Cost
from splitppo.models.heads import LOGIT_PIECE
from splitppo.models.learner import GATHER_BYTES
from splitppo.placement import Role, replicas
from splitppo.run.models import TRAINED
from splitppo.run.resolve import Resolved, check_groups

Parts = dict[str, float]  # what is held -> bytes
CONTEXT = 1.5 * 2**30  # of CUDA, NCCL and cuBLAS; fragments are in `USABLE`
GPU = 80 * GB  # memory of a GPU where there is none to ask
SURE = 0.9  # the part of an estimate that a run needs in any case: it is within a tenth
BEST = 3  # ways to need less that are named
FEWEST = 4096  # tokens of a micro-batch, below which matrix products are slow
PHASE = {"actor": "logprobs", "critic": "score"}  # in which the models run
VLLM = "vLLM's "  # begins the parts that another process holds


def phases(resolved: Resolved, memory: float = GPU) -> dict[str, Parts]:
    """Phase -> what a rank holds in it at most. The names are those of the spans: `actor
    update`."""
    context = {"CUDA": CONTEXT} if resolved.device.type == "cuda" else {}
    held_in: dict[str, Parts] = {}
    for role in resolved.placement.groups:
        held = [
            (name, *part)
            for name in resolved.models
            if resolved.placement.colocated or resolved.role_of(name) == role
            for part in _held(resolved, name)
        ]
        for phase, turn, work in _turns(resolved, role, memory):
            models = {part: size for name, part, size, stays in held if stays or name in turn}
            held_in[f"{role} {phase}"] = max(
                held_in.get(f"{role} {phase}", {}), context | models | work, key=needed
            )
    return held_in


def needed(parts: Parts) -> float:
    """Bytes of the device that a phase needs."""
    return sum(parts.values())


def table(resolved: Resolved, memory: float = GPU) -> list[str]:
    """The phases, and what is held in each, in GiB."""
    of = f", of {card(memory)}" if resolved.device.type == "cuda" else ""
    return [
        f"memory a rank needs by phase, estimated (GiB){of}:",
        *(
            f"  {phase} {needed(parts) / 2**30:.2f}: {_listed(parts)}"
            for phase, parts in phases(resolved, memory).items()
        ),
    ]


def trainer_peak(resolved: Resolved, *without: str) -> float:
    """The most bytes that PyTorch allocates on an actor rank's GPU in any phase, not counting parts
    whose names begin so."""
    return max(
        sum(size for part, size in parts.items() if not part.startswith(("CUDA", VLLM, *without)))
        for phase, parts in phases(resolved).items()
        if resolved.placement.colocated or phase.startswith("actor")
    )


def fits_awake(resolved: Resolved) -> bool:
    """Whether vLLM fits the GPU beside the trainer when both start: it is awake, and the trainer
    compiles with few activations."""
    memory = gpu_memory(resolved) or GPU
    rollout = phases(resolved, memory)["actor rollout"]
    awake = sum(size for part, size in rollout.items() if part.startswith(("CUDA", VLLM)))
    return trainer_peak(resolved, "activations") + awake <= USABLE * memory


def gpu_memory(resolved: Resolved) -> float | None:
    """Bytes of the GPU; None without one."""
    on_gpu = resolved.device.type == "cuda" and torch.cuda.is_available()
    return float(torch.cuda.get_device_properties(resolved.device).total_memory) if on_gpu else None


def card(memory: float) -> str:
    """What a job may plan with on a GPU of so many bytes, and why."""
    return (
        f"{_gib(USABLE * memory)} "
        f"(a GPU of {memory / 2**30:.1f} GiB less {1 - USABLE:.0%} for fragments)"
    )


def check_memory(resolved: Resolved, memory: float) -> str | None:
    """A warning if rows of full length would not fit what fragments leave. Raises UserError if the
    shortest rows would not fit the GPU either."""
    need, phase, parts = highest(resolved, memory)
    if need <= USABLE * memory:
        return None
    text = (
        f"{phase} needs about {_gib(need)} of {card(memory)}: "
        f"{_listed(parts)}; {remedies(resolved, memory)}"
    )
    sure = sum(size for part, size in parts.items() if not part.startswith("activations"))
    if SURE * sure > memory:
        raise UserError(text)
    return f"with rows of full length, {text}"


def out_of_memory(resolved: Resolved, phase: str) -> list[str]:
    """The last lines of a run whose memory ran out in a phase, as `Status` names it (`actor step 4
    update`)."""
    memory = gpu_memory(resolved) or GPU
    words = phase.split()
    parts = phases(resolved, memory).get(f"{words[0]} {words[-1]}") or highest(resolved, memory)[2]
    used = f"; PyTorch held {_gib(torch.cuda.memory_allocated())}" * torch.cuda.is_available()
    return [
        f"memory ran out in {phase!r}",
        f"estimated {_gib(needed(parts))} of {card(memory)}: {_listed(parts)}{used}",
        remedies(resolved, memory),
    ]


def remedies(resolved: Resolved, memory: float) -> str:
    """The three best ways to need less, each with what the run then needs. `memory`: bytes of the
    GPU."""
    need, *_ = highest(resolved, memory)
    needs = [(highest(changed, memory)[0], flags) for flags, changed in ways(resolved)]
    best = [f"{flags} {_gib(less)}" for less, flags in sorted(needs)[:BEST] if less < need]
    return f"ways to need less: {', '.join(best) or 'more GPUs'}"


def fitted(
    resolved: Resolved, memory: float, allowed: tuple[str, ...]
) -> tuple[Resolved, dict[str, str]]:
    """The run with the cheapest ways that make it fit what fragments leave of the GPU, of those
    whose flags begin so, or all; the flags by setting."""
    chosen: dict[str, str] = {}
    while (need := highest(resolved, memory)[0]) > USABLE * memory:
        for flags, changed in ways(resolved):
            if flags.startswith(allowed) and highest(changed, memory)[0] < need:
                resolved = changed
                chosen[flags.partition(" ")[0]] = flags
                break
        else:
            break
    return resolved, chosen


def offloaded(resolved: Resolved, memory: float | None) -> tuple[Resolved, str]:
    """The run with what `auto` offloads: if it is colocated what makes it fit, else nothing; a line
    that says so."""
    automatic = []
    for name in TRAINED:
        if name in resolved.models and resolved.offload(name) == "auto":
            automatic.append(name)
            resolved = with_setting(resolved, name, "offload", "none")
    if not memory or not resolved.placement.colocated:
        return resolved, ""
    fitting, chosen = fitted(resolved, memory, tuple(f"--{name}.offload" for name in automatic))
    before, after = (_gib(highest(one, memory)[0]) for one in (resolved, fitting))
    return fitting, (
        f"{' '.join(chosen.values())} is set automatically: without it the run needs about "
        f"{before} of "
        f"{card(memory)}, with it {after}; "
        f"{' '.join(f'{flag} none' for flag in chosen)} turns it off"
    ) * bool(chosen)


def highest(resolved: Resolved, memory: float) -> tuple[float, str, Parts]:
    """The phase that needs most: its bytes, its name, and what is held."""
    return max((needed(parts), phase, parts) for phase, parts in phases(resolved, memory).items())


def ways(resolved: Resolved) -> Iterator[tuple[str, Resolved]]:
    """The flags of each way that may need less memory and is allowed, cheapest first, and the run
    with them."""
    config = resolved.config
    actors = len(resolved.placement.groups["actor"])
    shape = config.set_shape("policy")
    longest = -(-config.rollout.max_row_tokens // shape.sequence)
    budget = config.compute.micro_batch_tokens
    other = "actor" if config.placement.reference == "critic" else "critic"
    engine = 2 * config.engine.tensor_parallel
    offloads = {name: resolved.offload(name) for name in TRAINED}
    candidates: list[tuple[str, Any, bool]] = [
        ("compute.micro_batch_tokens", budget // 2, budget >= 2 * max(longest, FEWEST)),
        ("compute.activation_checkpointing", True, True),
        ("value.share_base", True, True),
        ("fsdp.sequence_parallel", 2 * shape.sequence, longest > budget),
        ("placement.reference", other, True),
        ("reference.offload", True, True),
        ("reward.model_offload", True, True),
        ("teacher.offload", True, True),
        *((f"{name}.offload", "optimizer", offloads[name] != "all") for name in TRAINED),
        *((f"{name}.offload", "all", offloads[name] == "optimizer") for name in TRAINED),
        ("engine.tensor_parallel", engine, resolved.engine == "vllm" and actors % engine == 0),
        ("fsdp.tensor_parallel", 2 * shape.tensor, True),
    ]
    for setting, value, helps in candidates:
        table, _, name = setting.partition(".")
        changed = with_setting(resolved, table, name, value)
        if not helps or changed.config == config:
            continue
        with suppress(UserError):
            rules.check(changed.config)
            check_groups(changed)
            yield " ".join(as_flag(setting, value)), changed


def _shards(resolved: Resolved, name: str) -> int:
    """Among how many ranks a model's weights are sharded."""
    ranks, *_ = replicas(
        resolved.role_of(name),
        resolved.placement,
        resolved.config.fsdp.shard_size,
        local_world=resolved.local_world,
    )
    return len(ranks)


def _held(resolved: Resolved, name: str) -> Iterator[tuple[str, float, bool]]:
    """What a rank holds of a model while it runs, its bytes, and whether it stays there between its
    turns."""
    cost = resolved.cost(name)
    ranks = _shards(resolved, name)
    offload = resolved.offload(name)
    yield f"{name}'s weights", cost.weights / ranks, offload != "all"
    if cost.trained and offload in ("auto", "none"):
        yield f"{name}'s optimizer", cost.optimizer / ranks, True


def with_setting(resolved: Resolved, table: str, name: str, setting: Any) -> Resolved:
    """The same with another setting."""
    changed = replace(getattr(resolved.config, table), **{name: setting})
    return replace(resolved, config=replace(resolved.config, **{table: changed}))


def _turns(
    resolved: Resolved, role: Role, memory: float
) -> Iterator[tuple[str, Sequence[str], Parts]]:
    """A role's phases: name, the models whose turn it is, and what is held beside the models. What
    is not offloaded stays on the GPU in all phases (`_held`)."""
    models = [name for name in resolved.models if resolved.role_of(name) == role]
    engine = {}
    if role == "actor" or resolved.placement.colocated:
        engine, sync, rollout = _engine(resolved, memory)
        if role == "actor":
            yield "sync", ("policy",), engine | sync
            yield "rollout", (), engine | rollout
    for name in models:  # all of them are released when the last one has run
        yield PHASE[role], models, engine | _forward(resolved, name, role)
    for name in {"policy", "value"} & {*models}:
        yield "update", (name,), engine | _update(resolved, name, role)


def _engine(resolved: Resolved, memory: float) -> tuple[Parts, Parts, Parts]:
    """What the engine holds throughout (vLLM asleep, and buckets), in the sync, in the rollout."""
    config = resolved.config
    model = resolved.models["policy"]
    size = config.engine.tensor_parallel
    cost = resolved.cost("policy")
    most = most_rows(config, len(resolved.placement.groups["actor"]))
    rows = min(config.engine.max_rows, most) * size
    blocks = -(-config.rollout.max_row_tokens // plan.BLOCK) + 1
    row = blocks * plan.BLOCK * plan.kv_bytes_per_token(model.config, resolved.dtype, size)
    whole = cost.parameters * cost.width
    weights = whole / size
    embedding = cost.vocabulary * cost.hidden
    gathered = max(cost.largest * cost.width, GATHER_BYTES)
    sync = {"gathered weights": 2.0 * min(whole, gathered), "merged weight": cost.merged}
    if resolved.engine == "hf":  # at most: some models compute all rows again as one enters
        prompts = rows * (config.rollout.max_prompt_tokens or 0)
        states = prompts * 3 * (cost.widest + cost.hidden) + 12 * rows * cost.vocabulary
        return (
            {"engine's weights": weights},
            sync,
            {"engine's cache": rows * row, "activations of the engine": states},
        )
    room = memory * config.engine.memory_fraction - weights - plan.RESERVE
    awake = {f"{VLLM}weights": weights}
    cache = max(row, min(room, max(rows, 2) * row))
    buckets = 2.0 * max(embedding, client.BUCKET["cuda"])
    rest = {f"{VLLM}other memory": plan.RESERVE, "buckets": buckets}
    return rest, awake | sync, awake | {f"{VLLM}cache": cache}


def _tokens(resolved: Resolved, name: str, rows: int) -> tuple[int, int]:
    """A rank's tokens of the largest micro-batch of so many rows of full length, and how many
    micro-batches there are."""
    longest = resolved.row_tokens(name)
    pieces = resolved.config.set_shape(name).sequence
    most = min(rows, max(resolved.config.compute.micro_batch_tokens * pieces // longest, 1))
    count = -(-rows // most)
    rows_at_once = -(-rows // count) if resolved.models[name].packed else most
    return -(-rows_at_once * longest // pieces), count


def _forward(resolved: Resolved, name: str, role: Role) -> Parts:
    """A forward pass without gradients, of the log-probs or the scores."""
    cost = resolved.cost(name)
    shape = resolved.config.set_shape(name)
    rows = -(
        -resolved.config.rollout.batch_size * shape.size // len(resolved.placement.groups[role])
    )
    tokens, _ = _tokens(resolved, name, rows)
    states = tokens * (cost.outputs * cost.widest / shape.tensor + 3 * cost.hidden)
    logits = _logits(resolved, cost, tokens, entropy=name == "policy") + 2 * tokens * cost.hidden
    return {
        "gathered weights": (cost.root + 2 * cost.layer / shape.tensor) * cost.width,
        f"activations of {tokens:,} tokens": max(states, logits),
    }


def _logits(resolved: Resolved, cost: Cost, tokens: int, *, entropy: bool) -> float:
    """A piece of the logits, and what is computed from it in float32, of which compiled code keeps
    little."""
    rollout = resolved.config.rollout
    responses = tokens * rollout.max_new_tokens // rollout.max_row_tokens
    numbers = 1 + cost.width / 4 if resolved.compiled else 3 + 2 * entropy
    ids = resolved.vocabulary_size if cost.vocabulary else 0
    return min(responses, LOGIT_PIECE) * (cost.vocabulary * cost.width + ids * 4 * numbers)


def _update(resolved: Resolved, name: str, role: Role) -> Parts:
    """The update's peak: where the backward pass begins, or where it ends and the root's gradients
    are reduced."""
    config = resolved.config
    cost = resolved.cost(name)
    shards = _shards(resolved, name)
    shape = config.set_shape(name)
    cut = shape.tensor
    ppo = config.ppo
    ranks = len(resolved.placement.groups[role]) // shape.size
    mini_batches = ppo.mini_batches
    if name == "value":
        mini_batches = ppo.value_mini_batches or mini_batches
    tokens, count = _tokens(resolved, name, -(-config.rollout.batch_size // mini_batches // ranks))
    # of a layer, what tensor parallelism does not cut: residual stream and norms
    whole = 4 * cost.hidden
    # of each layer; of the one whose backward pass runs
    bytes_per_token = whole + (cost.saved - whole) / cut
    again = 0.0
    if config.compute.activation_checkpointing:
        bytes_per_token, again = cost.hidden * cost.checkpoints, bytes_per_token
    # the gradient of the output layer's weights
    head = cost.vocabulary * cost.hidden * cost.dense
    begin = 2 * head + _logits(resolved, cost, tokens, entropy=ppo.entropy_coef > 0)
    layer = 2 * cost.layer * cost.width / cut
    inside = tokens * (again + 2 * cost.widest / cut + cost.hidden) + head + layer * cost.dense
    gathered = cost.root * cost.width + layer
    gradients = cost.gradients / shards
    reduced = cost.root * (8 if shards == 1 else cost.width + 4) * cost.dense
    first = {
        "gathered weights": gathered,
        f"activations of {tokens:,} tokens": tokens * cost.layers * bytes_per_token
        + max(begin, inside),
    }
    if count > 1:
        first["gradients"] = gradients
    return max(first, {"gathered weights": gathered + reduced, "gradients": gradients}, key=needed)


def _listed(parts: Parts) -> str:
    ordered = sorted(parts.items(), key=lambda item: -item[1])
    texts = (f"{part} {size / 2**30:.2f}" for part, size in ordered if size >= 2**20)
    return ", ".join(texts) or "less than 0.01"


def _gib(size: float) -> str:
    return f"{size / 2**30:.0f} GiB"
