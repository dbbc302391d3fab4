"""Tensors that wait in host memory, pinned for a GPU. Copies run on streams of their own, while the GPU goes on."""

from collections.abc import Sequence
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from splitppo.models.sharding import local, mesh_of

PART = 2**28  # bytes of optimizer state that are moved at once, about
MOMENTS = ("exp_avg", "exp_avg_sq")


def host_copy(tensor: Tensor) -> Tensor:
    """Host memory for a tensor, sharded in the same way and not filled; pinned for a tensor of a GPU."""
    shard = local(tensor)
    copy = torch.empty(shard.shape, dtype=shard.dtype, pin_memory=shard.is_cuda or shard.is_pinned())
    if not isinstance(tensor, DTensor):
        return copy
    whole: Any = {"shape": tensor.shape, "stride": tensor.stride()}
    return DTensor.from_local(copy, mesh_of(copy, tensor.device_mesh), tensor.placements, run_check=False, **whole)


class HostShards:
    """A sharded model's weights, in host memory between uses.

    All that refers to a shard stays as it is. Only its memory on the device is given back meanwhile, as FSDP gives back
    gathered weights.
    """

    def __init__(self, model: nn.Module, device: torch.device):
        self.model, self.stream = model, _stream(device)
        self.held: list[tuple[torch.UntypedStorage, Tensor]] = []  # of each shard, and its bytes in host memory
        self.here = True

    def fetch(self) -> None:
        """Brings the shards to the device, unless they are there."""
        if self.here:
            return
        if self.stream:
            torch.cuda.current_stream().wait_stream(self.stream)
        for storage, copy in self.held:
            storage.resize_(copy.nbytes)
            _copy(_bytes(storage), copy, None)
        self.here = True

    def release(self, *, changed: bool) -> None:
        """Gives back the shards' memory on the device; `changed`: whether the weights may differ from the copy."""
        if not self.here:
            return
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # a forward without a backward leaves the root's weights gathered
        if not self.held:
            pinned, changed = self.stream is not None, True
            storages = {x.data_ptr(): x for p in self.model.parameters() if (x := local(p).untyped_storage()).nbytes()}
            for storage in storages.values():
                copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pinned)
                self.held.append((storage, copy))
        if self.stream:
            self.stream.wait_stream(torch.cuda.current_stream())
        for storage, copy in self.held:
            if changed:
                with torch.cuda.stream(self.stream):
                    _copy(copy, _bytes(storage), self.stream)
            storage.resize_(0)
        self.here = False


class HostState:
    """AdamW's moments in host memory. `step` brings them to the device part by part: while one part is used, the next
    one comes and the last one goes."""

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device):
        self.optimizer, self.coming, self.going = optimizer, _stream(device), _stream(device)

    def step(self) -> None:
        """The optimizer's step. Each part is a step of the optimizer, in which its parameters alone have gradients."""
        gradients = {p: p.grad for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None}
        sizes = accumulate([2 * local(parameter).nbytes for parameter in gradients])
        parts = groupby([*zip(sizes, gradients, strict=True)], key=lambda pair: pair[0] // PART)
        for parameter in gradients:
            parameter.grad = None
        if self.coming and self.going:
            self.coming.wait_stream(self.going)
        arriving = (self._fetch([parameter for _, parameter in part]) for _, part in parts)
        following = next(arriving, None)
        while following:
            (part, arrived), following = following, next(arriving, None)
            if arrived:
                torch.cuda.current_stream().wait_event(arrived)
            hosts = {parameter: dict(self.optimizer.state[parameter]) for parameter in part}
            for parameter, moments in part.items():
                parameter.grad = gradients.pop(parameter)
                self.optimizer.state[parameter] |= moments
            self.optimizer.step()
            if self.going:
                self.going.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.going):
                for parameter, moments in part.items():
                    for kind, tensor in moments.items():
                        _copy(local(hosts[parameter][kind]), local(tensor), self.going)
                    self.optimizer.state[parameter] |= hosts[parameter]
                    parameter.grad = None

    def finish(self) -> None:
        """Waits until all moments are in host memory."""
        if self.going:
            self.going.synchronize()

    def _fetch(self, parameters: Sequence[nn.Parameter]) -> tuple[dict[nn.Parameter, dict[str, Tensor]], Any]:
        """The moments of some parameters on the device, and the event of their arrival."""
        part = {p: {kind: torch.empty_like(p.detach()) for kind in MOMENTS} for p in parameters}
        if self.coming:
            self.coming.wait_stream(torch.cuda.current_stream())  # their memory may have been in use till now
        with torch.cuda.stream(self.coming):
            for parameter, moments in part.items():
                state = state_of(self.optimizer, parameter, on_host=True)
                for kind, tensor in moments.items():
                    _copy(local(tensor), local(state[kind]), None)
        return part, self.coming.record_event() if self.coming else None


def state_of(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, *, on_host: bool) -> dict[str, Tensor]:
    """AdamW's state of a parameter, as its first step would make it; the tensors themselves, not copies."""
    state = optimizer.state[parameter]
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=local(parameter).device)
        for kind in MOMENTS:
            state[kind] = host_copy(parameter.detach()) if on_host else torch.empty_like(parameter.detach())
            local(state[kind]).zero_()
    return state


def _copy(to: Tensor, source: Tensor, stream: torch.cuda.Stream | None) -> None:
    """Copies while the host goes on; on a stream of its own the source's memory is not given to others before."""
    to.copy_(source, non_blocking=True)
    if stream:
        source.record_stream(stream)


def _stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(device) if device.type == "cuda" else None


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
