"""What a model takes: parameters, bytes and FLOPs. Activations are measured on the meta device,
without any weights."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface

from splitppo.models.experts import experts_of, top_k
from splitppo.models.heads import adapted_layers
from splitppo.models.tensor import transformer_layers

# The part of a GPU that a job may plan with. On a card of 79.2 GiB a job that was estimated at 75
# ended with 73 GiB allocated. CUDA and NCCL hold 1.5 GiB, so fragments took 6 % of the card. The
# estimate errs by 2 %.
USABLE = 0.92
# bytes for each GB in a GPU's name: PyTorch finds 79.2 GiB on 80 GB, 139.8 GiB on 141 GB
GB = 0.99 * 2**30
TRACED = "splitppo_traced"
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "_grouped_mm")  # of torch.ops.aten
TOKENS = 64  # of the traced row
TYPICAL = 20  # hidden states that a layer keeps of a token, for models that can't be traced


class Counts(NamedTuple):
    """Parameters of a model, tied ones once: as a folder holds it; those that a token meets in a
    forward pass, with adapters; those that are trained."""

    parameters: int
    active: int
    trained: int

    @property
    def words(self) -> str:
        """For the screen."""
        meets = f", of which a token meets {self.active:,}" * (self.active < self.parameters)
        return f"{self.parameters:,} parameters{meets}"


@dataclass(frozen=True)
class Cost:
    """What a model takes, on all of its ranks together. Activations are bytes a token.

    Attributes:
        parameters, active, trained: as `Counts` has them.
        weights: bytes of the weights while the model runs.
        width: bytes of a number in forward passes.
        compiled: whether layers are compiled.
        largest: parameters of the largest weight. layer: those of the largest layer. root:
            those outside the layers, tied ones once.
        vocabulary: ids that the output layer knows; 0 without an output layer.
        layers: how many.
        saved: what autograd keeps of a layer. hidden: a hidden state. widest: the widest input or
            output of a layer's matrices.
        outputs: of the widest matrices that are alive at once in a forward pass.
        checkpoints: hidden states that activation checkpointing keeps of a layer.
        merged: bytes of the largest weight while adapters are merged into it.
        dense: whether the gradients of a layer are as large as its weights.
    """

    parameters: int
    active: int
    trained: int
    weights: float
    width: int
    compiled: bool
    largest: int
    layer: int
    root: int
    vocabulary: int
    layers: int
    saved: float
    hidden: int
    widest: int
    outputs: int = 3
    checkpoints: int = 1
    merged: float = 0.0
    dense: bool = True

    @property
    def optimizer(self) -> float:
        """Bytes of AdamW's state: two float32 moments of each trained parameter."""
        return 8.0 * self.trained

    @property
    def gradients(self) -> float:
        """Bytes of the reduced gradients, in float32."""
        return 4.0 * self.trained

    @property
    def flops(self) -> float:
        """FLOPs of a token's forward and backward pass: 6 for each active parameter."""
        return 6.0 * self.active


def measure(model: Any, layers: int, counts: Counts, dtype: torch.dtype, *, compiled: bool) -> Cost:
    """The cost of a model that runs in `dtype` and whose weights are float32 for the optimizer.

    In lower precision, compiled layers compute again what no matrix product needs.

    Args:
        model: on the meta device, in `dtype`, perhaps with fewer layers.
        layers: how many there are in all.
        counts: of the whole model.
    """
    traced = transformer_layers(model)
    hidden = model.config.hidden_size * dtype.itemsize
    # without memory, the products of experts run in bfloat16 alone
    traced_in = torch.bfloat16 if experts_of(model) else dtype
    try:
        saved = _saved(model.to(traced_in), again=compiled and dtype != torch.float32) / len(traced)
        saved *= dtype.itemsize / traced_in.itemsize
    except Exception:  # a model's own code may ask for values, and meta tensors have none
        saved = TYPICAL * hidden
    inside = {id(p): p for layer in traced for p in layer.parameters()}
    widths = [max(p.shape) for p in inside.values() if p.ndim == 2]
    for module in experts_of(model):
        widths += [top_k(model) * max(p.shape[1:]) for p in module.parameters(recurse=False)]
    output = getattr(model, "causal", None)  # of a policy
    return Cost(
        *counts,
        weights=4.0 * counts.parameters,
        width=dtype.itemsize,
        compiled=compiled,
        largest=max(weight.numel() for weight in model.parameters()),
        layer=max(numbers(layer.parameters()) for layer in traced),
        root=numbers(p for p in model.parameters() if id(p) not in inside),
        vocabulary=output.get_output_embeddings().weight.shape[0] if output else 0,
        layers=layers,
        saved=saved,
        hidden=hidden,
        widest=max(widths) * dtype.itemsize,
    )


def numbers(parameters: Iterable[Tensor]) -> int:
    """How many numbers they hold."""
    return sum(parameter.numel() for parameter in parameters)


def _saved(model: Any, *, again: bool) -> float:
    """The bytes a token that autograd keeps of a model's layers. `again`: what no matrix product
    needs is made again of what modules without parts, as norms, read."""
    saved: list[Tensor] = []
    read: list[Tensor] = []
    products = _Products()

    def attend(
        module: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, None]:
        """Stands for a kernel that keeps its inputs, its result and a number a token and head."""
        out = q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3])
        tensors = [q, k, v, out, q.new_empty(q.shape[:3]).float()]
        saved.extend(tensors)
        products.seen.extend(tensors)
        return out, None

    AttentionInterface.register(TRACED, attend)
    model.config._attn_implementation = TRACED
    for module in (module for module in model.modules() if not [*module.children()]):
        module.register_forward_pre_hook(
            lambda _, inputs: read.extend(x for x in inputs if isinstance(x, Tensor))
        )
    # the output of a layer with adapters is a sum of two products, and stands for both
    for module in adapted_layers(model):
        module.register_forward_hook(lambda _, __, out: products.seen.append(out))
    ids = torch.zeros(1, TOKENS, dtype=torch.int64, device="meta")
    with (
        products,
        torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x),
    ):
        getattr(model, model.base_model_prefix)(input_ids=ids, use_cache=False)
    if again:
        needed = {_key(x) for x in products.seen if isinstance(x, Tensor)}
        saved = [x for x in saved if _key(x) in needed] + read
    known = {_key(x) for x in (*model.parameters(), *model.buffers())}
    sizes = {key: x.untyped_storage().nbytes() for x in saved if (key := _key(x)) not in known}
    return sum(sizes.values()) / TOKENS


class _Products(TorchDispatchMode):
    """Notes what matrix products read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in PRODUCTS:
            self.seen += [*args, out]
        return out


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
