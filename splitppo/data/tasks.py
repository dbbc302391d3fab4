"""Generated tasks: rows without files, for tests and first runs."""

import itertools
import random
from collections.abc import Iterator

from splitppo.config import DataConfig
from splitppo.data.files import Row

_ECHO_TEXTS = ["".join(reversed(digits)) for digits in itertools.product("0123", repeat=3)]
_MAX_ROWS = 4000  # of both splits together
_HELD_OUT = 5  # one row in so many is for validation


def generate(config: DataConfig, seed: int, *, held_out: bool) -> Iterator[Row]:
    """The rows of `data.task`, a pure function of task, digits and seed.

    `echo`: repeat three digits of 0 to 3 ("312=" asks for "312"); 64 rows. `addition`: "What is a+b?" for pairs of
    numbers of `data.digits` digits; at most 4,000 rows. A fifth of the rows is held out. No row is in both splits
    ("3+4" and "4+3" are two rows).
    """
    task, digits = config.task, config.digits
    operands = range(10 ** (digits - 1) if digits > 1 else 0, 10**digits)
    count = len(_ECHO_TEXTS) if task == "echo" else len(operands) ** 2
    shuffled = random.Random(f"{task}/{digits}/{seed}").sample(range(count), min(count, _MAX_ROWS))
    cut = len(shuffled) // _HELD_OUT
    for index in shuffled[:cut] if held_out else shuffled[cut:]:
        if task == "echo":
            text, answer = f"{_ECHO_TEXTS[index]}=", _ECHO_TEXTS[index]
        else:
            a, b = operands[index // len(operands)], operands[index % len(operands)]
            text, answer = f"What is {a}+{b}?", str(a + b)
        yield Row(f"{task} row {index}", text, task, answer, {"index": index})
