"""Mixtures of experts: a layer's router sends each token to a few of the layer's experts, whose
matrices are stacked in weights `[experts, ...]`. fully_shard cuts these between experts, as it cuts
any weight by its rows."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from splitppo.errors import UserError
from splitppo.job.collectives import Group
from splitppo.models.batching import MicroBatch


def experts_of(model: nn.Module) -> list[Any]:
    """The modules that hold a layer's experts; [] of a dense model."""
    return [
        module
        for module in model.modules()
        if any(weight.ndim == 3 for weight in module.parameters(recurse=False))
        and hasattr(module, "num_experts")
    ]


def routers_of(model: nn.Module) -> list[Any]:
    """The modules that choose a layer's experts, in the layers' order; their outputs are logits
    `[L, E]`, weights, ids. [] if they are not such modules."""
    routers = [m for m in model.modules() if type(m).__name__.lower().endswith("router")]
    return routers if len(routers) == len(experts_of(model)) else []


def top_k(model: nn.Module) -> int:
    """Experts to which a token goes in a layer."""
    config = cast(Any, model).config
    k = getattr(config, "num_experts_per_tok", None)
    return config.top_k_experts if k is None else k


def active(model: nn.Module) -> int:
    """Parameters that a token meets in a forward pass."""
    idle = 0.0
    for module in experts_of(model):
        held = sum(weight.numel() for weight in module.parameters(recurse=False))
        idle += held * (1 - top_k(model) / module.num_experts)
    return sum(weight.numel() for weight in model.parameters()) - round(idle)


def check_balance(model: nn.Module, setting: str) -> None:
    """Raises a UserError that begins with `setting` if a policy has no load-balancing loss."""
    if not (routers_of(model) and _balance(model)):
        lacks = "load-balancing loss in transformers" if experts_of(model) else "experts"
        kind = cast(Any, model).config.model_type
        raise UserError(f"{setting}: type {kind!r} has no {lacks}; set it to 0")


def _balance(model: Any) -> Any:
    """The loss that transformers has beside a policy's class; None if it has none there."""
    return getattr(sys.modules[type(model.causal).__module__], "load_balancing_loss_func", None)


@dataclass(frozen=True)
class Packing:
    """How the experts of tokens are packed (`Segment.experts`): `k` of `experts` in each layer."""

    layers: int
    k: int
    experts: int

    @property
    def kind(self) -> torch.dtype:
        return torch.uint8 if self.experts < 256 else torch.int16

    @property
    def width(self) -> int:
        """Bytes of a token."""
        return -(-self.layers * self.k * self.kind.itemsize // 4) * 4

    def view(self, packed: Tensor) -> Tensor:
        """`[L, bytes]` as the ids that they hold, `[L, layers * k]`."""
        return packed.view(self.kind)[:, : self.layers * self.k]

    def pack(self, ids: Tensor) -> Tensor:
        """`[L, layers, k]` to `[L, bytes]` uint8."""
        packed = ids.new_zeros(len(ids), self.width, dtype=torch.uint8)
        self.view(packed).copy_(ids.flatten(1))
        return packed

    def unpack(self, packed: Tensor) -> Tensor:
        """`[L, bytes]` to `[layers, L, k]` int64; what is not known is no expert's number."""
        ids = self.view(packed).long() & 0xFFFF
        return ids.view(len(ids), self.layers, self.k).transpose(0, 1).contiguous()


class Load:
    """How many of a policy's or value model's tokens went to each expert, and where they go."""

    def __init__(self, model: nn.Module):
        self.model = model
        self.experts = experts_of(model)
        for module in self.experts:
            module.register_forward_pre_hook(_note)
        self.routers: list[Any] = []  # that can be told where tokens go
        self.clear()

    def clear(self) -> None:
        self.counts = torch.zeros(0)
        # choices of a layer for a token: that were replayed; of these, that are not the router's
        self.replayed = torch.zeros(2)

    @property
    def packing(self) -> Packing:
        return Packing(len(self.experts), top_k(self.model), self.experts[0].num_experts)

    def last(self, rows: int) -> Tensor:
        """`[R, bytes]` uint8, packed: the experts of the last token of each row in the last forward
        pass, which had so many rows."""
        ids = [module.chosen.view(rows, -1, self.packing.k)[:, -1] for module in self.experts]
        return self.packing.pack(torch.stack(ids, 1))

    def drive(self) -> None:
        """From now on, `replay` says where tokens go."""
        self.routers = routers_of(self.model)
        for router in self.routers:
            router.engine_ids = None
            router.forward = _driven(router)

    def replay(self, packed: Tensor | None) -> None:
        """Where the next forward pass sends its tokens, `MicroBatch.experts`. None: its routers
        choose."""
        if packed is not None and not packed.shape[1]:  # none is known; the compiler sees the same
            packed = packed.new_full((len(packed), self.packing.width), 255)
        ids = [None] * len(self.routers) if packed is None else self.packing.unpack(packed)
        for router, engine_ids in zip(self.routers, ids, strict=True):
            router.engine_ids = engine_ids

    def add(self, at: Tensor) -> None:
        """Counts the tokens `at` `[N]`, places in the flattened ids, of the last forward pass."""
        if self.experts:
            ids = torch.stack([module.chosen[at].flatten() for module in self.experts])
            counts = ids.new_zeros(len(ids), self.experts[0].num_experts)
            counts.scatter_add_(1, ids, torch.ones_like(ids))
            self.counts = self.counts + counts if len(self.counts) else counts
        for router in self.routers:
            if router.engine_ids is None:
                continue
            engine_ids = router.engine_ids[at].sort().values
            known = engine_ids[:, 0] < router.num_experts
            differs = (engine_ids != router.chosen[at].sort().values).any(1) & known
            self.replayed = self.replayed.to(at.device) + torch.stack([known.sum(), differs.sum()])

    def keep_logits(self) -> None:
        """From now on routers keep the logits of the last forward pass, for `balance_loss`."""
        for router in routers_of(self.model):
            router.register_forward_hook(_keep_logits)

    def balance_loss(self, batch: MicroBatch) -> Tensor:
        """The load-balancing loss, 0-d, of the last forward pass: E times the sum over experts of
        the choices that an expert got of a token, times its mean probability. Both are means over
        the batch's response tokens, where these were chosen, and over layers."""
        if not len(batch.chosen):
            return torch.zeros((), device=batch.chosen.device)
        logits = [batch.join(router.logits[batch.before]) for router in routers_of(self.model)]
        return _balance(self.model)(tuple(logits), self.experts[0].num_experts, top_k(self.model))

    def figures(self, group: Group) -> dict[str, float]:
        """Of the group's tokens since `clear`; all of its ranks call it. By layers, the mean and
        the largest: share of the tokens' choices that the busiest expert got, and experts that got
        none."""
        if not self.experts:
            return {}
        counts = group.all_sum(torch.stack(group.gather_set(self.counts.cpu())).sum(0))
        replayed, different = group.all_sum(
            torch.stack(group.gather_set(self.replayed.cpu())).sum(0)
        ).tolist()
        busiest = counts.amax(1) / counts.sum(1).clamp(min=1)
        idle = (counts == 0).double().sum(1)
        return {
            "expert_share": float(busiest.mean()),
            "expert_share_max": float(busiest.max()),
            "experts_idle": float(idle.mean()),
            "experts_idle_max": float(idle.max()),
            **({"routes_differ": different / max(replayed, 1)} if self.routers else {}),
        }


def _note(module: Any, inputs: tuple[Tensor, ...]) -> None:
    """Hook: the experts' inputs are states, ids `[L, k]`, weights."""
    module.chosen = inputs[1]


class _Replay(TorchFunctionMode):
    """While it is entered, a router's choice is the engine's; the router makes weights of it as of
    its own."""

    def __init__(self, router: Any):
        super().__init__()
        self.router = router

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        engine_ids = self.router.engine_ids
        choices = func in (torch.topk, torch.Tensor.topk) and out[1].shape == engine_ids.shape
        if not choices or args[0].shape[-1] != self.router.num_experts:
            return out
        self.router.chosen = out[1]
        ids = torch.where(engine_ids < self.router.num_experts, engine_ids, out[1])
        return torch.return_types.topk((args[0].gather(-1, ids), ids))


def _driven(router: Any) -> Callable[..., Any]:
    """A router's forward pass, which chooses what the engine chose."""
    plain = router.forward

    def forward(*args: Any, **options: Any) -> Any:
        if router.engine_ids is None:
            return plain(*args, **options)
        with _Replay(router):
            return plain(*args, **options)

    return forward


def _keep_logits(module: Any, _: Any, output: tuple[Tensor, ...]) -> None:
    module.logits = output[0]
