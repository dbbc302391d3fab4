"""LoRA (Hu et al. 2021, arXiv:2106.09685): a frozen base, and adapters beside its linear layers.

peft makes the modules. Beside a layer's weight W `[out, in]` stand A `[rank, in]` and B
`[out, rank]` in float32, and the layer computes W x + scale B A x with scale = alpha / rank. W has
the precision of forward passes and never changes: engines and exports get W + scale B A, computed
on the way. A module may hold two sets of adapters, the policy's and the value model's, of which one
is on. In a tensor-parallel set, A is cut as W is by its inputs, B as W is by its outputs.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch._dynamo.config as dynamo
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PretrainedConfig

from splitppo.config import LoraConfig
from splitppo.config.toml import flag
from splitppo.errors import UserError, need
from splitppo.models.build import build, matching
from splitppo.models.cost import Cost
from splitppo.models.experts import experts_of
from splitppo.models.names import ADAPTER, HEAD, hf_name, weights_of
from splitppo.models.sharding import bounds, described, gather_full, local
from splitppo.models.stored import Stored, open_tensors
from splitppo.models.tensor import cut_adapter
from splitppo.models.trainable import Trainable
from splitppo.models.weights import draw

# compiled graphs of a layer: its kinds, by which adapters are on, by what needs gradients; the
# compiler's own limit is 8
GRAPHS = 64
WEIGHTS = "adapter_model.safetensors"  # peft's files
SETTINGS = "adapter_config.json"
FILES = (SETTINGS, WEIGHTS)
PEFT = "base_model.model."  # begins the names of its tensors
# values at which a setting of peft does nothing, and those of settings that may have others; what
# is not listed may change what an adapter, or the base beside it, computes
OFF = (None, False, 0, "", [], {})
HARMLESS: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "init_lora_weights": (True, *OFF, "gaussian", "eva", "orthogonal"),
    "qalora_group_size": (16,),  # without `use_qalora`
    "modules_to_save": (["score"], *OFF),  # of a value model
    "megatron_core": ("megatron.core",),  # without `megatron_config`
    "runtime_config": ({"ephemeral_gpu_offload": False}, *OFF),
}
# `check` compares r and lora_alpha, and the stored tensors, which show what these came to; the
# others are of training, or words about the adapter
FREE = (
    *("r", "lora_alpha", "target_modules", "exclude_modules"),
    *("layers_to_transform", "layers_pattern", "lora_dropout", "task_type", "auto_mapping"),
    *("base_model_name_or_path", "revision", "inference_mode", "peft_version"),
)


@dataclass(frozen=True)
class Adapter(Trainable):
    """A model's set of adapters. `kind`, `policy` or `value`, is its name in the model's modules.

    Attributes:
        base: the base model, as the configuration names it.
        digest: returns what identifies the base's weights.
        where: before the names of its settings in messages; "": the tables of `kind`.
    """

    settings: LoraConfig
    base: str = ""
    digest: Callable[[], str] = str
    where: str = ""
    exact = False

    @property
    def alpha(self) -> int:
        return self.settings.alpha or self.settings.rank

    def pair(self, weight: str) -> list[str]:
        """The names of A and B beside a weight."""
        layer = weight.removesuffix(".weight")
        return [f"{layer}.lora_{part}.{self.kind}.weight" for part in "AB"]

    def layers(self, model: nn.Module) -> list[str]:
        """The linear layers that get adapters. Raises a UserError if a target matches none."""
        # peft takes these names for the experts' weights, wherever a layer of the name stands
        stacks = cast(Any, model).folder_names.stacks
        of_experts = {key.split(".")[-2] for stack in stacks for key in stack.source_patterns}
        names = [
            hf_name(name)
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear)
            and name.startswith(f"{model.base_model_prefix}.")
            and not re.search(ADAPTER, f"{name}.weight")
            and name.rpartition(".")[2] not in of_experts
        ]
        chosen = set()
        for target in self.settings.targets or ("",):
            named = f"targets={target}" if target else f"rank={self.settings.rank}"
            setting = f"{self.where or f'{self.kind}.lora.'}{named}"
            what = "linear layer" + ", and experts get no adapters" * bool(experts_of(model))
            chosen.update(matching(target, names, setting, what))
        return [name for name in names if name in chosen]

    def add(self, model: nn.Module) -> None:
        """Freezes all but adapters and scalar head. Raises a UserError if a target matches no
        layer, or peft is not installed."""
        layers = self.layers(model)
        rank = self.settings.rank
        need("peft", f"{self.where or f'{self.kind}.lora.'}rank={rank}", "'splitppo[lora]'")
        import peft

        settings = peft.LoraConfig(r=rank, lora_alpha=self.alpha, target_modules=layers)
        peft.inject_adapter_in_model(settings, model, self.kind, low_cpu_mem_usage=True)
        del cast(Any, model).peft_config
        dynamo.recompile_limit = max(dynamo.recompile_limit, GRAPHS)
        for path, weight in model.named_parameters():
            name = hf_name(path)
            weight.requires_grad_(name in HEAD or bool(re.search(ADAPTER, name)))
        for name in getattr(model, "float32", ()):
            model.get_submodule(name).float()
        for layer in layers:
            cut_adapter(model, layer, self.pair(layer))

    def stored(self, model: nn.Module, folder: Path) -> Stored:
        """The adapters and the head in a folder, by peft's names. Raises a UserError if they can't
        be read."""
        tensors = open_tensors(folder / WEIGHTS)
        files = dict.fromkeys(tensors.keys(), tensors)
        weights = self.saved(model)
        names = {name: peft_name(name) for name in weights}
        return Stored(
            str(folder),
            model,
            files,
            weights,
            {name: (tensor,) for name, tensor in names.items() if tensor in files},
            sorted(files.keys() - names.values()),
            remedy="the adapter was trained with another base or other targets than "
            f"{self.kind}.path={self.base}: set those that it was trained with",
        )

    def read(self, model: nn.Module, seed: int) -> None:
        """Without a folder A is drawn as in peft, and B is 0."""
        path = self.settings.path
        stored = self.stored(model, Path(path)) if path else None
        for name, weight in self.saved(model).items():
            if stored and name in stored.made_of:
                local(weight).copy_(stored.read(name, bounds(model, name, weight)))
            elif matrix := re.search(ADAPTER, name):  # and not a head, which `fill` has drawn
                inputs = described(model, name, weight).shape[-1]
                std = (3 * inputs) ** -0.5 if matrix[1] == "A" else 0.0
                local(weight).copy_(draw(model, name, weight, seed, std))

    def check(self, config: PretrainedConfig, start: Path | None = None) -> list[str]:
        """Raises a UserError if an adapter's folder is of another rank, scale, kind or base, or of
        other layers, or has a setting that may change what it computes."""
        if not (folder := start or self.settings.path):
            return []
        settings = read_settings(Path(folder))
        setting = f"{self.kind}.lora"
        for name, key, due in (
            ("rank", "r", self.settings.rank),
            ("alpha", "lora_alpha", self.alpha),
        ):
            if settings.get(key) != due:
                raise UserError(
                    f"{setting}.{name}={due}: the adapter in {folder} has {settings.get(key)}; "
                    f"set {flag(f'{setting}.{name}')} {settings.get(key)}"
                )
        model = build(config, self.kind)
        self.add(model)
        stored = self.stored(model, Path(folder))
        stored.check()
        file = next(iter(stored.files.values()))
        base = (file.metadata() or {}).get("base")
        if base and base != self.digest():
            raise UserError(
                f"{folder}: this adapter was trained on another base than "
                f"{self.kind}.path={self.base} (that base: {base}; this one: {self.digest()}); "
                "use the base of the adapter"
            )
        return [f"adapter {folder}: {note}" for note in stored.notes()]

    def cost(self, cost: Cost) -> Cost:
        # a layer's output is the sum of two products; compiled, checkpointing keeps both: measured
        # on GPUs, to 0.01 GiB (docs/measured_memory.md)
        return replace(
            cost,
            weights=float(cost.parameters * cost.width + 4 * cost.trained),
            outputs=cost.outputs + 1,
            checkpoints=1 + cost.compiled,
            # in float32, before and after
            merged=8 * cost.widest * cost.hidden / cost.width**2,
            dense=False,
        )

    def parameters(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """Those of the model whose adapters these are; another one may share its base."""
        others = {
            "policy": r"\.lora_[AB]\.value\.|^score\.",
            "value": rf"\.lora_[AB]\.policy\.|^(?!{model.base_model_prefix}\.|score\.)",
        }
        return {
            name: weight
            for name, weight in weights_of(model).items()
            if not re.search(others[self.kind], name)
        }

    def saved(self, model: nn.Module) -> dict[str, nn.Parameter]:
        return super().trained(model)

    def gather(
        self, model: nn.Module, named: dict[str, Tensor], dtype: torch.dtype
    ) -> Iterator[tuple[str, Tensor]]:
        """As `gather_full`; weights with adapters are merged, and rounded to `dtype` once."""
        every = weights_of(model)
        small = {part: every[part] for name in named for part in self.pair(name) if part in every}
        full = dict(gather_full(model, small, torch.float32))
        scale = self.alpha / self.settings.rank
        dtypes = [weight.dtype for name, weight in named.items() if self.pair(name)[0] in small]
        exact = torch.promote_types(dtype, dtypes[0]) if dtypes else dtype
        for name, weight in gather_full(model, named, exact):
            pair = [full[part] for part in self.pair(name) if part in full]
            yield name, (merge(weight, *pair, scale=scale) if pair else weight).to(dtype)

    def gather_files(self, model: nn.Module) -> dict[str, Tensor]:
        """The whole adapters and head, by peft's names."""
        gathered = gather_full(model, self.trained(model), torch.float32)
        return {peft_name(name): tensor.cpu().clone() for name, tensor in gathered}

    def write(self, folder: Path, model: nn.Module, tensors: Mapping[str, Tensor]) -> list[str]:
        """A folder that peft loads; a value model's head is among its `modules_to_save`. What
        identifies the base is in the metadata of the weights."""
        import peft

        layers = self.layers(model)
        # nothing of this machine: the name on the hub, or the folder's last part
        pinned = re.fullmatch(r"([\w.-]+/[\w.-]+)@([0-9a-f]{40})", self.base)
        settings = peft.LoraConfig(
            r=self.settings.rank,
            lora_alpha=self.alpha,
            target_modules=layers
            if self.settings.targets
            else sorted({layer.rpartition(".")[2] for layer in layers}),
            modules_to_save=["score"] if self.kind == "value" else None,
            base_model_name_or_path=pinned[1] if pinned else Path(self.base).absolute().name,
            revision=pinned[2] if pinned else None,
            inference_mode=True,
        )
        folder.mkdir(parents=True, exist_ok=True)
        settings.save_pretrained(str(folder))
        save_file(dict(tensors), folder / WEIGHTS, {"format": "pt", "base": self.digest()})
        return [*FILES]


@dataclass(frozen=True)
class FrozenAdapter(Adapter):
    """The adapters of a model that is not trained: of the policy's kind, read from a folder."""

    def trained(self, model: nn.Module) -> dict[str, nn.Parameter]:
        return {}


def frozen(folder: Path, base: str, digest: Callable[[], str], where: str) -> FrozenAdapter:
    """What a folder of peft's says of its adapters; the last arguments are as `Adapter` has
    them."""
    settings = read_settings(folder)
    tensors = open_tensors(folder / WEIGHTS)
    named = sorted({name.partition(".lora_")[0] for name in tensors.keys()})  # noqa: SIM118
    targets = tuple(f"^{re.escape(name.removeprefix(PEFT))}$" for name in named)
    lora = LoraConfig(settings.get("r", 0), settings.get("lora_alpha"), targets, str(folder))
    return FrozenAdapter("policy", lora, base, digest, where)


def merge(weight: Tensor, down: Tensor, up: Tensor, *, scale: float) -> Tensor:
    """W + scale B A in float32, a new tensor."""
    return torch.addmm(weight.float(), up.float(), down.float(), alpha=scale)


def peft_name(name: str) -> str:
    """A weight's name in an adapter's folder."""
    return PEFT + re.sub(ADAPTER, r".lora_\1.", name)


def read_settings(folder: Path) -> dict[str, Any]:
    """An adapter's settings. Raises a UserError if they can't be read, or one of them may change
    what it computes."""
    try:
        settings = dict(json.loads((folder / SETTINGS).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"{folder}: no adapter can be read there ({error}); name a folder with {SETTINGS} and "
            f"{WEIGHTS}, as peft writes them"
        ) from error
    for name, kinds in {"r": (int,), "lora_alpha": (int, float)}.items():
        value: Any = settings.get(name)
        if type(value) not in kinds or value <= 0:
            raise UserError(
                f"{folder}: {SETTINGS} has {name}={value!r}; write a whole number above 0, as peft "
                "does"
            )
    for name, value in settings.items():
        if name not in FREE and value not in HARMLESS.get(name, OFF):
            raise UserError(
                f"{folder}: the adapter has {name}={json.dumps(value)}, which splitppo does not "
                "support; merge it into its base with peft, and train the merged model"
            )
    return settings
