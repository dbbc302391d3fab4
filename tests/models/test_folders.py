"""Folders of models and adapters: nothing of them is left out in silence, or read as something
else."""

import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_families import MIXED, PLAIN, configure, configured, edited, in_fp8, written
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from splitppo.config import Config, LoraConfig, ValueConfig
from splitppo.errors import UserError
from splitppo.models import lora
from splitppo.models.build import Kind, build, read_config
from splitppo.models.weights import check_folder, fill
from splitppo.run.models import describe

CPU = torch.device("cpu")
FAMILIES = (
    "llama, tied", "qwen2, tied", "qwen3", "gemma3", "phi3", "gpt-neox, head renamed", "gpt2",
    "opt", "apertus, with buffers", "qwen3.5, hybrid",
)  # fmt: skip
HEADS = {
    "classifier": ("score.weight", "score.bias"),
    "trl": ("v_head.summary.weight", "v_head.summary.bias"),
    "one row": ("lm_head.weight", "lm_head.bias"),
}
OUTPUTS = ("lm_head.weight", "lm_head.bias", "embed_out.weight")  # which a value model has not
ADAPTED = ("policy", "value")
WHAT = ("body", *HEADS, *(f"adapter of the {kind}" for kind in ADAPTED), "reward")
NONE = {
    ("gpt2", "adapter of the policy"): "it has no linear layers",
    ("gpt2", "adapter of the value"): "it has no linear layers",
    ("apertus, with buffers", "reward"): "the library has no such class",
    ("qwen3.5, hybrid", "reward"): "the library has no such class",
}
CHANGES = ("renamed", "dropped", "doubled", "doubled in another file", "shape", "int8", "float16")


@dataclass
class Folder:
    """A folder, the file that holds its tensors, and how it is read."""

    path: Path
    file: Path
    kind: Kind
    adapter: lora.Adapter | None = None

    def notes(self) -> list[str]:
        config = read_config(str(self.path))
        if self.adapter:
            return self.adapter.check(config, self.file.parent)
        return check_folder(config, str(self.path), self.kind, random_init=False)


@torch.no_grad()
def with_head(folder: Path, names: tuple[str, str], width: int) -> None:
    """The body of a folder with a trained scalar head of these names."""
    generator = torch.Generator().manual_seed(1)
    head = dict(
        zip(names, (torch.randn(1, width, generator=generator), torch.ones(1)), strict=True)
    )
    edited(folder, lambda weights: {n: w for n, w in weights.items() if n not in OUTPUTS} | head)


def save_adapter(folder: Path, out: Path, kind: Kind) -> lora.Adapter:
    adapter = lora.Adapter(kind, LoraConfig(rank=2), "base")
    model = build(read_config(str(folder)), kind)
    adapter.add(model)
    trained = {
        lora.peft_name(name): torch.ones(weight.shape)
        for name, weight in adapter.trained(model).items()
    }
    adapter.write(out, model, trained)
    return adapter


def made(root: Path, family: str, what: str) -> Folder:
    kind, settings, _ = PLAIN[family]
    config = configured(kind, settings)
    if what == "reward":
        config.num_labels = 1
        AutoModelForSequenceClassification.from_config(config).save_pretrained(root / "model")
        return Folder(root / "model", root / "model" / "model.safetensors", "reward")
    written(root / "model", config)
    if what.startswith("adapter"):
        owner: Any = what.rpartition(" ")[2]
        adapter = save_adapter(root / "model", root / "adapter", owner)
        return Folder(root / "model", root / "adapter" / lora.WEIGHTS, owner, adapter)
    if what in HEADS:
        with_head(root / "model", HEADS[what], config.hidden_size)
    reader: Kind = "value" if what in HEADS else "policy"
    return Folder(root / "model", root / "model" / "model.safetensors", reader)


def changed(weights: dict[str, Tensor], name: str, change: str) -> dict[str, Tensor]:
    weight = weights[name]
    without = {other: tensor for other, tensor in weights.items() if other != name}
    if change == "renamed":
        return without | {f"{name.rpartition('.')[0]}_2.{name.rpartition('.')[2]}": weight}
    if change == "dropped":
        return without
    if change == "doubled":
        return weights | {f"model.{name}".replace("model.model.", ""): weight.clone()}
    if change == "shape":
        return without | {name: torch.zeros(*weight.shape[:-1], 3)}
    return without | {name: weight.to(getattr(torch, change))}


def layers(names: list[str]) -> Iterator[str]:
    """One name of those that differ in the layer alone."""
    yield from {
        "".join(char for char in name if not char.isdigit()): name for name in names
    }.values()


def check_change(folder: Folder, before: list[str], name: str, change: str) -> None:
    """A change of one tensor is refused, or a line that was not shown `before` names it."""
    whole = folder.file.read_bytes()
    beside = folder.file.with_name("model-2.safetensors")
    weights = load_file(folder.file)
    try:
        if change == "doubled in another file":
            save_file({name: weights[name]}, beside, metadata={"format": "pt"})
        else:
            save_file(changed(weights, name, change), folder.file, metadata={"format": "pt"})
        notes = folder.notes()
    except UserError:
        return
    finally:
        folder.file.write_bytes(whole)
        beside.unlink(missing_ok=True)
    stem = beside.name if change == "doubled in another file" else name.rpartition(".")[0]
    new = [note for note in notes if note not in before]
    assert any(stem in note or "head" in note for note in new), (name, change, notes)


def pairs() -> list[tuple[str, str]]:
    """Each family and each thing in a folder at least once."""
    count = max(len(FAMILIES), len(WHAT))
    every = [(FAMILIES[i % len(FAMILIES)], WHAT[i % len(WHAT)]) for i in range(count)]
    return [pair for pair in every if pair not in NONE]


@pytest.mark.parametrize(("family", "what"), pairs())
def test_a_changed_tensor_is_refused_or_named(family: str, what: str, tmp_path: Path) -> None:
    folder = made(tmp_path, family, what)
    before = folder.notes()
    names = [*layers([*load_file(folder.file)])]
    draw = random.Random(f"{family} {what}")
    for change in CHANGES:
        if change != "doubled in another file" or not folder.adapter:
            check_change(folder, before, draw.choice(names), change)


@pytest.mark.families
@pytest.mark.parametrize(
    ("family", "what"),
    [(family, what) for family in FAMILIES for what in WHAT if (family, what) not in NONE],
)
def test_each_changed_tensor_is_refused_or_named(family: str, what: str, tmp_path: Path) -> None:
    folder = made(tmp_path, family, what)
    before = folder.notes()
    for name in layers([*load_file(folder.file)]):
        for change in CHANGES:
            if change != "doubled in another file" or not folder.adapter:
                check_change(folder, before, name, change)


def test_a_trained_head_is_read_under_any_name(tmp_path: Path) -> None:
    for number, names in enumerate(
        [("reward_head.out.weight", "reward_head.out.bias"), *HEADS.values()]
    ):
        folder = tmp_path / str(number)
        written(folder, configured("qwen3", {}))
        with_head(folder, names, 32)
        model: Any = build(read_config(str(folder)), "value")
        fill(model, str(folder), CPU)
        stored = load_file(folder / "model.safetensors")
        assert torch.equal(model.score.weight, stored[names[0]])
        assert torch.equal(model.score.bias, stored[names[1]])
        (note, *_) = [
            *check_folder(read_config(str(folder)), str(folder), "value", random_init=False),
            "",
        ]
        assert (names[0] in note) == (names[0] != "score.weight")


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"critic.0.weight": torch.ones(32, 32), "critic.2.weight": torch.ones(1, 32)},
        {"a.weight": torch.ones(1, 32), "b.weight": torch.ones(1, 32)},
        {"quality.weight": torch.ones(3, 32)},
    ],
    ids=["none", "of two layers", "two", "of three numbers"],
)
def test_a_head_that_starts_new_is_said_with_what_is_not_used(more: Any, tmp_path: Path) -> None:
    written(tmp_path, configured("qwen3", {}))
    edited(tmp_path, lambda weights: weights | more)
    config = read_config(str(tmp_path))
    new, unused = check_folder(config, str(tmp_path), "value", random_init=False)
    assert "head is newly initialised" in new
    assert all(name in unused for name in ("lm_head.weight", *more))
    model: Any = build(config, "value")
    fill(model, str(tmp_path), CPU)
    assert not model.score.weight.any()


@pytest.mark.parametrize("where", ["config.json", "a tensor", "another tensor"])
def test_what_normalises_a_rewards_scores_is_refused(where: str, tmp_path: Path) -> None:
    config = configured("llama", {})
    config.num_labels = 1
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path)
    if where == "config.json":
        configure(tmp_path, mean=0.25, std=2.0)
    else:
        name = {"a tensor": "std", "another tensor": "running.offset"}[where]
        edited(tmp_path, lambda weights: weights | {name: torch.ones(1)})
    for kind in ("reward", "value"):
        with pytest.raises(UserError, match="next to the head"):
            check_folder(read_config(str(tmp_path)), str(tmp_path), kind, random_init=False)


@pytest.mark.parametrize(
    ("name", "bounds", "fits"),
    [("value", (0.0, 1.0), True), ("value", (0.0, 2.0), False), ("value", None, False),
     ("reward", (0.0, 1.0), False)],
)  # fmt: skip
def test_logits_of_bounded_values_are_read_with_their_bounds_alone(
    name: str, bounds: Any, fits: bool, tmp_path: Path
) -> None:
    written(tmp_path, configured("llama", {"num_labels": 1, "value_range": [0.0, 1.0]}))
    config = Config(value=ValueConfig(range=bounds))
    if fits:
        for path in (str(tmp_path), "tiny"):  # a head that has learned, and one to write
            model = describe(config, name, "x", path, "")
            assert vars(model.config)["value_range"] == [0.0, 1.0]
    else:
        with pytest.raises(UserError, match=r"x: .* --value.range .*=\[0.0, 1.0\]$"):
            describe(config, name, "x", str(tmp_path), "")


@pytest.mark.parametrize("wrong", [5, "01", [0], [0, 1, 2], {"a": 1}, [None, None]])
def test_bounds_that_are_none_are_a_short_line(wrong: Any, tmp_path: Path) -> None:
    written(tmp_path, configured("llama", {"num_labels": 1, "value_range": wrong}))
    config = Config(value=ValueConfig(range=(0.0, 1.0)))
    with pytest.raises(UserError, match=r"^[^\n]*value_range="):
        describe(config, "value", "x", str(tmp_path), "")


def test_fp8_is_said_and_scales_that_fit_no_block_are_refused(tmp_path: Path) -> None:
    written(tmp_path, configured("qwen3", {}))
    edited(tmp_path, in_fp8)
    blocks = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    configure(tmp_path, quantization_config=blocks)

    def notes() -> list[str]:
        config = read_config(str(tmp_path))
        return check_folder(config, str(tmp_path), "policy", random_init=False)

    assert "14 weights are FP8" in notes()[0]
    name = "model.layers.1.mlp.up_proj.weight"
    for scales in (
        torch.ones(2), torch.ones(5, 2), torch.ones(2, 2), torch.ones(3, 2).to(torch.int8),
    ):  # fmt: skip
        edited(tmp_path, lambda weights, scales=scales: weights | {f"{name}_scale_inv": scales})
        with pytest.raises(UserError, match=name):
            notes()
    edited(tmp_path, lambda weights: weights | {f"{name}_scale_inv": torch.full((3, 2), 2.0)})
    model: Any = build(read_config(str(tmp_path)), "policy")
    fill(model, str(tmp_path), CPU)
    stored = load_file(tmp_path / "model.safetensors")[name].float()
    up = model.get_parameter(name)
    assert torch.equal(up, 2 * stored), "48 rows in blocks of 16"


def test_fp8_weights_with_more_dimensions_than_blocks_are_refused(tmp_path: Path) -> None:
    """Stacked experts, as gpt-oss stores them."""
    written(tmp_path, configured("gpt_oss", MIXED))
    names = [key for key in load_file(tmp_path / "model.safetensors") if key.endswith("down_proj")]

    def stacked_in_fp8(weights: dict[str, Tensor]) -> dict[str, Tensor]:
        scale = {f"{names[0]}_scale_inv": torch.ones(len(weights[names[0]]), 1, 1)}
        return weights | {names[0]: weights[names[0]].to(torch.float8_e4m3fn)} | scale

    edited(tmp_path, stacked_in_fp8)
    blocks = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    configure(tmp_path, quantization_config=blocks)
    with pytest.raises(UserError, match=f"{names[0]} is stored as F8_E4M3"):
        check_folder(read_config(str(tmp_path)), str(tmp_path), "policy", random_init=False)


@pytest.mark.parametrize("shape", [(48, 1), (1, 32), (24, 2), ()])
def test_fp8_scales_without_blocks_are_as_many_as_divide_the_weight(shape: tuple, tmp_path: Path):
    written(tmp_path, configured("qwen3", {}))
    edited(tmp_path, in_fp8)
    configure(tmp_path, quantization_config={"quant_method": "fp8", "weight_block_size": None})
    name = "model.layers.1.mlp.up_proj.weight"
    names = [key for key in load_file(tmp_path / "model.safetensors") if key.endswith("_scale_inv")]
    scales = 1 + torch.arange(math.prod(shape)).float().reshape(shape)
    plain = {key: torch.ones(()) for key in names}
    edited(tmp_path, lambda weights: weights | plain | {f"{name}_scale_inv": scales})
    model: Any = build(read_config(str(tmp_path)), "policy")
    fill(model, str(tmp_path), CPU)
    stored = load_file(tmp_path / "model.safetensors")[name].float()
    wide = scales.reshape(shape or (1, 1))
    for dim, size in enumerate(stored.shape):
        wide = wide.repeat_interleave(size // wide.shape[dim], dim)
    assert torch.equal(model.get_parameter(name), wide * stored)


def test_two_folders_in_one_are_told_apart(tmp_path: Path) -> None:
    written(tmp_path, configured("qwen3", {}))
    weights = load_file(tmp_path / "model.safetensors")
    names = sorted(weights)
    parts = {"a.safetensors": names[:5], "b.safetensors": names[4:]}
    for file, part in parts.items():
        save_file({name: weights[name] for name in part}, tmp_path / file, {"format": "pt"})
    places = {name: file for file, part in parts.items() for name in part}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    config = read_config(str(tmp_path))
    (note,) = check_folder(config, str(tmp_path), "policy", random_init=False)
    assert "a.safetensors" in note
    assert "b.safetensors" in note
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UserError, match=f"{names[4]} is in b.safetensors and in another file"):
        check_folder(config, str(tmp_path), "policy", random_init=False)
    save_file({name: weights[name] for name in names[:4]}, tmp_path / "a.safetensors")
    assert check_folder(config, str(tmp_path), "policy", random_init=False) == []


# settings of peft's adapters -> whether these compute what is computed here
SETTINGS: list[tuple[dict[str, Any], bool]] = [
    ({"init_lora_weights": "gaussian"}, True),
    ({"init_lora_weights": False, "lora_dropout": 0.1, "task_type": "SEQ_CLS"}, True),
    ({"use_dora": False, "kasa_config": None, "megatron_core": "megatron.core"}, True),
    ({"init_lora_weights": "pissa_niter_4"}, False),
    ({"init_lora_weights": "olora"}, False),
    ({"init_lora_weights": "corda"}, False),
    ({"init_lora_weights": "loftq", "loftq_config": {"loftq_bits": 4}}, False),
    ({"alora_invocation_tokens": [3, 4]}, False),
    ({"arrow_config": {"top_k": 2}}, False),
    ({"layer_replication": [[0, 2], [1, 2]]}, False),
    ({"trainable_token_indices": [5]}, False),
    ({"alpha_pattern": {"q_proj": 1}}, False),
    ({"use_rslora": True}, False),
    ({"bias": "lora_only"}, False),
    ({"fan_in_fan_out": True}, False),
    ({"peft_type": "ADALORA"}, False),
    ({"a_field_of_a_later_version": "on"}, False),
    ({"modules_to_save": ["embed_tokens"]}, False),
]


def test_an_adapter_of_another_kind_is_refused_by_what_is_known_to_be_harmless(
    tmp_path: Path,
) -> None:
    written(tmp_path / "model", configured("qwen3", {}))
    adapter = save_adapter(tmp_path / "model", tmp_path / "adapter", "policy")
    config = read_config(str(tmp_path / "model"))
    file = tmp_path / "adapter" / lora.SETTINGS
    settings = json.loads(file.read_text())
    for more, harmless in SETTINGS:
        file.write_text(json.dumps(settings | more))
        if harmless:
            assert adapter.check(config, tmp_path / "adapter") == []
        else:
            with pytest.raises(UserError, match=next(iter(more))):
                adapter.check(config, tmp_path / "adapter")


@pytest.mark.parametrize("name", ["attn_implementation", "_attn_implementation"])
@pytest.mark.parametrize(
    "value", ["flash_attention_3", "flex_attention", "acme/kernel", {"": "eager"}]
)
def test_an_attention_that_a_config_names_is_not_taken(
    name: str, value: Any, tmp_path: Path
) -> None:
    written(tmp_path, configured("qwen3", {}))
    configure(tmp_path, **{name: value})
    config = read_config(str(tmp_path))
    assert check_folder(config, str(tmp_path), "policy", random_init=False) == []
    built: Any = build(config, "policy")
    assert built.config._attn_implementation == "sdpa"
