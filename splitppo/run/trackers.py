"""Sends the run's metrics to Weights & Biases, TensorBoard, Trackio, MLflow, or a tracker of the
user's: a class whose methods are `write` and `close`.

The actor group's first rank sends both roles' records. After each step it reads the new lines of
RUN/metrics/, so a record of the critic may come one step later than the actor's. A resumed run
sends the steps that it does.
"""

import os
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from splitppo.config import Config
from splitppo.config.toml import leaves
from splitppo.errors import DOCS, UserError, need, one_line, warn
from splitppo.placement import ROLES, Role
from splitppo.run.files import Tail, parse_record, read_file, write_whole
from splitppo.workers import find_in_file


def find_tracker(name: str) -> Any:
    """The class of a tracker, which is made with (config, run_dir, start). Raises UserError if its
    package is not installed, or it is in no file, or lacks a method."""
    if name in TRACKERS:
        need(name, f"log.trackers={name}", name)
        return TRACKERS[name]
    tracker = find_in_file(name, "log.trackers", "tracker", f"tracker; use {', '.join(TRACKERS)}")
    if not all(callable(getattr(tracker, method, None)) for method in ("write", "close")):
        raise UserError(
            f"log.trackers={name} needs the methods write and close; see {DOCS}/parts.md"
        )
    return tracker


class Wandb:
    """One run in Weights & Biases, plotted over `step`. A resumed run continues it (RUN/wandb_id):
    steps that it repeats are there twice. Raises UserError if wandb cannot log in."""

    def __init__(self, config: Config, run_dir: Path, start: int):
        import wandb  # an optional package
        from wandb.errors import AuthenticationError, UsageError

        path = run_dir / "wandb_id"
        known = read_file(path, str.strip, "delete it") if start and path.is_file() else ""
        try:
            self.run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "splitppo"),
                name=os.environ.get("WANDB_NAME", run_dir.resolve().name),
                id=known or None,
                resume="allow",
                dir=run_dir,
                config=asdict(config),
                allow_val_change=True,  # a resumed run may have other settings
            )
        except (UsageError, AuthenticationError) as error:
            raise UserError(
                f"log.trackers=wandb: {error} Or set WANDB_MODE=offline in the environment"
            ) from error
        write_whole(path, self.run.id)
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")
        self.close = self.run.finish

    def write(self, step: int, time: float, metrics: Mapping[str, float]) -> None:
        """Takes one role's metrics of a step, which ended at `time` (Unix seconds)."""
        self.run.log({"step": step, **metrics})


class Trackio(Wandb):
    """One run in Trackio's folder (its TRACKIO_DIR), in the project splitppo. A resumed run
    continues that of its folder's name."""

    def __init__(self, config: Config, run_dir: Path, start: int):
        import trackio  # an optional package

        self.run = trackio.init(
            project="splitppo",
            name=run_dir.resolve().name,
            resume="allow" if start else "never",
            config=asdict(config),
            embed=False,
        )
        self.close = self.run.finish

    def write(self, step: int, time: float, metrics: Mapping[str, float]) -> None:
        self.run.log({**metrics}, step)


class MLflow:
    """One run in MLflow (its MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME). A resumed
    run continues it (RUN/mlflow_id)."""

    def __init__(self, config: Config, run_dir: Path, start: int):
        import mlflow  # an optional package

        path = run_dir / "mlflow_id"
        known = read_file(path, str.strip, "delete it") if start and path.is_file() else ""
        run = mlflow.start_run(run_id=known or None, run_name=run_dir.resolve().name)
        write_whole(path, run.info.run_id)
        # of the first start: MLflow keeps them as they are
        mlflow.log_params({} if known else dict(leaves(asdict(config))))
        self.log = mlflow.log_metrics
        self.close = mlflow.end_run

    def write(self, step: int, time: float, metrics: Mapping[str, float]) -> None:
        self.log(
            # MLflow refuses other characters in names
            {re.sub(r"[^\w. :/-]", "_", name): value for name, value in metrics.items()},
            step,
            timestamp=round(1000 * time),
        )


class TensorBoard:
    """Event files in RUN/tensorboard. Those of a resumed run hide the steps that
    it repeats."""

    def __init__(self, config: Config, run_dir: Path, start: int):
        from torch.utils.tensorboard import SummaryWriter  # needs an optional package

        self.writer = SummaryWriter(
            str(run_dir / "tensorboard"), purge_step=start + 1 if start else 0
        )
        self.close = self.writer.close

    def write(self, step: int, time: float, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step, walltime=time)
        self.writer.flush()  # so that the files of a killed run have them


TRACKERS = {"wandb": Wandb, "tensorboard": TensorBoard, "trackio": Trackio, "mlflow": MLflow}


class Trackers:
    """The trackers of a run that resumes after step `start`, or begins (0); idle on a rank that is
    not `active`."""

    def __init__(self, config: Config, run_dir: Path, start: int, *, active: bool = True):
        self.last = start or -1  # the last step whose records are not sent
        self.records = {role: Tail(run_dir / "metrics" / f"{role}.jsonl") for role in ROLES}
        self.trackers = [
            find_tracker(name)(config, run_dir, start) for name in config.log.trackers if active
        ]

    def update(self) -> None:
        """Sends the new records. Call it first after a step has ended: by then both roles have
        removed the records of an earlier run after `start` from their files."""
        for role in ROLES if self.trackers else ():
            for line in self.records[role]:
                record = parse_record(*line)
                if (step := record["step"]) > self.last:
                    for tracker in self.trackers:
                        tracker.write(step, record["time"], metrics_of(role, record))

    def close(self) -> None:
        """Sends the last records and closes the trackers. Call it when all ranks have finished
        their last step."""
        self.update()
        for tracker in self.trackers:
            try:
                tracker.close()
            except Exception as error:  # the run has done its work
                text = f"{type(error).__name__}: {one_line(str(error))}"
                warn(f"{type(tracker).__name__}.close: {text}")


def metrics_of(role: Role, record: Mapping[str, Any]) -> dict[str, float]:
    """A record's numbers under their names in the trackers, which hold the role where both have
    them."""
    return {
        re.sub("^(timing_s|perf)/", rf"\1/{role}/", name): float(value)
        for name, value in record.items()
        if isinstance(value, int | float) and name not in ("step", "time")
    }
