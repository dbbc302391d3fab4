"""The frozen model of the KL penalty, on the group that `placement.reference` names."""

from functools import partial

from torch import Tensor, nn

from splitppo.learner import Runner
from splitppo.models.heads import PolicyOutputs
from splitppo.rollout import Rollout


class Reference:
    """The model on its group; with `offload`, its shards sit on the CPU between its uses.

    Args:
        model: sharded by `parallelize` and filled.
        runner: how its group runs.
        outputs: the policy's.
    """

    def __init__(self, model: nn.Module, runner: Runner, outputs: PolicyOutputs, *, offload: bool):
        self.model, self.runner, self.outputs, self.offload = model, runner, outputs, offload
        self.rest()

    def logprobs(self, rollout: Rollout) -> Tensor:
        """`[N]` log-probs of the response tokens; all ranks of the group must call it, even those without rows."""
        if self.offload:
            self.model.to(self.runner.device)
        logprobs, _ = self.runner.forward(self.model, rollout, partial(self.outputs, entropy=False), fields=2)
        return logprobs

    def rest(self) -> None:
        """Nothing is asked of it for a while."""
        if self.offload:
            self.model.to("cpu")
