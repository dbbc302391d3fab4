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
    last step. The policy begins with it in its first update, after the steps in which it waits for
    the value model."""
    warmup_steps: int = 0
    """Steps of linear warm-up. Step s of w runs at s/w of the peak."""
    min_lr_ratio: float = 0.0
    """Learning rate at the end of a linear or cosine schedule, as a fraction of the peak."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's moment decay rates."""
    eps: float = 1e-8
    """AdamW's epsilon."""
    weight_decay: float = 0.0
    """Decoupled weight decay. Biases and norms (tensors with fewer than two axes) have none."""
    max_grad_norm: float = 1.0
    """Clip the gradient of the whole model to this L2 norm. 0: off."""


@dataclass(frozen=True)
class LoraConfig:
    """Adapters of low rank are trained, and the model itself is not (LoRA, arXiv:2106.09685). Needs
    `splitppo[lora]`."""

    rank: int = 0
    """Rank of the adapters. 0: no LoRA, the model is trained. Above 0 a learning rate that neither
    a flag nor a preset sets is ten times the default."""
    alpha: int | None = None
    """The adapters are scaled by alpha / rank. Unset: the rank, so that the scale is 1."""
    targets: tuple[str, ...] = ()
    """Linear layers with adapters: names such as `q_proj`, or regular expressions that are searched
    in a layer's Hugging Face name. Empty: all linear layers but the output layer."""
    path: str | None = None
    """Folder of an adapter to start from, as peft or a checkpoint of a run has it. Unset: B is 0,
    so the model starts as its base."""


@dataclass(frozen=True)
class PolicyConfig:
    """The policy: any Hugging Face causal language model."""

    path: str = "tiny"
    """A Hugging Face folder, or a hub name: `owner/name`, `owner/name@revision`. `tiny`: the
    embedded model."""
    trust_remote_code: bool = False
    """Run the Python code that a model's folder or repository brings, of all models of the run.
    Read it first."""
    random_init: bool = False
    """Draw the weights of all models at random from the seed instead of reading them. For
    benchmarks on a real shape."""
    freeze: tuple[str, ...] = ()
    """What is not trained: `attention`, `router` (of a mixture of experts), `embeddings` (and an
    output layer tied to them), `body` (all but the output layer), or regular expressions that are
    searched in a weight's Hugging Face name."""
    offload: Offload = "auto"
    """What is in pinned host memory while it is not needed: `none`; `optimizer`: AdamW's moments;
    `all`: the weights' shards, too. `auto`: in a colocated run what makes it fit, by the estimated
    memory, else none. Changes no result."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-6))


@dataclass(frozen=True)
class ReferenceConfig:
    """The frozen reference of the KL penalty. Loaded only if `ppo.kl_coef` or `ppo.kl_loss_coef` is
    above 0."""

    path: str | None = None
    """Folder or hub name of the reference model. Unset: the policy before training; with LoRA its
    base, which then takes no memory of its own where the actor group holds the reference."""
    offload: bool = False
    """Keep the reference's shards in pinned host memory between uses."""
    tensor_parallel: int | None = None
    """Ranks that share each of the reference's layers. Unset: as many as its group's. Its sets have
    a multiple of the ranks of its group's sets."""
    sequence_parallel: int | None = None
    """Ranks that share each of the reference's rows. Unset: as many as its group's."""


@dataclass(frozen=True)
class TeacherConfig:
    """A frozen model that the policy follows (on-policy distillation): the policy samples, and the
    teacher says how likely each token is. The critic group holds it. `distill` says how it is
    followed."""

    path: str | None = None
    """Folder or hub name of a causal language model with the policy's ids. Unset: no teacher; with
    `prompt_key`: the policy before training."""
    prompt_key: str | None = None
    """Column of the prompt that the teacher reads in place of the policy's, such as one with the
    answer. Rendered as `data.prompt_key`. Unset: the policy's prompt."""
    offload: bool = False
    """Keep the teacher's shards in pinned host memory between uses."""
    tensor_parallel: int | None = None
    """Ranks that share each of the teacher's layers. Unset: as many as the value model's. Its sets
    have a multiple of the ranks of the value model's."""
    sequence_parallel: int | None = None
    """Ranks that share each of the teacher's rows. Unset: as many as the value model's."""


@dataclass(frozen=True)
class DistillConfig:
    """How the policy follows the teacher."""

    coef: float = 0.3
    """c. Each sampled token's whitened advantage gets c (d - mean of d over the batch), where d is
    the teacher's log-prob less the policy's old one. With `top_k`: weight of the divergence in the
    policy's loss."""
    top_k: int = 0
    """The teacher sends its k most likely tokens, and the policy's loss has a divergence over these
    and all others as one, in place of the advantages' part. 8 is enough. 0: off."""
    divergence: Literal["forward", "reverse", "jsd"] = "forward"
    """With `top_k`. `forward`: KL(teacher || policy). `reverse`: KL(policy || teacher). `jsd`: the
    mean of both sides' KL to their mixture."""


@dataclass(frozen=True)
class ValueConfig:
    """The value model: a causal language model's body with a scalar head."""

    path: str | None = None
    """Folder or hub name of a model with the policy's ids. A reward model gives its head, too.
    Unset: the policy's."""
    head: Literal["zero", "normal"] = "zero"
    """Initial scalar head if `path` holds none: all zero, with the first rollout's mean return as
    its bias, or N(0, 1/hidden size)."""
    range: tuple[float, float] | None = None
    """Lowest and highest return, after shaping (BPCO, arXiv:2608.23566). Values lie between them by
    a sigmoid, and learn the whole rewards-to-go by cross-entropy, without `ppo.value_clip`. Needs
    `ppo.gamma` and `ppo.lam_value` 1, `ppo.kl_coef` 0. Unset: any value, by squared error."""
    layers: int | None = None
    """Use the first so many layers of the body, with its final norm. Unset: all."""
    tensor_parallel: int | None = None
    """Ranks that share each of the value model's layers. Unset: `fsdp.tensor_parallel`."""
    sequence_parallel: int | None = None
    """Ranks that share each of the value model's rows. Unset: `fsdp.sequence_parallel`."""
    freeze: tuple[str, ...] = ()
    """What is not trained, as in `policy.freeze`. `body`: all but the scalar head."""
    pretrain_steps: int = 0
    """First steps, which train the value model alone, with lambda 1 (VC-PPO, arXiv:2503.01491).
    Then it is saved as RUN/pretrained_value, for `value.path` of other runs."""
    pretrain_epochs: int = 4
    """Passes over the rollout in each of these steps."""
    offload: Offload = "auto"
    """As `policy.offload`."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    share_base: bool = False
    """Hold one base for policy and value model, which both have LoRA, in a colocated run."""
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=5e-5))
