"""Attacks on what a user gives: flags, presets, data, rewards, run folders, the environment,
signals.

    python tests/helpers/attacks.py [--count 200] [--seed 0] [--only WORD]

Each runs a command as `python -m` does, in a process of its own (forked, to be quick). It must end
within `LIMIT` seconds, without a traceback, and either refuse in one line with status 2, or do what
was asked: `wants` are the statuses that are right, `check` says what is wrong with what was done.
"""

import argparse
import contextlib
import functools
import json
import os
import random
import re
import resource
import runpy
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import torch
from faults import figures
from ranks import fresh_process
from safetensors.torch import load_file, save_file

from splitppo.config import Config
from splitppo.config.cli import PATHS, parse
from splitppo.config.toml import leaves, toml_value
from splitppo.models.tiny import build_tiny
from splitppo.run.folder import changes

LIMIT = 30
REFUSED, FINE, EITHER = {2}, {0}, {0, 2}
BASE = (
    "--policy.path=model --value.path=model --data.files=data.jsonl "
    "--reward.function=reward.py:score"
).split()
BASE += (
    "--rollout.batch-size=4 --ppo.mini-batches=2 --rollout.max-new-tokens=4 "
    "--rollout.max-prompt-tokens=64"
).split()
BASE += (
    "--policy.optim.lr=1e-3 --data.answer-key=answer --compute.device=cpu --engine.kind=hf"
).split()
RESUME = [*BASE, "--run-dir=run", "--checkpoint.every=1", "--checkpoint.keep=0", "--steps=3"]
ROWS = [{"prompt": f"{i}+{i}=", "answer": str(2 * i), "data_source": "sums"} for i in range(8)]
SCORE = "def score(data_source, solution_str, ground_truth, extra_info):\n    {}\n"
LATIN = os.fsdecode(b"caf\xe9")
BAD_TEXTS = [
    "a\0b",
    LATIN,
    "\ud800",
    "x" * 5000,
    "a/" * 3000 + "b",
    "/dev/null",
    "/dev/null/a",
    "reward.py",
    "run",
    "",
]
EDGES = [
    "1e308",
    "-1e308",
    "1e-320",
    "-1e-320",
    "1e39",
    "inf",
    "nan",
    "0",
    "-0.0",
    "1e-46",
    "1" + "0" * 25,
    "9" * 4999,
]


@dataclass(frozen=True)
class Attack:
    """`do` prepares the folder in which the command runs; `inside` is called in its process (what
    it returns is the screen's encoding), `outside` in this one with the process's number and the
    file that it writes to."""

    name: str
    argv: list[str]
    wants: set[int]
    command: str = "train"
    do: Callable[[Path], Any] = lambda folder: None
    inside: Callable[[], Any] = lambda: None
    outside: Callable[[int, Path], Any] = lambda pid, out: None
    check: Callable[[Path, str], str] = lambda folder, said: ""
    crash: str = ""  # what a crash that may keep its traceback says


def child(place: tuple[int, int, int] | None, command: str, argv: list[str], folder: str) -> None:
    """The attacked process. The attack itself is drawn again where it is due, since its functions
    don't travel."""
    os.setsid()
    os.chdir(folder)
    torch.set_num_threads(1)
    file = os.open("out.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    coding = (draw(*place[:2])[place[2]].inside() if place else None) or "utf-8"
    sys.stdout, sys.stderr = (
        os.fdopen(1, "w", encoding=coding),
        os.fdopen(2, "w", buffering=1, encoding=coding),
    )
    module = "splitppo.train" if command == "train" else "splitppo"
    sys.argv = [command, *argv] if command == "train" else ["splitppo", command, *argv]
    sys.modules.pop("splitppo.train", None)  # or runpy warns of it
    status: Any = 1
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as stop:
        status = stop.code or 0
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(status)


def trouble(attack: Attack, folder: Path, place: tuple[int, int, int]) -> str:
    """What went wrong that should not have; "" if nothing. `place`: count, seed and number, to draw
    it again."""
    attack.do(folder)
    process, out = (
        fresh_process(child, place, attack.command, attack.argv, str(folder)),
        folder / "out.log",
    )
    attack.outside(process.pid, out)
    process.join(LIMIT)
    hung = process.exitcode is None
    with contextlib.suppress(ProcessLookupError):  # and what it left running
        os.killpg(process.pid, signal.SIGKILL)
    process.join()
    said = out.read_text(errors="replace") if out.exists() else ""
    if attack.crash and attack.crash in said and process.exitcode == 1:
        return ""
    wrong = [f"hung for {LIMIT} s"] if hung else []
    if "Traceback (most recent call last)" in said or "Exception ignored" in said:
        wrong.append("a traceback")
    if not hung and process.exitcode not in attack.wants:
        wrong.append(f"status {process.exitcode}, not one of {sorted(attack.wants)}")
    told = [line for line in said.splitlines() if line.startswith("error: ")]
    by_tyro = "For full help" in said
    if process.exitcode == 2 and len(told) != 1 and not by_tyro:
        wrong.append(f"{len(told)} lines of an error")
    if not wrong and process.exitcode == 0 and (found := attack.check(folder, said)):
        wrong.append(found)
    return "; ".join(wrong) + (f"\n{said[-1500:]}" if wrong else "")


MADE: dict[int, Path] = {}  # by steps, while attacks are under way


def base(steps: int) -> Path:
    """A folder with a model, data, a reward, and a run of so many steps in run/; made once."""
    if steps in MADE:
        return MADE[steps]
    folder = MADE[steps] = Path(tempfile.mkdtemp(prefix="attacks-"))
    build_tiny(folder / "model", seed=0)
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (folder / "reward.py").write_text(SCORE.format("return len(solution_str) % 3"))
    if steps:
        process = fresh_process(child, None, "train", [*RESUME, f"--steps={steps}"], str(folder))
        process.join(300)
        if process.exitcode:
            raise RuntimeError((folder / "out.log").read_text())
        (folder / "out.log").unlink()
    return folder


def copied(steps: int, then: Callable[[Path], Any] = lambda folder: None) -> Callable[[Path], None]:
    def do(folder: Path) -> None:
        shutil.copytree(base(steps), folder, dirs_exist_ok=True, symlinks=True)
        then(folder)

    return do


def same_figures(folder: Path, said: str) -> str:
    """A resumed run's record of all steps is the uninterrupted run's."""
    try:
        found, due = figures(folder / "run"), figures(base(3) / "run")
    except (OSError, ValueError) as error:
        return f"metrics that can't be read: {error}"
    return (
        f"other figures at {[key for key in due if found.get(key) != due[key]]}"
        if found != due
        else ""
    )


def score(body: str) -> Callable[[Path], None]:
    return copied(0, lambda folder: (folder / "reward.py").write_text(SCORE.format(body)))


def rows(*lines: Any, name: str = "data.jsonl") -> Callable[[Path], None]:
    """A data file of these lines: bytes as they are, others as JSON."""
    raw = b"".join(
        line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n" for line in lines
    )
    return copied(0, lambda folder: (folder / name).write_bytes(raw))


# --- the kinds of attack ---


def flags(random_: random.Random) -> Iterator[Attack]:
    """Texts and numbers at the edge, of any setting, as a flag or in a preset."""
    known = {
        name: value
        for name, value in leaves(asdict(Config()))
        if name not in ("config", "dry_run", "force")
    }
    dry = [*BASE, "--dry-run"]
    while True:
        name = random_.choice(list(known))
        if isinstance(known[name], bool):
            continue
        texts = name in PATHS or isinstance(known[name], str)
        value = random_.choice(BAD_TEXTS if texts or random_.random() < 0.2 else EDGES)
        flag = f"--{name}={value}"
        yield Attack(f"flag {flag[:60]!a}", [*dry, flag], EITHER, do=copied(0))
        if "\ud800" <= value[-1:] <= "\udfff":
            continue  # TOML has none
        section, _, key = name.rpartition(".")
        written = (
            value
            if re.fullmatch(r"-?[\d.e+-]+|inf|nan", value) and not texts
            else toml_value(value)
        )
        preset = (f"[{section}]\n" if section else "") + f"{key} = {written}\n"
        toml = functools.partial(
            lambda preset, folder: (folder / "p.toml").write_text(preset), preset
        )
        yield Attack(
            f"preset {preset[:60]!a}", [*dry, "--config=p.toml"], EITHER, do=copied(0, toml)
        )


def home(name: str) -> Callable[[], None]:
    return lambda: os.environ.update(HOME=os.getcwd() if name == "here" else "/nonexistent")


def paths(_: random.Random) -> Iterator[Attack]:
    """What is done with paths, the same in all commands."""
    at_home = [word.replace("=", "=~/", 1)
               if "model" in word or "data.files" in word or "py:" in word else word
               for word in BASE]  # fmt: skip

    def in_home(folder: Path, said: str) -> str:
        return (
            ""
            if (folder / "run/metrics/actor.jsonl").is_file() and not (folder / "~").exists()
            else "not at ~/run"
        )

    yield Attack("~ in all paths", [*at_home, "--run-dir=~/run", "--steps=1"], FINE, do=copied(0),
                 inside=home("here"),
                 check=in_home)  # fmt: skip
    yield Attack("~ of nobody", [*at_home, "--dry-run"], REFUSED, do=copied(0), inside=home("none"))
    yield Attack("--config=~/p.toml", ["--config=~/p.toml", "--dry-run"], FINE, inside=home("here"),
                 do=copied(0, lambda f: (f / "p.toml").write_text("steps = 7\n")),
                 check=lambda f, said: "" if "steps = 7" in said else "not read")  # fmt: skip
    for command, argv in (
        ("report", ["~/run", "--out=~/p.html"]),
        ("export", ["~/run", "--out=~/x"]),
        ("plan", ["~/run"]),
    ):
        yield Attack(f"~ {command}", argv, EITHER if command == "plan" else FINE, command,
                     do=copied(3), inside=home("here"),
                     check=lambda f, said: "made ~" if (f / "~").exists() else "")  # fmt: skip
    for command in ("report", "export", "plan", "bench", "prepare"):
        for value in (LATIN, "a\0b", "x" * 5000, "/dev/null", "/dev/null/x"):
            argv = {
                "bench": ["--gpus=1", "--jobs=colocated", f"--out={value}", f"--lengths={value}"],
                "prepare": ["gsm8k", "--source=nowhere", f"--out={value}"],
            }
            yield Attack(f"{command} {value[:20]!a}", argv.get(command, [value]), REFUSED, command)
    yield Attack(
        "report into nowhere", ["run", "--out=no/where.html"], REFUSED, "report", do=copied(3)
    )
    yield Attack("report over a folder", ["run", "--out=run"], REFUSED, "report", do=copied(3))
    yield Attack("export over a file", ["run", "--out=data.jsonl"], REFUSED, "export", do=copied(3))


def data(_: random.Random) -> Iterator[Attack]:
    """Rows of any kind: read, or refused by name."""
    argv = [*BASE, "--steps=1", "--run-dir=run", "--log.samples=4"]
    good = ROWS[0]
    cases: list[tuple[str, set[int], list[Any]]] = [
        (
            "half a character in a prompt",
            REFUSED,
            [good, b'{"prompt": "a\\ud83d", "answer": "1"}\n'],
        ),
        (
            "half a character in an answer",
            REFUSED,
            [good, b'{"prompt": "a", "answer": "\\uDFFF"}\n'],
        ),
        (
            "half a character in a source",
            REFUSED,
            [good, b'{"prompt": "a", "answer": "1", "data_source": "\\ud800"}\n'],
        ),
        (
            "half a character in a key",
            REFUSED,
            [good, b'{"prompt": "a", "answer": "1", "extra_info": {"\\udc00": 1}}\n'],
        ),
        (
            "a whole character in two escapes",
            FINE,
            [b'{"prompt": "1", "answer": "\\ud83d\\ude00"}\n'],
        ),
        (
            "escape codes",
            FINE,
            [{"prompt": "1", "answer": "\x1b[2J\x07", "data_source": "\x1b]0;a\x07\u2028"}],
        ),
        ("NUL in texts", FINE, [{"prompt": "1", "answer": "a\0b", "data_source": "\0"}]),
        (
            "a nest of lists",
            REFUSED,
            [b'{"prompt": "1", "answer": ' + b"[" * 100000 + b"]" * 100000 + b"}\n"],
        ),
        ("no UTF-8", REFUSED, [b'{"prompt": "caf\xe9", "answer": "1"}\n']),
        ("UTF-16", EITHER, ['{"prompt": "1", "answer": "1"}\n'.encode("utf-16")]),
        ("a byte order mark", EITHER, [b"\xef\xbb\xbf", good]),
        (
            "a number of 5,000 digits",
            REFUSED,
            [b'{"prompt": "1", "answer": ' + b"9" * 5000 + b"}\n"],
        ),
        (
            "numbers that are none",
            FINE,
            [b'{"prompt": "1", "answer": NaN, "extra_info": {"a": -Infinity, "b": 1e999}}\n'],
        ),
        ("line ends of Windows", FINE, [b'{"prompt": "1", "answer": "2"}\r\n' * 2]),
        ("a cut last line", REFUSED, [good, b'{"prompt": "1", "ans']),
        ("NUL bytes after a crash", REFUSED, [good, b"\0" * 512]),
        ("a list as a row", REFUSED, [good, [1, 2]]),
        ("a long row", REFUSED, [{"prompt": "1" * 10**6, "answer": "1"}]),
    ]
    for name, wants, lines in cases:
        yield Attack(f"data: {name}", argv, wants, do=rows(*lines))
    parquet = [*argv, "--data.files=rows.parquet"]

    def broken_text(folder: Path) -> None:
        column = pyarrow.array([b"caf\xe9"], pyarrow.binary()).view(pyarrow.string())
        pyarrow.parquet.write_table(
            pyarrow.table({"prompt": column, "answer": ["1"]}), folder / "rows.parquet"
        )

    yield Attack("data: a parquet text of no UTF-8", parquet, REFUSED, do=copied(0, broken_text))
    yield Attack(
        "data: a parquet of zeros",
        parquet,
        REFUSED,
        do=rows(b"PAR1" + b"\0" * 99, name="rows.parquet"),
    )
    yield Attack(
        "data: a pipe",
        [*argv, "--data.files=p.jsonl"],
        REFUSED,
        do=copied(0, lambda f: os.mkfifo(f / "p.jsonl")),
    )
    yield Attack("data: a link to itself", [*argv, "--data.files=l.jsonl"], REFUSED,
                 do=copied(0, lambda f: (f / "l.jsonl").symlink_to("l.jsonl")))  # fmt: skip
    yield Attack("lengths that are no text",
                 [*BASE, "--dry-run", "--rollout.lengths=model/model.safetensors"], REFUSED,
                 do=copied(0))  # fmt: skip


def rewards(_: random.Random) -> Iterator[Attack]:
    """Whatever a reward does costs its row, is counted and named, and ends the run in one line if
    all rows fail."""
    argv = [*BASE, "--run-dir=run", "--steps=1", "--log.samples=4", "--reward.timeout=2"]

    def failures(folder: Path, said: str) -> str:
        named = all(
            text in said
            for text in ("rewards that failed: score: 4 x", "error: reward score failed on every")
        )
        return "" if named else "not named"

    bodies = {
        "raises a half character": "raise ValueError('\\ud800\\x1b[2J\\0')",
        "raises a long line": "raise ValueError('x' * 10**7)",
        "exits": "raise SystemExit(0)",
        "is interrupted": "raise KeyboardInterrupt",
        "recurses": "return score(data_source, solution_str, ground_truth, extra_info)",
        "gives nan": "return float('nan')",
        "gives infinity": "return -float('inf')",
        "gives too large an int": "return 10**400",
        "gives nothing": "return None",
        "gives a half character": "return '\\udfff'",
        "gives what cannot be shown": "return type('A', (), {'__repr__': lambda self: 1 / 0})()",
        "hangs": "import time; time.sleep(99)",
        "raises what cannot be pickled": (
            "raise type('Odd', (Exception,), {'__str__': lambda self: 1 / 0})"
        ),
    }
    for name, body in bodies.items():
        yield Attack(f"reward {name}", argv, REFUSED, do=score(body), check=failures)
    fine = {
        "writes escapes": "print('\\x1b[2J\\ud800'.encode('utf-8', 'replace')); return 1",
        "has odd keys": "return {'score': 1, 'a\\nb\\ud800/': 2.0, '': 3, 4: 5}",
        "closes its screen": "import os; os.close(1); os.close(2); return 1",
        "gives an edge of float32": "return 3e38",
        "gives hardly anything": "return 5e-324",
        "goes elsewhere": "import os; os.chdir('/'); return 1",
    }
    for name, body in fine.items():
        yield Attack(f"reward {name}", argv, {0, 2} if "edge" in name else FINE, do=score(body))
    yield Attack(
        "reward fails always",
        [*argv, "--steps=9"],
        REFUSED,
        do=score("raise ValueError('\\ud800 always')"),
    )
    yield Attack(
        "reward kills itself",
        argv,
        REFUSED,
        do=score("import os; os.kill(os.getpid(), 9)"),
        check=failures,
    )
    yield Attack("a reward file of no UTF-8", argv, REFUSED,
                 do=copied(0, lambda f: (f / "reward.py").write_bytes(b"x = '\xe9'\n"))
                 )  # fmt: skip
    yield Attack(
        "a reward file with NUL",
        argv,
        REFUSED,
        do=copied(0, lambda f: (f / "reward.py").write_bytes(b"a\0b")),
    )
    yield Attack(
        "scores times weights overflow",
        [*argv, "--reward.weights=1e38", "--steps=5"],
        EITHER,
        do=score("return 1e30"),
    )

    def judge(folder: Path, number: float) -> None:
        config = json.loads((folder / "model/config.json").read_text()) | {
            "num_labels": 1,
            "pad_token_id": 0,
        }
        config |= {
            "architectures": ["LlamaForSequenceClassification"],
            "id2label": {"0": "a"},
            "label2id": {"a": 0},
        }
        shutil.copytree(folder / "model", folder / "judge")
        weights = load_file(folder / "judge/model.safetensors")
        weights = {
            name: tensor for name, tensor in weights.items() if not name.startswith("lm_head")
        }
        weights["score.weight"] = torch.full((1, config["hidden_size"]), number)
        save_file(weights, folder / "judge/model.safetensors", metadata={"format": "pt"})
        (folder / "judge/config.json").write_text(json.dumps(config))

    for number in (float("nan"), float("inf"), 3e38):
        for steps in (1, 9):
            yield Attack(f"a reward model of {number}, {steps} steps",
                         [*argv, "--reward.model=judge", "--reward.function=none",
                          f"--steps={steps}", "--reward.normalize=batch"], REFUSED,
                         do=copied(
                             0, functools.partial(lambda number, f: judge(f, number), number)
                         ),
                         check=lambda f, said: (
                             "" if "reward model: 4 x invalid" in said else "not named"
                         ))  # fmt: skip


def damages(_: random.Random) -> Iterator[Attack]:
    """A run's folder, damaged by hand: resume, report and export. Damaged checkpoints are in
    test_checkpoint.py and test_resume.py."""

    def write(name: str, content: str | bytes) -> Callable[[Path], Any]:
        return lambda f: (f / name).write_bytes(
            content if isinstance(content, bytes) else content.encode()
        )

    def edit(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], Any]:
        return lambda f: (f / name).write_bytes(change((f / name).read_bytes()))

    def to_file(name: str) -> Callable[[Path], Any]:
        return lambda f: (remove(f / name), (f / name).write_text("a file\n"))

    def to_folder(name: str) -> Callable[[Path], Any]:
        return lambda f: (remove(f / name), (f / name).mkdir(parents=True))

    # what must be told
    told: dict[str, Callable[[Path], Any]] = {
        "a file for checkpoints": to_file("run/checkpoints"),
        "a file for logs": to_file("run/logs"),
        "a file for metrics": to_file("run/metrics"),
        "a file for samples": to_file("run/samples"),
        "a folder for actor.jsonl": to_folder("run/metrics/actor.jsonl"),
        "a folder for config.toml": to_folder("run/config.toml"),
        "a broken config.toml": write("run/config.toml", "steps = \n"),
        "a config.toml of no text": write("run/config.toml", b"\xff\xfe\0"),
        "a config.toml of another run": edit(
            "run/config.toml", lambda text: text.replace(b"seed = 0", b"seed = 5")
        ),
        "changed data": edit(
            "data.jsonl", lambda text: text.replace(b"answer", b"answer", 1).replace(b'"2"', b'"3"')
        ),
        "a changed reward": edit("reward.py", lambda text: text.replace(b"% 3", b"% 2")),
        "a changed model": lambda f: (remove(f / "model"), build_tiny(f / "model", seed=1)),
        "the data gone": lambda f: remove(f / "data.jsonl"),
        "a link to itself": lambda f: (
            remove(f / "run/checkpoints"),
            (f / "run/checkpoints").symlink_to("checkpoints"),
        ),
    }
    for name, harm in told.items():
        yield Attack(f"resume with {name}", RESUME, REFUSED, do=copied(2, harm))
    healed = {
        "a broken versions.json": write("run/versions.json", "{"),
        "a folder for placement.txt.new": to_folder("run/placement.txt.new"),
        "no placement.txt": lambda f: remove(f / "run/placement.txt"),
        "no logs": lambda f: remove(f / "run/logs"),
    }
    for name, harm in healed.items():
        yield Attack(f"resume with {name}", RESUME, FINE, do=copied(2, harm), check=same_figures)
    # the same folders, read
    shown = told | healed | {
        "numbers without bounds": write(
            "run/metrics/actor.jsonl", '{"step": 1e400, "a": 1' + "0" * 400 + "}\n",
        ),
        "spans without bounds": write(
            "run/metrics/actor.jsonl", '{"step": 1, "spans": [["a", NaN, 1e999]]}\n',
        ),
        "spans that are none": write("run/metrics/actor.jsonl", '{"step": 1, "spans": null}\n'),
        "a nest of lists": write("run/metrics/critic.jsonl", "[" * 100000 + "\n{}\n"),
        "edges of floats": write("run/metrics/actor.jsonl", "".join(
            f'{{"step": {i}, "critic/score/mean": {value}, "spans": [["rollout", {i}, {i}.5]]}}\n'
            for i, value in enumerate(("1e308", "-1e308", "5e-324", "NaN", "Infinity"), 1))),
        "versions in a list": write("run/versions.json", "[1, 2]"),
        "a broken placement.txt": write("run/placement.txt", b"\xff\xfe"),
        "a sample of no JSON": write("run/samples/step_000001.jsonl", '{"a": \n{}\n'),
        "half a character in a sample": write(
            "run/samples/step_000001.jsonl", '{"a": "\\ud800", "b": "</script>"}\n',
        ),
        "a folder for a sample": to_folder("run/samples/step_000001.jsonl"),
    }  # fmt: skip
    for name, harm in shown.items():
        for command, argv in (("report", ["run"]), ("export", ["run"]), ("plan", ["run"])):
            yield Attack(
                f"{' '.join([command, *argv])} with {name}",
                argv,
                EITHER,
                command,
                do=copied(2, harm),
            )


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)


def surroundings(_: random.Random) -> Iterator[Attack]:
    """The environment, the screen, the disk."""
    dry = [*BASE, "--dry-run"]
    launched = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29501"}
    for name in (*launched, "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"):
        for value in ("", "x", "-1", "1e3", None):
            env = {
                key: text for key, text in (launched | {name: value}).items() if text is not None
            }
            wants = (
                FINE
                if (name, value) == ("RANK", None)
                else EITHER
                if name == "MASTER_ADDR" or value is None
                else REFUSED
            )
            wants = (
                REFUSED
                if value is None and name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
                else wants
            )
            yield Attack(
                f"{name}={value}",
                dry,
                wants,
                do=copied(0),
                inside=functools.partial(os.environ.update, env),
            )
    yield Attack("RANK beyond WORLD_SIZE", dry, REFUSED, do=copied(0),
                 inside=functools.partial(os.environ.update, launched | {"RANK": "1"}))  # fmt: skip

    def no_reader() -> None:
        ours, theirs = os.pipe()
        os.dup2(theirs, 1)
        os.close(ours)

    def full_screen() -> None:
        os.dup2(os.open("/dev/full", os.O_WRONLY), 1)

    def ascii_screen() -> str:
        return "ascii"

    run = [*BASE, "--run-dir=run", "--steps=2"]
    helped = ("report", "export", "plan", "bench", "prepare")
    commands = [("train", ["--help"]), ("train", dry), ("report", ["run"])]
    for command, argv in [*commands, *((name, ["--help"]) for name in helped)]:
        yield Attack(
            f"nobody reads {command} {argv[0]}",
            argv,
            {141},
            command,
            do=copied(3),
            inside=no_reader,
        )
        yield Attack(
            f"ascii for {command} {argv[0]}", argv, FINE, command, do=copied(3), inside=ascii_screen
        )
    yield Attack("nobody reads a run", run, {2, 141}, do=copied(0), inside=no_reader)
    yield Attack("a full disk under the screen", run, REFUSED, do=copied(0), inside=full_screen)
    yield Attack(
        "ascii for an error",
        [*BASE, "--data.files=é.jsonl"],
        REFUSED,
        do=copied(0),
        inside=ascii_screen,
    )
    failing = score("raise ValueError('é\\ud800')")
    yield Attack("ascii for a failing reward", run, REFUSED, do=failing, inside=ascii_screen)
    for kilobytes in (1, 10, 100, 400):
        limit = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, (1024 * kilobytes, -1))
        for command, argv in (
            ("train", [*RESUME, "--run-dir=new"]),
            ("export", ["run"]),
            ("report", ["run"]),
        ):
            yield Attack(f"{command} onto a disk of {kilobytes} KB", argv, EITHER, command,
                         do=copied(3), inside=limit,
                         crash="could not be written; earlier checkpoints are intact")  # fmt: skip
    for ranks in (1, 7, 100_000):
        size = ["--rollout.batch-size=200000", "--placement.mode=auto", f"--world-size={ranks}"]
        yield Attack(f"a dry run of {ranks} ranks", [*dry, *size], FINE, do=copied(0))
    yield Attack(
        "chunks beyond all rows", [*run, "--rollout.chunks=2000000000"], FINE, do=copied(0)
    )
    for text in ("[" * 10**5, '{"a": ' * 10**5, '{"a": "\\ud800"}', "\x7f", "{}\0"):
        yield Attack(
            f"chat_kwargs {text[:20]!a}",
            [*dry, f"--data.chat-kwargs={text}"],
            REFUSED,
            do=copied(0),
        )
    name = "--rollout.stop=\x7f\x1b[2J\r\n"
    yield Attack(
        "a text of control characters",
        [*run, name],
        FINE,
        do=copied(0),
        check=lambda f, said: kept(f, [*run, name]),
    )


def kept(folder: Path, argv: list[str]) -> str:
    """What of the flags the run's folder doesn't say."""
    return str(changes(parse(argv), folder / "run") or "")


def signals(random_: random.Random) -> Iterator[Attack]:
    """Signals at any moment of a run, or of another command."""
    ends = {
        "SIGINT": {130},
        "SIGTERM": {75, -15},
        "SIGUSR1": {75},
        "SIGHUP": {-1},
        "SIGPIPE": {0},
        "SIGWINCH": {0},
    }
    moments = {
        "at once": "^",
        "at the start": "placement",
        "in step 1": r"\[actor\]  step    1",
        "later": "step    3 ",
    }
    for moment, text in moments.items():
        for name, wants in ends.items():

            def outside(pid: int, out: Path, text: str = text, name: str = name) -> None:
                until = time.monotonic() + LIMIT
                while time.monotonic() < until and not re.search(
                    text, out.read_text() if out.exists() else "", re.M
                ):
                    time.sleep(0.01)
                time.sleep(random_.random() / 10)
                os.kill(pid, getattr(signal, name))

            steps = 6 if wants == {0} else 400
            early = {-2, -15, -10, 0, 1} if moment == "at once" else set()
            argv = [
                *BASE,
                "--run-dir=run",
                f"--steps={steps}",
                "--checkpoint.every=1",
                "--checkpoint.keep=1",
            ]
            yield Attack(f"{name} {moment}", argv, wants | early, do=copied(0), outside=outside)


KINDS = (flags, paths, data, rewards, damages, surroundings, signals)


def draw(count: int, seed: int) -> list[Attack]:
    """So many attacks, of all kinds alike as far as there are; of what a kind has, chosen by the
    seed."""
    drawn = []
    for kind in KINDS:
        own = random.Random(f"{kind.__name__}/{seed}")
        found = [attack for attack, _ in zip(kind(own), range(300), strict=False)]
        own.shuffle(found)
        drawn.append(found)
    return [attack for turn in range(300) for found in drawn for attack in found[turn : turn + 1]][
        :count
    ]


def run_all(
    count: int, seed: int, only: str = "", chosen: slice = slice(None), *, tell: bool = True
) -> list[str]:
    """Runs the attacks; what failed."""
    failed, began = [], time.monotonic()
    for number, attack in list(enumerate(draw(count, seed)))[chosen]:
        if only not in attack.name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            start = time.monotonic()
            wrong = trouble(attack, Path(folder), (count, seed, number))
        failed += [f"{attack.name}: {wrong}"] if wrong else []
        if tell:
            print(
                f"{number:>4} {attack.name}: {wrong or f'ok, {time.monotonic() - start:.1f} s'}",
                flush=True,
            )
    while MADE:
        shutil.rmtree(MADE.popitem()[1])
    if tell:
        print(f"{len(failed)} failed; {time.monotonic() - began:.0f} s")
        print("\n".join(text.split("\n")[0] for text in failed))
    return failed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    sys.exit(bool(run_all(options.count, options.seed, options.only)))
