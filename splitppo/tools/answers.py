"""What a run's policy answers, with the values: for `splitppo chat`, which imports this when it
must, since torch takes seconds."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from splitppo.config import Config
from splitppo.data.files import Row
from splitppo.data.prompts import tokenize
from splitppo.engine.hf import HFEngine
from splitppo.envs.player import players_of
from splitppo.errors import UserError, one_line
from splitppo.generator.sampler import Sampler
from splitppo.models.batching import micro_batch
from splitppo.models.build import most_positions
from splitppo.models.heads import value_outputs
from splitppo.models.tokenizer import read_tokenizer
from splitppo.rewards.samples import token_figures
from splitppo.rollout import Rollout
from splitppo.run.resolve import dtype_of
from splitppo.run.sources import model_folder
from splitppo.tools.saved import kinds_of, load_model, open_run

# `text` of each token, and its `value` if there is a value model
Answer = dict[str, list[Any]]


def load_engines(config: Config, run: Path, saved: Path, tokenizer: Any) -> list[HFEngine]:
    """Engines of a checkpoint's policy and of the one before training, if its weights are there.
    They are on a GPU if there is one."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    dtype = dtype_of(config, device)
    source = model_folder(config, run, "policy")
    models = [load_model(config, run, "policy", saved)]
    try:
        models.append(load_model(config, run, "policy", None))
    except UserError as error:
        note = f"note: no answers of the policy before training: {one_line(str(error))}"
        print(note, file=sys.stderr)
    engines = []
    for model in models:
        engine = HFEngine(
            model.config, tokenizer, device=device, dtype=dtype, max_rows=1, folder=source
        )
        engine.load_weights(model.state_dict().items())
        engines.append(engine)
    return engines


def load(
    run: Path, step: int | None, temperature: float, limit: int | None
) -> Callable[[str, int], list[Answer]]:
    """Loads a checkpoint's policy and value model, and the policy before training. Returns (prompt,
    number) -> both answers: the noise depends on the number. A prompt that is too long is a
    UserError."""
    config, _, saved = open_run(run, step)
    most = config.rollout.max_new_tokens if limit is None else limit
    if temperature < 0 or most < 1:
        raise UserError(
            f"--temperature {temperature}, --max-new-tokens {most}: use at least 0 and 1"
        )
    sampling = replace(config.rollout, temperature=temperature, max_new_tokens=most)
    source = str(model_folder(config, run, "policy"))
    tokenizer = read_tokenizer(source, own_code=config.policy.trust_remote_code)
    engines = load_engines(config, run, saved, tokenizer)
    device = engines[0].device
    models = {
        kind: load_model(config, run, kind, saved).to(device, dtype_of(config, device))
        for kind in kinds_of(config)
        if kind != "policy"
    }
    every = [engines[0].model, *models.values()]
    limits = [positions for model in every if (positions := most_positions(model.config)[0])]
    room = min(limits, default=2**31) - most
    player, _ = players_of(config, tokenizer)

    @torch.no_grad()
    def answers(line: str, number: int) -> list[Answer]:
        row = Row("the prompt", line, "", "", {})
        (prompt,) = tokenize(config.data, [row], tokenizer, render=player.render)
        if isinstance(prompt, UserError):
            raise prompt
        if (length := len(prompt.tokens)) > room:
            raise UserError(
                f"the prompt has {length} tokens, but only {room} fit with {most} new tokens; "
                "shorten it"
            )
        answered = []
        for engine in engines:
            # the noise depends on the row's number
            sampler = Sampler(
                number + 1,
                lambda _: prompt,
                limit=most,
                context=config.rollout.max_context,
                player=player,
            )
            parts = sampler.generate(engine, 1, [number], sampling, config.seed)
            rollout = Rollout(episode for part in parts for episode in part)
            batch = micro_batch(rollout.episodes, device)
            figures = {
                kind: value_outputs(model, batch, config.value.range).cpu()
                for kind, model in models.items()
            }
            answered += token_figures(
                rollout, figures, lambda i: tokenizer.decode(i, skip_special_tokens=True)
            )
        return answered

    return answers
