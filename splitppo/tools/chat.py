"""`splitppo chat RUN`: answers of the trained policy and of the one before training, with the value
model's curve."""

# torch, transformers and the modules that import them are imported in the functions: --help must
# not wait for them
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any
from unicodedata import east_asian_width

import tyro

from splitppo.config import Config
from splitppo.errors import UserError, check_text, one_line
from splitppo.tools.export import load_model, open_run
from splitppo.tools.runs import curves, read_columns

BLOCKS = "▁▂▃▄▅▆▇█"
HEADS = ("trained", "before training")
Answer = dict[str, list[Any]]  # `text` of each token, and its `value` if there is a value model


def load_models(config: Config, run: Path, saved: Path) -> tuple[Any, Any, list[Any]]:
    """The tokenizer, a checkpoint's value model, and two engines: of the checkpoint's policy and of
    the one before training, unless its weights are gone; then a line says so. They are on a GPU if
    there is one. Of a run without a value model, it is None."""
    import torch

    from splitppo.engine.hf import HFEngine
    from splitppo.models.tokenizer import read_tokenizer
    from splitppo.run.resolve import dtype_of
    from splitppo.run.sources import model_folder

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    dtype = dtype_of(config, device)
    source = model_folder(config, run, "policy")
    tokenizer = read_tokenizer(str(source), own_code=config.policy.trust_remote_code)
    value = load_model(config, run, "value", saved) if config.has_value else None
    engines = []
    for folder in (saved, None):
        try:
            model = load_model(config, run, "policy", folder)
        except UserError as error:
            if folder:
                raise
            print(
                f"note: no answers of the policy before training: {one_line(str(error))}",
                file=sys.stderr,
            )
            break
        engine = HFEngine(
            model.config, tokenizer, device=device, dtype=dtype, max_rows=1, folder=source
        )
        engine.load_weights(model.state_dict().items())
        engines.append(engine)
    return tokenizer, value and value.to(device, dtype), engines


def load(
    run: Path, step: int | None, temperature: float, limit: int | None
) -> Callable[[str, int], list[Answer]]:
    """Loads a checkpoint's policy and value model, and the policy before training. Returns (prompt,
    number) -> both answers: the noise depends on the number. A prompt that is too long is a
    UserError."""
    import torch

    from splitppo.data.files import Row
    from splitppo.data.prompts import tokenize
    from splitppo.envs.player import players_of
    from splitppo.generator.sampler import Sampler
    from splitppo.models.batching import micro_batch
    from splitppo.models.build import most_positions
    from splitppo.models.heads import value_outputs
    from splitppo.rewards.samples import token_figures
    from splitppo.rollout import Rollout

    config, _, saved = open_run(run, step)
    most = config.rollout.max_new_tokens if limit is None else limit
    if temperature < 0 or most < 1:
        raise UserError(
            f"--temperature {temperature}, --max-new-tokens {most}: use at least 0 and 1"
        )
    sampling = replace(config.rollout, temperature=temperature, max_new_tokens=most)
    tokenizer, value, engines = load_models(config, run, saved)
    positions = [most_positions(m.config)[0] for m in (value, engines[0].model) if m]
    room = min(filter(None, positions), default=2**31) - most

    player, _ = players_of(config, tokenizer)

    @torch.no_grad()
    def answers(line: str, number: int) -> list[Answer]:
        prompts, wrong = tokenize(
            config.data, {0: Row("the prompt", line, "", "", {})}, tokenizer, render=player.render
        )
        if wrong:
            raise wrong[0]
        ids = prompts[0].tokens
        answered = []
        if len(ids) > room:
            raise UserError(
                f"a prompt of {len(ids)} tokens, but {room} fit beside {most} new ones; shorten it"
            )
        for engine in engines:
            # the noise depends on the row's number
            sampler = Sampler(
                number + 1,
                lambda _: prompts[0],
                limit=most,
                context=config.rollout.max_context,
                player=player,
            )
            parts = sampler.generate(engine, 1, [number], sampling, config.seed)
            rollout = Rollout(episode for part in parts for episode in part)
            batch = micro_batch(rollout.episodes, engine.device)
            figures = {"value": value_outputs(value, batch).cpu()} if value else {}
            answered += token_figures(
                rollout, figures, lambda i: tokenizer.decode(i, skip_special_tokens=True)
            )
        return answered

    return answers


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
    """Prints the answers: on a terminal with curves that span the run's scores, from the lowest to
    the highest."""
    if not sys.stdout.isatty() or "value" not in answers[0]:
        for head, answer in zip(HEADS, answers, strict=False):
            print(f"{head}: {''.join(answer['text'])}")
            figures = [
                f"{json.dumps(t, ensure_ascii=False)} {'-' if v is None else f'{v:.4g}'}"
                for t, v in zip(answer["text"], answer.get("value", ()), strict=False)
            ]
            values = "  ".join(figures) or "the run has no value model (ppo.baseline)"
            print(f"{head}, values: {values}")
        return
    series = curves({}, read_columns(run)[1])
    low = min(series.get("critic/score/min", {0: 0.0}).values())
    high = max(series.get("critic/score/max", {0: 1.0}).values())
    width = min(shutil.get_terminal_size().columns, 120) // 2 - 2
    columns = [
        layout(head, answer, low, high, width) for head, answer in zip(HEADS, answers, strict=False)
    ]
    print(
        *("   ".join(pair).rstrip() for pair in zip_longest(*columns, fillvalue=" " * width)),
        f"values from ▁ {low:.3g} to █ {high:.3g}; "
        f"at the last token {answers[0]['value'][-1]:.3g}\n",
        sep="\n",
    )


def chat(
    run: Annotated[Path, tyro.conf.Positional],
    step: int | None = None,
    temperature: float = 0.0,
    max_new_tokens: int | None = None,
) -> int:
    """Answer each line of the standard input by the trained policy and by the one before training,
    with the values: of each token, the score that the value model expected just before it.

    Args:
        run: The run's folder.
        step: The checkpoint's step. Unset: the newest.
        temperature: Sampling temperature. 0: greedy.
        max_new_tokens: Longest answer, in tokens. Unset: the run's.
    """
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
