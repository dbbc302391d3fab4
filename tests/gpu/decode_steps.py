"""Decode steps, tokens and processor seconds of rollouts with windows and without, of the embedded
engine.

    python tests/gpu/decode_steps.py [--slots 128] [--lengths lognormal:62:256] [--windows 0 32 64
    128] [--steps 8]

A decode step is one forward pass, also where rows enter. Waiting rows enter when idle places have
lost as much as a step; vLLM fills a slot at once, which takes W steps a window.
"""

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from splitppo.config import RolloutConfig
from splitppo.engine import hf
from splitppo.generator.sampler import Sampler
from splitppo.models.tiny import build_tiny, build_tokenizer, model_config
from splitppo.rollout import Prompt
from splitppo.tools.bench import lengths_of

PROMPT = Prompt("", [5, 6, 7], "", "", {})


def count(
    engine: hf.HFEngine, slots: int, lengths: Sequence[int], window: int, steps: int
) -> tuple[int, int, int, float]:
    """Forward passes, tokens decoded, tokens of rows that ended, and seconds, over some training
    steps."""
    sampler = Sampler(slots, lambda _: PROMPT, limit=max(lengths), window=window, lengths=lengths)
    alone: Any = SimpleNamespace(
        dp_rank=0, dp_size=1, all_gather=lambda value: [value], all_to_all=list
    )
    passes: list[Any] = []
    hook = engine.model.register_forward_pre_hook(lambda *args: passes.append(1))
    trained = 0
    seconds = 0.0
    for step in range(1, steps + 1):
        start = time.process_time()
        sampler.move_open(alone, [range(slots)])
        lists = list(sampler.generate(engine, step, range(slots), RolloutConfig(), 0))
        seconds += time.process_time() - start
        trained += sum(sample.tokens for ended in lists for sample in ended)
        sampler.gather_open(alone)
    hook.remove()
    goes_on = sum(row.tokens for row in sampler.open.values())
    return len(passes), trained + goes_on, trained, seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--slots", type=int, default=128)
    parser.add_argument("--lengths", default="lognormal:62:256", help="as splitppo bench has them")
    parser.add_argument("--windows", type=int, nargs="+", default=[0, 32, 64, 128])
    parser.add_argument(
        "--steps",
        type=int,
        default=8,
        help="with windows: as many tokens as in so many whole rollouts",
    )
    options = parser.parse_args()
    lengths = lengths_of(options.lengths)
    with tempfile.TemporaryDirectory() as folder:
        build_tiny(Path(folder), seed=0)
        engine = hf.HFEngine(
            model_config(),
            build_tokenizer(),
            device=torch.device("cpu"),
            dtype=torch.float32,
            max_rows=options.slots,
        )
        engine.load_weights(AutoModelForCausalLM.from_pretrained(folder).state_dict().items())
        base = None
        for window in options.windows:
            steps = (
                options.steps
                if not window
                else round(options.steps * sum(lengths) / len(lengths) / window)
            )
            drawn, made, trained, seconds = count(
                engine, options.slots, lengths, window, max(1, steps)
            )
            rate = 1000 * drawn / made
            base = base or rate
            at_once = (
                f", {base / (1000 / options.slots):.2f}x fewer filled at once" if window else ""
            )
            print(
                f"window {window:>4}: {drawn:>5} decode steps for {made:,} tokens ({trained:,} of "
                f"rows that ended): "
                f"{rate:.2f} a thousand, {base / rate:.2f}x fewer{at_once}; "
                f"{1e6 * seconds / made:.1f} us a token",
                flush=True,
            )


if __name__ == "__main__":
    main()
