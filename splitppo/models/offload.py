"""Tensors that wait in host memory, pinned for a GPU. Copies run on streams of their own, while the
GPU goes on."""

from collections.abc import Sequence
from itertools import accumulate, cycle, groupby

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from splitppo.models.sharding import as_shard, local

PART = 2**28  # bytes of optimizer state that are moved at once, about
MOMENTS = ("exp_avg", "exp_avg_sq")


def host_copy(tensor: Tensor) -> Tensor:
    """Host memory for a tensor, sharded in the same way and not filled; pinned for a tensor of a
    GPU."""
    shard = local(tensor)
    copy = torch.empty(
        shard.shape, dtype=shard.dtype, pin_memory=shard.is_cuda or shard.is_pinned()
    )
    return (
        as_shard(copy, tensor.device_mesh, tensor.placements, tensor.shape)
        if isinstance(tensor, DTensor)
        else copy
    )


class Offloaded:
    """Tensors whose memory on the device is given back while they are not needed. All that refers
    to them stays as it is, as where FSDP gives back gathered weights. `pairs`: each tensor, which
    has its storage alone, and its copy in host memory; `stream` is for the copies."""

    def __init__(
        self, pairs: Sequence[tuple[Tensor, Tensor]] = (), stream: torch.cuda.Stream | None = None
    ):
        self.pairs = pairs
        self.stream = stream
        self.here = True

    def fetch(self) -> None:
        """Begins to bring the tensors to the device, unless they are there; `arrive` comes before
        their use."""
        if not self.here:
            for tensor, _ in self.pairs:
                tensor.untyped_storage().resize_(tensor.nbytes)
            self._copy(to_host=False)
        self.here = True

    def arrive(self) -> None:
        """What the device does from here on waits for the copies."""
        if self.stream:
            torch.cuda.current_stream().wait_stream(self.stream)

    def release(self, *, changed: bool) -> None:
        """Gives back the memory on the device; `changed`: whether the tensors may differ from the
        copies."""
        if self.here and changed:
            self._copy(to_host=True)
        for tensor, _ in self.pairs:
            tensor.untyped_storage().resize_(0)
        self.here = False

    def _copy(self, *, to_host: bool) -> None:
        if self.stream:
            self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for tensor, copy in self.pairs:
                to, source = (copy, tensor) if to_host else (tensor, copy)
                to.copy_(source, non_blocking=True)
                if self.stream and to_host:
                    # its memory is not given to others before the copy has ended
                    tensor.record_stream(self.stream)


class HostShards(Offloaded):
    """A sharded model's weights, in host memory between uses."""

    def __init__(self, model: nn.Module, device: torch.device):
        storages = [local(parameter).untyped_storage() for parameter in model.parameters()]
        shards = [
            torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
            for storage in {x.data_ptr(): x for x in storages if x.nbytes()}.values()
        ]
        super().__init__([(shard, host_copy(shard)) for shard in shards], _stream(device))
        self.model = model
        self._copy(to_host=True)

    def fetch(self) -> None:
        super().fetch()
        self.arrive()

    def release(self, *, changed: bool) -> None:
        for module in self.model.modules() if self.here else ():
            if isinstance(module, FSDPModule):
                module.reshard()  # a forward without a backward leaves the root's weights gathered
        super().release(changed=changed)


class HostState:
    """AdamW's moments in host memory. While `step` uses one part of them, the next comes and the
    last one goes."""

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device):
        self.optimizer = optimizer
        self.parts = []
        # as `state_of`, with the moments in host memory
        self.state: dict[nn.Parameter, dict[str, Tensor]] = {}
        parameters = [weight for group in optimizer.param_groups for weight in group["params"]]
        ends = accumulate(2 * local(parameter).nbytes for parameter in parameters)
        # of the parts that come, are used, and go
        streams = cycle([_stream(device) for _ in range(3)])
        for _, part in groupby(
            zip(ends, parameters, strict=True), key=lambda pair: pair[0] // PART
        ):
            pairs = []
            members = [parameter for _, parameter in part]
            for parameter in members:
                state = state_of(optimizer, parameter)
                hosts = {kind: host_copy(state[kind]) for kind in MOMENTS}
                self.state[parameter] = state | hosts
                pairs += [(local(state[kind]), local(copy).zero_()) for kind, copy in hosts.items()]
            moments = Offloaded(pairs, next(streams))
            moments.release(changed=False)
            self.parts.append((members, moments))

    def step(self) -> None:
        """The optimizer's step. Each part is a step of the optimizer, in which its parameters alone
        have gradients."""
        gradients = {parameter: parameter.grad for parameter in self.state}
        self.optimizer.zero_grad()
        for (part, moments), (_, following) in zip(
            self.parts, self.parts[1:] + self.parts[-1:], strict=True
        ):
            moments.fetch()
            following.fetch()
            moments.arrive()
            for parameter in part:
                parameter.grad = gradients.pop(parameter)
            self.optimizer.step()
            self.optimizer.zero_grad()
            moments.release(changed=True)

    def finish(self) -> None:
        """Waits until all moments are in host memory."""
        for stream in {moments.stream for _, moments in self.parts if moments.stream}:
            stream.synchronize()


def state_of(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    """AdamW's state of a parameter, as its first step would make it; the tensors themselves, not
    copies."""
    state = optimizer.state[parameter]
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=local(parameter).device)
        for kind in MOMENTS:
            state[kind] = torch.zeros_like(parameter.detach())
    return state


def _stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(device) if device.type == "cuda" else None
