"""Settings of the algorithm: data, rollout, environments, reward, PPO. The docstring of a field is
its text in --help."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class DataConfig:
    """The prompts."""

    task: str = "echo"
    """Generated task, used if `files` is empty. `echo`: repeat three digits. `addition`: sums of
    two numbers. `guess`: a game of several turns, with the environment of this name.
    `reasoning_gym:NAME`: a task of that package. `textarena:GAME`: a game of that package for one
    player, with its environment."""
    task_settings: str = "{}"
    """Settings of a reasoning_gym task, as a JSON object: '{"max_terms": 3, "size": 4000}'."""
    digits: int = 1
    """Digits of the operands in the generated task `addition`."""
    files: tuple[str, ...] = ()
    """Training files: .parquet, .json, .jsonl, `hf://datasets/owner/name[@revision]/file`. Empty:
    the generated `task`."""
    prompt_key: str = "prompt"
    """Column of the prompt: a string, or a list of {role, content} messages."""
    answer_key: str = "reward_model.ground_truth"
    """Column of the ground truth. A dot names a field of a nested column. '': no ground truth."""
    chat: bool = True
    """Render string prompts as one user message with the tokenizer's chat template, if it has
    one."""
    system: str | None = None
    """System message for prompts that have none. Unset: left to the chat template."""
    chat_kwargs: str = "{}"
    """Further arguments of the chat template, as a JSON object: '{"enable_thinking": false}'."""
    max_rows: int | None = None
    """Maximum number of training prompts, drawn at random from all files. Unset: all."""
    overlong: Literal["refuse", "filter"] = "refuse"
    """What to do with prompts over `rollout.max_prompt_tokens`, if it is set: refuse the run, or
    drop the row."""
    invalid: Literal["refuse", "filter"] = "refuse"
    """What to do with unusable rows (no prompt, a wrong type, no ground truth for the reward rule):
    refuse the run, or drop them."""
    validation_files: tuple[str, ...] = ()
    """Held-out files. Empty: the held-out part of the generated task, or none."""
    validation_rows: int = 256
    """Maximum number of held-out prompts, the first ones."""


@dataclass(frozen=True)
class RolloutConfig:
    """The rollout: the rows (prompt and response) that a step generates."""

    batch_size: int = 64
    """B: rows (prompt and response) per step, over all actor ranks. With `window`: the number of
    slots."""
    samples: int = 1
    """Responses per prompt. A step has `batch_size / samples` prompts."""
    max_prompt_tokens: int | None = None
    """Maximum length of a prompt, in tokens; see `data.overlong` for longer prompts. Unset: the
    longest prompt of the data."""
    max_new_tokens: int = 512
    """Maximum number of response tokens of a row, over all its turns. A longer row is cut there."""
    max_context: int | None = None
    """Maximum number of tokens of a row with an environment: prompt, response tokens and answers.
    Unset: the models' context length."""
    temperature: float = 1.0
    """Sampling temperature. All log-probs are computed at this temperature."""
    top_p: float = 1.0
    """Nucleus sampling: sample from the smallest set of most likely tokens with this total
    probability. Below 1 it biases the ratio."""
    top_k: int = 0
    """Sample from this many most likely tokens. 0: from all. Above 0 it biases the ratio."""
    stop: tuple[str, ...] = ()
    """Strings that end a turn or response, besides the end-of-sequence token. The string stays in
    the response."""
    window: int = 0
    """Partial rollouts. W: tokens that each of `batch_size` slots decodes in a step, one row after
    another. A row that has not ended continues in the next step with the new weights. A step trains
    on the rows that end in it. 0: every step generates whole rows."""
    lengths: str | None = None
    """For benchmarks: a file of response lengths, one per line, in the order of the rows, repeated
    as needed."""
    chunks: int = 4
    """K: messages per pair of actor and critic rank in a step. Each carries half of the remaining
    rows, so that few rows are scored late."""

    @property
    def max_row_tokens(self) -> int:
        """Longest row in tokens: prompt and response, or `max_context`. Until the data are read, an
        unset longest prompt counts as 0."""
        return self.max_context or (self.max_prompt_tokens or 0) + self.max_new_tokens

    @property
    def messages(self) -> int:
        """K, limited to the number of times a step's rows can be halved."""
        return min(self.chunks, self.batch_size.bit_length())


@dataclass(frozen=True)
class EnvConfig:
    """The environment or tools that answer the policy between the turns of a row. They run in
    worker processes of the actor ranks, `reward.workers` each."""

    path: str | None = None
    """Environment: `path/to/file.py:Name`, a class with reset(), step(message) and close(), or
    `guess`."""
    tools: tuple[str, ...] = ()
    """Functions that the policy may call: `path/to/file.py:name`, with type hints and a docstring,
    `calculator`, or `python`."""
    call_format: str = "auto"
    """Format of the policy's tool calls: `hermes`, `llama`, `mistral`, `mistral_args`, `qwen_xml`,
    `glm`, `deepseek`, `kimi`, `minimax`, `harmony`, or a regular expression with one group, the
    call's JSON, or with the groups `name` and `arguments`. `auto`: the format of the chat
    template."""
    format_reward: float = 0.0
    """Reward for the first turn of a row if all its calls parse."""
    network: bool = False
    """Let the tool `python` use the network, also where the kernel can't isolate it."""
    seed: Literal["row", "prompt"] = "row"
    """What determines the environment's seed, besides the run's: `row`; or `prompt`, so that all
    responses to a prompt play the same game and `ppo.baseline=group` compares them."""
    rewritten: Literal["refuse", "keep"] = "refuse"
    """If the chat template rewrites earlier messages: `refuse` the run, or `keep` the sampled
    tokens."""
    settings: str = "{}"
    """Settings of a textarena game, as a JSON object: '{"max_turns": 5}'."""
    max_turns: int = 16
    """Maximum number of turns of a row."""
    max_turn_tokens: int | None = None
    """Maximum number of tokens that the policy samples in a turn. A longer turn ends there, and the
    environment answers it. Unset: no limit per turn."""
    max_observation_tokens: int = 2048
    """Maximum number of tokens of an answer. A longer answer is cut and says so."""
    timeout: float = 60.0
    """Time limit of an answer, in seconds. After it the row ends with `reward.failed_score`."""


@dataclass(frozen=True)
class RewardConfig:
    """The score of a row: a weighted sum of reward functions and a reward model, plus the rewards
    of an environment's turns."""

    function: tuple[str, ...] = ("auto",)
    """`exact_match`, `last_number`, `gsm8k`, `gsm8k_flexible`, `math`, or `path/to/file.py:name`.
    `auto`: by the row's data_source. `none`: no function; a reward model or an environment scores
    the rows, or only a teacher trains the policy, without a value model. A file's function takes
    (data_source, solution_str, ground_truth, extra_info), optionally prompt and messages, and may
    be async. It returns a number, or a dict with `score`, further numbers that become metrics, and
    optionally `spans`: rewards inside the response."""
    weights: tuple[float, ...] = ()
    """Weight of each function in the score. Empty: 1 each."""
    workers: int = 1
    """Worker processes for the functions, per critic rank (per first rank of a parallel group), and
    as many for async functions. Actor ranks have as many for held-out rows, and for
    environments."""
    timeout: float = 60.0
    """Time limit per row and function, in seconds. A slower call fails: its process is replaced, or
    the async call is cancelled."""
    concurrency: int | None = None
    """Maximum number of concurrent calls of async functions, on each rank that scores rows. Unset:
    one per row."""
    failed_score: float = 0.0
    """Score of a function that failed: a time-out, an exception, or a result that is not a finite
    number. Also the score of a row whose environment failed."""
    model: str | None = None
    """Folder or hub name of a reward model: sequence classification with one label, or with
    `label`. The critic ranks run it."""
    label: str | None = None
    """For a reward model with several labels: the one whose probability is the score."""
    steps: str | None = None
    """Text that ends a step of a response, such as an empty line. The reward model then scores the
    text up to the end of each step, and the step's last token gets that score. Unset: one score per
    row."""
    step_token: str | None = None
    """Marker, such as a token of the reward model, that replaces each `steps` in the reward model's
    input and at which it scores the step. The policy never sees it."""
    model_weight: float = 1.0
    """Weight of the reward model in the score."""
    model_offload: bool = False
    """Keep the reward model's shards in pinned host memory between uses."""
    tensor_parallel: int | None = None
    """Ranks that split each layer of the reward model. The parallel group is then a multiple of the
    value model's. Unset: as for the value model."""
    sequence_parallel: int | None = None
    """Ranks that split each row of the reward model, which must be causal with a linear head. 1:
    each rank of a parallel group reads whole rows. Unset: as for the value model."""
    validation: tuple[str, ...] = ()
    """Functions that score held-out rows. Empty: `function` with its weights."""
    normalize: Literal["off", "batch", "running"] = "off"
    """Normalise scores by their mean and deviation: over the batch (not with `rollout.window`,
    where a step may have one row), or over all steps so far. With an environment or spans, scores
    are only divided by the deviation."""
    clip: tuple[float, float] | None = None
    """Lowest and highest score of a row, including its turns' rewards, after normalising."""
    missing_eos_penalty: float = 0.0
    """Subtracted from the score of a row that was cut at a limit: of tokens, or, with an
    environment, of context or turns."""
    overlong_tokens: int = 0
    """Length of the buffer before `rollout.max_new_tokens` in which the penalty grows to
    `overlong_penalty` (DAPO, eq. 13). 0: off."""
    overlong_penalty: float = 1.0
    """Penalty of a row of `rollout.max_new_tokens` tokens, with `overlong_tokens`."""


@dataclass(frozen=True)
class PPOConfig:
    """Proximal policy optimisation (Schulman et al. 2017), as practised on language models."""

    gamma: float = 1.0
    """Discount factor."""
    lam: float | Literal["adaptive"] = 1.0
    """GAE's lambda. Below 1, a reward at the end hardly reaches the first tokens of a long row
    until the value model predicts the scores. `adaptive`: max(0, 1 - 1 / (`lam_alpha` * l)) for a
    row of l tokens (VAPO, arXiv:2504.05118)."""
    lam_alpha: float = 0.05
    """Alpha of the adaptive lambda."""
    lam_value: float | None = None
    """Lambda of the value model's targets (VC-PPO, Yuan et al. 2025). Unset: `lam`."""
    kl_coef: float = 0.0
    """Weight of the KL to the reference that is subtracted from each token's reward."""
    kl_kind: Literal["k1", "k2", "k3"] = "k1"
    """Estimator of the KL in the reward (Schulman, 'Approximating KL divergence', 2020)."""
    kl_target: float | None = None
    """Adaptive KL: target KL per row, in nats, towards which `kl_coef` is adjusted (Ziegler et al.
    2019, section 2.2) in steps that update the policy. Unset: `kl_coef` is constant."""
    kl_horizon: int = 10000
    """Horizon of the adaptive KL. A step multiplies `kl_coef` by 1 + rows / kl_horizon * clip(KL /
    kl_target - 1, -0.2, 0.2)."""
    kl_loss_coef: float = 0.0
    """Weight of the KL to the reference in the policy's loss."""
    kl_loss_kind: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL in the loss."""
    loss: str | None = None
    """Custom policy loss: `path/to/file.py:name`, a function of packed tensors that replaces the
    clipped surrogate (the documentation's page `parts`). KL and entropy terms, importance weights
    and `aggregate` still apply. Unset: PPO's."""
    clip_mode: Literal["clip", "mask"] = "clip"
    """`clip`: PPO's. `mask`: -ratio * advantage inside the bounds, 0 outside (SAO,
    arXiv:2607.07508, eq. 3)."""
    clip_low: float = 0.2
    """The ratio's lower bound is 1 - clip_low."""
    clip_high: float = 0.2
    """The ratio's upper bound is 1 + clip_high."""
    dual_clip: float | None = None
    """Upper bound of the loss for negative advantages, as a factor above 1 (dual-clip PPO, Ye et
    al. 2020). Unset: off."""
    value_clip: float | None = 0.2
    """Clip new values to within this distance of the old values in the value loss. None: off."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    whiten: bool = True
    """Whiten the advantages over the whole batch."""
    baseline: Literal["value", "batch", "group"] = "value"
    """Source of the advantages. `value`: a value model, with GAE. `batch` and `group` need no value
    model and serve as comparisons: the reward-to-go minus a mean over rows, taken at the first
    token of the same turn (for spans, at the same token). `batch`: over the step's rows that have
    this turn. `group`: over the prompt's other rows; a row without this turn counts as 0."""
    advantages: str | None = None
    """Custom advantages: `path/to/file.py:name`, a function of packed tensors of the step's rows
    (the documentation's page `parts`). The value model of `baseline`, if any, is trained as before,
    and `whiten` still applies. Unset: those of `baseline`."""
    epochs: int = 1
    """Passes over the rollout per step."""
    mini_batches: int = 1
    """Optimizer steps per pass. Must divide `rollout.batch_size`."""
    value_epochs: int | None = None
    """Passes over the rollout for the value model. Unset: `epochs`."""
    value_mini_batches: int | None = None
    """Optimizer steps per pass of the value model: a divisor or a multiple of `mini_batches`.
    Unset: `mini_batches`."""
    old_logprobs: Literal["trainer", "engine"] | None = None
    """Source of the old log-probs in the ratio. `engine`: as sampled, which saves a forward pass;
    the ratio then includes the difference between engine and trainer. Unset: `engine` with
    `rollout.window`, else `trainer`."""
    importance: Literal["off", "token", "sequence"] = "off"
    """Weight the policy's loss by the trainer's probability over the engine's, at most
    `importance_cap`, per token or per response."""
    importance_cap: float = 2.0
    """Upper bound of the importance weights."""
    mask_truncated: bool = False
    """Leave out of both losses the rows that were cut at a limit or whose environment failed."""
    aggregate: Literal["token_mean", "seq_mean_token_sum", "seq_mean_token_mean"] = "token_mean"
    """How a mini-batch's token losses are averaged. `token_mean`: over all tokens.
    `seq_mean_token_sum`, `seq_mean_token_mean`: sum or mean over each row's tokens, then mean over
    rows."""
