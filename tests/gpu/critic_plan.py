"""What critic_block.py runs and compares: the plan in docs/critic_study.md, as data."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

DIGITS = (1, 2, 3, 4)
TRAINING = 20_000  # sums in the file
HELD_OUT = 998  # sums, as many of each count of digits
ONE_DIGIT = 14  # of them at most: there are 55, in either order
RATES = ("1e-5", "2e-5", "4e-5", "8e-5")
RATE_SEEDS = (1, 2)
SEEDS = tuple(range(11, 21))
STEPS = 50
ROWS = 256
EQUAL = 0.02  # a difference within this on either side counts as none
EXPLAINED = {"first": "the first token", "token_8": "tokens 8 to 15"}
AFTER = (1_000, 2_000, 4_000, 8_000, 12_000)  # rows, where the explained variance is read


@dataclass(frozen=True)
class Arm:
    """What gives the advantages. `like`: the arm whose policy rate it has."""

    title: str
    flags: tuple[str, ...]
    baseline: str = "none"  # of critic_arms.py
    like: str = ""


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
PRIMARY = ("V1", "D1")
SECONDARY = (
    ("V1", "B1"), ("V1", "G8"), ("V1", "S8"), ("V1", "V8"),
    ("V8", "G8"), ("V8", "S8"), ("D1", "B1"), ("D1", "G8"),
)  # fmt: skip


# ---- the task


def quotas(digits: Sequence[int]) -> dict[int, int]:
    """How many sums of each count of digits are held out."""
    longer = [count for count in digits if count > 1]
    ones = ONE_DIGIT if 1 in digits else 0
    return {count: ones if count == 1 else (HELD_OUT - ones) // len(longer) for count in digits}


def write_sums(out: Path, digits: Sequence[int] = DIGITS) -> list[str]:
    """Writes the sums to train on and those held out; returns the flags that read them. No sum is
    in both files, in either order of its numbers. The data_source names the count of digits."""
    drawn = random.Random(54)

    def draw(count: int) -> tuple[int, int]:
        low = 10 ** (count - 1) if count > 1 else 0
        return drawn.randrange(low, 10**count), drawn.randrange(low, 10**count)

    held_out: dict[frozenset[int], tuple[int, int]] = {}
    sizes = quotas(digits)
    for place in range(max(sizes.values())):  # in turn: the first few have all counts
        for count in (count for count, size in sizes.items() if place < size):
            while frozenset(pair := draw(count)) in held_out:
                pass
            held_out[frozenset(pair)] = pair
    training: list[tuple[int, int]] = []
    while len(training) < TRAINING:
        pair = draw(digits[len(training) % len(digits)])
        if frozenset(pair) not in held_out:
            training.append(pair)
    flags = []
    for flag, name, pairs in (
        ("--data.files", "training", training),
        ("--data.validation-files", "held_out", list(held_out.values())),
    ):
        rows = [
            {
                "prompt": f"What is {a}+{b}?",
                "data_source": f"addition_{len(str(a))}",
                "reward_model": {"ground_truth": str(a + b)},
            }
            for a, b in pairs
        ]
        file = out / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        flags += [flag, str(file)]
    return flags


# ---- the runs
