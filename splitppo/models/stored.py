"""A folder's safetensors files: which tensor makes which weight, what does not fit, what is left
over."""

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from splitppo.errors import UserError
from splitppo.models.build import SCALE, folder_error
from splitppo.models.heads import SharedModel, ValueModel
from splitppo.models.names import (
    HEAD,
    buffers_of,
    find_head,
    hf_name,
    own_weights,
    shorten_names,
    ties_of,
    weights_of,
)
from splitppo.models.sharding import described

HEADED = (ValueModel, SharedModel)  # with a scalar head
# types of stored tensors, as safetensors names them
FLOATS = ("F64", "F32", "F16", "BF16")
WHOLE = ("I64", "I32", "I16", "I8", "U8", "BOOL")
FP8 = "F8_E4M3"
# in config.json: what normalises a head's outputs (OpenRLHF's `mean` and `std`)
MOMENTS = r"((score|reward|value|head|running)_)?(mean|std|var|deviation|variance)"


def fp8_blocks(folder: str) -> list[int]:
    """Rows and columns of an FP8 weight that have a scale in common; [] if all of it has one.
    Raises a UserError if config.json names no such blocks."""
    config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    quantized = config.get("quantization_config") or {}
    blocks = quantized.get("weight_block_size", [128, 128]) or []
    if not isinstance(blocks, list) or [type(size) is int and size > 0 for size in blocks] not in (
        [],
        [True, True],
    ):
        raise folder_error(
            folder,
            f"config.json has weight_block_size = {json.dumps(blocks)}",
            "write null, or two whole numbers",
        )
    return blocks


def open_tensors(file: Path) -> Any:
    """A safetensors file. Raises a UserError if it can't be read."""
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise UserError(
            f"{file} can't be read as a safetensors file ({error}); fetch it again"
        ) from error


def _open_files(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Name of a tensor -> the open safetensors file that holds it, of those that transformers
    reads; and the names of the folder's other safetensors files."""
    single = folder / "model.safetensors"
    index = folder / "model.safetensors.index.json"
    read = {single.name}
    if index.is_file() and not single.is_file():
        try:
            read = {*map(str, json.loads(index.read_text())["weight_map"].values())}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                f"{index} is broken ({type(error).__name__}: {error}); fetch it again"
            ) from error
    elif not single.is_file():
        raise folder_error(
            folder,
            "no model.safetensors",
            "load it with transformers and save_pretrained it, which writes one",
        )
    opened: dict[str, Any] = {}
    for file in sorted(read):
        tensors = open_tensors(folder / file)
        for name in tensors.keys():  # noqa: SIM118
            if name in opened:
                raise folder_error(
                    folder, f"weight {name} is in {file} and in another file", "fetch it again"
                )
            opened[name] = tensors
    return opened, sorted({path.name for path in folder.glob("*.safetensors")} - read)


def describe_kinds(kinds: Mapping[str, str]) -> list[str]:
    """Names the tensors of another type than most. `kinds`: tensor -> its type."""
    return [
        f"stored as {kind}: {shorten_names(name for name in kinds if kinds[name] == kind)}"
        for kind, _ in Counter(kinds.values()).most_common()[1:]
    ]


@dataclass(frozen=True)
class Stored:
    """Which tensors of a folder's safetensors files make a model's weights, and these tensors.

    Attributes:
        files: tensor -> the open file that holds it.
        weights: the weights and buffers that may be read from them.
        made_of: weight or buffer -> the tensors that make it: one, or as many as its experts have
            matrices, in the order of the weight's rows. Tied weights have the same.
        unexpected: tensors for which the model has no weight, though it has the module.
        unused: the other tensors, and files, that are not read.
        remedy: what helps if tensors and weights don't fit.
        blocks: `fp8_blocks` of the folder.
    """

    folder: str
    model: nn.Module
    files: Mapping[str, Any]
    weights: Mapping[str, Tensor]
    made_of: Mapping[str, tuple[str, ...]]
    unexpected: Sequence[str]
    unused: Sequence[str] = ()
    remedy: str = "take config.json and weights from the same model"
    blocks: Sequence[int] = ()

    def check(self) -> None:
        """Raises a UserError that names the first weight that is missing, of another shape or type,
        or unexpected."""
        head = HEAD if isinstance(self.model, HEADED) else ()
        names = cast(Any, self.model).folder_names
        for name, tensor in self.weights.items():
            if name in self.made_of:
                self._check_stored(name, tensor)
            # without its buffer, a router chooses other experts
            elif (isinstance(tensor, nn.Parameter) or names.exact(name)) and name not in head:
                due = names.stored(name, tensor.shape)
                missing = next((each for each in due if each not in self.files), name)
                raise folder_error(
                    self.folder, f"no weight {missing} in its safetensors", self.remedy
                )
        if self.unexpected:
            raise folder_error(
                self.folder,
                f"the model has no weight {self.unexpected[0]} ({len(self.unexpected)} such)",
                self.remedy,
            )

    def _check_stored(self, name: str, tensor: Tensor) -> None:
        due = [*described(self.model, name, tensor).shape]
        parts = self.made_of[name]
        if len(parts) > 1:
            due[:2] = [math.prod(due[:2]) // len(parts)]
        for stored in parts:
            self._check_tensor(stored, due, floats=tensor.is_floating_point())

    def _check_tensor(self, stored: str, due: list[int], *, floats: bool) -> None:
        shape = self._slice(stored).get_shape()
        kind = self._slice(stored).get_dtype()
        if shape != due:
            raise folder_error(
                self.folder, f"weight {stored} is {shape}, but {due} in the model", self.remedy
            )
        allowed = FLOATS if floats else WHOLE
        if stored + SCALE in self.files:
            allowed = (FP8,) if self._block(stored) else ()
        if kind not in allowed:
            raise folder_error(
                self.folder,
                f"weight {stored} is stored as {kind}, so it is quantized or belongs to another "
                "model",
                f"use a folder of {', '.join(FLOATS)} weights",
            )

    def _block(self, stored: str) -> list[int]:
        """Rows and columns of an FP8 weight that have a scale in common: by config.json, or by the
        number of scales. [] if its scales can't be read."""
        shape = self._slice(stored).get_shape()
        scales = self._slice(stored + SCALE)
        grid = scales.get_shape() or [1] * len(shape)
        dimensions = {len(shape), len(grid), len(self.blocks or shape)}
        if len(dimensions) > 1 or scales.get_dtype() not in FLOATS:
            return []
        parts = zip(shape, grid, strict=True)
        block = [*self.blocks] or [max(size // max(count, 1), 1) for size, count in parts]
        due = [math.ceil(size / part) for size, part in zip(shape, block, strict=True)]
        return block if grid == due else []

    def notes(self) -> list[str]:
        """What the user should know of weights that can be read: which tensors are not used, which
        are FP8 or of another type than most, and what starts new."""
        read = self.made_of
        notes = []
        if (head := read.get(HEAD[0], HEAD)[0]) != HEAD[0]:
            notes.append(f"its head is {head}")
        missing = [name for name in self.weights if name not in read]
        if new := [name for name in missing if name in HEAD]:
            part = "a part of " if HEAD[0] in read else ""
            notes.append(f"{part}the head is newly initialised ({', '.join(new)})")
        if self.unused:
            notes.append(f"not used: {shorten_names(self.unused)}")
        if new := [name for name in missing if name not in HEAD]:
            notes.append(f"missing, so they are newly initialised: {shorten_names(new)}")
        kinds = {
            stored: self._slice(stored).get_dtype() for parts in read.values() for stored in parts
        }
        if fp8 := [stored for stored in kinds if kinds[stored] == FP8]:
            notes.append(f"{len(fp8)} weights are FP8 and are read as floats (dequantized)")
        plain = {stored: kind for stored, kind in kinds.items() if kind != FP8}
        scales = {stored + SCALE: self._slice(stored + SCALE).get_dtype() for stored in fp8}
        return [*notes, *describe_kinds(plain | scales)]

    def check_moments(self) -> None:
        """Raises a UserError if a trained head's outputs are meant to be normalised by numbers that
        the folder has beside it, in config.json or as tensors."""
        if HEAD[0] not in self.made_of:
            return
        fields = [
            name for name in vars(cast(Any, self.model).config) if re.fullmatch(MOMENTS, name)
        ]
        numbers = [
            name
            for name in self.unused
            # a layer's number is no output's
            if name in self.files
            and math.prod(self._slice(name).get_shape()) == 1
            and not re.search(r"\.\d+\.", name)
        ]
        if moments := [*fields, *numbers]:
            raise folder_error(
                self.folder,
                f"{moments[0]} next to the head would change its output, and is not supported",
                "scale the head's weight and bias by it, then remove it",
            )

    def check_ties(self) -> None:
        """Raises a UserError if weights that config.json ties differ in the folder; transformers
        doesn't tie these."""
        for tied in ties_of(self.model).items():
            stored = {source for path in tied for source in self.made_of.get(hf_name(path), ())}
            if len(stored) == 2 and not torch.equal(*(self._slice(name)[:] for name in stored)):
                raise folder_error(
                    self.folder,
                    f"config.json ties {' and '.join(sorted(stored))}, which differ",
                    "set tie_word_embeddings to false there, or drop the weight that is not used",
                )

    def read(self, name: str, where: tuple[slice, ...] = ()) -> Tensor:
        """A part of a weight, or all of it, FP8 as float32. Of experts, those that the part has are
        read."""
        tensors = self.made_of[name]
        if len(tensors) == 1:
            return self._read(tensors[0], where)
        experts, *shape = self.weights[name].shape
        each = len(tensors) // experts
        first, last, _ = (*where, slice(None))[0].indices(experts)
        matrices = [self._read(stored) for stored in tensors[first * each : last * each]]
        return torch.cat(matrices).view(-1, *shape) if matrices else torch.empty(0, *shape)

    def _read(self, stored: str, where: tuple[slice, ...] = ()) -> Tensor:
        if stored + SCALE not in self.files:
            return self._slice(stored)[where or ...]
        weight = self._slice(stored)[:].float()
        scales = self._slice(stored + SCALE)[...].float()
        scales = scales.reshape(scales.shape or (1,) * weight.ndim)
        for dim, size in enumerate(self._block(stored)):
            scales = scales.repeat_interleave(size, dim).narrow(dim, 0, weight.shape[dim])
        return (weight * scales)[where]

    def _slice(self, stored: str) -> Any:
        return self.files[stored].get_slice(stored)


def open_folder(folder: str, model: Any) -> Stored:
    """From a folder's names to the model's. Raises a UserError if a file can't be read, two tensors
    are the same weight, or transformers would merge or split one."""
    files, other_files = _open_files(Path(folder))
    shapes = {name: file.get_slice(name).get_shape() for name, file in files.items()}
    names = model.folder_names
    ties = {hf_name(alias): hf_name(main) for alias, main in ties_of(model).items()}
    weights = own_weights(weights_of(model)) | buffers_of(model)
    # tensor, as transformers names it -> the weight that it makes, and its place among the tensors
    # of a weight; None: it is all of it
    known: dict[str, tuple[str, int | None]] = {}
    for name, weight in weights.items():
        parts = names.parts(name, weight.shape)
        known |= {part: (name, place) for place, part in enumerate(parts)}
    known |= {name: (name, None) for name in [*weights, *ties]}
    modules = {
        part.split(".")[0]
        for name in known
        for part in (name, name.removeprefix(f"{model.base_model_prefix}."))
    }
    places: dict[str, dict[int | None, str]] = {}  # weight -> the folder's tensors, by their places
    others: dict[bool, list[str]] = {True: [], False: []}  # by whether they are of a module
    for source in shapes:
        try:
            part = names.part_of(source, known)
        except ValueError as error:
            raise folder_error(folder, str(error), "use another model") from error
        name, place = known.get(part, (part, None))
        same = places.get(name, {})
        if place in same or (same and None in (place, *same)):
            other = same.get(place, next(iter(same.values())))
            raise folder_error(
                folder,
                f"{other} and {source} are both the weight {name}",
                "remove the one that is not the model's",
            )
        if part in known:
            places.setdefault(name, {})[place] = source
        # a scale is read with its weight
        elif not (source.endswith(SCALE) and source.removesuffix(SCALE) in shapes):
            of_module = name.split(".")[0] in modules and not re.search(
                "|".join(names.ignored), name
            )
            others[of_module].append(source)
    made_of = {
        name: tuple(parts[place] for place in sorted(parts, key=lambda place: place or 0))
        for name, parts in places.items()
        if None in parts or len(parts) == len(names.parts(name, weights[name].shape))
    }
    unused = others[False]
    if HEAD[0] in weights and HEAD[0] not in made_of:
        width = weights[HEAD[0]].shape[-1]
        head = find_head({name: shapes[name] for name in unused}, width)
        made_of |= {name: (source,) for name, source in head.items() if name in weights}
        unused = [source for source in unused if (source,) not in made_of.values()]
    tied = {main: made_of[alias] for alias, main in ties.items() if alias in made_of}
    return Stored(
        folder,
        model,
        files,
        weights,
        tied | made_of,
        others[True],
        [*unused, *other_files],
        blocks=fp8_blocks(folder),
    )
