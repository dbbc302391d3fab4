"""The configuration, resolved before any process group or GPU is touched: what "auto" came to,
every model's folder."""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.utils import WeakFileLock
from transformers import dynamic_module_utils

from splitppo.config import Config, DataConfig, Offload
from splitppo.config.cli import map_paths
from splitppo.data import PromptSet
from splitppo.engine.build import engine_kind
from splitppo.engine.vllm import TESTED, vllm_version
from splitppo.errors import UserError
from splitppo.job.launch import Launch
from splitppo.models import build, hub, tiny
from splitppo.models.cost import Cost
from splitppo.models.probe import find_undriven
from splitppo.models.sequence import check_heads
from splitppo.models.tokenizer import eos_ids, read_tokenizer, vocabulary_size
from splitppo.models.trainable import cost_of
from splitppo.placement import Placement, Role, check_sets, holders
from splitppo.rewards.model import check_steps
from splitppo.run.folder import TRAINING, VALIDATION, check_run_folder, inputs_of
from splitppo.run.models import Model, check_sizes, hold_against, read_model, setting_of
from splitppo.run.sources import model_paths


@dataclass(frozen=True)
class Resolved:
    """What a run is, the same on every rank but for `device`."""

    # the settings; a hub name has the commit that is used, `offload` what `auto` came to
    config: Config
    local: Mapping[str, str]  # hub name -> its path in the cache
    placement: Placement
    local_world: int  # ranks of a node
    device: torch.device
    dtype: torch.dtype  # of forward and backward passes
    compiled: bool  # whether layers are compiled
    engine: str  # `hf` or `vllm`
    # that the run loads, by name: policy, perhaps value, reference, reward and teacher
    models: Mapping[str, Model]
    tokenizer: Any  # the policy's
    vocabulary_size: int  # ids from 0 that the policy may sample
    # ids that end its responses, and what says so
    eos: Mapping[int, str] = field(default_factory=dict)
    # the time in prompts whose template shows it
    now: datetime = field(default_factory=datetime.now)
    user_settings: Sequence[str] = ()  # the settings that the user has set
    teacher_prompt: int = 0  # tokens of the longest prompt that a teacher alone reads

    @property
    def longest(self) -> int:
        """Most tokens of a row with turns: what all models can read, if they have a limit; else
        what its limits of turns and tokens come to."""
        env = self.config.env
        bound = self.config.rollout.max_row_tokens + env.max_turns * env.max_observation_tokens
        return min(
            build.most_positions(model.config.get_text_config())[0] or bound
            for name, model in self.models.items()
            if name != "reward"
        )

    def row_tokens(self, model: str) -> int:
        """Most tokens of a row as a model reads it."""
        rollout = self.config.rollout
        taught = self.teacher_prompt + rollout.max_new_tokens if model == "teacher" else 0
        return max(rollout.max_row_tokens, taught)

    @property
    def data(self) -> DataConfig:
        """The configuration's, with local files."""
        return map_paths(self.config.data, lambda _, file: self.local.get(file, file), "data.")

    def role_of(self, model: str) -> Role:
        """The group that holds a model."""
        return holders(self.config)[model]

    def base_of(self, model: str) -> str:
        """The model whose module holds it: with a shared base the policy's holds the value
        model."""
        return "policy" if model == "value" and self.config.value.share_base else model

    def cost(self, name: str) -> Cost:
        """What a model takes in this run."""
        guest = self.base_of(name) != name
        return _cost(self.models[name], self.dtype, self.compiled and name != "reward", guest)

    @property
    def unreplayed(self) -> str:
        """Why the engine's choice of experts is not replayed; "" if it is."""
        return _unreplayed(self.config.policy.replay_routing, self.models["policy"], self.engine)

    def offload(self, model: str) -> Offload:
        """What of a model is in host memory while it is not needed."""
        config = self.config
        held: dict[str, Offload] = {
            "policy": config.policy.offload,
            "value": config.value.offload,
            "reference": "all" if config.reference.offload else "none",
            "reward": "all" if config.reward.model_offload else "none",
            "teacher": "all" if config.teacher.offload else "none",
        }
        return held[model]

    @property
    def notes(self) -> list[str]:
        """What the user should know of the models' folders, a line each; of a folder that two
        models have, once."""
        models = self.models.values()
        return [*dict.fromkeys(f"{model.name}: {note}" for model in models for note in model.notes)]

    def inputs(self, *splits: PromptSet) -> dict[str, str]:
        """What identifies all that the run reads: its files (`inputs_of`), and the prompts of its
        splits (training, held out) as they are rendered, if they are given."""
        names = {name: model.name for name, model in self.models.items()}
        prompts: dict[str, PromptSet] = dict(zip((TRAINING, VALIDATION), splits, strict=False))
        return inputs_of(self.config, names, self.local, prompts)

    def to_json(self) -> str:
        """As the dry run prints it and the run's folder keeps it (RUN/resolved.json)."""
        return json.dumps(
            {
                "placement": self.placement.mode,
                **{role: len(ranks) for role, ranks in self.placement.groups.items()},
                "device": self.device.type,
                "dtype": str(self.dtype).removeprefix("torch."),
                "compiled": self.compiled,
                "engine": self.engine,
                "vocabulary_size": self.vocabulary_size,
                "models": {
                    name: {
                        "name": model.name,
                        "folder": model.path
                        if model.path == "tiny"
                        else os.path.abspath(model.path),
                        "type": model.config.model_type,
                        "group": self.role_of(name),
                        "parameters": model.counts.parameters,
                        "active": model.counts.active,
                        "random_init": model.random_init,
                        "packed": model.packed,
                        "tensor_parallel": self.config.set_shape(name).tensor,
                        "sequence_parallel": self.config.set_shape(name).sequence,
                        "offload": self.offload(name),
                        "trained": model.counts.trained,
                    }
                    for name, model in self.models.items()
                },
            },
            indent=1,
        )


def check_groups(resolved: Resolved) -> None:
    """Refuses settings of two groups where there is one, a critic group without a model, and sets
    that don't fill their group."""
    colocated = resolved.placement.colocated
    if resolved.config.placement.reference == "critic" and colocated:
        raise UserError(
            "placement.reference=critic needs two groups, but every rank plays both roles; unset it"
        )
    if not colocated and any(resolved.base_of(name) != name for name in resolved.models):
        raise UserError(
            "value.share_base=True: policy and value model are on different ranks "
            f"(placement.mode={resolved.placement.mode}); use placement.mode=colocated"
        )
    if not (colocated or "critic" in map(resolved.role_of, resolved.models)):
        raise UserError(
            f"ppo.baseline={resolved.config.ppo.baseline} has no value model, so placement's "
            "critic ranks would hold no model; use placement.mode=colocated, or give them a "
            "reward.model, a teacher, or the reference of ppo.kl_coef (placement.reference=critic)"
        )
    check_sets(resolved.config, resolved.placement, local_world=resolved.local_world)
    for name, model in resolved.models.items():
        shape = resolved.config.set_shape(name)
        if shape.sequence > 1:
            check_heads(model.config, *shape, f"{setting_of(name)}={model.name}")


@cache
def _unreplayed(setting: str, policy: Model, engine: str) -> str:
    if setting == "off":
        return "it is off"
    if policy.counts.active == policy.counts.parameters:
        return f"type {policy.config.model_type!r} has no experts to choose from"
    if engine == "vllm" and not (vllm_version() or "").startswith(TESTED):
        return f"vLLM {vllm_version()} is untested; {' and '.join(TESTED)}x report experts"
    return find_undriven(policy.config)


@cache
def _cost(model: Model, dtype: torch.dtype, compiled: bool, shared: bool) -> Cost:
    return cost_of(
        model.config, model.trainable, model.counts, dtype, compiled=compiled, shared=shared
    )


def resolve(
    config: Config, placement: Placement, local_world: int, device: torch.device, *, probe: bool
) -> Resolved:
    """Fetches what is named on the hub; reads and checks each model's folder. With `probe` it tries
    whether the models run on packed rows: one rank does it for all (`main.agree`). Raises UserError
    if a model can't be read, or run."""
    dtype = dtype_of(config, device)
    wanted = config.compute.packing == "on" or (
        config.compute.packing == "auto" and device.type == "cuda" and dtype != torch.float32
    )
    config, local = pin(config)
    if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") == "0":
        # a setting that makes this another run is told before what follows from the setting
        check_run_folder(config)
    own_code = config.policy.trust_remote_code
    # transformers copies a model's own code to a folder that the ranks share: one rank at a time
    shared = WeakFileLock(Path(dynamic_module_utils.HF_MODULES_CACHE) / "splitppo.lock")
    with shared if own_code else nullcontext():
        models = {
            name: read_model(config, name, origin, local, wanted, probe)
            for name, origin in model_paths(config).items()
        }
        if "reward" in models:
            other = read_tokenizer(models["reward"].path, own_code=own_code)
            check_steps(other, config.reward)
        policy = models["policy"]
        tokenizer = (
            tiny.build_tokenizer()
            if policy.path == "tiny"
            else read_tokenizer(policy.path, own_code=own_code)
        )
    size = vocabulary_size(tokenizer)
    eos = eos_ids(policy.config, tokenizer, None if policy.path == "tiny" else Path(policy.path))
    check_sizes(config, models, size)
    return Resolved(
        config=config,
        local=local,
        placement=placement,
        local_world=local_world,
        device=device,
        dtype=dtype,
        compiled={"on": True, "off": False, "auto": device.type == "cuda"}[config.compute.compile],
        engine=engine_kind(config, device.type),
        models={
            name: hold_against(tokenizer, policy, name, model, eos, own_code=own_code)
            for name, model in models.items()
        },
        tokenizer=tokenizer,
        vocabulary_size=size,
        eos=eos,
    )


def pick_device(config: Config, launch: Launch) -> torch.device:
    """The rank's device: one GPU each, or the CPU, on which the embedded model trains where GPUs
    are too few."""
    gpus = torch.cuda.device_count()
    wanted = config.compute.device
    few = gpus < launch.local_world
    lacking = not gpus or (few and config.policy.path == "tiny")
    if wanted == "cpu" or (wanted == "auto" and lacking):
        return torch.device("cpu")
    if few:
        raise UserError(
            f"compute.device={wanted} with {launch.local_world} ranks on a node of {gpus} GPUs: "
            f"each rank needs its own; start {f'{gpus} ranks' if gpus else 'on a GPU machine'} "
            "or set --compute.device cpu"
        )
    return torch.device("cuda", launch.local_rank)


def dtype_of(config: Config, device: torch.device) -> torch.dtype:
    """The precision of forward and backward."""
    if config.compute.dtype != "auto":
        return getattr(torch, config.compute.dtype)
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def pin(config: Config) -> tuple[Config, dict[str, str]]:
    """The configuration with the commit in each hub name, and each such name's path in the cache. A
    run that goes on keeps its commits. Raises UserError if what is named can't be found or
    fetched."""
    models = {*model_paths(config).values()}
    local = {}
    file = Path(config.run_dir or "", "config.toml")
    begun = config.run_dir is not None and file.is_file()
    before = file.read_text(errors="replace") if begun else ""
    own_code = config.policy.trust_remote_code

    def find(setting: str, name: str) -> str:
        is_model = setting.endswith((".path", ".model")) and name in models
        if not is_model and not setting.startswith("data."):
            return name
        pinned, path = hub.find(setting, name, before=before, own_code=own_code)
        if path != pinned:
            local[pinned] = path
        return pinned

    return map_paths(config, find), local
