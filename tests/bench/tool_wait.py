"""What waiting for tools costs: the real sampler, on an engine and tools that are simulated.

    PYTHONPATH=tests/helpers python tests/bench/tool_wait.py

Tokens a decode step, as a share of those without tools in as many slots. A decode step takes the
same time for any number of rows, and what an environment says costs none. Rows have two to six
turns of 100 tokens on average.
"""

import argparse
import random
from functools import cache

from simulated import Simulation

PLACES = 64
TOOLS = (0, 50, 200)  # decode steps


@cache
def turns(row: int) -> tuple[int, ...]:
    draw = random.Random(row)
    return tuple(1 + int(draw.expovariate(1 / 99)) for _ in range(draw.randint(2, 6)))


def rate(slots: int, window: int, tool: int | None, steps: int) -> float:
    """Tokens a decode step."""
    run = Simulation(slots, PLACES, window, None if tool is None else lambda *_: tool, turns)
    for step in range(1, steps + 1):
        run.step(step)
    return run.engine.tokens / run.clock.now


def table(steps: int) -> str:
    lines = ["| slots a place | window | no tools | " + " | ".join(f"{t} steps" for t in TOOLS)]
    lines = [lines[0] + " |", "|---|---|---|" + "---|" * len(TOOLS)]
    for window in (400, 1600, 0):
        for times in (1, 2, 4):
            free = rate(times * PLACES, window, None, steps)
            shares = [rate(times * PLACES, window, tool, steps) / free for tool in TOOLS]
            told = " | ".join(f"{share:.2f}" for share in shares)
            lines.append(f"| {times} | {window or 'none'} | {free / PLACES:.2f} | {told} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=6)
    print(table(parser.parse_args().steps))
