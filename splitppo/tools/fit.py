"""Which placements and settings fit a model on some GPUs, and a step's time: from the model's
configuration alone."""

import torch

from splitppo.config.cli import parse
from splitppo.errors import UserError
from splitppo.models import hub
from splitppo.models.build import check_type, read_config
from splitppo.models.cost import GB, USABLE
from splitppo.models.trainable import NotTrained, Trainable
from splitppo.placement import place
from splitppo.run.memory import card, fitted, highest
from splitppo.run.models import KINDS, TRAINED, Model
from splitppo.run.resolve import Resolved
from splitppo.tools.cost import Split, Work, columns, predict, splits

# of a step
ROWS = 512
MINI_BATCHES = 4
MEAN = 4  # the longest response by the mean one
# of an H100 or H200 in bfloat16; the part of them that updates reached (docs/measured_speed.md)
FLOPS = 989e12
MFU = 0.45
# a decode step's seconds, and bytes of weights a second, as measured on H200
DECODE = 1.3e-3
BANDWIDTH = 3.8e12
HOST = 50e9  # bytes a second between a GPU and pinned host memory
SHOWN = 5
# the placements are tried anyway
TRIED = ("--compute", "--reference", "--policy", "--value", "--engine", "--fsdp.sequence")


def fit(name: str, gpus: int, length: int, memory: float) -> list[str]:
    """The placements that fit, the fastest first, each with as few as possible of the ways to need
    less memory. Raises UserError if none does, or the model can't be read or trained.

    Args:
        length: the longest row in tokens; a quarter of it is the prompt. memory: GB of a GPU, as
            its name has them.
    """
    # of a model on the hub this file alone is fetched
    config = read_config(hub.find("MODEL", name, files=["config.json"])[1])
    check_type(config, "policy", name)
    fitting = []
    least = []
    total = memory * GB
    models = {
        role: Model(
            KINDS[role],
            name,
            name,
            config,
            random_init=True,
            packed=True,
            trainable=(Trainable if role in TRAINED else NotTrained)(KINDS[role]),
        )
        for role in ("policy", "reference", "value")
    }
    for split in splits(gpus, movable=True):
        resolved, flags = _resolved(models, split, length)
        resolved, chosen = fitted(resolved, total, TRIED)
        need, phase, _ = highest(resolved, total)
        if need <= USABLE * total:
            work = _work(resolved)
            actor, critic = columns(work, split)
            step = (
                f"  {split}: {predict(work, split):.1f} s a step (actor group {actor:.1f} s, "
                f"critic group {critic:.1f} s), {need / 2**30:.0f} GiB at most ({phase})"
            )
            fitting.append(
                (predict(work, split), step, f"    {' '.join([*flags, *chosen.values()])}")
            )
        else:
            least.append(
                (need, f"{split} does not fit: the {phase} needs {need / 2**30:.0f} GiB at least")
            )
    if not fitting:
        raise UserError(
            f"{name} on {gpus} GPUs, each with {card(total)}: {min(least)[1]}; "
            "use more GPUs, or a smaller --length"
        )
    return [
        f"{name}: {models['policy'].counts.words}, each for policy, reference and "
        f"value model; rows of {length:,} tokens",
        f"planned for {card(total)}",
        f"estimates, not measurements: {ROWS} rows a step, responses a quarter of the longest "
        f"on average; updates at {MFU:.0%} of {FLOPS / 1e12:.0f} TFLOP/s",
        *(line for _, *both in sorted(fitting)[:SHOWN] for line in both),
        *(f"  {line}" for _, line in sorted(least)[:1]),
    ]


def _resolved(models: dict[str, Model], split: Split, length: int) -> tuple[Resolved, list[str]]:
    """A run with a placement, and the flags of the placement."""
    flags = [
        f"--placement.actor {split.actor}" if split.critic else "--placement.mode colocated",
        *["--placement.reference critic"] * (split.reference == "critic"),
    ]
    argv = (
        f"--policy.path m --ppo.kl-coef 0.01 --ppo.mini-batches {MINI_BATCHES} "
        f"--rollout.batch-size {ROWS} --rollout.max-prompt-tokens {length // 4} "
        f"--rollout.max-new-tokens {length - length // 4} {' '.join(flags)}"
    )
    config = parse(argv.split())
    world = split.actor + split.critic
    return (
        Resolved(
            config,
            local={},
            placement=place(config.placement, world=world, local_world=world, gpu=True),
            local_world=world,
            device=torch.device("cuda"),
            dtype=torch.bfloat16,
            compiled=True,
            engine="vllm",
            models=models,
            tokenizer=None,
            vocabulary_size=models["policy"].config.vocab_size,
        ),
        flags,
    )


def _work(resolved: Resolved) -> Work:
    """The seconds of a step's phases."""
    config = resolved.config
    models = resolved.models
    longest = config.rollout.max_new_tokens
    row = config.rollout.max_row_tokens - longest + longest / MEAN
    text = models["policy"].config
    engine = models["policy"].counts.parameters * 2 / config.engine.tensor_parallel

    def forward(name: str) -> float:
        attention = 2 * row * text.hidden_size * text.num_hidden_layers
        return ROWS * row * (resolved.cost(name).flops / 3 + attention) / (MFU * FLOPS)

    def update(name: str, offload: str) -> float:
        offloaded = {"optimizer": 8, "all": 12}.get(offload, 0)  # bytes of a parameter
        moved = offloaded * models[name].counts.parameters * MINI_BATCHES
        return forward(name) * (4 if config.compute.activation_checkpointing else 3) + moved / HOST

    return Work(
        batch=ROWS,
        rollout=longest * (DECODE + engine / BANDWIDTH),
        sync=0.05 + models["policy"].counts.parameters * 2e-11,
        other=0.0,
        old=forward("policy"),
        reference=forward("reference"),
        score=forward("value"),
        policy=update("policy", config.policy.offload),
        value=update("value", config.value.offload),
        longest=MEAN,
    )
