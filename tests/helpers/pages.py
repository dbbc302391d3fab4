"""Made-up runs, as a report's page gets them."""

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from splitppo.config import Config, LogConfig, RolloutConfig
from splitppo.config.toml import to_toml
from splitppo.tools.page import build_page
from splitppo.tools.runs import Column, Run, Span, Step, read_runs

EVIL = "</script><script>window.hacked=1</script><img src=x onerror='window.hacked=2'>"
TURNS = [
    {"role": "system", "content": "You may call add."},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": 'add{"a": 1}', "reward": 0.25, "value": 0.5},
    {"role": "tool", "content": "error: add(a, b): missing a required argument: 'b'"},
    {"role": "assistant", "content": EVIL, "reward": 0.0, "value": 0.125},
]


def spans_of(step: int, length: float = 4.0) -> dict[str, list[Span]]:
    """A step of both columns, 4 s after the one before; the critic's update of it ends 1 s into the
    next step."""
    t = 1000.0 + 4.0 * step
    actor = [
        ("rollout", t, t + 2),
        ("wait_advantages", t + 2, t + 2.5),
        ("update", t + 2.5, t + length),
    ]
    critic = [
        ("wait_rollouts", t + 1, t + 1.5),
        ("score", t + 1.5, t + 2.5),
        ("novel_work", t + 2.5, t + 3),
    ]
    return {"actor": actor, "critic": [*critic, ("update", t + 3, t + 5)]}


def columns(steps: int) -> tuple[Column, Column]:
    actor, critic = (
        {n: Step({}, spans_of(n)[role]) for n in range(1, steps + 1)}
        for role in ("actor", "critic")
    )
    return actor, critic


def tokens_of(count: int, value: float) -> dict[str, list[Any]]:
    """Tokens of a row whose last one the environment said."""
    numbers = [value + i for i in range(count - 1)]
    texts = ["x", EVIL, "\n", *["é"] * (count - 4), ""]
    return {
        "text": texts,
        "value": [*numbers, None],
        "advantage": [*numbers, None],
        "reward": [*numbers, None],
    }


def write_metrics(run: Path, steps: int, *, more: Sequence[str] = (), scale: float = 1.0) -> None:
    """The metrics of a run with a validation before its first step and after its last one. `more`:
    names of further metrics of both roles. `scale`: of the scores."""
    figures = {
        "actor": lambda n: {
            "actor/pg_loss": -0.1 / n,
            "actor/ppo_kl": math.nan if n == 5 else 0.01 * n,
            "actor/lr": 0.001,
            "tokens": 9.0,
        },
        "critic": lambda n: {"critic/score/mean": 0.1 * n * scale, "critic/vf_loss": 1.0 / n},
    }
    (run / "metrics").mkdir(parents=True, exist_ok=True)
    for role, values in figures.items():
        rows = [
            {
                "step": n,
                "time": 1000.0 + n,
                **values(n),
                **{f"{role}/{name}": math.sin(n * i) for i, name in enumerate(more, 1)},
                "timing_s/step": 4.0,
                "spans": spans_of(n)[role],
            }
            for n in range(1, steps + 1)
        ]
        if role == "actor":
            rows = [{"step": 0, "time": 1.0, "val/score/mean": 0.1, "spans": []}, *rows]
            rows[-1]["val/score/mean"] = 0.9
        (run / "metrics" / f"{role}.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows)
        )


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.parent.mkdir(exist_ok=True)
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    path.write_text("".join(lines), encoding="utf-8")


def write_run(run: Path, steps: int = 12, *, seed: int = 0, scale: float = 1.0) -> Path:
    """A made-up run with two responses to a prompt in each step, and a validation whose last
    sample is an attack."""
    write_metrics(run, steps, scale=scale)
    for folder, chosen in (("samples", range(1, steps + 1)), ("validation", [steps])):
        for n in chosen:
            texts = [f"answer {n}", EVIL if folder == "validation" else "a line\u2028and another"]
            rows = [
                {"step": n, "row": 2 * n + i, "score": 0.5, "prompt": "1+1=", "response": text}
                for i, text in enumerate(texts)
            ]
            if folder == "samples":
                rows[0] |= {"tokens": tokens_of(5, n / 8)}
            write_rows(run / folder / f"step_{n:06d}.jsonl", rows)
    config = Config(
        steps=12,
        seed=seed,
        run_dir="</script><b>",
        rollout=RolloutConfig(samples=2),
        log=LogConfig(validate_samples=1),
    )
    (run / "config.toml").write_text(to_toml(config))
    (run / "versions.json").write_text(json.dumps({"torch": "9.9", "command": EVIL}))
    return run


def page_of(run: Path, chosen: int | None) -> str:
    return build_page(run, read_runs([run])[0], chosen)


def bare_run(*metrics: dict[str, float]) -> Run:
    """A run without spans and settings."""
    columns: tuple[Column, Column] = ({n: Step(m, []) for n, m in enumerate(metrics, 1)}, {})
    series = {
        name: {n: step.metrics[name] for n, step in columns[0].items() if name in step.metrics}
        for name in dict.fromkeys(name for found in metrics for name in found)
    }
    return Run("bare", "#2f6db3", series, {}, columns)
