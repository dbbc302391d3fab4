"""Metrics of a validation's scores: means and pass@k."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb
from statistics import fmean


@dataclass(frozen=True)
class Response:
    """What the metrics need of a response. `cut`: whether it was cut at max_new_tokens. `failed`:
    whether its reward failed."""

    row: int
    score: float
    figures: Mapping[str, float]
    tokens: int
    cut: bool
    failed: bool


def metrics(responses: Sequence[Response], sources: Sequence[str]) -> dict[str, float]:
    """The metrics of a validation (docs/metrics.md): of all responses in the order of their rows,
    as many to each prompt. `sources`: the data_source of each prompt. What `score_metrics` returns,
    over all and for each of several sources; means of each further figure of the functions over the
    responses that have it."""
    figures = [one.figures for one in responses]
    summary = {
        f"val/reward/{name}/mean": fmean(part[name] for part in figures if name in part)
        for name in dict.fromkeys(name for part in figures for name in part)
    }
    n = len(responses) // len(sources)
    prompts = [responses[i : i + n] for i in range(0, len(responses), n)]
    summary |= score_metrics(prompts) | {
        "val/rows": len(responses),
        "val/response_length/mean": fmean(one.tokens for one in responses),
        "val/clip_ratio": fmean(one.cut for one in responses),
    }
    if failed := sum(one.failed for one in responses):
        summary["val/failures"] = failed
    for source in dict.fromkeys(sources) if len({*sources}) > 1 else ():
        summary |= score_metrics(
            [prompt for prompt, of in zip(prompts, sources, strict=True) if of == source],
            f"/{source}",
        )
    return summary


def score_metrics(prompts: Sequence[Sequence[Response]], infix: str = "") -> dict[str, float]:
    """The metrics of the scores of the n responses to each prompt, as `val/score{infix}/mean`. With
    n > 1 also that of the best score, and `val/pass@K` for K = 1, 2, 4, ... up to n. A response
    passes if its score is at least 1; pass@K is left out if a score lies outside [0, 1], where 1
    need not mean right."""
    scores = [[one.score for one in prompt] for prompt in prompts]
    n = len(scores[0])
    every = [score for prompt_scores in scores for score in prompt_scores]
    summary = {f"val/score{infix}/mean": fmean(every)}
    if n == 1:
        return summary
    summary[f"val/best{infix}/mean"] = fmean(map(max, scores))
    if all(0 <= score <= 1 for score in every):
        passed = [sum(score >= 1 for score in prompt_scores) for prompt_scores in scores]
        summary |= {
            f"val/pass@{k}{infix}": fmean(pass_at_k(n, c, k) for c in passed)
            for k in (2**i for i in range(n.bit_length()))
        }
    return summary


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased estimate of the chance that one of k responses passes, from n of which c passed; 1
    <= k <= n (Chen et al. 2021, "Evaluating large language models trained on code", eq. 1)."""
    return 1 - comb(n - c, k) / comb(n, k)
