"""The configuration: frozen dataclasses with a docstring per field. Read by flags.py; rules: limits.py."""

from dataclasses import dataclass, field
from typing import Literal

ShardSize = int | Literal["node"] | None


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
    reference: Literal["actor", "critic"] = "actor"
    """Group that holds the reference. On the critic's side it works under the rollout, and takes work off the actor
    group, which is the busier one if all models are of one size."""
    barrier: bool = False
    """Let the groups wait for each other after their updates, as controllers do: to see what doing without is worth."""


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
    with settings of its own (splitppo/config/tiny.toml) in place of the defaults below."""
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
    """Folder of the body, or of a reward model, whose head it then starts with. Unset: the policy's. It must read the
    policy's token ids."""
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
    """Training files: .parquet, .json, .jsonl, or folders of the library `datasets` (save_to_disk); read in order as
    one data set. Empty: the generated task."""
    prompt_key: str = "prompt"
    """Column of the prompt: a string, or a list of {role, content} messages."""
    answer_key: str = "reward_model.ground_truth"
    """Column of the ground truth; a dot goes into a nested column."""
    chat: bool = True
    """Put string prompts through the tokenizer's chat template (as one user message) if it has one."""
    system: str | None = None
    """System message put before prompts that have none. Unset: what the chat template puts there."""
    chat_kwargs: str = "{}"
    """Further arguments of the chat template, a JSON object: '{"enable_thinking": false}'."""
    weights: tuple[float, ...] = ()
    """One weight a file: its share of the prompts. Empty: all rows alike, each once an epoch."""
    max_rows: int | None = None
    """Training prompts to use at most, drawn from all of them."""
    overlong: Literal["refuse", "filter", "cut"] = "refuse"
    """A prompt over `rollout.max_prompt_tokens`: refuse the run, leave the row out, or cut it on the left."""
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
    """What `data.overlong` calls too long."""
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
    lengths: str | None = None
    """File with a whole number a line: tokens of the responses in the order of the rows, over and over, whatever the
    policy would have ended them by. For benchmarks."""
    chunks: int = 4
    """K: finished rows leave for the critic in at most this many messages for each pair of ranks, each of half of those
    left: the last to end are the longest, and their scoring no longer fits under the rollout."""

    @property
    def messages(self) -> int:
        """K, as far as all rows of a step in one pair of ranks could fill them."""
        return min(self.chunks, self.batch_size.bit_length())


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
    steady: bool = True
    """Schedule rows that only get a token in short loops of our own, with the versions of vLLM that these were tested
    with: its scheduler takes longer than the GPU where the model is small and the rows are many. Off: all by vLLM's."""


@dataclass(frozen=True)
class RewardConfig:
    """The score of a row: a weighted sum of functions and of a reward model."""

    function: tuple[str, ...] = ("auto",)
    """`exact_match`, `last_number`, `gsm8k`, `gsm8k_flexible`, `math`, or `path/to/file.py:name` of a function
    (data_source, solution_str, ground_truth, extra_info) -> float or dict with `score`, whose other numbers become
    metrics; it may be async. `auto`: the generated task's own, or by the rows' data_source. `none`: a model alone."""
    weights: tuple[float, ...] = ()
    """Weight of each function in the score. Empty: 1 each."""
    workers: int = 1
    """Processes on each critic rank that run the functions."""
    timeout: float = 60.0
    """Seconds that a function may take for a row; then it failed: its process is replaced, an async call cancelled."""
    failed_score: float = 0.0
    """What a function's failure (time-out, exception, not a finite number) counts as."""
    model: str | None = None
    """Folder of a reward model: a sequence-classification checkpoint with one label, on the critic ranks."""
    model_weight: float = 1.0
    """Weight of the reward model in the score."""
    model_random_init: bool = False
    """Draw its weights at random from the seed in place of reading them: for benchmarks on a real shape."""
    model_offload: bool = False
    """Keep its shards on the CPU between its uses."""
    model_chat: bool = True
    """Give it prompt and response through its own chat template, if it has one; else as plain text."""
    validation: tuple[str, ...] = ()
    """Functions that score the held-out rows. Empty: `function` with its weights."""
    normalize: Literal["off", "batch", "running"] = "off"
    """Subtract the mean of the scores and divide by their deviation: the batch's, or that of all steps so far."""
    clip: tuple[float, float] | None = None
    """Lowest and highest score, after normalising."""
    missing_eos_penalty: float = 0.0
    """Subtracted from the score of a row that was cut at `rollout.max_new_tokens`."""
    overlong_tokens: int = 0
    """Of the last so many tokens before `rollout.max_new_tokens`, each one used costs an equal part of
    `overlong_penalty` (Yu et al. 2025, DAPO, eq. 13). 0: off."""
    overlong_penalty: float = 1.0
    """What a row of `rollout.max_new_tokens` loses if `overlong_tokens` is set."""


@dataclass(frozen=True)
class PPOConfig:
    """Proximal policy optimisation (Schulman et al. 2017), as practised on language models."""

    gamma: float = 1.0
    """Discount."""
    lam: float = 0.95
    """GAE's lambda."""
    lam_value: float | None = None
    """Lambda of the value model's targets (Yuan et al. 2025, VC-PPO). Unset: `lam`."""
    kl_coef: float = 0.0
    """Weight of the KL to the reference, subtracted from the reward at each token."""
    kl_kind: Literal["k1", "k2", "k3", "abs"] = "k1"
    """Estimator of the KL in the reward (Schulman, 'Approximating KL divergence', 2020)."""
    kl_target: float | None = None
    """The KL of a row (nats, summed over its tokens) towards which `kl_coef` is steered from step to step (Ziegler et
    al. 2019, section 2.2). Unset: it stays."""
    kl_horizon: int = 10000
    """A step multiplies `kl_coef` by 1 + rows / kl_horizon * clip(KL / kl_target - 1, -0.2, 0.2)."""
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
    value_epochs: int | None = None
    """Passes of the value model. Unset: `epochs`."""
    value_mini_batches: int | None = None
    """Optimizer steps a pass of the value model; divides `mini_batches` or is a multiple. Unset: `mini_batches`."""
    critic_warmup: int = 0
    """Steps in which only the value model learns."""
    old_logprobs: Literal["trainer", "engine"] = "trainer"
    """Whose log-probs the ratio is taken to. `engine`: those of the distribution that was drawn from, which saves a
    forward pass; the ratio then starts off 1 by what engine and trainer differ by, and only clipping limits it."""
    importance: Literal["off", "token", "sequence"] = "off"
    """Weigh the policy's loss by min(trainer's / engine's probability, `importance_cap`) of each token or of the whole
    response (Yao et al. 2025, truncated importance sampling)."""
    importance_cap: float = 2.0
    """Where these weights are cut off."""
    mask_truncated: bool = False
    """Leave rows that were cut at `rollout.max_new_tokens` out of both losses."""
    aggregate: Literal["token_mean", "seq_mean_token_sum", "seq_mean_token_mean"] = "token_mean"
    """How token losses become one number, over the whole mini-batch."""


@dataclass(frozen=True)
class ComputeConfig:
    """Devices, precision and memory."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: cuda if there are GPUs, one for each local rank; for the embedded model cpu where they are too few."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of forward and backward; weights and reductions stay float32. `auto`: bfloat16 on GPUs."""
    micro_batch_tokens: int = 16384
    """Tokens of one forward-backward at most, padding counted; a longer row goes alone."""
    packing: Literal["auto", "on", "off"] = "auto"
    """Rows one after the other without padding, none attending to another. `auto`: on GPUs in bfloat16, where the
    model's attention allows it."""
    compile: Literal["auto", "on", "off"] = "auto"
    """Compile the layers with torch.compile, for rows of any lengths at once. `auto`: on GPUs."""
    gather: Literal["layer", "mini_batch"] = "layer"
    """When weights are gathered and gradients reduced. `layer`: at each layer of each micro-batch, which takes least
    memory; `mini_batch`: once for all its micro-batches, which holds whole weights and gradients meanwhile (in bfloat16
    6 bytes a parameter)."""
    activation_checkpointing: bool = False
    """Recompute the layers' activations in the backward pass."""


@dataclass(frozen=True)
class FsdpConfig:
    """How weights, gradients and optimizer states are cut over the ranks of a group."""

    shard_size: ShardSize = None
    """Ranks that hold one copy together; a group of more holds several and sums their gradients (hybrid sharding).
    `node`: those that each group has on a node, so that weights are gathered within nodes alone. Unset: one copy over
    the group."""


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints under RUN/checkpoints."""

    every: int = 0
    """Write one every n steps and after the last; 0: only of a run that is told to stop."""
    keep: int = 2
    """Complete checkpoints to keep, the newest; 0: all."""
    keep_every: int = 0
    """Keep those of every n-th step, too; 0: none."""


@dataclass(frozen=True)
class LogConfig:
    """What the run folder holds."""

    samples: int = 4
    """Generations of each step written to RUN/samples."""
    validate_every: int = 0
    """Score held-out prompts before the first, every n-th and after the last step; 0: never."""
    validate_samples: int = 1
    """Responses to each held-out prompt; above 1: also the best, the majority's and, of scores in [0, 1], pass@k."""
    validate_temperature: float = 0.0
    """Their sampling temperature; 0: greedy, one sample."""
    trackers: tuple[Literal["wandb", "tensorboard"], ...] = ()
    """Where metrics go beside RUN/metrics: Weights & Biases (WANDB_MODE=offline works); RUN/tensorboard."""
    project: str = "splitppo"
    """Project of wandb."""
    name: str | None = None
    """The run's name in wandb. Unset: its folder's."""
    profile_steps: tuple[int, ...] = ()
    """Steps that the torch profiler records, into RUN/profile."""
    profile_ranks: tuple[int, ...] = (0,)
    """Ranks that it records."""


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
    force: bool = False
    """Go on in run_dir, or begin anew there if it has no checkpoint, though settings have changed that make the run
    another one."""
    dry_run: bool = False
    """Print the resolved config, placement, messages and memory, and stop; needs no torchrun."""
    world_size: int | None = None
    """Ranks to plan for in a dry run. Unset: torchrun's, or 1."""
    nodes: int = 1
    """Nodes to plan for in a dry run."""
    timeout: float = 1800.0
    """Seconds that a wait for another rank may take before the run ends with an error that says what the ranks were
    doing. A host of which nothing is heard ends it after two minutes at the latest."""
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
