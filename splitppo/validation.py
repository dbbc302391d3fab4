"""Validation: n responses to each held-out prompt, scored over the actor group; metrics `val/...`, RUN/validation.

Row `p * n + j` is response j to held-out prompt p, both from 0. Its noise is that of step 0, which no training step
has, so that every validation draws with the same noise and its curves compare.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from math import comb
from pathlib import Path
from statistics import fmean
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from splitppo.config import Config
from splitppo.engine import RolloutEngine, Sampling
from splitppo.models.sharding import all_objects
from splitppo.rewards import rules
from splitppo.rewards.scorer import Pending, Scored, Scorer, failure_line
from splitppo.rollout import Prompt, Request, Sample

VALIDATION_STEP = 0  # training's steps count from 1
FILE_ROWS = 256  # rows in the .jsonl file of a validation at most, the first
TABLE_ROWS = 16  # rows in a table at most, the first
CELL = 120  # characters of a table's cell at most, before escapes


@dataclass(frozen=True)
class Answered:
    """What the metrics need of the n responses to one held-out prompt.

    Attributes:
        prompt: its index. source: its data_source.
        scores, figures: of each response, in order.
        tokens, cut, failed: tokens of all responses; how many were cut at max_new_tokens; how many a reward failed on.
        majority: mean score of the responses that give the most frequent answer.
    """

    prompt: int
    source: str
    scores: tuple[float, ...]
    figures: tuple[Mapping[str, float], ...]
    tokens: int
    cut: int
    failed: int
    majority: float


class Validator:
    """Scores the held-out prompts: one rank's part of them, as each of the actor group does.

    Args:
        prompts: the held-out ones; the same on every rank.
        decode: token ids of a response -> its text.
        mesh: the actor group's.
        folder: the run's.
    """

    def __init__(
        self,
        config: Config,
        prompts: Sequence[Prompt],
        decode: Callable[[list[int]], str],
        engine: RolloutEngine,
        mesh: DeviceMesh,
        scorer: Scorer,
        folder: Path,
    ):
        self.config, self.prompts, self.decode, self.engine = config, prompts, decode, engine
        self.mesh, self.rank, self.scorer, self.folder = mesh, mesh.get_local_rank(), scorer, folder

    def due(self, step: int) -> bool:
        """Whether to validate after this step; 0: before the first. The same on every rank."""
        every = self.config.log.validate_every
        return bool(every and self.prompts) and (step % every == 0 or step == self.config.steps)

    def run(self, step: int) -> dict[str, float]:
        """Validates the weights that the engine holds; all ranks of the group call it.

        Returns:
            The group's metrics, the same on every rank and under any number of ranks; see `metrics`.
        """
        n = self.config.log.validate_samples
        mine = range(self.rank, len(self.prompts), self.mesh.size())
        requests = [Request(prompt * n + j, self.prompts[prompt].tokens) for prompt in mine for j in range(n)]
        batches: list[tuple[list[Sample], list[str], Pending]] = []
        for finished in self.engine.generate(requests, self._sampling(), seed=self.config.seed, step=VALIDATION_STEP):
            if finished:
                texts = [self.decode(sample.response) for sample in finished]
                # the scorer may work while the engine goes on
                rows = [(self.prompts[sample.row // n], text) for sample, text in zip(finished, texts, strict=True)]
                batches.append((finished, texts, self.scorer.submit(rows)))
        done: dict[int, tuple[Sample, str, Scored]] = {}
        for samples, texts, pending in batches:
            for sample, text, outcome in zip(samples, texts, pending.result(), strict=True):
                done[sample.row] = (sample, text, outcome)
        answered = [self._answered(prompt, [done[prompt * n + j] for j in range(n)]) for prompt in mine]
        # the prompts' side of a row is known to every rank
        written = [(row, text, out.score, s.finished) for row, (s, text, out) in done.items() if row < FILE_ROWS]
        failures = [(row, failure) for row, (_, _, outcome) in sorted(done.items()) for failure in outcome.failures]
        gathered = all_objects((answered, written, failures), self.mesh)
        if self.rank == 0:
            rows = sorted(row for _, part, _ in gathered for row in part)
            write_rows(self.folder / "validation", step, [self._record(step, *row) for row in rows])
            if failed := [failure for *_, part in gathered for failure in part]:
                print(f"[actor] step {step}, held-out rows, {failure_line(failed)}", flush=True)
        return metrics(sorted((prompt for part, *_ in gathered for prompt in part), key=lambda answer: answer.prompt))

    def _sampling(self) -> Sampling:
        """The rollout's, at the validation's temperature."""
        drawn, temperature = Sampling.of(self.config.rollout), self.config.log.validate_temperature
        if temperature == 0:
            return replace(drawn, greedy=True, top_p=1.0, top_k=0)
        return replace(drawn, temperature=temperature)

    def _answered(self, prompt: int, responses: Sequence[tuple[Sample, str, Scored]]) -> Answered:
        samples, texts, outcomes = zip(*responses, strict=True)
        scores = tuple(outcome.score for outcome in outcomes)
        return Answered(
            prompt,
            self.prompts[prompt].data_source,
            scores,
            figures=tuple(dict(outcome.figures) for outcome in outcomes),
            tokens=sum(len(sample.response) for sample in samples),
            cut=sum(not sample.finished for sample in samples),
            failed=sum(bool(outcome.failures) for outcome in outcomes),
            majority=majority_score(texts, scores),
        )

    def _record(self, step: int, row: int, text: str, score: float, finished: bool) -> dict[str, Any]:
        """A row as it is written."""
        index, sample = divmod(row, self.config.log.validate_samples)
        prompt = self.prompts[index]
        return {
            "step": step,
            "row": row,
            "sample": sample,
            "score": round(score, 6),
            "prompt": prompt.text,
            "response": text,
            "finished": finished,
            "data_source": prompt.data_source,
            "ground_truth": prompt.ground_truth,
        }


def metrics(answered: Sequence[Answered]) -> dict[str, float]:
    """The metrics of a validation, from at least one prompt; each has the same number n of responses.

    Returns:
        `val/score/mean`: over all responses. `val/rows`: how many there are. `val/response_length/mean`: tokens.
        `val/clip_ratio`: share cut at max_new_tokens. `val/KEY/mean`: of each further figure of the functions, over
        the responses that have it. `val/failures`: responses that a function failed on, if there are any. With n > 1,
        what `score_metrics` adds. With several data sources, `score_metrics` of each.
    """
    rows = sum(len(prompt.scores) for prompt in answered)
    figures = [figures for prompt in answered for figures in prompt.figures]
    found = {
        f"val/{name}/mean": fmean(part[name] for part in figures if name in part)
        for name in dict.fromkeys(name for part in figures for name in part)
    }
    # the trainer's own figures win over a reward's of the same name
    found |= score_metrics(answered) | {
        "val/rows": rows,
        "val/response_length/mean": sum(prompt.tokens for prompt in answered) / rows,
        "val/clip_ratio": sum(prompt.cut for prompt in answered) / rows,
    }
    if failed := sum(prompt.failed for prompt in answered):
        found["val/failures"] = failed
    sources = dict.fromkeys(prompt.source for prompt in answered)
    for source in sources if len(sources) > 1 else ():
        found |= score_metrics([prompt for prompt in answered if prompt.source == source], f"/{source}")
    return found


def score_metrics(answered: Sequence[Answered], infix: str = "") -> dict[str, float]:
    """What follows from the scores alone; `infix` goes into the names: `val/score{infix}/mean`.

    With n > 1 responses a prompt, means over the prompts of: the best score (`val/best/mean`), the score of the most
    frequent answer (`val/majority/mean`), and `val/pass@K` for K = 1, 2, 4, ... up to n. A response passes if its
    score is at least 1, so pass@K is left out if a score lies outside [0, 1], where 1 need not mean right.
    """
    n, scores = len(answered[0].scores), [score for prompt in answered for score in prompt.scores]
    found = {f"val/score{infix}/mean": fmean(scores)}
    if n == 1:
        return found
    found[f"val/best{infix}/mean"] = fmean(max(prompt.scores) for prompt in answered)
    found[f"val/majority{infix}/mean"] = fmean(prompt.majority for prompt in answered)
    if all(0 <= score <= 1 for score in scores):
        passed = [sum(score >= 1 for score in prompt.scores) for prompt in answered]
        for k in (2**i for i in range(n.bit_length())):
            found[f"val/pass@{k}{infix}"] = fmean(pass_at_k(n, c, k) for c in passed)
    return found


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that one of k responses passes, without bias from n responses of which c passed; 1 <= k <= n.

    Chen et al. 2021, "Evaluating large language models trained on code", eq. 1: 1 - C(n - c, k) / C(n, k).
    """
    return 1 - comb(n - c, k) / comb(n, k)


def majority_score(texts: Sequence[str], scores: Sequence[float]) -> float:
    """The mean score of the responses that give the most frequent answer; of equally frequent ones, the first.

    verl's maj@n takes the score of the first of these responses, and averages over resampled sets of n.
    """
    answers = [answer(text) for text in texts]
    chosen = Counter(answers).most_common(1)[0][0]  # counts that are equal stay in the order first seen
    return fmean(score for said, score in zip(answers, scores, strict=True) if said == chosen)


def answer(text: str) -> Decimal | str:
    """What a response says, to compare it with others: its last number by value, else its text without white space at
    both ends."""
    numbers = list(rules._ANY_NUMBER.finditer(text))
    return rules._value(numbers[-1]) if numbers else text.strip()


def write_rows(folder: Path, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes rows to FOLDER/step_NNNNNN.jsonl, and the first of them as a table beside it (.md), over what is there."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step_{step:06d}.jsonl"
    lines = [json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows]
    path.write_text("".join(lines), encoding="utf-8", errors="backslashreplace")
    write_table(path.with_suffix(".md"), rows)


def write_table(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes the first 16 rows as a Markdown table with the first row's keys as columns; no rows: an empty file.

    A cell shows the beginning and the end of what is longer than 120 characters, and `↵` for a new line.
    """
    names = list(rows[0]) if rows else []
    cells = [names, ["---"] * len(names)] if names else []
    cells += [[_cell(row[name]) for name in names] for row in rows[:TABLE_ROWS]]
    path.write_text("".join(f"| {' | '.join(line)} |\n" for line in cells), encoding="utf-8")


def _cell(value: Any) -> str:
    text = str(value)
    if len(text) > CELL:
        half = (CELL - 3) // 2
        text = f"{text[:half]} … {text[-half:]}"
    text = "".join(char if char.isprintable() else " " for char in "↵".join(text.splitlines()))
    # what Markdown, or the HTML in it, would take for its own
    return re.sub(r"([\\`*_<>\[\]|~&$])", r"\\\1", text)
