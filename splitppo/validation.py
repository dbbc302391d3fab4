"""Validation: n responses to each held-out prompt, scored over the actor group; metrics `val/...`, RUN/validation.

Row `p * n + j` is response j to held-out prompt p, both from 0. Its noise has a seed of its own, the same in every
validation, so their results can be compared.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from math import comb
from statistics import fmean
from typing import Any

from splitppo.context import Context, record
from splitppo.engine import RolloutEngine, row_seed
from splitppo.errors import say
from splitppo.job.collectives import Group
from splitppo.rewards import rules
from splitppo.rewards.scorer import Pending, Scorer, failure_line
from splitppo.rollout import Request, Sample

NO_ROW = -1  # training's rows count from 0; the seed of this one is validation's
FILE_ROWS = 256  # rows that a validation writes at most, the first


@dataclass(frozen=True)
class Response:
    """What the metrics need of a response. `cut`: at max_new_tokens; `failed`: its reward."""

    row: int
    score: float
    figures: Mapping[str, float]
    answer: Decimal | str
    tokens: int
    cut: bool
    failed: bool


class Validator:
    """Scores the held-out prompts; each rank of the actor group takes a part of them. `context` holds the held-out
    prompts, `group` are the actors, `write` writes a step's rows to the run's folder."""

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
        """Validates the weights that the engine holds; all ranks of the group call it. Returns the group's metrics, the
        same on every rank and under any number of ranks; see `metrics`."""
        n = self.config.log.validate_samples
        mine = range(self.group.dp_rank, len(self.prompts), self.group.dp_size)
        requests = [Request(prompt * n + j, self.prompts[prompt].tokens) for prompt in mine for j in range(n)]
        batches: list[tuple[list[Sample], list[str], Pending]] = []
        sampling = replace(self.config.rollout, temperature=self.config.log.validate_temperature)
        for finished in self.engine.generate(requests, sampling, seed=row_seed(self.config.seed, NO_ROW, 0)):
            if finished:
                texts = [self.decode(sample.response) for sample in finished]
                # the scorer works while the engine generates
                rows = [(self.prompts[sample.row // n], text) for sample, text in zip(finished, texts, strict=True)]
                batches.append((finished, texts, self.scorer.submit(rows)))
        found, written, failures = [], [], []
        for samples, texts, pending in batches:
            for sample, text, scored in zip(samples, texts, self.group.of_first(pending), strict=True):
                row, score, failed = sample.row, scored.score, bool(scored.failures)
                what = answer(text), len(sample.response), sample.truncated, failed
                found.append(Response(row, score, dict(scored.figures), *what))
                failures += [(row, failure) for failure in scored.failures]
                if row < FILE_ROWS:  # every rank has the prompts, so only responses are gathered
                    written.append((row, text, score, sample.end))
        gathered = self.group.all_gather((found, written, failures))
        if self.group.is_first:
            rows = sorted(row for _, part, _ in gathered for row in part)
            self.write(step, [self._record(step, *row) for row in rows])
            if failed := [failure for *_, part in gathered for failure in part]:
                say(f"[actor] step {step}, held-out rows, {failure_line(failed)}")
        responses = sorted((one for part, *_ in gathered for one in part), key=lambda one: one.row)
        return metrics(responses, [prompt.data_source for prompt in self.prompts])

    def _record(self, step: int, row: int, text: str, score: float, end: str) -> dict[str, Any]:
        index, sample = divmod(row, self.config.log.validate_samples)
        return record(step, row, score, self.prompts[index], text, end) | {"sample": sample}


def metrics(responses: Sequence[Response], sources: Sequence[str]) -> dict[str, float]:
    """The metrics of a validation: of all responses in the order of their rows, as many to each prompt. `sources`: the
    data_source of each prompt.

    Returns:
        `val/rows`: responses. `val/response_length/mean`: tokens. `val/clip_ratio`: share cut at max_new_tokens.
        `val/KEY/mean`: of each further figure of the functions, over the responses that have it. `val/failures`:
        responses whose reward failed, if any. What `score_metrics` returns, over all and for each of several sources.
    """
    figures = [one.figures for one in responses]
    found = {
        f"val/{name}/mean": fmean(part[name] for part in figures if name in part)
        for name in dict.fromkeys(name for part in figures for name in part)
    }
    n = len(responses) // len(sources)
    prompts = [responses[i : i + n] for i in range(0, len(responses), n)]
    # the trainer's own figures win over a reward's of the same name
    found |= score_metrics(prompts) | {
        "val/rows": len(responses),
        "val/response_length/mean": fmean(one.tokens for one in responses),
        "val/clip_ratio": fmean(one.cut for one in responses),
    }
    if failed := sum(one.failed for one in responses):
        found["val/failures"] = failed
    for source in dict.fromkeys(sources) if len({*sources}) > 1 else ():
        own = [prompt for prompt, of in zip(prompts, sources, strict=True) if of == source]
        found |= score_metrics(own, f"/{source}")
    return found


def score_metrics(prompts: Sequence[Sequence[Response]], infix: str = "") -> dict[str, float]:
    """The metrics of the scores of the n responses to each prompt; `infix` goes into their names:
    `val/score{infix}/mean`.

    With n > 1 also means over the prompts of the best score (`val/best/mean`), the score of the most frequent answer
    (`val/majority/mean`), and `val/pass@K` for K = 1, 2, 4, ... up to n. A response passes if its score is at least 1;
    pass@K is left out if a score lies outside [0, 1], where 1 need not mean right.
    """
    scores = [[one.score for one in prompt] for prompt in prompts]
    n, every = len(scores[0]), [score for own in scores for score in own]
    found = {f"val/score{infix}/mean": fmean(every)}
    if n == 1:
        return found
    found[f"val/best{infix}/mean"] = fmean(map(max, scores))
    found[f"val/majority{infix}/mean"] = fmean(map(majority_score, prompts))
    if all(0 <= score <= 1 for score in every):
        passed = [sum(score >= 1 for score in own) for own in scores]
        for k in (2**i for i in range(n.bit_length())):
            found[f"val/pass@{k}{infix}"] = fmean(pass_at_k(n, c, k) for c in passed)
    return found


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased estimate of the chance that one of k responses passes, from n of which c passed; 1 <= k <= n.

    Chen et al. 2021, "Evaluating large language models trained on code", eq. 1: 1 - C(n - c, k) / C(n, k).
    """
    return 1 - comb(n - c, k) / comb(n, k)


def majority_score(responses: Sequence[Response]) -> float:
    """The mean score of the responses that give the most frequent answer; of equally frequent ones, the first.

    verl's maj@n takes the score of the first of these responses, and averages over resampled sets of n.
    """
    chosen = Counter(one.answer for one in responses).most_common(1)[0][0]  # equal counts stay in the order first seen
    return fmean(one.score for one in responses if one.answer == chosen)


def answer(text: str) -> Decimal | str:
    """The answer of a response, to compare it with others: the value of its last number, else its stripped text."""
    numbers = list(rules._ANY_NUMBER.finditer(text))
    return rules._value(numbers[-1]) if numbers else text.strip()
