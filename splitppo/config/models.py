"""Settings of the models: how each is read, cut, kept in memory and trained. The docstring of a
field is its text in --help."""

from dataclasses import dataclass, field
from typing import Literal

Offload = Literal["auto", "none", "optimizer", "all"]


@dataclass(frozen=True)
class OptimConfig:
    """AdamW and its schedule."""

    lr: float
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up: constant, or falling to `min_lr_ratio` of the peak at the
    last step. The policy's schedule starts at its first update, after `value.pretrain_steps`."""
    warmup_steps: int = 0
    """Steps of linear warm-up. Step s of w runs at s/w of the peak."""
    min_lr_ratio: float = 0.0
    """Learning rate at the end of a linear or cosine schedule, as a fraction of the peak."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's moment decay rates."""
    eps: float = 1e-8
    """AdamW's epsilon."""
    weight_decay: float = 0.0
    """Decoupled weight decay, for tensors with at least two axes (not for biases and norms)."""
    max_grad_norm: float = 1.0
    """Clip the gradient of the whole model to this L2 norm. 0: off."""


@dataclass(frozen=True)
class LoraConfig:
    """Train low-rank adapters and freeze the model (LoRA, arXiv:2106.09685). Needs
    `splitppo[lora]`."""

    rank: int = 0
    """Rank of the adapters. 0: no LoRA; the whole model is trained. Above 0, a learning rate that
    neither a flag nor a preset sets is ten times the default."""
    alpha: int | None = None
    """The adapters are scaled by alpha / rank. Unset: the rank, so that the scale is 1."""
    targets: tuple[str, ...] = ()
    """Linear layers that get adapters: names such as `q_proj`, or regular expressions searched in a
    layer's Hugging Face name. Empty: all linear layers except the output layer."""
    path: str | None = None
    """Folder of an adapter to start from, in peft's format or from a checkpoint. Unset: B = 0, so
    the model starts as its base."""


@dataclass(frozen=True)
class PolicyConfig:
    """The policy: any Hugging Face causal language model."""

    path: str = "tiny"
    """A Hugging Face folder, or a hub name: `owner/name`, `owner/name@revision`. `tiny`: the
    embedded model."""
    trust_remote_code: bool = False
    """Run Python code from the folders or repositories of the run's models. Read that code
    first."""
    random_init: bool = False
    """Draw the weights of all models at random from the seed. For benchmarks with a real model's
    shape."""
    freeze: tuple[str, ...] = ()
    """Weights that are not trained: `attention`, `router` (of a mixture of experts), `embeddings`
    (and a tied output layer), `body` (all but the output layer), or regular expressions searched in
    a weight's Hugging Face name."""
    replay_routing: Literal["auto", "on", "off"] = "auto"
    """Routing replay for mixtures of experts: the trainer sends each response token to the experts
    that the engine chose, weighted by its own router. `auto`: if the engine reports its choices and
    the model's routers can be overridden."""
    router_aux_coef: float = 0.0
    """Weight of the load-balancing loss of a mixture of experts, as transformers computes it for
    the model type, over the response tokens of each micro-batch. 0.001 is common. 0: off."""
    offload: Offload = "auto"
    """What moves to pinned host memory while it is not needed. `none`: nothing. `optimizer`:
    AdamW's moments. `all`: also the weights' shards. `auto`: in a colocated run, as much as the
    estimated memory requires; otherwise nothing. Results don't change."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-6))


@dataclass(frozen=True)
class ReferenceConfig:
    """The frozen reference model of the KL penalty, loaded if `ppo.kl_coef` or `ppo.kl_loss_coef`
    is above 0."""

    path: str | None = None
    """Folder or hub name of the reference model. Unset: the policy before training. With LoRA that
    is the policy's base, which needs no memory of its own in the actor group."""
    offload: bool = False
    """Keep the reference's shards in pinned host memory between uses."""
    tensor_parallel: int | None = None
    """Ranks that split each layer of the reference. The parallel group is then a multiple of its
    group's. Unset: as for its group."""
    sequence_parallel: int | None = None
    """Ranks that split each row of the reference. Unset: as for its group."""


@dataclass(frozen=True)
class TeacherConfig:
    """On-policy distillation: a frozen model of the critic group gives log-probs of the tokens that
    the policy samples. See `distill`."""

    path: str | None = None
    """Folder or hub name of a causal language model with the policy's vocabulary. Unset: no
    teacher, or, with `prompt_key`, the policy before training."""
    prompt_key: str | None = None
    """Column of a prompt that the teacher reads in place of the policy's, such as one with the
    answer. It is rendered like `data.prompt_key`. Unset: the policy's prompt."""
    offload: bool = False
    """Keep the teacher's shards in pinned host memory between uses."""
    tensor_parallel: int | None = None
    """Ranks that split each layer of the teacher. The parallel group is then a multiple of the
    value model's. Unset: as for the value model."""
    sequence_parallel: int | None = None
    """Ranks that split each row of the teacher. Unset: as for the value model."""


@dataclass(frozen=True)
class DistillConfig:
    """How the policy is trained towards the teacher."""

    coef: float = 0.3
    """c. Adds c (d - mean of d over the batch) to each sampled token's whitened advantage, where d
    is the teacher's log-prob minus the policy's old one. With `top_k`: weight of the divergence in
    the policy's loss."""
    top_k: int = 0
    """Number of most likely tokens that the teacher sends. The policy's loss then has a divergence
    over these tokens and the rest as one, and the advantages are left as they are. 8 is enough. 0:
    off."""
    divergence: Literal["forward", "reverse", "jsd"] = "forward"
    """Divergence for `top_k`. `forward`: KL(teacher || policy). `reverse`: KL(policy || teacher).
    `jsd`: the mean of both models' KL to their mixture."""


@dataclass(frozen=True)
class ValueConfig:
    """The value model: a causal language model's body with a scalar head."""

    path: str | None = None
    """Folder or hub name of a model with the policy's vocabulary. A reward model also provides its
    head. Unset: the policy's."""
    head: Literal["zero", "normal"] = "zero"
    """Initial scalar head if `path` has none. `zero`: zeros, with the first rollout's mean return
    as the bias. `normal`: N(0, 1/hidden size)."""
    range: tuple[float, float] | None = None
    """Lowest and highest return, after shaping (BPCO, arXiv:2608.23566). A sigmoid bounds the
    values, which are trained on whole rewards-to-go by cross-entropy, without `ppo.value_clip`.
    Needs `ppo.gamma` and `ppo.lam_value` 1 and `ppo.kl_coef` 0. Unset: unbounded values, squared
    error."""
    layers: int | None = None
    """Number of the body's first layers to use, with its final norm. Unset: all."""
    tensor_parallel: int | None = None
    """Ranks that split each layer of the value model. Unset: `fsdp.tensor_parallel`."""
    sequence_parallel: int | None = None
    """Ranks that split each row of the value model. Unset: `fsdp.sequence_parallel`."""
    freeze: tuple[str, ...] = ()
    """Weights that are not trained, as for `policy.freeze`. `body`: all but the scalar head."""
    pretrain_steps: int = 0
    """Number of first steps that train the value model alone, with lambda 1 (VC-PPO,
    arXiv:2503.01491). Export the last one's checkpoint for `value.path` of other runs."""
    pretrain_epochs: int = 4
    """Passes over the rollout in each pretraining step."""
    offload: Offload = "auto"
    """As `policy.offload`."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    share_base: bool = False
    """Share one base model between policy and value model, which both have LoRA, in a colocated
    run."""
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=5e-5))
