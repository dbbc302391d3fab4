"""What a model's forward and backward passes keep in memory, found on the meta device, without any
weights."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AttentionInterface, PretrainedConfig

from splitppo.models import lora
from splitppo.models.build import Kind, build, shorten
from splitppo.models.heads import adapted_layers
from splitppo.models.tensor import transformer_layers

# The part of a GPU that a job may plan with. On a card of 79.2 GiB a job that was estimated at 75
# ended with 73 GiB allocated. CUDA and NCCL hold 1.5 GiB, so fragments took 6 % of the card. The
# estimate errs by 2 %.
USABLE = 0.92
# bytes for each GB in a GPU's name: PyTorch finds 79.2 GiB on 80 GB, 139.8 GiB on 141 GB
GB = 0.99 * 2**30
TRACED = "splitppo_traced"
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution")  # of torch.ops.aten
TOKENS = 64  # of the traced row
TRACED_LAYERS = 8
TYPICAL = 20  # hidden states that a layer keeps of a token, for models that can't be traced


@dataclass(frozen=True)
class Footprint:
    """Sizes of a model. Those of activations are bytes a token."""

    layer: int  # parameters of the largest layer
    root: int  # those outside the layers, tied ones once
    vocabulary: int  # ids that the output layer knows; 0 without an output layer
    layers: int
    saved: float  # what autograd keeps of a layer
    hidden: int  # a hidden state
    widest: int  # the widest input or output of a layer's matrices


def footprint(
    config: PretrainedConfig,
    kind: Kind,
    dtype: torch.dtype,
    *,
    compiled: bool,
    adapter: lora.Adapter | None = None,
) -> Footprint:
    """Of a model that runs in `dtype`, perhaps with adapters. In lower precision, compiled layers
    make again what no matrix product needs."""
    whole = config.num_hidden_layers
    model: Any = build(shorten(config, min(whole, TRACED_LAYERS), ""), kind, dtype).to("meta")
    if adapter:
        lora.add(model, adapter)
        model.to(dtype)
    layers = transformer_layers(model)
    hidden = config.hidden_size * dtype.itemsize
    try:
        saved = _saved(model, again=compiled and dtype != torch.float32) / len(layers)
    except Exception:  # a model's own code may ask for values, and meta tensors have none
        saved = TYPICAL * hidden
    inside = {id(p): p for layer in layers for p in layer.parameters()}
    return Footprint(
        layer=max(sum(p.numel() for p in layer.parameters()) for layer in layers),
        root=sum(p.numel() for p in model.parameters() if id(p) not in inside),
        vocabulary=model.causal.get_output_embeddings().weight.shape[0] if kind == "policy" else 0,
        layers=whole,
        saved=saved,
        hidden=hidden,
        widest=max(max(p.shape) for p in inside.values() if p.ndim == 2) * dtype.itemsize,
    )


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
        kept = [q, k, v, out, q.new_empty(q.shape[:3]).float()]
        saved.extend(kept)
        products.seen.extend(kept)
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
