"""All ranks agree on the run's folder and on the checkpoint that it resumes from."""

from collections.abc import Mapping
from pathlib import Path

from splitppo.config import Config
from splitppo.errors import warn
from splitppo.job.runtime import Runtime, format_map
from splitppo.models.tiny import build_tiny
from splitppo.run import checkpoint
from splitppo.run.checks import check_run_folder, warnings
from splitppo.run.files import write_whole
from splitppo.run.folder import check_same_run, inputs_of, log_to_file, new_folder, write_run_files
from splitppo.run.lock import STALE, Lock
from splitppo.run.metrics import records_until
from splitppo.run.resolve import Resolved


def begin_folder(resolved: Resolved, runtime: Runtime, lock: Lock) -> tuple[Path, Path | None]:
    """Locks, checks and fills the run's folder; all ranks call it. Returns the folder and the checkpoint to resume."""
    config, rank = resolved.config, runtime.launch.rank
    given = Path(config.run_dir) if config.run_dir else None
    folder = Path(runtime.broadcast("run_dir", lambda: str(lock.take(given or new_folder())), patience=STALE))
    models = {name: model.name for name, model in resolved.models.items()}
    inputs = inputs_of(config, models, resolved.local) if rank == 0 else {}
    found = find_checkpoint(config, runtime, folder, inputs)
    if rank == 0:
        for warning in warnings(resolved):
            warn(warning)
        write_run_files(config, folder, found, inputs)
        write_whole(folder / "resolved.json", resolved.to_json() + "\n")
        placed = format_map(runtime.placement, runtime.hosts, runtime.devices)
        (folder / "placement.txt").write_text(placed + "\n")
    if "tiny" in models.values():
        runtime.broadcast("tiny", lambda: build_tiny(folder / "tiny", seed=config.seed) or "built")
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    log_to_file(folder / "logs" / f"rank_{rank:03d}.log")
    return folder, Path(found) if found else None


def find_checkpoint(config: Config, runtime: Runtime, folder: Path, inputs: Mapping[str, str]) -> str:
    """Returns the checkpoint that the run resumes from, or "", and removes unfinished ones. All ranks call it, each
    checks some of the files; `inputs` (`inputs_of`) matters on rank 0."""
    launch = runtime.launch

    def candidates() -> str:
        restarts = runtime.job.add("splitppo/begun", 0)  # starts of this job (torchrun --max-restarts) that passed here
        if not restarts:
            check_run_folder(config, config.resume, inputs)
        elif not config.force:
            check_same_run(config, folder, inputs)
        # a restart resumes from the newest checkpoint, whatever the first start resumed from
        resume = "auto" if restarts and checkpoint.complete(folder) else config.resume
        found = checkpoint.candidates(folder, resume)
        runtime.job.add("splitppo/begun", 1)
        return "\n".join(map(str, found))

    def damage_of(folder: Path) -> str:
        own = checkpoint.damage(folder, rank=launch.rank, ranks=launch.world)
        return next(filter(None, runtime.all_gather(f"damage/{folder}", own)), "")

    listed = map(Path, runtime.broadcast("candidates", candidates).splitlines())
    found = checkpoint.choose(list(listed), damage_of, report=launch.rank == 0)

    def tidy() -> str:
        start = checkpoint.step_of(found) if found else 0
        for path in folder.glob("metrics/*.jsonl") if start else ():
            records_until(path, start)  # refuses a broken one now
        return checkpoint.tidy(folder, start) or "tidy"

    runtime.broadcast("tidy", tidy)
    return str(found or "")
