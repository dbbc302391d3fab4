"""The torch profiler for chosen steps of chosen ranks. It writes RUN/profile/step_N_rank_R.json, which chrome://tracing
and ui.perfetto.dev open."""

from collections.abc import Collection
from pathlib import Path

from torch.profiler import profile

from splitppo.config import Config
from splitppo.errors import UserError
from splitppo.placement import Placement


def check_profiler(config: Config, placement: Placement) -> None:
    """Raises UserError for a rank or a step that the run doesn't have."""
    log, world = config.log, placement.world
    if not log.profile_steps:
        return
    if (rank := max(log.profile_ranks, default=0)) >= world:
        raise UserError(f"log.profile_ranks={rank}: the last rank is {world - 1}; choose one up to that")
    if (step := max(log.profile_steps)) > config.steps:
        raise UserError(f"log.profile_steps={step}: the run has steps={config.steps}; choose one up to that")


class Profiler:
    """Records each of `steps` in a trace of its own, if `rank` is among `ranks`."""

    def __init__(self, steps: Collection[int], ranks: Collection[int], rank: int, folder: Path):
        self.steps, self.rank, self.folder = steps if rank in ranks else (), rank, folder
        self.step: int | None = None
        self.recording: profile | None = None

    def boundary(self, next_step: int) -> None:
        """Between two steps: writes the trace of the first and starts the second's. Both roles may call it."""
        if next_step == self.step:
            return
        if self.recording:
            self.recording.stop()
            self.folder.mkdir(parents=True, exist_ok=True)
            self.recording.export_chrome_trace(str(self.folder / f"step_{self.step}_rank_{self.rank}.json"))
        self.step, self.recording = next_step, profile() if next_step in self.steps else None
        if self.recording:
            self.recording.start()
