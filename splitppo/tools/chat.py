"""`splitppo chat RUN`: answers of the trained policy and of the one before training, with the value
model's curve."""

import json
import shutil
import sys
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any
from unicodedata import east_asian_width

import tyro

from splitppo.errors import UserError, check_text, one_line
from splitppo.tools.runs import curves, read_columns

BLOCKS = "▁▂▃▄▅▆▇█"
HEADS = ("trained", "before training")
# `text` of each token, and its `value` if there is a value model
Answer = dict[str, list[Any]]


def layout(head: str, answer: Answer, low: float, high: float, width: int) -> list[str]:
    """An answer as lines of `width` columns. Under each line of text stands one with a block for
    each character: its token's value from `low` to `high`. A token without text is a dot."""
    lines = [head.ljust(width)]
    top = ""
    below = ""
    for text, value in zip(answer["text"], answer["value"], strict=True):
        block = " "  # of what an environment said
        if value is not None:
            share = (value - low) / (high - low) if high > low else 0.5
            block = BLOCKS[min(max(int(share * len(BLOCKS)), 0), len(BLOCKS) - 1)]
        for char in text or "·":
            columns = 1 + (east_asian_width(char) in "WF")
            if char == "\n" or len(below) + columns > width:
                lines += [top + " " * (width - len(below)), below.ljust(width)]
                top = below = ""
            if char != "\n":
                top = top + (char if char.isprintable() else "?")
                below = below + block * columns
    return [*lines, top + " " * (width - len(below)), below.ljust(width)]


def show(run: Path, answers: list[Answer]) -> None:
    """Prints the answers: on a terminal with curves of the values, which span the run's scores,
    from the lowest to the highest."""
    if not sys.stdout.isatty() or "value" not in answers[0]:
        for head, answer in zip(HEADS, answers, strict=False):
            print(f"{head}: {''.join(answer['text'])}")
            values = [
                f"{json.dumps(t, ensure_ascii=False)} {'-' if v is None else f'{v:.4g}'}"
                for t, v in zip(answer["text"], answer.get("value", ()), strict=False)
            ]
            print(f"{head}, values: {'  '.join(values) or 'none'}")
        return
    series = curves({}, read_columns(run)[1])
    low = min(series.get("critic/score/min", {0: 0.0}).values())
    high = max(series.get("critic/score/max", {0: 1.0}).values())
    width = min(shutil.get_terminal_size().columns, 120) // 2 - 2
    columns = [
        layout(head, answer, low, high, width) for head, answer in zip(HEADS, answers, strict=False)
    ]
    for pair in zip_longest(*columns, fillvalue=" " * width):
        print("   ".join(pair).rstrip())
    last = answers[0]["value"][-1]
    print(f"values from ▁ {low:.3g} to █ {high:.3g}; at the last token {last:.3g}\n")


def chat(
    run: Annotated[Path, tyro.conf.Positional],
    step: int | None = None,
    temperature: float = 0.0,
    max_new_tokens: int | None = None,
) -> int:
    """Answer each line of standard input with the trained policy and with the policy before
    training. Below each token stands its value, the score that the value model expected before that
    token.

    Args:
        run: The run's folder.
        step: The checkpoint's step. Unset: the newest.
        temperature: Sampling temperature. 0: greedy.
        max_new_tokens: Longest answer, in tokens. Unset: the run's.
    """
    from splitppo.tools.answers import load  # imports torch, and --help must not wait for it

    answers = load(run, step, temperature, max_new_tokens)
    status = 0
    prompt = "> " if sys.stdin.isatty() else ""
    print(prompt, end="", flush=True)
    for number, line in enumerate(map(str.strip, sys.stdin)):
        try:
            check_text([line])
            if line:
                show(run, answers(line, number))
        except UserError as error:  # the models stay for the next prompt
            print(f"error: {one_line(str(error))}", file=sys.stderr)
            status = 2
        print(prompt, end="", flush=True)
    print(end="\n" if prompt else "")
    return status
