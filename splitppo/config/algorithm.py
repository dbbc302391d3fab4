"""Settings of the algorithm: data, rollout, environments, reward, PPO. The docstring of a field is
its text in --help."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class DataConfig:
    """The prompts."""

    task: str = "echo"
    """Generated task, if there are no `files`. `echo`: repeat three digits. `addition`: sums of two
    numbers. `guess`: a game of several turns, with the environment of this name.
    `reasoning_gym:NAME`: a task of that package. `textarena:GAME`: a game of that package for one
    player, with its environment."""
    task_settings: str = "{}"
    """Settings of reasoning_gym's task, as a JSON object: '{"max_terms": 3, "size": 4000}'."""
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
    settings: str = "{}"
    """Settings of textarena's game, as a JSON object: '{"max_turns": 5}'."""
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
    concurrency: int | None = None
    """Most calls of async functions under way at once, on each rank that scores rows. Unset: those
    of all its rows."""
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
    clipped surrogate (the documentation's page `parts`). KL and entropy in the loss, importance
    weights and `aggregate` stay. Unset: PPO's."""
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
    (the documentation's page `parts`). A value model, if `baseline` has one, learns as without.
    `whiten` stays. Unset: those of `baseline`."""
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
