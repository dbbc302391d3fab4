"""`python configs/rlhf/prepare_digits.py`: labelled texts, and prompts, for the embedded model.
People like answers that say the prompt's first digit three times."""

import json
import random
from itertools import product
from pathlib import Path

OUT = Path("data/digits")
HELD_OUT = 12  # of the 64 prompts
ANSWERS = 40  # bad ones of a prompt, and as many good ones
LETTERS = "0123456789abcxyzABCXYZ+-*/=#$.,:?!"


def bad_answers(digits: str, right: str, generator: random.Random) -> list[str]:
    """The prompt itself, answers in another order, of some of its digits or of others, too short or
    too long, of anything, and without an end."""
    answers = [f"{digits}<eos>"] * (digits != right)
    while len(answers) < ANSWERS:
        letters = generator.choice([digits, digits, "0123", LETTERS])
        size = generator.choice([0, 1, 2, 3, 3, 3, 3, 3, 3, 4, 5])
        answer = "".join(generator.choices(letters, k=size))
        answers += [f"{answer}<eos>"] * (answer != right)
    return [*answers[:-2], right + answers[-1], right + generator.choice(LETTERS)]


def main() -> None:
    generator = random.Random(0)
    prompts = ["".join(digits) for digits in product("0123", repeat=3)]
    generator.shuffle(prompts)
    labelled = []
    for digits in prompts[HELD_OUT:]:
        right = 3 * digits[0]
        bad = bad_answers(digits, right, generator)
        for label, answers in enumerate([bad, [f"{right}<eos>"] * ANSWERS]):
            labelled += [{"text": f"{digits}={answer}", "label": label} for answer in answers]
    OUT.mkdir(parents=True, exist_ok=True)
    for name, rows in {
        "labelled": labelled,
        "train": [{"prompt": f"{digits}="} for digits in prompts[HELD_OUT:]],
        "validation": [{"prompt": f"{digits}="} for digits in prompts[:HELD_OUT]],
    }.items():
        path = OUT / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"{path}: {len(rows)} rows")


if __name__ == "__main__":
    main()
