"""What a run shows on the screen: some lines at its start, a line for each step and role, a summary
at its end."""

import shlex
import textwrap
from collections import deque
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

from splitppo.config import Config
from splitppo.data import PromptSet
from splitppo.errors import one_line, say
from splitppo.job.nodes import installed
from splitppo.placement import ROLES, Role
from splitppo.run.files import parse_record, read_lines
from splitppo.run.resolve import Resolved

WIDTH = 120  # columns of a line at most
PAUSE = 1.0  # seconds between two lines of a role, at least
SAMPLE_LINES = 10  # lines from one sample to the next
# figures of a role's line: name on the screen, metric, decimals, columns (six where it may be
# negative)
FIGURES: dict[Role, tuple[tuple[str, str, int, int], ...]] = {
    "actor": (
        ("loss", "actor/pg_loss", 3, 6),
        ("entropy", "actor/entropy", 3, 5),
        ("len", "response_length/mean", 1, 5),
        ("cut", "response_length/clip_ratio", 2, 5),
    ),
    "critic": (
        ("score", "critic/score/mean", 3, 6),
        ("ev", "critic/vf_explained_var", 2, 6),
        ("kl_row", "critic/kl_row", 3, 6),
        ("loss", "critic/vf_loss", 3, 5),
    ),
}


def opening(
    resolved: Resolved, folder: Path, start: int, training: PromptSet, validation: PromptSet
) -> str:
    """Notes on the data, and what the run is, in about ten lines. `start`: the step that it resumes
    after."""
    config = resolved.config
    rollout = config.rollout
    placement = resolved.placement
    due = {"held-out score": config.validate_every, "checkpoint": config.checkpoint.every}
    lines = {
        "splitppo": f"{installed('splitppo')}: ranks {placement.world}, {resolved.device.type}, "
        f"{str(resolved.dtype).removeprefix('torch.')}, engine {resolved.engine}",
        "data": f"{', '.join(config.data.files) or f'the generated task {config.data.task}'}: "
        f"{counted(training, validation)}",
        "reward": ", ".join(filter(None, [*config.reward.function, config.reward.model])),
        **{
            name: f"{model.name}, {model.counts.words}"
            f"{', random weights' * model.random_init}, on {resolved.role_of(name)} ranks"
            for name, model in resolved.models.items()
        },
        "settings": "those of --config tiny, unless set otherwise" * (config.policy.path == "tiny"),
        "placement": f"{placement.mode}: "
        f"{', '.join(f'{len(ranks)} {role}' for role, ranks in placement.groups.items())}",
        "one step": f"{rollout.batch_size} rows ({rollout.samples} per prompt) of up to "
        f"{rollout.max_new_tokens} new tokens, window {rollout.window}; epochs "
        f"{config.ppo.epochs}, mini-batches {config.ppo.mini_batches}, baseline "
        f"{config.ppo.baseline}",
        "steps": f"{start} to {config.steps}"
        f"{''.join(f', {name} every {every}' for name, every in due.items() if every)}",
        "run folder": f"{folder} (messages of libraries and engines: logs/)",
    }
    return "\n".join(
        [*training.notes, *validation.notes, *(_titled(*line) for line in lines.items() if line[1])]
    )


def counted(training: PromptSet, validation: PromptSet) -> str:
    """How many prompts there are, and of which lengths."""
    lengths = [len(prompt.tokens) for prompt in training.prompts]
    held_out = f"; {len(validation.prompts):,} held out" * bool(validation.prompts)
    return f"{len(lengths):,} prompts of {min(lengths)} to {max(lengths)} tokens{held_out}"


def _titled(title: str, text: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent=f"{title:<12} ", subsequent_indent=" " * 13)


def fixed(value: float | None, decimals: int, columns: int) -> str:
    """A number in so many columns, with fewer decimals where it is large; `-` for none. What is not
    0 does not look like 0: it is shown as 4e-05."""
    if value is None:
        return "-".rjust(columns)
    texts = [*(f"{value:.{places}f}" for places in range(decimals, -1, -1)), f"{value:.0e}"]
    fitting = (text for text in texts if len(text) <= columns and (float(text) or not value))
    return next(fitting, texts[-1]).rjust(columns)


def cut(text: str, columns: int) -> str:
    """The text as a line of so many columns at most: its beginning and its end."""
    line = one_line(text)
    half = (columns - 5) // 2
    return line if len(line) <= columns else f"{line[:half]} ... {line[-half:]}"


class Screen:
    """A role's lines, on the first rank of its group. Where steps are short, not every step has a
    line. `samples`: of the step that ends next."""

    def __init__(self, role: Role, steps: int):
        self.role: Role = role
        self.steps = steps
        self.times: deque[float] = deque(maxlen=10)  # of the last steps, in seconds
        self.since = PAUSE  # seconds since the last line
        self.lines = 0
        self.silent = False
        self.samples: Sequence[Mapping[str, Any]] = ()

    def step(self, step: int, took: float, metrics: Mapping[str, Any]) -> None:
        """A step has ended: it took so many seconds. Prints its line, if one is due. The first and
        the last step have one, and those with a validation or skipped updates."""
        if self.silent:
            return
        self.times.append(took)
        self.since += took
        head = f"{f'[{self.role}]':<8} step {step:>{len(str(self.steps))}}/{self.steps}"
        extra = []
        if "val/score/mean" in metrics:
            extra.append(f"{head}  held-out score {metrics['val/score/mean']:.3f}")
        if skipped := metrics.get(f"{self.role}/skipped"):
            extra.append(
                f"[{self.role}] step {step}: SKIPPED {skipped:g} updates: gradient not finite"
            )
        if step and (extra or self.since >= PAUSE or step == self.steps):
            say(self._line(head, step, took, metrics))
            if self.samples and self.lines % SAMPLE_LINES == 0:
                extra += _shown(self.samples[self.lines // SAMPLE_LINES % len(self.samples)])
            self.since = 0.0
            self.lines += 1
        for line in extra:
            say(line)

    def _line(self, head: str, step: int, took: float, metrics: Mapping[str, Any]) -> str:
        """Figures, speed or time left, seconds."""
        figures = [
            f"{name} {fixed(metrics.get(metric), *size)}"
            for name, metric, *size in FIGURES[self.role]
        ]
        if self.role == "actor":
            figures.append(f"{metrics.get('tokens', 0) / max(took, 1e-9):>6.0f} tok/s")
        else:
            left = round((self.steps - step) * median(self.times))
            figures.append(f"ETA {left // 3600:>2}:{left // 60 % 60:02}:{left % 60:02}")
        return "  ".join([head, *figures, f"step {fixed(took, 2, 4)} s"])


def _shown(sample: Mapping[str, Any]) -> list[str]:
    """A question and its answer, a line each; of a dialogue all that came behind its prompt."""
    score = f"  (score {sample['score']:g})"
    return [
        f"[critic] question  {cut(str(sample['question']), WIDTH - 19)}",
        f"[critic] answer    {cut(sample['response'], WIDTH - 19 - len(score))}{score}",
    ]


def summary(folder: Path, config: Config, saved: Path | None, notices: Sequence[str] = ()) -> str:
    """What a run that has ended came to, from its metrics, and what to type next. `saved`: its
    newest checkpoint; `notices`: why it may have learned nothing."""
    steps = {
        role: [*read_lines(folder / "metrics" / f"{role}.jsonl", parse_record)] for role in ROLES
    }
    done = max((step["step"] for step in steps["actor"]), default=0)
    took = timedelta(seconds=round(sum(step["timing_s/step"] for step in steps["actor"])))
    lines = [("done", f"{done} of {config.steps} steps in {took}")]
    for title, name in (("held-out", "val/score/mean"), ("training", "critic/score/mean")):
        if scores := {
            step["step"]: step[name] for role in ROLES for step in steps[role] if name in step
        }:
            (first, before), *_, (last, after) = [*scores.items()] * 2
            at = max(scores, key=lambda step: scores[step])
            first_and_last = f"score {before:.3f} at step {first}, {after:.3f} at step {last}"
            lines.append((title, f"{first_and_last}; best {scores[at]:.3f} at step {at}"))
    run = shlex.quote(str(folder))
    # paths and commands are not wrapped: they are to be copied
    return "\n".join(
        [
            *(_titled(*line) for line in lines),
            f"{'weights':<12} {saved or 'not saved (--checkpoint.no-last)'}",
            *(_titled("warning", notice) for notice in notices),
            f"{'next':<12} splitppo report {run}",
            f"{'':<12} splitppo chat {run}",
            f"{'':<12} splitppo export {run}",
        ]
    )
