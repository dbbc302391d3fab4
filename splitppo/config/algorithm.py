"""Settings of the algorithm: models, data, rollout, reward, PPO. The docstring of a field is its
text in --help."""

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
    """What is not trained: `attention`, `embeddings` (and an output layer tied to them), `body`
    (all but the output layer), or regular expressions that are searched in a weight's Hugging Face
    name."""
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
    """Lowest and highest return, after shaping: values lie between them, by a sigmoid, and learn by
    cross-entropy on the whole rewards-to-go, without `ppo.value_clip`. Needs `ppo.gamma` and
    `ppo.lam_value` 1, `ppo.kl_coef` 0. Unset: any value, by squared error."""
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
    pretrain_patience: int = 5
    """Pretraining ends early after this many steps without a new highest explained variance on
    fresh rows. 0: never."""
    offload: Offload = "auto"
    """As `policy.offload`."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    share_base: bool = False
    """Hold one base for policy and value model, which both have LoRA, in a colocated run."""
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=5e-5))


@dataclass(frozen=True)
class DataConfig:
    """The prompts."""

    task: Literal["echo", "addition", "guess"] = "echo"
    """Generated task, if there are no `files`. `echo`: repeat three digits. `addition`: sums of two
    numbers. `guess`: a game of several turns, with the environment of this name."""
    digits: int = 1
    """Digits of the operands in the generated task `addition`."""
    files: tuple[str, ...] = ()
    """Training files: .parquet, .json, .jsonl, `hf://datasets/owner/name[@revision]/file`. Empty:
    generated."""
    prompt_key: str = "prompt"
    """Column of the prompt: a string, or a list of {role, content} messages."""
    answer_key: str = "reward_model.ground_truth"
    """Column of the ground truth; '': there is none. A dot names a field of a nested column."""
    chat: bool = True
    """Render string prompts as one user message with the tokenizer's chat template, if it has
    one."""
    system: str | None = None
    """System message for prompts that have none. Unset: left to the chat template."""
    chat_kwargs: str = "{}"
    """More arguments of the chat template, as a JSON object: '{"enable_thinking": false}'."""
    max_rows: int | None = None
    """Most training prompts to use, drawn at random from all files."""
    overlong: Literal["refuse", "filter", "cut"] = "refuse"
    """Prompts over `rollout.max_prompt_tokens`, if set: refuse the run, drop the row, or drop the
    first tokens."""
    invalid: Literal["refuse", "filter"] = "refuse"
    """Rows that can't be used (no prompt, a wrong type, no truth for the reward rule): refuse the
    run, or drop them."""
    validation_files: tuple[str, ...] = ()
    """Held-out files. Empty: the held-out part of the generated task, or none."""
    validation_rows: int = 256
    """Most held-out prompts to use: the first ones."""


@dataclass(frozen=True)
class RolloutConfig:
    """The rollout: the rows (prompt and response) that a step generates."""

    batch_size: int = 64
    """B: rows per step, over all actor ranks. With `window`: slots."""
    samples: int = 1
    """Responses per prompt. A step has `batch_size / samples` prompts."""
    max_prompt_tokens: int | None = None
    """Longest prompt; `data.overlong` says what happens to longer ones. Unset: the longest prompt
    of the data."""
    max_new_tokens: int = 512
    """Most response tokens of a row, over all its turns. A row that has not ended by then is cut
    there."""
    max_context: int | None = None
    """Most tokens of a row that an environment answers: prompt, response tokens and answers. Unset:
    what the models can read."""
    temperature: float = 1.0
    """Sampling temperature. All log-probs are computed at this temperature."""
    top_p: float = 1.0
    """Sample from the smallest set of likeliest tokens with this total probability. Below 1 biases
    the ratio."""
    top_k: int = 0
    """Sample from this many likeliest tokens. 0: from all. Above 0 biases the ratio."""
    stop: tuple[str, ...] = ()
    """Strings that end a response, or a turn of it, besides the end-of-sequence token. The string
    stays in the response."""
    window: int = 0
    """W: tokens that each of `batch_size` slots decodes in a step, row after row. A row that has
    not ended goes on in the next step, with the new weights. A step trains on the rows that end in
    it. 0: a step generates whole rows."""
    lengths: str | None = None
    """For benchmarks: file of response lengths, one per line, in the order of the rows, repeated as
    needed."""
    chunks: int = 4
    """K: messages per pair of ranks and step. Each carries half of the rows that remain, so few are
    scored late."""

    @property
    def max_row_tokens(self) -> int:
        """Longest row: a prompt and its response, or what an environment may make of them. Until
        the data are read, an unset longest prompt counts as 0."""
        return self.max_context or (self.max_prompt_tokens or 0) + self.max_new_tokens

    @property
    def messages(self) -> int:
        """K, at most as many as halving a step's rows can fill."""
        return min(self.chunks, self.batch_size.bit_length())


@dataclass(frozen=True)
class EnvConfig:
    """What answers the policy between the turns of a row. Runs in worker processes of the actor
    ranks, `reward.workers` each."""

    path: str | None = None
    """An environment: `path/to/file.py:Name`, a class with reset(), step(message) and close(), or
    `guess`."""
    tools: tuple[str, ...] = ()
    """Functions that the policy may call: `path/to/file.py:name`, with type hints and a docstring,
    `calculator`, or `python`."""
    call_format: str = "auto"
    """How the policy writes a call: `hermes`, `llama`, `mistral`, `mistral_args`, `qwen_xml`,
    `glm`, `deepseek`, `kimi`, `minimax`, `harmony`, or a regular expression whose group is the
    call's JSON, or with the groups `name` and `arguments`. `auto`: what reads the calls that the
    chat template writes."""
    format_reward: float = 0.0
    """Reward of the first turn of a row whose calls all parse."""
    network: bool = False
    """Let the tool `python` use the network, also where the kernel can't take it away."""
    seed: Literal["row", "prompt"] = "row"
    """What the environment's seed follows from, with the run's: the row, or its prompt, so that all
    responses to a prompt play one game and `ppo.baseline=group` compares like with like."""
    rewritten: Literal["refuse", "keep"] = "refuse"
    """With a chat template that rewrites earlier messages: refuse the run, or `keep` what was
    sampled."""
    max_turns: int = 16
    """Most turns of a row."""
    max_turn_tokens: int | None = None
    """Most tokens that the policy samples in a turn. A longer turn ends there, and the environment
    answers what was said. Unset: no limit of its own."""
    max_observation_tokens: int = 2048
    """Most tokens of an answer. A longer one is cut, and says so."""
    timeout: float = 60.0
    """Seconds that an answer may take. Then the row ends, with `reward.failed_score`."""


@dataclass(frozen=True)
class RewardConfig:
    """The score of a row: a weighted sum of reward functions and a reward model. What an
    environment gives for turns is added."""

    function: tuple[str, ...] = ("auto",)
    """`exact_match`, `last_number`, `gsm8k`, `gsm8k_flexible`, `math`, or `path/to/file.py:name`.
    `auto`: by the row's data_source. `none`: no function; the reward model, the environment or both
    score a row, or a teacher alone leads, and then there is no value model. A function of a file
    takes (data_source, solution_str, ground_truth, extra_info), perhaps prompt and messages, and
    may be async. It returns a number, or a dict with `score` and more numbers, which become
    metrics, and perhaps with `spans`: rewards on the way."""
    weights: tuple[float, ...] = ()
    """Weight of each function in the score. Empty: 1 each."""
    workers: int = 1
    """Processes per critic rank (of ranks that share rows: of the first) that run the functions, as
    many more for async ones; and as many per actor rank for held-out rows, and to run
    environments."""
    timeout: float = 60.0
    """Seconds per row and function. A slower call fails: its process is replaced, or the async call
    is cancelled."""
    failed_score: float = 0.0
    """Score of a function that failed: a time-out, an exception, or a result that is not a finite
    number. Also of an environment that failed, in place of its rewards."""
    model: str | None = None
    """Folder or hub name of a reward model: sequence classification with one label, or `label`.
    Runs on the critic ranks."""
    label: str | None = None
    """Of a reward model with several labels, the one whose probability is the score."""
    steps: str | None = None
    """What ends a step of a response, such as an empty line. The reward model then scores the text
    up to the end of each step, and the step's last token is paid. Unset: the row as a whole."""
    step_token: str | None = None
    """A marker, such as a token of the reward model, that stands in its text in the place of each
    `steps`; there it scores the step. The policy never sees it."""
    model_weight: float = 1.0
    """Weight of the reward model in the score."""
    model_offload: bool = False
    """Keep the reward model's shards in pinned host memory between uses."""
    model_chat: bool = True
    """Render prompt and response with the reward model's own chat template, if it has one. Else: as
    plain text."""
    tensor_parallel: int | None = None
    """Ranks that share each of the reward model's layers. Unset: as many as the value model's. Its
    sets have a multiple of the ranks of the value model's."""
    sequence_parallel: int | None = None
    """Ranks that share each of the reward model's rows, for a causal model with a linear head on
    its states. Unset: as many as the value model's. 1: each rank of a set reads all of its rows."""
    validation: tuple[str, ...] = ()
    """Functions that score the held-out rows. Empty: `function` with its weights."""
    normalize: Literal["off", "batch", "running"] = "off"
    """Subtract the mean of the scores and divide by their deviation: those of the batch (not with
    `rollout.window`: a step may have one row), or of all steps so far. With an environment or
    spans: only divide."""
    clip: tuple[float, float] | None = None
    """Lowest and highest score of a row, with the rewards of its turns, after normalising."""
    missing_eos_penalty: float = 0.0
    """Subtracted from the score of a row that was cut at a limit: of tokens, with an environment
    also of context or turns."""
    overlong_tokens: int = 0
    """Last tokens before `rollout.max_new_tokens` that cost part of `overlong_penalty` each (DAPO,
    eq. 13). 0: off."""
    overlong_penalty: float = 1.0
    """Subtracted from a row of `rollout.max_new_tokens` if `overlong_tokens` is set."""


@dataclass(frozen=True)
class PPOConfig:
    """Proximal policy optimisation (Schulman et al. 2017), as practised on language models."""

    gamma: float = 1.0
    """Discount."""
    lam: float | Literal["adaptive"] = 1.0
    """GAE's lambda. Below 1, a reward at the end hardly reaches the first of many tokens until the
    value model knows the scores. `adaptive`: max(0, 1 - 1 / (`lam_alpha` * l)) in a row of l tokens
    (VAPO, arXiv:2504.05118)."""
    lam_alpha: float = 0.05
    """Alpha of the adaptive lambda."""
    lam_value: float | None = None
    """Lambda of the value model's targets (Yuan et al. 2025, VC-PPO). Unset: `lam`."""
    kl_coef: float = 0.0
    """Weight of the KL to the reference, subtracted from the reward at each token."""
    kl_kind: Literal["k1", "k2", "k3", "abs"] = "k1"
    """Estimator of the KL in the reward (Schulman, 'Approximating KL divergence', 2020)."""
    kl_target: float | None = None
    """KL per row, in nats, to which `kl_coef` adapts (Ziegler et al. 2019, section 2.2), but not
    while the policy waits for the value model. Unset: it is constant."""
    kl_horizon: int = 10000
    """A step multiplies `kl_coef` by 1 + rows / kl_horizon * clip(KL / kl_target - 1, -0.2,
    0.2)."""
    kl_loss_coef: float = 0.0
    """Weight of the KL to the reference in the policy's loss."""
    kl_loss_kind: Literal["k1", "k2", "k3", "abs"] = "k3"
    """Estimator of the KL in the loss."""
    loss: str | None = None
    """The policy's loss: `path/to/file.py:name`, a function of packed tensors in place of the
    clipped surrogate (docs/parts.md). KL and entropy in the loss, importance weights and
    `aggregate` stay. Unset: PPO's."""
    clip_mode: Literal["clip", "mask"] = "clip"
    """`clip`: PPO's. `mask`: -ratio * advantage between the bounds, 0 beyond them (SAO,
    arXiv:2607.07508, eq. 3)."""
    clip_low: float = 0.2
    """The ratio's lower bound is 1 - clip_low."""
    clip_high: float = 0.2
    """The ratio's upper bound is 1 + clip_high."""
    dual_clip: float | None = None
    """Bound of the loss for negative advantages (Ye et al. 2020), above 1. Unset: off."""
    value_clip: float | None = 0.2
    """In the loss, values are clipped to within this of the old values. None: off."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    whiten: bool = True
    """Whiten the advantages over the whole batch."""
    baseline: Literal["value", "batch", "group"] = "value"
    """Where advantages come from. `value`: a value model, by GAE. `batch` and `group` need none,
    and are there to compare: a token's advantage is its reward-to-go less a mean over rows. The
    mean is of the reward-to-go at the first token of the same turn; of spans, at the same token.
    `batch`: over the step's rows that have this turn. `group`: over the prompt's other rows; one
    without this turn counts 0."""
    advantages: str | None = None
    """Advantages: `path/to/file.py:name`, a function of packed tensors of the step's rows
    (docs/parts.md). A value model, if `baseline` has one, learns as without. `whiten` stays.
    Unset: those of `baseline`."""
    epochs: int = 1
    """Passes over the rollout."""
    mini_batches: int = 1
    """Optimizer steps per pass. Must divide `rollout.batch_size`."""
    value_epochs: int | None = None
    """Passes of the value model. Unset: `epochs`."""
    value_mini_batches: int | None = None
    """Optimizer steps per pass of the value model: a divisor or a multiple of `mini_batches`.
    Unset: `mini_batches`."""
    critic_warmup: int = 0
    """First steps, in which the policy waits and the value model is trained as in all other
    steps."""
    old_logprobs: Literal["trainer", "engine"] | None = None
    """Old log-probs in the ratio. `engine`: as sampled, which saves a forward pass; the ratio then
    also holds the difference between engine and trainer. Unset: `engine` with `rollout.window`,
    else `trainer`."""
    importance: Literal["off", "token", "sequence"] = "off"
    """Weigh the policy's loss by min(trainer's / engine's probability, `importance_cap`), per token
    or response."""
    importance_cap: float = 2.0
    """Upper bound of these weights."""
    mask_truncated: bool = False
    """Leave rows that were cut at a limit, or whose environment failed, out of both losses."""
    aggregate: Literal["token_mean", "seq_mean_token_sum", "seq_mean_token_mean"] = "token_mean"
    """How the token losses of a mini-batch become one number. `token_mean`: their mean. The others:
    the sum, or the mean, over each row's tokens, then the mean over rows."""
