"""A run's folder: who may use it, whether the run can go on in it, and what it records of settings,
input files and versions.

One run at a time uses a folder: the kernel's lock on RUN/lock, which names the owner, ends with its
process, however that ends. If a host fails, the server of a network file system drops its locks
after a while, NFSv4 after 90 s by default.
"""

import errno
import fcntl
import hashlib
import itertools
import json
import os
import platform
import re
import shlex
import shutil
import socket
import subprocess
import time
import tomllib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import torch

from splitppo.config import Config, cli, toml
from splitppo.data import PromptSet
from splitppo.errors import UserError, say, warn
from splitppo.job.nodes import installed
from splitppo.run import checkpoint
from splitppo.run.files import read_file, read_if_there, write_whole
from splitppo.run.sources import absolute

# settings that may change when a run resumes. What the longest prompt changes, the prompts show
FREE = (
    r"(placement|engine|checkpoint|log|fsdp)\..*|(policy|value|reference|teacher)\.offload"
    r"|value\.share_base"
    r"|compute\.(device|micro_batch_tokens|packing|compile|activation_checkpointing)"
    r"|(reference|value|reward|teacher)\.(tensor|sequence)_parallel"
    r"|reward\.(workers|concurrency|timeout|model_offload)|env\.timeout"
    r"|rollout\.(chunks|max_prompt_tokens)"
    r"|config|run_dir|resume|force|dry_run|world_size|nodes|timeout|steps"
)
# files in the folder of a model or of a data set
READ = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".safetensors", ".arrow")
# in inputs.json
TRAINING = "training prompts as rendered"
VALIDATION = "validation prompts as rendered"
# of a run
FOLDERS = ("checkpoints", "logs", "metrics", "samples", "tensorboard", "tiny", "validation")
# settings of which rank 0's value counts, or none
MAY_DIFFER = ("config", "run_dir", "resume", "force")
BLOCK = 2**18  # bytes read at once
PATIENCE = 120  # seconds that a lock of another host is waited for


def take(folder: Path) -> TextIO:
    """Makes and locks the folder, until the returned file is closed. Waits while the owner's host
    may have failed. Raises UserError if another process holds it."""
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / "lock").open("a+", errors="replace")
    place = f" on {socket.gethostname()} "
    for second in itertools.count():
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                warn(f"{folder} can't be locked ({error}): make sure that no other run uses it")
                break
        file.seek(0)
        owner = file.read() or "an unknown process"
        patience = 1 if place in owner else PATIENCE
        if second >= patience:
            raise UserError(
                f"run_dir={folder} is in use by {owner}; wait for its end, "
                "or choose another --run-dir"
            )
        if second == 0:
            say(f"{folder} is in use by {owner}: waiting {patience} s for its end")
        time.sleep(1)
    file.truncate(0)
    file.write(f"process {os.getpid()}{place}since {time.strftime('%Y-%m-%d %H:%M:%S')}")
    file.flush()
    return file


def check_run_folder(config: Config, inputs: Mapping[str, str] | None = None) -> None:
    """Raises UserError for a folder in which the run can't go on, or a checkpoint that it can't go
    on from; `inputs` (`inputs_of`) are compared if given. Under torchrun --max-restarts this is
    called when the restart count is known: what the first start left in the folder belongs to the
    next one."""
    if config.run_dir is None:
        if config.resume != "auto":
            raise UserError(
                f"--resume {config.resume} needs --run-dir, the folder that this run writes to"
            )
        return
    folder = Path(config.run_dir)
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    for path in (existing, *(path for name in FOLDERS if (path := folder / name).exists())):
        if not path.is_dir():
            raise UserError(
                f"run_dir={folder}: {path} is not a folder; move it away, or choose another "
                "--run-dir"
            )
        if not os.access(path, os.W_OK | os.X_OK):
            raise UserError(
                f"run_dir={folder}: {path} is not writable; make it writable, or choose another "
                "--run-dir"
            )
    resumed_from = checkpoint.find(folder, config.resume)
    begun = not resumed_from and cli.has_steps(folder)
    same = config.checkpoint.every and (folder / "config.toml").is_file()
    if begun and not config.force and not same:
        raise UserError(
            f"run_dir={folder} contains a run without checkpoints; "
            "choose another, or --force to start again in it"
        )
    if begun or (resumed_from and resumed_from.parent.parent.resolve() == folder.resolve()):
        check_same_run(config, folder, inputs)
    if resumed_from and (step := checkpoint.step_of(resumed_from)) > config.steps:
        raise UserError(
            f"steps={config.steps}, but {resumed_from} is of step {step}; raise --steps to continue"
        )


def check_same_run(config: Config, folder: Path, inputs: Mapping[str, str] | None = None) -> None:
    """Raises UserError if settings or `inputs` (`inputs_of`) make this another run than the
    folder's, unless forced."""
    if config.force:
        return
    scheduled = {config.policy.optim.schedule, config.value.optim.schedule} != {"constant"}
    end = ", where the learning rate's schedule ends"
    differences = [
        f"{name} was {was} and is now {now}{end * (name == 'steps')}"
        for name, was, now in changes(config, folder, inputs)
        if not re.fullmatch(FREE, name) or (name == "steps" and scheduled)
    ]
    if differences:
        more = f"; and {len(differences) - 6} more" * (len(differences) > 6)
        raise UserError(
            f"{'; '.join(differences[:6])}{more}: this is another run than the one in {folder}; "
            "restore the old values, choose another --run-dir, or --force to resume anyway"
        )


def changes(
    config: Config, folder: Path, inputs: Mapping[str, str] | None = None
) -> list[tuple[str, str, str]]:
    """(setting or file, old value, new value) of all that differs from the run in `folder`; [] if
    there is no run. Settings that this version lacks are not compared. Files and models are the
    same in any place: RUN has their hashes."""
    remedy = "fix it, or delete it to resume without comparing its contents"
    now: dict[str, str] = {}
    before: dict[str, str] = {}
    if (path := folder / "config.toml").is_file():
        before, now = (
            {
                name: toml.toml_value(_without_place(name, value))
                for name, value in toml.leaves(table)
            }
            for table in (
                read_file(path, tomllib.loads, remedy),
                tomllib.loads(toml.to_toml(absolute(config, folder))),
            )
        )
        known = dict(toml.leaves(asdict(Config())))
        before = {name: value for name, value in before.items() if name in known}
        # a setting that the run's version lacked was as by default
        plain = toml.leaves(tomllib.loads(toml.to_toml(Config())))
        before = {name: toml.toml_value(value) for name, value in plain} | before
    if inputs is not None and (path := folder / "inputs.json").is_file():
        recorded = read_file(path, lambda text: _renamed(dict(json.loads(text)), inputs), remedy)
        # before the data are read there is no hash of the prompts
        now |= {name: recorded[name] for name in (TRAINING, VALIDATION) if name in recorded}
        now |= inputs
        before |= recorded
    return [
        (name, before.get(name, "unset"), now.get(name, "unset"))
        for name in sorted(before.keys() | now.keys())
        if before.get(name, "unset") != now.get(name, "unset")
    ]


def _without_place(setting: str, value: Any) -> Any:
    """What a setting says beside the place of its files: their names, and of a model nothing but
    that it is one."""
    if setting not in cli.PATHS or "." not in setting or value == "tiny":
        return value
    if setting.endswith((".path", ".model")):
        return "a model"
    return [os.path.basename(str(path)) for path in (value if isinstance(value, list) else [value])]


def _renamed(recorded: Mapping[str, str], inputs: Mapping[str, str]) -> dict[str, str]:
    """A run's `recorded` inputs under the keys that `inputs` have for the same setting and file
    name, wherever it lies."""
    names = {key: re.sub(r" .*[ /]", " ", key) for key in (*recorded, *inputs)}
    keys = {name: [key for key in inputs if names[key] == name] for name in names.values()}
    return {(keys[names[key]] or [key]).pop(0): value for key, value in recorded.items()}


def inputs_of(
    config: Config,
    models: Mapping[str, str],
    local: Mapping[str, str],
    prompts: Mapping[str, PromptSet] | None = None,
) -> dict[str, str]:
    """`SETTING FILE` -> size and hash, for each file that the run reads, not for a reward file's
    imports. FILE does not depend on where the hub's cache lies. `models`: model -> its folder or
    hub name. `local`: hub name -> its path. `prompts`: name -> prompts whose texts, as they are
    rendered, have a hash under that name."""
    once = {folder: name for name, folder in reversed([*models.items()]) if folder != "tiny"}
    setting_files = [
        *(("data.files", file) for file in config.data.files),
        *(("data.validation_files", file) for file in config.data.validation_files),
        ("rollout.lengths", config.rollout.lengths or ""),
        *(("reward.function", name.rpartition(":")[0]) for name in config.reward.function),
        *(("reward.validation", name.rpartition(":")[0]) for name in config.reward.validation),
        ("ppo.loss", (config.ppo.loss or "").rpartition(":")[0]),
        ("ppo.advantages", (config.ppo.advantages or "").rpartition(":")[0]),
        *(("log.trackers", name.rpartition(":")[0]) for name in config.log.trackers),
        ("env.path", (config.env.path or "").rpartition(":")[0]),
        *(("env.tools", name.rpartition(":")[0]) for name in config.env.tools),
        ("policy.lora.path", config.policy.lora.path or ""),
        ("value.lora.path", config.value.lora.path or ""),
        *(("reward.model" if m == "reward" else f"{m}.path", folder) for folder, m in once.items()),
    ]
    fingerprints = {}
    for setting, name in (one for one in setting_files if one[1]):
        path = Path(local.get(name, name)).expanduser()
        inside = (file for file in sorted(path.glob("*")) if file.suffix in READ and file.is_file())
        files = {file: file.name for file in inside} if path.is_dir() else {path: name}
        fingerprints |= {
            f"{setting} {files[f] if name in local else f}": fingerprint(f) for f in files
        }
    for name, split in (prompts or {}).items():
        texts = [part.text for p in split.prompts for part in (p, p.teacher) if part]
        text = "\0".join(texts).encode(errors="surrogatepass")
        fingerprints[name] = hashlib.blake2b(text, digest_size=16).hexdigest()
    return fingerprints


def fingerprint(path: Path) -> str:
    """Size and BLAKE2b of a file. Of weights, which may take minutes to read, only 64 blocks."""
    size = path.stat().st_size
    digest = hashlib.blake2b(digest_size=16)
    every = max(BLOCK, -(-size // 64)) if path.suffix == ".safetensors" else BLOCK
    with path.open("rb") as file:
        for start in range(0, size, every):
            file.seek(start)
            digest.update(file.read(BLOCK))
    return f"{size:,} bytes, {digest.hexdigest()}"


def facts_of(config: Config) -> dict[str, str]:
    """What must be the same on all nodes: versions, this package's code, and the settings."""
    code = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        code.update(path.read_bytes())
    facts = {
        "torch": torch.__version__,
        "transformers": installed("transformers"),
        "splitppo": f"{installed('splitppo')} (code {code.hexdigest()[:8]})",
    }
    if torch.cuda.is_available():
        nccl = torch.cuda.nccl.version()  # type: ignore[attr-defined]
        facts |= {"vLLM": installed("vllm"), "NCCL": ".".join(map(str, nccl))}
    return facts | {
        toml.flag(name): str(value)
        for name, value in toml.leaves(asdict(config))
        if name not in MAY_DIFFER
    }


def command_line() -> str:
    """The command that started this process, as a shell takes it; of a rank torchrun's, or that of
    `splitppo train`."""
    # torchrun is the rank's parent
    pid = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid()
    program, *more = Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1]
    if more and not more[0].startswith("-") and not more[0].endswith(".py"):
        program, *more = more  # `python .../bin/torchrun`
    return shlex.join([os.path.basename(program), *more])


def new_folder(parent: str = "runs") -> Path:
    """Makes `parent`/DATE-TIME; a second later if another run has that name."""
    while True:
        folder = Path(parent, time.strftime("%Y%m%d-%H%M%S"))
        with suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder
        time.sleep(1)


def write_run_files(
    config: Config,
    folder: Path,
    resumed: Path | None,
    inputs: Mapping[str, str],
    user_settings: Iterable[str] = (),
) -> None:
    """Writes the settings, the names of those that the user has set (`user_settings`), the inputs
    and the versions. Prints what a run `resumed` from a checkpoint changes."""
    begun = cli.has_steps(folder)
    before = read_if_there(folder / "given.json", json.loads) if begun else None
    write_whole(folder / "given.json", json.dumps(sorted({*(before or ()), *user_settings})) + "\n")
    if resumed:
        # not of another run's checkpoint
        settings_kept = ", with its settings unless the command sets them" * begun
        print(f"resuming from {resumed}{settings_kept}", flush=True)
        for name, was, now in changes(config, folder, inputs):
            print(f"  {name}: {was} -> {now}", flush=True)
    elif begun:
        warn(f"{folder} holds steps without a checkpoint: they are overwritten")
    write_whole(folder / "config.toml", toml.to_toml(absolute(config, folder)))
    write_whole(folder / "inputs.json", json.dumps(inputs, indent=1) + "\n")
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    revision = (
        shutil.which("git")
        and subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    )
    packages = ("splitppo", "torch", "transformers", "safetensors", "vllm")
    versions = {
        "python": platform.python_version(),
        "command": command_line(),
        **{name: installed(name) for name in packages},
        "git": revision or "not a checkout",
    }
    write_whole(folder / "versions.json", json.dumps(versions, indent=1) + "\n")
