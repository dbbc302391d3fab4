"""What a run is made from: its paths as RUN records them, and the copies in RUN by which it stands
alone.

RUN/models/NAME holds a model's configuration and tokenizer; models that share a folder are there
once, under the first of their names. RUN/rewards/PATH holds the reward file of the absolute path
PATH, without the modules that it imports.
"""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from splitppo.config import Config
from splitppo.config.cli import map_paths
from splitppo.errors import UserError
from splitppo.models import hub
from splitppo.models.tokenizer import TOKENIZER_FILES


def absolute(config: Config, run: Path) -> Config:
    """The configuration as the folder `run` records it: the paths of local files and models are
    absolute, and that of a copy in RUN/rewards is the original's."""

    def change(setting: str, name: str) -> str:
        if ".py:" in name:
            return os.path.abspath(name)
        # by a word, and not by a path
        named = name == "tiny" or setting.startswith(("env.", "log."))
        is_local = "." in setting and not named and os.path.exists(name)
        return os.path.abspath(name) if is_local else name

    return map_paths(config, change)


def model_paths(config: Config) -> dict[str, str]:
    """The models that the run loads, as the configuration names them."""
    paths = {"policy": config.policy.path}
    if config.has_value:
        paths["value"] = config.value.path or config.policy.path
    if config.has_kl and not config.base_is_reference:
        paths["reference"] = config.reference.path or config.policy.path
    if config.reward.model:
        paths["reward"] = config.reward.model
    if config.has_teacher:
        paths["teacher"] = config.teacher.path or config.policy.path
    return paths


def keep_copies(config: Config, models: Mapping[str, str], run: Path) -> None:
    """Copies each model's configuration and tokenizer, and the reward files, into the run's folder.
    `models`: model -> its folder, or `tiny`."""
    sources = {source: name for name, source in reversed([*models.items()]) if source != "tiny"}
    for source, name in sources.items():
        copy = run / "models" / name
        if copy.resolve() != Path(source).resolve():
            copy.mkdir(parents=True, exist_ok=True)
            for old in _without_weights(copy):
                old.unlink()
            for file in _without_weights(Path(source)):
                shutil.copyfile(file, copy / file.name)
    env = config.env
    functions = (
        *(*config.reward.function, *config.reward.validation, *env.tools, *config.log.trackers),
        *filter(None, (env.path, config.ppo.loss, config.ppo.advantages)),
    )
    for path in {name.rpartition(":")[0] for name in functions} - {""}:
        file = Path(os.path.realpath(path))
        copy = run.joinpath("rewards", *Path(os.path.abspath(path)).parts[1:])
        if not file.is_relative_to(run.resolve() / "rewards"):
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, copy)


def _without_weights(folder: Path) -> set[Path]:
    """What the tools need of a model's folder beside its weights."""
    patterns = ("config.json", "generation_config.json", *TOKENIZER_FILES, "*.py")
    return {file for pattern in patterns for file in folder.glob(pattern) if file.is_file()}


def model_folder(config: Config, run: Path, kind: str, *, weights: bool = False) -> Path:
    """The folder with the configuration and the tokenizer of a run's model, and with the `weights`
    that it started from: RUN's own, or else the folder that RUN names. Raises UserError if neither
    has them."""
    paths = model_paths(config)
    name = next(name for name, path in paths.items() if path == paths[kind])
    copy = run / ("tiny" if paths[kind] == "tiny" else f"models/{name}")
    if any(copy.glob("*.safetensors" if weights else "config.json")):
        return copy
    try:
        return Path(hub.find(f"{kind}.path", paths[kind], fetch=False)[1])
    except UserError as error:
        raise UserError(
            f"{kind}.path={paths[kind]}: no such folder (from {Path.cwd()}), and not in the hub's "
            f"cache; put that model there, or its files into {copy}"
        ) from error
