"""Which placements and settings fit a model on some GPUs, and a step's time: from the model's configuration alone."""

from dataclasses import replace
from pathlib import Path

import torch
from huggingface_hub import hf_hub_download
from transformers import PretrainedConfig

from splitppo.config import Config
from splitppo.errors import UserError
from splitppo.models import hub
from splitppo.models.build import Kind, check_type, read_config
from splitppo.placement import place
from splitppo.run.memory import highest, needed, ways
from splitppo.run.resolve import Model, Resolved
from splitppo.tools.cost import Split, Work, columns, predict, splits

ROWS, MINI_BATCHES = 512, 4  # of a step
MEAN = 4  # the longest response by the mean one
FLOPS, MFU = 989e12, 0.45  # of an H100 or H200 in bfloat16; the part of them that updates reached (docs/measured.md)
DECODE, BANDWIDTH = 1.3e-3, 3.8e12  # a decode step's seconds, and bytes of weights a second, as measured on H200
HOST = 50e9  # bytes a second between a GPU and pinned host memory
SHOWN = 5
TRIED = ("--compute", "--reference", "--policy", "--value", "--engine")  # the placements are tried anyway


def model_config(name: str) -> PretrainedConfig:
    """Of a folder or a hub name, of which config.json alone is fetched.

    Raises:
        UserError: there is none, or of no model that can be trained.
    """
    folder = name
    if not Path(name).is_dir() and (match := hub.MODEL.fullmatch(name)):
        try:
            folder = str(Path(hf_hub_download(match[1], "config.json", revision=match[2])).parent)
        except hub.FAILURES as error:
            problem = f"no such folder, and its config.json can't be fetched from the hub ({type(error).__name__})"
            raise UserError(f"{name}: {problem}; name a folder with a config.json") from error
    config = read_config(folder)
    check_type(config, "policy", name)
    return config


def fit(name: str, gpus: int, length: int, memory: float) -> list[str]:
    """The placements that fit, the fastest first, each with as few as possible of the ways to need less memory.

    Args:
        length: the longest row in tokens; a quarter of it is the prompt. memory: of a GPU in GiB.

    Raises:
        UserError: nothing fits.
    """
    config, found, least = model_config(name), [], []
    kinds: dict[str, Kind] = {"policy": "policy", "reference": "policy", "value": "value"}
    models = {role: Model(kind, name, name, config, True, packed=True) for role, kind in kinds.items()}
    for split in splits(gpus, movable=True):
        resolved, flags = _resolved(models, split, length)
        while True:
            phase, parts = highest(resolved, memory * 2**30)
            need = needed(parts) / 2**30
            way = next((way for way in ways(resolved) if way[0].startswith(TRIED)), None)
            if need <= memory or way is None:
                break
            resolved = way[1](resolved)
            flags[way[0].partition(" ")[0]] = way[0]
        if need <= memory:
            work = _work(resolved, split)
            found.append((predict(work, split), split, columns(work, split), need, phase, flags.values()))
        else:
            least.append((need, f"{split} does not fit: the {phase} needs {need:.0f} GiB at least"))
    if not found:
        raise UserError(
            f"{name} on {gpus} GPUs of {memory:g} GiB: {min(least)[1]}; use more GPUs, or a smaller --length"
        )
    parameters = f"{models['policy'].parameters:,} parameters each for policy, reference and value model"
    how = f"{ROWS} rows a step, responses a quarter of the longest on average"
    lines = [
        f"{name}: {parameters}; rows of {length:,} tokens",
        f"estimates, nothing is measured: {how}; updates at {MFU:.0%} of {FLOPS / 1e12:.0f} TFLOP/s",
    ]
    for seconds, split, (actor, critic), need, phase, chosen in sorted(found, key=lambda one: one[0])[:SHOWN]:
        why = f"actor column {actor:.1f} s, critic column {critic:.1f} s"
        lines.append(f"  {split}: {seconds:.1f} s a step ({why}), {need:.0f} GiB at most ({phase})")
        lines.append(f"    {' '.join(chosen)}")
    return lines + [f"  {line}" for _, line in sorted(least)[:1]]


def _resolved(models: dict[str, Model], split: Split, length: int) -> tuple[Resolved, dict[str, str]]:
    """A run with a placement, and the flags of the placement."""
    base, prompt, world = Config(), length // 4, split.actor + split.critic
    mode, flags = "colocated", {"mode": "--placement.mode colocated"}
    if split.critic:
        mode, flags = "per_node", {"actor": f"--placement.actor {split.actor}"}
    if split.reference == "critic":
        flags["reference"] = "--placement.reference critic"
    placed = replace(
        base.placement, mode=mode, actor=split.actor, critic=split.critic or world, reference=split.reference
    )
    rollout = replace(base.rollout, batch_size=ROWS, max_prompt_tokens=prompt, max_new_tokens=length - prompt)
    ppo = replace(base.ppo, kl_coef=0.01, mini_batches=MINI_BATCHES)
    config, device = replace(base, placement=placed, rollout=rollout, ppo=ppo), torch.device("cuda")
    placement, ids = place(placed, world=world, local_world=world, gpu=True), models["policy"].config.vocab_size
    return Resolved(config, {}, placement, world, device, torch.bfloat16, True, "vllm", models, None, ids), flags


def _work(resolved: Resolved, split: Split) -> Work:
    """The seconds of a step's phases."""
    config, models = resolved.config, resolved.models
    longest = config.rollout.max_new_tokens
    row, text = config.rollout.max_prompt_tokens + longest / MEAN, models["policy"].config
    rate, engine = MFU * FLOPS, models["policy"].parameters * 2 / config.engine.tensor_parallel

    def forward(name: str) -> float:
        attention = 2 * row * text.hidden_size * text.num_hidden_layers
        return ROWS * row * (2 * models[name].parameters + attention) / rate

    def update(name: str, offload: str) -> float:
        moved = {"none": 0, "optimizer": 8, "all": 12}[offload] * models[name].parameters * MINI_BATCHES / HOST
        return forward(name) * (4 if config.compute.activation_checkpointing else 3) + moved

    return Work(
        batch=ROWS,
        rollout=longest * (DECODE + engine / BANDWIDTH),
        sync=0.05 + models["policy"].parameters * 2e-11,
        other=0.0,
        old=forward("policy"),
        reference=forward("reference"),
        score=forward("value"),
        policy=update("policy", config.policy.offload),
        value=update("value", config.value.offload),
        longest=MEAN,
    )
