"""The configuration: frozen dataclasses with a docstring per field, read from flags and presets, and its rules."""

import argparse
import io
import math
import re
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

import tyro

from splitppo.errors import UserError
from splitppo.presets import as_flag, leaves, read_preset, toml_value
from splitppo.presets import to_toml as to_toml


@dataclass(frozen=True)
class PlacementConfig:
    """Which ranks play which role."""

    mode: Literal["auto", "per_node", "by_node", "colocated"] = "auto"
    """`per_node` cuts every node alike; `by_node` gives whole nodes to a role; `colocated` lets every rank play
    both. `auto`: colocated for one rank, else per_node."""
    actor: int | None = None
    """Ranks of the actor group, over all nodes. Unset: what the critic leaves, or half, rounded up."""
    critic: int | None = None
    """Ranks of the critic group, over all nodes. Unset: what the actor leaves, or half, rounded down."""


@dataclass(frozen=True)
class OptimConfig:
    """AdamW and its schedule."""

    lr: float = 1e-6
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate goes on from its peak to `min_lr_ratio` of it at the last step."""
    warmup_steps: int = 0
    """Steps of linear warm-up; step s of w has s/w of the peak."""
    min_lr_ratio: float = 0.0
    """Where a linear or cosine schedule ends, as a share of the peak."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's moment decay rates."""
    eps: float = 1e-8
    """AdamW's epsilon."""
    weight_decay: float = 0.0
    """Decoupled weight decay; not applied to biases and norms (tensors with fewer than two axes)."""
    max_grad_norm: float = 1.0
    """Clip the gradient to this L2 norm over the whole model; 0 turns clipping off."""


@dataclass(frozen=True)
class PolicyConfig:
    """The policy: any Hugging Face causal language model."""

    path: str = "tiny"
    """Folder with config, tokenizer and safetensors, or `tiny`: the embedded model, built and tokenised here,
    with settings of its own (splitppo/tiny.toml) in place of the defaults below."""
    random_init: bool = False
    """Draw the weights at random from the seed in place of reading them: for benchmarks on a real shape."""
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-6))


@dataclass(frozen=True)
class ReferenceConfig:
    """The frozen reference of the KL penalty. Loaded only if `ppo.kl_coef` or `ppo.kl_loss_coef` is above 0."""

    path: str | None = None
    """Folder of the reference model. Unset: the policy as it was before training."""
    offload: bool = False
    """Keep its shards on the CPU between its uses."""


@dataclass(frozen=True)
class ValueConfig:
    """The value model: a causal language model's body with a scalar head."""

    path: str | None = None
    """Folder of the body. Unset: the policy's. It must read the policy's token ids."""
    random_init: bool = False
    """Draw the body at random from the seed in place of reading it."""
    head: Literal["zero", "normal"] = "zero"
    """How a scalar head starts that `path` doesn't hold: all zero (the first values are 0) or N(0, 1/hidden size)."""
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5))


@dataclass(frozen=True)
class DataConfig:
    """The prompts."""

    task: str = "echo"
    """The generated task to train on when no `files` are given: `echo` or `addition`."""
    digits: int = 1
    """Digits of the operands of the generated task `addition`."""
    files: tuple[str, ...] = ()
    """Training files: .parquet, .json or .jsonl; read in order as one data set. Empty: the generated task."""
    prompt_key: str = "prompt"
    """Column of the prompt: a string, or a list of {role, content} messages."""
    answer_key: str = "reward_model.ground_truth"
    """Column of the ground truth; a dot goes into a nested column."""
    chat: bool = True
    """Put string prompts through the tokenizer's chat template (as one user message) if it has one."""
    validation_files: tuple[str, ...] = ()
    """Held-out files. Empty: the generated task's held-out part, or none."""
    validation_rows: int = 256
    """Held-out prompts to use at most, the first of them."""


@dataclass(frozen=True)
class RolloutConfig:
    """One rollout: the rows of a step."""

    batch_size: int = 64
    """B: rows (prompt + response) a step, over all actor ranks."""
    samples: int = 1
    """Responses sampled for each prompt; `batch_size / samples` prompts a step."""
    max_prompt_tokens: int = 512
    """A longer prompt is refused when the data is read."""
    max_new_tokens: int = 512
    """A response is cut here if it has not ended."""
    temperature: float = 1.0
    """Sampling temperature; log-probs are taken at it everywhere."""
    top_p: float = 1.0
    """Draw from the fewest likeliest tokens that have this probability together. Below 1 it biases the ratio."""
    top_k: int = 0
    """Draw from this many likeliest tokens; 0: from all. Above 0 it biases the ratio."""
    stop: tuple[str, ...] = ()
    """Strings that end a response (they stay part of it), beside the end-of-sequence token."""
    chunks: int = 4
    """K: finished rows leave for the critic in at most this many messages for each pair of ranks."""


@dataclass(frozen=True)
class EngineConfig:
    """What generates."""

    kind: Literal["auto", "hf", "vllm"] = "auto"
    """`vllm`, in a process of its own on the actor's GPU; `hf`: the library's generate(), in the trainer's process.
    `auto`: vllm on GPUs if it is installed, else hf."""
    max_rows: int = 512
    """Rows that one actor rank generates at once; more wait for their turn."""
    tensor_parallel: int = 1
    """Actor ranks (GPUs) that share an engine, each holding a part of its weights; on one node."""
    memory_fraction: float = 0.5
    """Share of a GPU that vLLM may hold at most. It takes its weights and the KV cache that its rows can fill."""
    sleep: Literal["auto", "off", "1", "2"] = "auto"
    """vLLM's memory while the trainer works: `off` keeps it, `1` moves the weights to the CPU and drops the KV cache,
    `2` drops both (new weights come with the next sync). `auto`: 2, until what the trainer needs is known to fit
    beside it."""
    eager: bool = False
    """Neither compile vLLM's model nor capture CUDA graphs: starts sooner, generates slower."""


@dataclass(frozen=True)
class RewardConfig:
    """The score of a row."""

    function: str = "auto"
    """`exact_match`, `last_number`, `gsm8k`, or `path/to/file.py:name` of a function
    (data_source, solution_str, ground_truth, extra_info) -> float or dict with `score`, whose other numbers become
    metrics. `auto`: the generated task's own, or by the rows' data_source."""


@dataclass(frozen=True)
class PPOConfig:
    """Proximal policy optimisation (Schulman et al. 2017), as practised on language models."""

    gamma: float = 1.0
    """Discount."""
    lam: float = 0.95
    """GAE's lambda."""
    kl_coef: float = 0.0
    """Weight of the KL to the reference, subtracted from the reward at each token."""
    kl_kind: Literal["k1", "k2", "k3", "abs"] = "k1"
    """Estimator of the KL in the reward (Schulman, 'Approximating KL divergence', 2020)."""
    kl_loss_coef: float = 0.0
    """Weight of the KL to the reference in the policy's loss."""
    kl_loss_kind: Literal["k1", "k2", "k3", "abs"] = "k3"
    """Estimator of the KL in the loss."""
    clip_low: float = 0.2
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float = 0.2
    """The ratio is clipped above at 1 + clip_high."""
    dual_clip: float | None = None
    """Bound of the loss for negative advantages (Ye et al. 2020), above 1. Unset: off."""
    value_clip: float | None = 0.2
    """Values are clipped to within this of the old ones in the loss. None: off."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    whiten: bool = True
    """Whiten the advantages over the whole batch."""
    epochs: int = 1
    """Passes over the rollout."""
    mini_batches: int = 1
    """Optimizer steps a pass; must divide `rollout.batch_size`."""
    aggregate: Literal["token_mean", "seq_mean_token_sum", "seq_mean_token_mean"] = "token_mean"
    """How token losses become one number, over the whole mini-batch."""


@dataclass(frozen=True)
class ComputeConfig:
    """Devices, precision and memory."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: cuda if there is a GPU for each local rank."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of forward and backward; weights and reductions stay float32. `auto`: bfloat16 on GPUs."""
    micro_batch_tokens: int = 16384
    """Padded tokens of one forward-backward at most; a longer row goes alone."""
    activation_checkpointing: bool = False
    """Recompute the layers' activations in the backward pass."""


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints under RUN/checkpoints."""

    every: int = 0
    """Write one every n steps and after the last; 0: never."""
    keep: int = 2
    """Complete checkpoints to keep, the newest; 0: all."""


@dataclass(frozen=True)
class LogConfig:
    """What the run folder holds."""

    samples: int = 4
    """Generations of each step written to RUN/samples."""
    validate_every: int = 0
    """Greedy score on held-out prompts before the first, every n-th and after the last step; 0: never."""


@dataclass(frozen=True)
class Config:
    """PPO for language models on one torchrun, split by rank into an actor and a critic group."""

    config: str | None = None
    """TOML preset; flags given beside it win."""
    steps: int = 60
    """Training steps: rollouts."""
    seed: int = 0
    """Everything random follows from it."""
    run_dir: str | None = None
    """The run's folder. Unset: runs/DATE-TIME."""
    resume: str = "auto"
    """`auto`: go on from the newest complete checkpoint in run_dir, if any; `never`; or a checkpoint's folder."""
    dry_run: bool = False
    """Print the resolved config, placement, messages and memory, and stop; needs no torchrun."""
    world_size: int | None = None
    """Ranks to plan for in a dry run. Unset: torchrun's, or 1."""
    nodes: int = 1
    """Nodes to plan for in a dry run."""
    timeout: float = 1800.0
    """Seconds that a wait for another rank may take before the run ends with an error that names it."""
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    value: ValueConfig = field(default_factory=ValueConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    ppo: PPOConfig = field(default_factory=PPOConfig)
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)


# What a value must do (None: the setting is off), in words, and the settings that must; `optim.`: both models'.
RULES: tuple[tuple[Callable[[Any], bool], str, str], ...] = (
    (lambda v: v >= 1, "must be at least 1", "steps nodes ppo.epochs ppo.mini_batches engine.max_rows rollout.samples"),
    (lambda v: v >= 1, "must be at least 1", "rollout.batch_size rollout.chunks rollout.max_prompt_tokens"),
    (lambda v: v >= 1, "must be at least 1", "rollout.max_new_tokens data.validation_rows compute.micro_batch_tokens"),
    (lambda v: v >= 0, "must be at least 0", "ppo.kl_coef ppo.kl_loss_coef ppo.entropy_coef checkpoint.every"),
    (lambda v: v >= 0, "must be at least 0", "checkpoint.keep log.samples log.validate_every"),
    (lambda v: v >= 0, "must be at least 0", "optim.lr optim.warmup_steps optim.weight_decay optim.max_grad_norm"),
    (lambda v: 0 <= v <= 1, "must lie between 0 and 1", "ppo.gamma ppo.lam optim.min_lr_ratio"),
    (lambda v: 1 <= v <= 9, "must lie between 1 and 9", "data.digits"),
    (lambda v: -(2**63) <= v < 2**63, "must fit into 64 bits, as torch's generators have it", "seed"),
    (lambda v: 0 <= v <= 10**9, f"must lie between 0 and {10**9}", "timeout"),
    (lambda v: v > 0, "must be above 0", "timeout rollout.temperature ppo.clip_high ppo.value_clip optim.eps"),
    (lambda v: 0 < v < 1, "must lie between 0 and 1 (the ratio's lower bound is 1 - it)", "ppo.clip_low"),
    (lambda v: v > 1, "must be above 1; use 3.0, or None to turn it off", "ppo.dual_clip"),
    (lambda v: all(0 <= beta < 1 for beta in v), "must lie in [0, 1); use 0.9 0.999", "optim.betas"),
    (lambda v: "" not in v, "holds an empty string, which would end every response at once", "rollout.stop"),
    (lambda v: v >= 1, "must be at least 1", "engine.tensor_parallel"),
    (lambda v: v >= 0, "must be at least 0; 0 turns it off", "rollout.top_k"),
    (lambda v: 0 < v <= 1, "must be above 0 and at most 1; 1 turns it off", "rollout.top_p"),
    (lambda v: 0 < v < 1, "must lie between 0 and 1", "engine.memory_fraction"),
)


def parse(argv: Sequence[str], *, quiet: bool = False) -> Config:
    """Reads the flags, behind those of the preset that `--config` names: one given by hand wins.

    A wrong preset is a UserError; a wrong flag ends in tyro's box and SystemExit or, if `quiet`, is a UserError too.
    """
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--config", nargs="?")  # without a value it is tyro that complains
    path = finder.parse_known_args(argv)[0].config
    given = [*(_preset_flags(path) if path is not None else []), *argv]
    config = _cli(given, quiet)
    if config.policy.path == "tiny":
        # it has settings of its own, under all of them: a model that small learns at other rates
        config = _cli([*_preset_flags(str(Path(__file__).with_name("tiny.toml"))), *given], quiet)
    return config


def _cli(args: Sequence[str], quiet: bool) -> Config:
    if not quiet:
        return tyro.cli(Config, args=args, prog="splitppo.train")
    box = io.StringIO()
    try:
        with redirect_stdout(box), redirect_stderr(box):
            return tyro.cli(Config, args=args, prog="splitppo.train")
    except SystemExit as stop:
        if not stop.code:
            raise
        lines = [line.strip("│|╭╮─ ") for line in box.getvalue().splitlines() if re.search("[a-z]", line)]
        near = lines[lines.index("Perhaps you meant:") + 1] if "Perhaps you meant:" in lines else ""
        told = " ".join(takewhile(lambda line: not line.startswith(("Perhaps", "For full")), lines[1:]))
        raise UserError(f"{told}; {f'did you mean {near}?' if near else 'see --help'}") from stop


def _preset_flags(path: str) -> list[str]:
    """The flags that a preset stands for, each good by itself."""
    settings = read_preset(path, asdict(Config()))
    flags = [word for name, value in settings.items() for word in as_flag(name, value)]
    try:
        _cli(flags, quiet=True)
    except UserError:
        for name, value in settings.items():
            try:
                _cli(as_flag(name, value), quiet=True)
            except UserError as error:
                raise UserError(f"--config {path}: {name} = {toml_value(value)}: {error}") from error
        raise
    return flags


def check(config: Config) -> None:
    """A UserError for what can be told to be wrong before any file, model, GPU or process group is touched."""
    values = dict(leaves(asdict(config)))
    for name, value in values.items():
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, float) and not math.isfinite(number):
                raise UserError(f"{name}={number} must be a finite number; its default is in --help")
    for holds, rule, names in RULES:
        for short in names.split():
            for name in (f"policy.{short}", f"value.{short}") if short.startswith("optim.") else (short,):
                if values[name] is not None and not holds(values[name]):
                    raise UserError(f"{name}={values[name]} {rule}")
    rows, samples, mini_batches = config.rollout.batch_size, config.rollout.samples, config.ppo.mini_batches
    unit = math.lcm(samples, mini_batches)  # what a batch size must be a multiple of, both rules together
    below = rows // unit * unit
    use = f"use {below} or {below + unit}" if below else f"use {unit}"
    if rows % samples:
        raise UserError(f"rollout.batch_size={rows} is not a multiple of rollout.samples={samples}; {use}")
    if rows % mini_batches:
        raise UserError(f"rollout.batch_size={rows} does not cut into {mini_batches} mini-batches; {use}")
    if (size := config.world_size) is not None and not config.dry_run:
        raise UserError(f"world_size={size} is for --dry-run; in a run torchrun's --nproc_per_node says how many ranks")
