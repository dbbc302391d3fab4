"""The configuration: frozen dataclasses, read by cli.py, checked by rules.py. Imports no torch:
--help starts fast.

The docstring of a field is its text in --help. Here: settings of the job; in algorithm.py: those of
the algorithm.
"""

from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from splitppo.config.algorithm import DataConfig, EnvConfig, PPOConfig, RewardConfig, RolloutConfig
from splitppo.config.models import (
    DistillConfig,
    LoraConfig,
    Offload,
    OptimConfig,
    PolicyConfig,
    ReferenceConfig,
    TeacherConfig,
    ValueConfig,
)

__all__ = [
    "OF_VALUES",
    "CheckpointConfig",
    "ComputeConfig",
    "Config",
    "DataConfig",
    "DistillConfig",
    "EngineConfig",
    "EnvConfig",
    "FsdpConfig",
    "LogConfig",
    "LoraConfig",
    "Offload",
    "OptimConfig",
    "PPOConfig",
    "PlacementConfig",
    "PolicyConfig",
    "ReferenceConfig",
    "RewardConfig",
    "RolloutConfig",
    "SetShape",
    "ShardSize",
    "TeacherConfig",
    "ValueConfig",
]

ShardSize = int | Literal["node"] | None
# how the settings begin that are of the value model, and of no use without one
OF_VALUES = ("value.", "ppo.value_epochs", "ppo.value_mini_batches", "ppo.lam_value")


class SetShape(NamedTuple):
    """The shape of a parallel group, whose ranks run a model's rows together: sequence-parallel
    ranks times tensor-parallel ranks."""

    sequence: int = 1
    tensor: int = 1

    @property
    def size(self) -> int:
        return self.sequence * self.tensor


@dataclass(frozen=True)
class PlacementConfig:
    """Which ranks play which role."""

    mode: Literal["auto", "per_node", "by_node", "colocated"] = "auto"
    """`per_node`: every node has ranks of both groups. `by_node`: a node belongs to one group.
    `colocated`: every rank plays both roles. `auto`: colocated for one rank, and, if no other
    placement setting is given, for two GPUs or a critic group without a model; else per_node."""
    actor: int | None = None
    """Number of actor ranks, over all nodes. Unset: all ranks that are not critic ranks."""
    critic: int | None = None
    """Number of critic ranks, over all nodes. Unset: all ranks that are not actor ranks; a quarter,
    rounded up, if both are unset."""
    reference: Literal["actor", "critic"] = "actor"
    """Group that holds the reference. In the critic group it works during the rollout, which helps
    if all models have one size."""


@dataclass(frozen=True)
class EngineConfig:
    """The rollout engine, which generates the responses."""

    kind: Literal["auto", "hf", "vllm"] = "auto"
    """`vllm`: vLLM, in its own process. `hf`: transformers, in the rank's process. `auto`: vllm on
    GPUs if it is installed, else hf."""
    max_rows: int = 512
    """Maximum number of rows that an actor rank decodes at once. Further rows wait."""
    tensor_parallel: int = 1
    """Number of actor ranks (GPUs) of one node that share an engine. Each holds a part of its
    weights."""
    memory_fraction: float = 0.5
    """Largest fraction of a GPU's memory that vLLM may use. It allocates what its weights and its
    rows' KV cache need."""
    sleep: Literal["auto", "off", "1", "2"] = "auto"
    """vLLM's memory while the trainer works. `off`: vLLM keeps it. `1`: weights move to the CPU and
    the KV cache is dropped. `2`: both are dropped, and the next sync sends new weights. `auto`: 2,
    until the trainer is known to fit beside vLLM."""
    eager: bool = False
    """Don't compile vLLM's model or capture CUDA graphs: starts faster, generates slower."""


@dataclass(frozen=True)
class ComputeConfig:
    """Devices, precision and memory."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: cuda if there are GPUs, one per local rank. With too few GPUs, the embedded model
    runs on the cpu."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of forward and backward passes. Weights and reductions stay float32. `auto`:
    bfloat16 on GPUs."""
    micro_batch_tokens: int = 16384
    """Maximum number of tokens per rank in one forward and backward pass, including padding. A
    longer row is a micro-batch of its own."""
    packing: Literal["auto", "on", "off"] = "auto"
    """Concatenate rows without padding. `auto`: on GPUs in bfloat16 if the model's attention allows
    it, and with `fsdp.sequence_parallel`."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Compile the layers with torch.compile, with dynamic lengths. `auto`: on GPUs."""
    activation_checkpointing: bool = False
    """Recompute the layers' activations in the backward pass."""


@dataclass(frozen=True)
class FsdpConfig:
    """How weights, gradients and optimizer states are sharded over the ranks of a group."""

    shard_size: ShardSize = None
    """Ranks per replica. With several replicas in a group, gradients are summed over them (hybrid
    sharding). `node`: the group's ranks on a node, so weights are gathered within nodes only.
    Unset: the whole group."""
    tensor_parallel: int = 1
    """Tensor parallelism: ranks of one node that split each layer of policy and value model and
    work on the same rows."""
    sequence_parallel: int = 1
    """Sequence parallelism: ranks of one node that split the tokens of each row, and the attention
    heads, of policy and value model. For rows that are too long for one rank. Combined with
    `fsdp.tensor_parallel`, a parallel group has as many ranks as the product of both."""


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints under RUN/checkpoints."""

    every: int = 0
    """Write a checkpoint every n steps. 0: only after the last step, or when the run is asked to
    stop."""
    last: bool = True
    """Write a checkpoint after the last step."""
    keep: int = 2
    """Number of complete checkpoints to keep, the newest ones. 0: all."""
    keep_every: int = 0
    """Also keep the checkpoint of every n-th step. 0: none."""


@dataclass(frozen=True)
class LogConfig:
    """Contents of the run's folder."""

    samples: int = 4
    """Responses per step to write to RUN/samples."""
    validate_every: int = 0
    """Score held-out prompts before the first step, every n steps, and after the last step. 0:
    never. With `data.files` this needs `data.validation_files`."""
    validate_samples: int = 1
    """Responses per held-out prompt. Above 1, the best response's score is logged as well, and
    pass@k if scores lie in [0, 1]."""
    validate_temperature: float = 0.0
    """Sampling temperature of the held-out responses. 0: greedy, one response."""
    stop_at: float | None = None
    """End the run, with a checkpoint, after the first step whose mean validation score reaches
    this. Unset: after `steps`."""
    trackers: tuple[str, ...] = ()
    """Trackers that also receive the metrics: `wandb` (reads WANDB_PROJECT, WANDB_NAME and
    WANDB_MODE=offline), `tensorboard` (RUN/tensorboard), `trackio`, `mlflow`, or
    `path/to/file.py:Name`, a class with write() and close() (the documentation's page `parts`)."""


@dataclass(frozen=True)
class Config:
    """PPO for language models on one torchrun, split by rank into an actor and a critic group."""

    config: str | None = None
    """TOML preset: a file, or one that ships with splitppo (gsm8k/qwen2.5_0.5b). Flags override
    it."""
    steps: int = 60
    """Training steps. A step is one rollout."""
    seed: int = 0
    """Seed of all random numbers."""
    run_dir: str | None = None
    """The run's folder. Unset: runs/DATE-TIME."""
    resume: str = "auto"
    """`auto`: resume from the newest complete checkpoint in run_dir, if there is one, with its
    settings where no flag or preset sets them. Or the folder of a checkpoint, or of another run,
    whose newest checkpoint is used."""
    force: bool = False
    """Resume in run_dir even if changed settings make it another run. Without a checkpoint: start
    again."""
    dry_run: bool = False
    """Print the resolved config, data, placement and memory, and stop. Needs no torchrun."""
    world_size: int | None = None
    """Ranks to plan for in a dry run. Unset: torchrun's, or 1."""
    nodes: int = 1
    """Nodes to plan for in a dry run."""
    timeout: float = 1800.0
    """Maximum wait for another rank, in seconds. After it the run ends and reports what each rank
    was doing."""
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    value: ValueConfig = field(default_factory=ValueConfig)
    teacher: TeacherConfig = field(default_factory=TeacherConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    env: EnvConfig = field(default_factory=EnvConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    ppo: PPOConfig = field(default_factory=PPOConfig)
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    fsdp: FsdpConfig = field(default_factory=FsdpConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)

    @property
    def old_logprobs(self) -> Literal["trainer", "engine"]:
        """Whose log-probs are the old ones in the ratio."""
        return self.ppo.old_logprobs or ("engine" if self.rollout.window else "trainer")

    @property
    def environment(self) -> EnvConfig:
        """`env`, with the environment of the generated task."""
        is_game = self.data.task.startswith(("guess", "textarena:"))
        if not is_game or self.data.files or self.env.tools:
            return self.env
        return replace(self.env, path=self.env.path or self.data.task)

    @property
    def has_env(self) -> bool:
        """Whether rows have turns that an environment or tools answer."""
        return bool(self.environment.path or self.env.tools)

    @property
    def validate_every(self) -> int:
        """Steps between validations. 0: none, as for files without held-out prompts."""
        held_out = self.data.validation_files or not self.data.files
        return self.log.validate_every if held_out else 0

    def validates(self, step: int) -> bool:
        """Whether held-out rows are scored after this step; 0: before the first."""
        every = self.validate_every
        return every > 0 and (step % every == 0 or step == self.steps)

    @property
    def has_kl(self) -> bool:
        """Whether the run needs a reference."""
        return self.ppo.kl_coef > 0 or self.ppo.kl_loss_coef > 0

    @property
    def base_is_reference(self) -> bool:
        """Whether the reference is the policy with its adapters off: no model of its own."""
        is_separate = self.reference.path or self.placement.reference == "critic"
        return self.has_kl and self.policy.lora.rank > 0 and not is_separate

    @property
    def has_value(self) -> bool:
        """Whether the run has a value model. A run without rewards has none."""
        return self.ppo.baseline == "value" and not (self.has_teacher and not self.has_rewards)

    @property
    def has_teacher(self) -> bool:
        """Whether the policy follows a teacher."""
        return bool(self.teacher.path or self.teacher.prompt_key)

    @property
    def has_rewards(self) -> bool:
        """Whether anything is rewarded or penalised."""
        reward = self.reward
        scored = reward.function != ("none",) or reward.model or self.has_env
        penalties = reward.missing_eos_penalty, reward.overlong_tokens, self.ppo.kl_coef
        return bool(scored or any(penalties))

    def set_shape(self, model: str) -> SetShape:
        """The parallel group that runs the rows of a model: `policy`, `value`, `reference`,
        `reward` or `teacher`. Without a value model each row of the critic group belongs to one
        rank."""

        def cut(table: Any, unset: SetShape) -> SetShape:
            return SetShape(
                table.sequence_parallel or unset.sequence, table.tensor_parallel or unset.tensor
            )

        policy = SetShape(self.fsdp.sequence_parallel, self.fsdp.tensor_parallel)
        value = cut(self.value, policy if self.has_value else SetShape())
        group = policy if self.placement.reference == "actor" else value
        return {
            "policy": policy,
            "value": value,
            "reference": cut(self.reference, group),
            "reward": cut(self.reward, value),
            "teacher": cut(self.teacher, value),
        }[model]
