"""What critic_block.py runs and compares, as data. Method and results: docs/critic_study.md.

Plans are committed before their first run: `sums` in 384d285, its seeds 21 to 50 in 2e42870,
`written` in 3f8d37d. The tasks `alike`, `mixture` and `papers` are planned and have not run:

* Each has 50 steps of 256 rows. Arms run at rates 1e-5 to 8e-5 by seeds 1 and 2, then seeds 11 to
  20 at the best rate. Without time for this search all arms have 2e-5, and the page says so.
* `alike`: sums of two digits. `mixture`: ten tasks of reasoning-gym 0.1.25 of which SmolLM2 gets up
  to 20 % right when it samples; 100 held-out rows each. `papers`: the sums of the first block, with
  tokens of positive advantage only (arXiv:2606.17250), and value model and group mean fused by
  their errors (after V0.5, arXiv:2603.10848).
* The first pair of a task is tested at 5 %, the others by Holm's correction.

A run that fails is tried once more; one that fails twice, or has not ended when the machine goes
back, is left out and counted. Nobody looks at scores to decide when to end.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import critic_tasks

HERE = Path(__file__).parent
DIGITS = (1, 2, 3, 4)
RATE_SEEDS = (1, 2)
SEEDS = tuple(range(11, 21))
EQUAL = 0.02  # a difference within this on either side counts as none
EXPLAINED = {
    "first": "the first token",
    "token_2": "tokens 2 and 3",
    "token_4": "tokens 4 to 7",
    "token_8": "tokens 8 to 15",
}
AFTER = (1_000, 2_000, 4_000, 8_000, 12_000)  # rows, where the explained variance is read


@dataclass(frozen=True)
class Arm:
    """What gives the advantages. `like`: the arm whose policy rate it has."""

    title: str
    flags: tuple[str, ...]
    baseline: str = "none"  # of critic_arms.py
    like: str = ""


def advantages(name: str) -> tuple[str, str]:
    return "--ppo.advantages", f"{HERE / 'critic_advantages.py'}:{name}"


ONE = ("--rollout.samples", "1")
EIGHT = ("--rollout.samples", "8")
BATCH = ("--ppo.baseline", "batch")
GROUP = ("--ppo.baseline", "group")
ARMS = {
    "V1": Arm("value model, 1 response", ONE),
    "D1": Arm("mean by digit count, 1 response", (*ONE, *BATCH), "digits"),
    "B1": Arm("batch mean, 1 response", (*ONE, *BATCH)),
    "G8": Arm("group mean, 8 responses (RLOO)", (*EIGHT, *GROUP)),
    "V8": Arm("value model, 8 responses", EIGHT),
    "S8": Arm(
        "group mean over deviation, 8 responses (GRPO)",
        (*EIGHT, *GROUP, "--ppo.no-whiten"),
        "deviation",
    ),
    "T1": Arm("mean by task, 1 response", (*ONE, *BATCH), "digits"),
    "Q1": Arm(
        "what the value model says of the prompt, 1 response", (*ONE, *advantages("of_prompt"))
    ),
    "P1": Arm(
        "batch mean, tokens of positive advantage only, 1 response",
        (*ONE, *BATCH, "--ppo.no-whiten", *advantages("positive")),
    ),
    "F8": Arm("value model and group mean fused, 8 responses", (*EIGHT, *advantages("fused"))),
}
# block two, its first part: settings of the value model; V1 has rate 1e-4, lambda 1
SETTINGS = {
    "V1old": ("rate 2e-5, lambda .95", ("--value.optim.lr", "2e-5", "--ppo.lam", "0.95")),
    "V1mid": ("rate 5e-5, lambda 1", ("--value.optim.lr", "5e-5")),
    "V1low": ("rate 2e-5, lambda 1", ("--value.optim.lr", "2e-5")),
    "V1lam": ("rate 1e-4, lambda .95", ("--ppo.lam", "0.95")),
    "V1high": ("rate 3e-4, lambda 1", ("--value.optim.lr", "3e-4")),
}
ARMS |= {
    name: Arm(f"value model, 1 response, {title}", (*ONE, *flags), like="V1")
    for name, (title, flags) in SETTINGS.items()
}


@dataclass(frozen=True)
class Task:
    """What is learned, and what is compared there. `write` makes training.jsonl and held_out.jsonl
    in a folder, and returns how many held-out rows each data_source has. `explained`: places of a
    row (`critic/explained/PLACE`). `unit`: of the held-out rows, for a table's head."""

    write: Callable[[Path], Mapping[str, int]]
    arms: tuple[str, ...]
    primary: tuple[str, str]
    secondary: Sequence[tuple[str, str]] = ()
    flags: tuple[str, ...] = ("--reward.function", "last_number", "--rollout.max-new-tokens", "24")
    rates: tuple[str, ...] = ("1e-5", "2e-5", "4e-5", "8e-5")
    steps: int = 50
    rows: int = 256
    explained: tuple[str, ...] = ("first", "token_8")
    unit: str = ""
    embedded: bool = False  # the embedded model, in place of SmolLM2


BLOCK = ("V1", "D1", "B1", "G8", "V8", "S8")
SUMS = Task(
    partial(critic_tasks.write_sums, digits=DIGITS),
    (*BLOCK, *SETTINGS),
    ("V1", "D1"),
    (
        ("V1", "B1"), ("V1", "G8"), ("V1", "S8"), ("V1", "V8"),
        ("V8", "G8"), ("V8", "S8"), ("D1", "B1"), ("D1", "G8"),
    ),
    unit=" sums",
)  # fmt: skip
TASKS = {
    "sums": SUMS,
    "papers": Task(
        SUMS.write,
        ("P1", "F8", "B1", "V8", "G8"),
        ("P1", "B1"),
        (("P1", "G8"), ("F8", "V8"), ("F8", "G8")),
        unit=" sums",
    ),
    "alike": Task(
        partial(critic_tasks.write_sums, digits=(2,)),
        ("V1", "B1", "G8", "V8", "S8"),
        ("V1", "B1"),
        (("V1", "G8"), ("V8", "G8"), ("V8", "S8"), ("B1", "G8")),
        unit=" sums",
    ),
    "mixture": Task(
        critic_tasks.write_mixture,
        ("V1", "T1", "B1", "G8"),
        ("V1", "T1"),
        (("V1", "B1"), ("V1", "G8"), ("T1", "B1")),
        ("--data.system", "Reply with the answer alone.",
         "--reward.function", f"{HERE / 'critic_rewards.py'}:answer",
         "--rollout.max-new-tokens", "24"),
    ),
    "written": Task(
        critic_tasks.write_written,
        ("V1", "B1", "Q1", "G8"),
        ("V1", "B1"),
        (("V1", "Q1"), ("Q1", "B1"), ("V1", "G8")),
        ("--reward.function", f"{HERE / 'critic_rewards.py'}:written",
         "--rollout.max-new-tokens", "6"),
        rates=("5e-4", "1e-3", "2e-3"),
        steps=120,
        rows=128,
        explained=("first", "token_2", "token_4"),
        embedded=True,
    ),
}  # fmt: skip
