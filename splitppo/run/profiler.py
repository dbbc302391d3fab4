"""The torch profiler over chosen steps of chosen ranks: RUN/profile/step_N_rank_R.json, which chrome://tracing and
ui.perfetto.dev open."""

from collections.abc import Collection
from pathlib import Path

from torch.profiler import profile

from splitppo.config import Config
from splitppo.errors import UserError
from splitppo.placement import Placement


def check_profiler(config: Config, placement: Placement) -> None:
    """A UserError for a rank or a step that the run doesn't have."""
    log, world = config.log, len({*placement.actor, *placement.critic})
    if not log.profile_steps:
        return
    if (rank := max(log.profile_ranks, default=0)) >= world:
        raise UserError(f"log.profile_ranks={rank}: the last rank is {world - 1}; choose one up to that")
    if (step := max(log.profile_steps)) > config.steps:
        raise UserError(f"log.profile_steps={step}: the run has steps={config.steps}; choose one up to that")


class Profiler:
    """Records the operators and kernels (CPU and, if there is one, GPU) of single steps.

    Args:
        steps: to record, each in a trace of its own.
        ranks: that record.
        rank: this one.
        folder: of the traces.
    """

    def __init__(self, steps: Collection[int], ranks: Collection[int], rank: int, folder: Path):
        self.steps, self.rank, self.folder = steps if rank in ranks else (), rank, folder
        self.step: int | None = None
        self.recording: profile | None = None

    def boundary(self, next_step: int) -> None:
        """Between two steps: ends the one's trace and begins the next one's. To tell it twice is to tell it once."""
        if next_step == self.step:
            return
        if self.recording:
            self.recording.stop()
            self.folder.mkdir(parents=True, exist_ok=True)
            self.recording.export_chrome_trace(str(self.folder / f"step_{self.step}_rank_{self.rank}.json"))
            self.recording = None
        self.step = next_step
        if next_step in self.steps:
            self.recording = profile()
            self.recording.start()
