"""The tasks of critic_block.py: training.jsonl and held_out.jsonl in a folder, from a fixed seed.
Means by class and held-out scores go by a row's data_source."""

import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

TRAINING = 20_000  # rows in the file
HELD_OUT = 998  # sums, as many of each count of digits
ONE_DIGIT = 14  # of them at most: there are 55, in either order
EACH = 100  # held-out rows of each task of the mixture
COLUMNS = 3  # of the sums that are written digit by digit, each of two digits up to HIGHEST
HIGHEST = 4


# settings of the tasks of the mixture: SmolLM2 gets up to 20 % of each right before training
# (24 samples each; of chain_sum none)
MIXTURE: dict[str, dict[str, Any]] = {
    "chain_sum": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
    "basic_arithmetic": {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1},
    "products": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
    "lcm": {"min_numbers": 2, "max_numbers": 2, "min_value": 1, "max_value": 10},
    "gcd": {"min_numbers": 2, "max_numbers": 2, "min_value": 2, "max_value": 30},
    "count_bits": {"min_n": 1, "max_n": 63},
    "leg_counting": {
        "min_animals": 1, "max_animals": 2, "min_instances": 1, "max_instances": 3,
    },
    "needle_haystack": {"min_num_statements": 2, "max_num_statements": 3},
    "ransom_note": {
        "min_note_length": 1, "max_note_length": 3,
        "min_magazine_length": 2, "max_magazine_length": 6,
    },
    "syllogism": {},
}  # fmt: skip


def write_rows(file: Path, rows: Iterable[tuple[str, str, str]]) -> None:
    """Prompt, data_source, answer."""
    lines = (
        {"prompt": prompt, "data_source": source, "reward_model": {"ground_truth": answer}}
        for prompt, source, answer in rows
    )
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))


def quotas(digits: Sequence[int]) -> dict[int, int]:
    """How many sums of each count of digits are held out."""
    longer = [count for count in digits if count > 1]
    ones = ONE_DIGIT if 1 in digits else 0
    return {count: ones if count == 1 else (HELD_OUT - ones) // len(longer) for count in digits}


def write_sums(out: Path, digits: Sequence[int]) -> dict[str, int]:
    """Sums of two numbers of as many digits. No sum is in both files, in either order of its
    numbers. The data_source names the count of digits."""
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
    for name, pairs in (("training", training), ("held_out", held_out.values())):
        rows = [(f"What is {a}+{b}?", f"addition_{len(str(a))}", str(a + b)) for a, b in pairs]
        write_rows(out / f"{name}.jsonl", rows)
    return {f"addition_{count}": size for count, size in sizes.items()}


def write_written(out: Path) -> dict[str, int]:
    """Sums column by column, for the embedded model: `312+120=`, with digits up to HIGHEST, so that
    nothing is carried and each digit of the answer is a sum of its own. No two rows of the files
    are alike, but for numbers that are swapped."""
    drawn = random.Random(54)
    columns = [(a, b) for a in range(HIGHEST + 1) for b in range(HIGHEST + 1)]
    chosen = drawn.sample(range(len(columns) ** COLUMNS), 4256)
    rows = []
    for number in chosen:
        pairs = [columns[number // len(columns) ** k % len(columns)] for k in range(COLUMNS)]
        first, second = ("".join(map(str, part)) for part in zip(*pairs, strict=True))
        rows.append((f"{first}+{second}=", "written", "".join(str(a + b) for a, b in pairs)))
    write_rows(out / "held_out.jsonl", rows[:256])
    write_rows(out / "training.jsonl", rows[256:])
    return {"written": 256}


def write_mixture(out: Path) -> dict[str, int]:
    """As many training rows of each task of MIXTURE, from reasoning-gym (`pip install
    reasoning-gym==0.1.25`); no question is in both files. The data_source names the task."""
    from reasoning_gym import create_dataset

    training, held_out = [], []
    for name, settings in MIXTURE.items():
        drawn = create_dataset(name, size=4 * TRAINING // len(MIXTURE), seed=54, **settings)
        answers = {item["question"]: str(item["answer"]) for item in drawn}
        rows = [(question, name, answer) for question, answer in answers.items()]
        kept = min(EACH, len(rows) // 4)
        held_out.append(rows[:kept])
        training.append(rows[kept:])
    each = TRAINING // len(MIXTURE)
    # in turn, and again from the first where a task has few questions
    write_rows(
        out / "training.jsonl",
        (rows[place % len(rows)] for place in range(each) for rows in training),
    )
    write_rows(out / "held_out.jsonl", (row for rows in held_out for row in rows))
    return {name: len(rows) for name, rows in zip(MIXTURE, held_out, strict=True)}
