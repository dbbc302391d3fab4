"""What a run shows on the screen: some lines at its start, a line for each step and role, a summary at its end."""

import sys
import textwrap
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

from tqdm import tqdm

from splitppo.config import Config
from splitppo.data import PromptSet
from splitppo.errors import say
from splitppo.job.nodes import installed
from splitppo.placement import ROLES, Role
from splitppo.run.files import parse_record, read_lines
from splitppo.run.resolve import Resolved

WIDTH = 120  # columns of a line at most
SHOWN = {  # metric: its name on the screen; the score comes first
    "val/score/mean": "held-out", "critic/score/mean": "score", "critic/values/mean": "value",
    "critic/vf_explained_var": "ev", "actor/pg_loss": "loss", "critic/vf_loss": "loss", "actor/ppo_kl": "ppo_kl",
    "actor/ref_kl": "ref_kl", "actor/entropy": "entropy", "actor/grad_norm": "grad", "critic/grad_norm": "grad",
    "response_length/mean": "len", "response_length/clip_ratio": "cut", "actor/mismatch_mean": "mismatch",
}  # fmt: skip


def opening(resolved: Resolved, folder: Path, start: int, training: PromptSet, validation: PromptSet) -> str:
    """Notes on the data, and what the run is, in about ten lines. `start`: the step that it resumes after."""
    config, placement, dtype = resolved.config, resolved.placement, str(resolved.dtype).removeprefix("torch.")
    facts = f"ranks {placement.world}, {resolved.device.type}, {dtype}, engine {resolved.engine}"
    source = ", ".join(config.data.files) or f"the generated task {config.data.task}"
    lines = {"splitppo": f"{installed('splitppo')}: {facts}"}
    lines["data"] = f"{source}: {counted(training, validation)}"
    lines["reward"] = ", ".join(filter(None, [*config.reward.function, config.reward.model]))
    for name, model in resolved.models.items():
        drawn = ", random weights" if model.random_init else ""
        lines[name] = f"{model.name}, {model.parameters:,} parameters{drawn}, on {resolved.role_of(name)} ranks"
    sizes = ", ".join(f"{len(ranks)} {role}" for role, ranks in placement.groups.items())
    lines["placement"] = f"{placement.mode}: {sizes}"
    rollout, rows = config.rollout, f"{config.rollout.batch_size} rows"
    if rollout.window:
        rows = f"{rollout.window} tokens of each of {rollout.batch_size} slots,"
    rows += f" ({rollout.samples} a prompt) of up to {rollout.max_new_tokens} new tokens"
    lines["one step"] = f"{rows}; epochs {config.ppo.epochs}, mini-batches {config.ppo.mini_batches}"
    due = {"held-out score": config.log.validate_every, "checkpoint": config.checkpoint.every}
    steps = [f"{start} to {config.steps}", *(f"{name} every {every}" for name, every in due.items() if every)]
    lines["steps"] = ", ".join(steps)
    lines["run folder"] = f"{folder} (messages of libraries and engines: logs/)"
    return "\n".join([*training.notes, *validation.notes, *(_titled(*line) for line in lines.items())])


def counted(training: PromptSet, validation: PromptSet) -> str:
    """How many prompts there are, and of which lengths."""
    lengths = [len(prompt.tokens) for prompt in training.prompts]
    held_out = f"; {len(validation.prompts):,} held out" * bool(validation.prompts)
    return f"{len(lengths):,} prompts of {min(lengths)} to {max(lengths)} tokens{held_out}"


def _titled(title: str, text: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent=f"{title:<12} ", subsequent_indent=" " * 13)


class Screen:
    """A role's lines, on the first rank of its group; on a terminal the actor's has a progress bar below them."""

    def __init__(self, role: Role, start: int, steps: int):
        self.role, self.steps = role, steps
        self.times: deque[float] = deque(maxlen=10)  # of the last steps, in seconds
        quiet = role != "actor" or not sys.stdout.isatty()
        self.bar = tqdm(total=steps, initial=start, unit="step", file=sys.stdout, dynamic_ncols=True, disable=quiet)

    def step(self, step: int, took: float, spans: Mapping[str, float], metrics: Mapping[str, Any]) -> None:
        """A step has ended: it took so many seconds, of which so many in each span. Prints its score and figures, as
        many as fit, its two longest spans and the time that is left."""
        self.times.append(took)
        longest = sorted((pair for pair in spans.items() if pair[1] >= 0.05 * took), key=lambda pair: -pair[1])[:2]
        end = "".join(f"  {name} {seconds:.2f} s" for name, seconds in longest)
        if step < self.steps:
            end += f"  ETA {timedelta(seconds=round((self.steps - step) * median(self.times)))}"
        line = f"{f'[{self.role}]':<8} step {step:>4}/{self.steps}"
        for figure in (f"  {short} {metrics[name]:.3g}" for name, short in SHOWN.items() if name in metrics):
            if len(line) + len(figure) + len(end) + 3 > WIDTH:
                break
            line += figure
        say(f"{line}  |{end}")
        if skipped := metrics.get(f"{self.role}/skipped"):
            say(f"[{self.role}] step {step}: SKIPPED {skipped:g} updates: gradient not finite")
        self.bar.update(step - self.bar.n)


def summary(folder: Path, config: Config, saved: Path | None) -> str:
    """What a run that has ended came to, from its metrics, and what to type next. `saved`: its newest checkpoint."""
    files = {role: folder / "metrics" / f"{role}.jsonl" for role in ROLES}
    steps = {role: list(read_lines(file, parse_record)) if file.is_file() else [] for role, file in files.items()}
    took = timedelta(seconds=round(sum(step["timing_s/step"] for step in steps["actor"])))
    lines = [("done", f"{max((s['step'] for s in steps['actor']), default=0)} of {config.steps} steps in {took}")]
    for title, name in (("held-out", "val/score/mean"), ("training", "critic/score/mean")):
        if scores := {step["step"]: step[name] for role in ROLES for step in steps[role] if name in step}:
            (first, before), *_, (last, after) = [*scores.items()] * 2
            at = max(scores, key=lambda step: scores[step])
            found = f"score {before:.3f} at step {first}, {after:.3f} at step {last}"
            lines.append((title, f"{found}; best {scores[at]:.3f} at step {at}"))
    lines += [(f"{role} time", _shares(found)) for role, found in steps.items() if found]
    lines.append(("weights", str(saved or "not saved (--checkpoint.no-last)")))
    lines += zip(("next", "", ""), (f"splitppo {tool} {folder}" for tool in ("report", "chat", "export")), strict=True)
    return "\n".join(_titled(*line) for line in lines)


def _shares(steps: Sequence[Mapping[str, Any]]) -> str:
    """The spans of a role's steps as shares of their time, the largest first."""
    spent: Counter[str] = Counter()
    for step in steps:
        spent.update({name: value for name, value in step.items() if name.startswith("timing_s/")})
    total = spent.pop("timing_s/step")
    shares = [(name.removeprefix("timing_s/"), value / total) for name, value in spent.most_common()]
    return ", ".join(f"{name} {share:.0%}" for name, share in shares if share >= 0.015)
