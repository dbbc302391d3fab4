"""The run's models: their folders, read and held against what they will be given."""

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from splitppo.config import Config, PolicyConfig, ValueConfig
from splitppo.config.toml import flag
from splitppo.data import PromptSet
from splitppo.errors import UserError
from splitppo.models import build, lora, tiny, weights
from splitppo.models.cost import Counts
from splitppo.models.probe import find_mismatch
from splitppo.models.tokenizer import (
    eos_ids,
    find_differences,
    has_tokenizer,
    read_tokenizer,
    turn_end,
)
from splitppo.models.trainable import NotTrained, Trainable, count
from splitppo.run.folder import fingerprint
from splitppo.run.sources import model_paths

KINDS: Mapping[str, build.Kind] = {
    "policy": "policy",
    "reference": "policy",
    "value": "value",
    "reward": "reward",
    "teacher": "policy",
}
TRAINED = ("policy", "value")


@dataclass(frozen=True, eq=False)
class Model:
    """One of the run's models."""

    kind: build.Kind
    name: str  # as the configuration names it
    path: str  # its folder, or `tiny`: the embedded model, built in the run's folder
    config: PretrainedConfig
    random_init: bool  # whether its weights are drawn from the seed
    packed: bool  # whether it runs on packed rows
    trainable: Trainable  # what of it is trained
    notes: tuple[str, ...] = ()  # what the user should know of its folder
    # ids of the policy's added tokens that are others in its tokenizer
    other_tokens: frozenset[int] = frozenset()

    def folder(self, run_dir: Path) -> Path:
        return run_dir / "tiny" if self.path == "tiny" else Path(self.path)

    @cached_property
    def counts(self) -> Counts:
        """Raises UserError if what is frozen, or has adapters, matches nothing."""
        return count(self.config, self.trainable)


def setting_of(name: str) -> str:
    """The setting that names a model."""
    return "reward.model" if name == "reward" else f"{name}.path"


def describe(
    config: Config, name: str, origin: str, path: str, base: str, *, wanted: bool = False
) -> Model:
    """What settings and config.json say of a model in the folder `path`, unchecked. A teacher's
    folder may hold an adapter over the policy's, `base`; without a folder of its own it starts as
    the policy does. `wanted`: that it runs on packed rows."""
    adapter = None
    if name == "teacher" and Path(path, lora.SETTINGS).is_file():
        adapter = path
        path = base
    elif name == "teacher" and not config.teacher.path:
        adapter = config.policy.lora.path
    own_code = config.policy.trust_remote_code
    model_config = (
        tiny.model_config() if path == "tiny" else build.read_config(path, own_code=own_code)
    )
    model_config = build.bound(
        model_config, config.value.range if name == "value" else None, origin
    )
    if name == "value":
        model_config = build.shorten(model_config, config.value.layers, origin)
    if name == "reward":
        model_config = build.choose_label(model_config, config.reward.label, origin)
    return Model(
        kind=KINDS[name],
        name=origin,
        path=path,
        config=model_config,
        random_init=config.policy.random_init,
        # all steps of a row in one pass
        packed=config.set_shape(name).sequence > 1
        or bool(config.reward.steps if name == "reward" else wanted),
        trainable=_trainable(config, name, path, adapter),
    )


def read_model(
    config: Config, name: str, origin: str, local: Mapping[str, str], wanted: bool, probe: bool
) -> Model:
    """Reads and checks a model's folder. `local`: hub name -> its path."""
    path, base = (local.get(each, each) for each in (origin, config.policy.path))
    model = describe(config, name, origin, path, base, wanted=wanted)
    if model.path != "tiny":
        notes = weights.check_folder(
            model.config, model.path, model.kind, random_init=model.random_init
        )
        model = replace(model, notes=tuple(notes))
        if probe and (model.packed or name != "reward"):
            model = replace(model, packed=_packs(config, name, model))
    if name in TRAINED:
        _ = model.counts  # refuses what matches nothing
    notes = model.trainable.check(model.config)
    return replace(model, notes=(*model.notes, *notes))


def _trainable(config: Config, name: str, path: str, adapter: str | None) -> Trainable:
    """What of a model is trained; `path`: its folder; `adapter`: of a teacher."""

    def digest() -> str:
        if config.policy.random_init or path == "tiny":
            return f"drawn from seed {config.seed}"
        files = sorted(Path(path).glob("*.safetensors"))
        return hashlib.sha256("".join(map(fingerprint, files)).encode()).hexdigest()[:16]

    if adapter:
        where = f"teacher.path={adapter}: " if config.teacher.path else ""
        return lora.frozen(Path(adapter), config.policy.path, digest, where)
    if name not in TRAINED:
        return NotTrained(KINDS[name])
    settings: PolicyConfig | ValueConfig = getattr(config, name)
    if settings.lora.rank:
        return lora.Adapter(KINDS[name], settings.lora, model_paths(config)[name], digest)
    return Trainable(KINDS[name], frozen=settings.freeze)


def _packs(config: Config, name: str, model: Model) -> bool:
    """Whether a model runs on packed rows, if that is wanted; it must run on padded rows at
    least."""
    ranks = config.set_shape(name).sequence
    why = find_mismatch(model.config, model.kind, packed=model.packed, cut=ranks > 1)
    where = f"{setting_of(name)}={model.name}"
    if why and ranks > 1:
        setting = f"{'fsdp' if name == 'policy' else name}.sequence_parallel"
        raise UserError(
            f"{setting}={ranks}: {where}: its rows can't be split: {why}; set {flag(setting)} 1"
        )
    if name == "reward":  # else it takes a pass a step
        return not why
    if why and model.packed and config.compute.packing == "on":
        raise UserError(
            f"compute.packing=on: {where}: rows can't be packed: {why}; use auto or off"
        )
    if why and (not model.packed or find_mismatch(model.config, model.kind, packed=False)):
        raise UserError(
            f"{where}: type {model.config.model_type!r} gives other outputs in splitppo than in "
            f"transformers: {why}; use another model"
        )
    return model.packed and not why


def check_sizes(
    config: Config, models: Mapping[str, Model], vocabulary: int, longest: int = 1
) -> None:
    """Raises UserError if a model can't read the policy's token ids, or rows as long as they may
    become. `longest`: tokens of the longest prompt, where `rollout.max_prompt_tokens` is unset; at
    least 1 as long as no data are read."""
    if config.distill.top_k > vocabulary:
        raise UserError(
            f"distill.top_k={config.distill.top_k} is more than the {vocabulary} tokens of the "
            "policy's tokenizer; lower it"
        )
    prompt = config.rollout.max_prompt_tokens or longest
    new = config.rollout.max_new_tokens
    context = config.rollout.max_context or 0
    for name, model in ((name, model) for name, model in models.items() if name != "reward"):
        text = model.config.get_text_config()
        most, setting = build.most_positions(text)
        if most and prompt + new > most:
            raise UserError(
                f"a prompt of {prompt} tokens and rollout.max_new_tokens={new} are {prompt + new} "
                f"together, more than the {most} ({setting}) that {name}.path={model.name} can "
                "read; lower rollout.max_new_tokens, leave out longer prompts by "
                "rollout.max_prompt_tokens and data.overlong, or use another model"
            )
        if most and context > most:
            raise UserError(
                f"rollout.max_context={context} is more than the {most} ({setting}) that "
                f"{name}.path={model.name} can read; use {most}, or leave it unset"
            )
        if text.vocab_size < vocabulary:
            raise UserError(
                f"{name}.path={model.name}: its vocabulary of {text.vocab_size} is smaller than "
                f"the policy's tokenizer ({vocabulary}); "
                f"the {name} must read the policy's token ids"
            )


def _check_ends(tokenizer: Any, other: Any, teacher: Model, ends: Collection[int]) -> None:
    """Refuses a teacher that ends responses otherwise than the policy: it would punish every row's
    end. `other`: its tokenizer. Of several ends the one behind a dialogue's answer counts, where a
    template shows it: the others end texts."""
    folder = None if teacher.path == "tiny" else Path(teacher.path)
    others = eos_ids(teacher.config, other, folder)
    due = {*turn_end(tokenizer)[:1]} & {*ends} or {*ends}
    turn = {*turn_end(other)[:1]} & {*others}
    if not (due <= {*others} and turn <= {*ends}):
        there, here = (
            ", ".join(map(str, of.convert_ids_to_tokens(sorted(ids))))
            for of, ids in ((other, turn or others), (tokenizer, due))
        )
        raise UserError(
            f"teacher.path={teacher.name}: the teacher's responses end in "
            f"{there or 'no token'}, the policy's in {here}, so the teacher would penalise the end "
            "of every response; use a teacher with the policy's end token, or change the "
            "teacher's eos_token_id"
        )


def hold_against(
    tokenizer: Any, policy: Model, name: str, model: Model, ends: Collection[int], *, own_code: bool
) -> Model:
    """A model; one that reads the policy's token ids held against its tokenizer. Raises a UserError
    if an id stands for another token, unless that is an added one that ends no response: then
    prompts must not hold it (`check_prompt_tokens`). A reward model may read texts."""
    if name == "reward" or model.random_init or model.path == policy.path:
        return model
    setting = f"{name}.path={model.name}"
    notes = [*model.notes]
    other = tokenizer
    if model.path == "tiny":
        other = tiny.build_tokenizer()
    elif has_tokenizer(model.path):
        other = read_tokenizer(model.path, own_code=own_code)
    else:
        facts = [(each.config.model_type, each.config.vocab_size) for each in (model, policy)]
        if facts[0] != facts[1]:
            raise UserError(
                f"{setting}: this model has no tokenizer, and its type and vocabulary size "
                f"{facts[0]} are not the policy's {facts[1]}; if both have the same tokenizer, "
                "save it in this model's folder; else use another model"
            )
        notes.append(
            "it has no tokenizer; its type and vocabulary are the policy's, so its ids should be"
        )
    differences = find_differences(other, tokenizer)
    added = tokenizer.added_tokens_decoder
    wrong = [token for token in differences if token in ends or token not in added]
    if wrong:
        there, here = differences[min(wrong)]
        raise UserError(
            f"{setting}: this model reads the policy's token ids, but id {min(wrong)} is "
            f"{there!r} in its tokenizer and {here!r} in the policy's; "
            "name a model with the policy's tokenizer"
        )
    if name == "teacher":
        _check_ends(tokenizer, other, model, ends)
    if differences:
        first, (there, here) = min(differences.items())
        notes.append(
            f"{len(differences)} added tokens differ in its tokenizer, the first is id {first} "
            f"({there!r}; {here!r} in the policy's); prompts must not contain them"
        )
    return replace(model, notes=tuple(notes), other_tokens=frozenset(differences))


def check_prompt_tokens(models: Mapping[str, Model], tokenizer: Any, *splits: PromptSet) -> None:
    """Raises a UserError if a prompt holds a token that is another in a model's tokenizer."""
    for name, model in models.items():
        for prompt in (prompt for split in splits for prompt in split.prompts):
            read = (name == "teacher" and prompt.teacher) or prompt
            if model.other_tokens and (held := model.other_tokens.intersection(read.tokens)):
                token = min(held)
                raise UserError(
                    f"{name}.path={model.name}: prompts contain "
                    f"{tokenizer.convert_ids_to_tokens(token)!r} (id {token}), which is another "
                    "token in this model's tokenizer; name a model with the policy's tokenizer"
                )
