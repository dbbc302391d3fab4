"""The configuration: frozen dataclasses, read by cli.py, checked by rules.py. Imports no torch: --help starts fast."""

from dataclasses import dataclass, field
from typing import Literal

from splitppo.config.algorithm import (
    DataConfig,
    Offload,
    OptimConfig,
    PolicyConfig,
    PPOConfig,
    ReferenceConfig,
    RewardConfig,
    RolloutConfig,
    ValueConfig,
)
from splitppo.config.job import (
    CheckpointConfig,
    ComputeConfig,
    EngineConfig,
    FsdpConfig,
    LogConfig,
    PlacementConfig,
    ShardSize,
)

__all__ = [
    "CheckpointConfig", "ComputeConfig", "Config", "DataConfig", "EngineConfig", "FsdpConfig", "LogConfig",
    "Offload", "OptimConfig", "PPOConfig", "PlacementConfig", "PolicyConfig", "ReferenceConfig", "RewardConfig",
    "RolloutConfig", "ShardSize", "ValueConfig",
]  # fmt: skip


@dataclass(frozen=True)
class Config:
    """PPO for language models on one torchrun, split by rank into an actor and a critic group."""

    config: str | None = None
    """TOML preset: a file, or one that ships with splitppo (gsm8k/qwen2.5_0.5b). Flags override it."""
    steps: int = 60
    """Training steps. A step is one rollout."""
    seed: int = 0
    """Seed of everything random."""
    run_dir: str | None = None
    """The run's folder. Unset: runs/DATE-TIME."""
    resume: str = "auto"
    """`auto`: go on from the newest complete checkpoint in run_dir, if any. `never`. Or the folder of a checkpoint."""
    force: bool = False
    """Go on in run_dir although settings have changed that make it another run. Without a checkpoint: start again."""
    dry_run: bool = False
    """Print config, placement, messages and memory, and stop. Needs no torchrun."""
    world_size: int | None = None
    """Ranks to plan for in a dry run. Unset: torchrun's, or 1."""
    nodes: int = 1
    """Nodes to plan for in a dry run."""
    timeout: float = 1800.0
    """Longest wait for another rank, in seconds. Then the run ends with an error that says what each rank was doing. A
    host that is not heard from ends the run after at most two minutes."""
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
    fsdp: FsdpConfig = field(default_factory=FsdpConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)

    @property
    def old_logprobs(self) -> Literal["trainer", "engine"]:
        """Whose log-probs are the old ones of the ratio."""
        return self.ppo.old_logprobs or ("engine" if self.rollout.window else "trainer")

    def tensor_parallel(self, model: str) -> int:
        """Ranks that share each layer of a model: `policy`, `value`, `reference` or `reward`."""
        policy = self.fsdp.tensor_parallel
        value = self.value.tensor_parallel or policy
        group = policy if self.placement.reference == "actor" else value
        own = {"reference": self.reference.tensor_parallel or group, "reward": self.reward.tensor_parallel or value}
        return {"policy": policy, "value": value, **own}[model]
