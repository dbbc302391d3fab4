"""Validation: n responses to each held-out prompt, scored over the actor group; metrics `val/...`, RUN/validation.

Row `p * n + j` is response j to held-out prompt p, both from 0. Its noise is that of step 0. No training step has this
noise and every validation has it, so their results can be compared.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from math import comb
from statistics import fmean
from typing import Any

from splitppo.context import Context, record
from splitppo.engine import RolloutEngine, Sampling
from splitppo.errors import say
from splitppo.job.collectives import Group
from splitppo.rewards import rules
from splitppo.rewards.scorer import Pending, Scored, Scorer, failure_line
from splitppo.rollout import Request, Sample

VALIDATION_STEP = 0  # training's steps count from 1
FILE_ROWS = 256  # rows that a validation writes at most, the first


@dataclass(frozen=True)
class Answered:
    """What the metrics need of the n responses to one held-out prompt.

    Attributes:
        prompt: its index. source: its data_source.
        scores, figures: of each response, in order.
        tokens, cut, failed: tokens of all responses; responses cut at max_new_tokens; responses whose reward failed.
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
    """Scores the held-out prompts; each rank of the actor group takes a part of them.

    Args:
        context: holds the held-out prompts.
        group: the actors.
        write: (step, rows) -> writes them to the run's folder.
    """

    def __init__(
        self,
        context: Context,
        engine: RolloutEngine,
        group: Group,
        scorer: Scorer,
        write: Callable[[int, Sequence[Mapping[str, Any]]], None],
    ):
        self.config, self.prompts, self.decode = context.config, context.held_out, context.decode
        self.engine, self.group, self.scorer, self.write = engine, group, scorer, write

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
        mine = range(self.group.dp_rank, len(self.prompts), self.group.dp_size)
        requests = [Request(prompt * n + j, self.prompts[prompt].tokens) for prompt in mine for j in range(n)]
        batches: list[tuple[list[Sample], list[str], Pending]] = []
        sampling = Sampling.of(self.config.rollout).at(self.config.log.validate_temperature)
        for finished in self.engine.generate(requests, sampling, seed=self.config.seed, step=VALIDATION_STEP):
            if finished:
                texts = [self.decode(sample.response) for sample in finished]
                # the scorer works while the engine generates
                rows = [(self.prompts[sample.row // n], text) for sample, text in zip(finished, texts, strict=True)]
                batches.append((finished, texts, self.scorer.submit(rows)))
        done: dict[int, tuple[Sample, str, Scored]] = {}
        for samples, texts, pending in batches:
            for sample, text, outcome in zip(samples, texts, self.group.of_first(pending.result), strict=True):
                done[sample.row] = (sample, text, outcome)
        answered = [self._answered(prompt, [done[prompt * n + j] for j in range(n)]) for prompt in mine]
        # every rank has the prompts, so only responses are gathered
        written = [(row, text, out.score, s.end) for row, (s, text, out) in done.items() if row < FILE_ROWS]
        failures = [(row, failure) for row, (_, _, outcome) in sorted(done.items()) for failure in outcome.failures]
        gathered = self.group.all_gather((answered, written, failures))
        if self.group.is_first:
            rows = sorted(row for _, part, _ in gathered for row in part)
            self.write(step, [self._record(step, *row) for row in rows])
            if failed := [failure for *_, part in gathered for failure in part]:
                say(f"[actor] step {step}, held-out rows, {failure_line(failed)}")
        return metrics(sorted((prompt for part, *_ in gathered for prompt in part), key=lambda answer: answer.prompt))

    def _answered(self, prompt: int, responses: Sequence[tuple[Sample, str, Scored]]) -> Answered:
        samples, texts, outcomes = zip(*responses, strict=True)
        scores = tuple(outcome.score for outcome in outcomes)
        return Answered(
            prompt,
            self.prompts[prompt].data_source,
            scores,
            figures=tuple(dict(outcome.figures) for outcome in outcomes),
            tokens=sum(len(sample.response) for sample in samples),
            cut=sum(sample.truncated for sample in samples),
            failed=sum(bool(outcome.failures) for outcome in outcomes),
            majority=majority_score(texts, scores),
        )

    def _record(self, step: int, row: int, text: str, score: float, end: str) -> dict[str, Any]:
        index, sample = divmod(row, self.config.log.validate_samples)
        return record(step, row, score, self.prompts[index], text, end) | {"sample": sample}


def metrics(answered: Sequence[Answered]) -> dict[str, float]:
    """The metrics of a validation, from at least one prompt; each has the same number n of responses.

    Returns:
        `val/rows`: responses. `val/response_length/mean`: tokens. `val/clip_ratio`: share cut at max_new_tokens.
        `val/KEY/mean`: of each further figure of the functions, over the responses that have it. `val/failures`:
        responses whose reward failed, if any. What `score_metrics` returns, over all and for each of several sources.
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
    """The metrics of the scores; `infix` goes into their names: `val/score{infix}/mean`.

    With n > 1 responses a prompt, also means over the prompts of the best score (`val/best/mean`), the score of the
    most frequent answer (`val/majority/mean`), and `val/pass@K` for K = 1, 2, 4, ... up to n. A response passes if its
    score is at least 1; pass@K is left out if a score lies outside [0, 1], where 1 need not mean right.
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
    """Unbiased estimate of the chance that one of k responses passes, from n of which c passed; 1 <= k <= n.

    Chen et al. 2021, "Evaluating large language models trained on code", eq. 1: 1 - C(n - c, k) / C(n, k).
    """
    return 1 - comb(n - c, k) / comb(n, k)


def majority_score(texts: Sequence[str], scores: Sequence[float]) -> float:
    """The mean score of the responses that give the most frequent answer; of equally frequent ones, the first.

    verl's maj@n takes the score of the first of these responses, and averages over resampled sets of n.
    """
    answers = [answer(text) for text in texts]
    chosen = Counter(answers).most_common(1)[0][0]  # equal counts stay in the order first seen
    return fmean(score for said, score in zip(answers, scores, strict=True) if said == chosen)


def answer(text: str) -> Decimal | str:
    """The answer of a response, to compare it with others: the value of its last number, else its stripped text."""
    numbers = list(rules._ANY_NUMBER.finditer(text))
    return rules._value(numbers[-1]) if numbers else text.strip()
