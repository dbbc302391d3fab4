"""`run` in a notebook's cells: docs/notebooks.md in a real kernel; what a cell shows, how it ends;
rewards that are written to a file."""

import inspect
import json
import linecache
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from runs import names, records
from torch.distributed import run as torchrun

from splitppo import Config
from splitppo.config.cli import parse
from splitppo.config.rules import check
from splitppo.errors import UserError
from splitppo.rewards.functions import find_function, name_function
from splitppo.run import launcher
from splitppo.run.launcher import run

PAGE = Path(__file__).parents[1] / "docs" / "notebooks.md"
NEEDS = "needs Jupyter: pip install nbconvert ipykernel"
REAL = sys.executable
BEGUN = "from splitppo import Config, run\n"
REWARD = "def score(**row): return 1.0\n"
# interrupts all processes of the kernel's group, as Jupyter does, once the run has a step
INTERRUPT = """
import os, pathlib, signal, threading, time
def interrupt():
    while not [*pathlib.Path("runs/long/metrics").glob("critic.jsonl")]:
        time.sleep(0.05)
    os.killpg(0, signal.SIGINT)
threading.Thread(target=interrupt).start()
"""


def play(folder: Path, *cells: str) -> list[dict[str, Any]]:
    """The cells after a kernel has run them; one that fails ends no other."""
    pytest.importorskip("nbconvert", reason=NEEDS)
    pytest.importorskip("ipykernel", reason=NEEDS)
    written = [
        {"cell_type": "code", "execution_count": None, "id": str(i), "outputs": [], "source": cell,
         "metadata": {}}
        for i, cell in enumerate(cells)
    ]  # fmt: skip
    kernel = {"name": "python3", "display_name": "Python 3"}
    book = {"nbformat": 4, "nbformat_minor": 5, "metadata": {"kernelspec": kernel}}
    path = folder / "mine.ipynb"
    path.write_text(json.dumps(book | {"cells": written}))
    words = ["--to", "notebook", "--execute", "--allow-errors", "--inplace", str(path)]
    subprocess.run([sys.executable, "-m", "nbconvert", *words], cwd=folder, check=True)
    return json.loads(path.read_text())["cells"]


def text_of(cell: dict[str, Any]) -> str:
    text = "".join("".join(output.get("text", "")) for output in cell["outputs"])
    return re.sub(" +", " ", text)


def error_of(cell: dict[str, Any]) -> str:
    errors = [out for out in cell["outputs"] if out["output_type"] == "error"]
    return "".join(f"{error['ename']}: {error['evalue']}" for error in errors)


def cells_of_the_page() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.M | re.S)


@pytest.mark.wide
@pytest.mark.ranks
def test_the_notebook_of_the_page(tmp_path: Path) -> None:
    """In a kernel, on one rank, with fewer steps: the first run ends with step 2, the next cell
    goes on."""
    fewer = {"steps=40": "steps=2", '"60"': '"3"', '"2"': '"1"'}
    cells = [
        re.sub("|".join(fewer), lambda part: fewer[part[0]], cell) for cell in cells_of_the_page()
    ]
    *cells, first, second, report, formulas = play(tmp_path, *cells)
    assert [error_of(cell) for cell in (*cells, first, second, report, formulas)] == [""] * 6
    assert "step 2/2" in text_of(first)
    assert "step 3/3" in text_of(second)
    assert "page: runs/cell/report.html" in text_of(report)
    assert text_of(formulas).startswith("tensor([")
    steps = records(tmp_path / "runs/cell", "critic")
    assert [step["step"] for step in steps] == [1, 2, 3]
    for step in steps:
        assert step["critic/reward/right/max"] > 0 == step["critic/reward_failures"]
    (written,) = tmp_path.glob("runs/cells/score_*.py")
    (copy,) = tmp_path.glob("runs/cell/rewards/**/score_*.py")
    assert written.read_text() == copy.read_text()


@pytest.mark.wide
@pytest.mark.ranks
def test_a_cell_that_fails_or_is_interrupted_or_runs_twice(tmp_path: Path) -> None:
    once = "run(Config(steps=1, run_dir='runs/once'), score)"
    _, failing, interrupted, first, again = play(
        tmp_path,
        REWARD,
        BEGUN + "run(Config(), score, ['--policy.path=./nowhere'])",
        BEGUN + INTERRUPT + "run(Config(steps=10000, run_dir='runs/long'), score)",
        once,
        once,
    )
    assert error_of(failing).startswith("UserError: policy.path=./nowhere: no such folder")
    assert error_of(interrupted).startswith("KeyboardInterrupt")
    (saved,) = names(tmp_path / "runs/long")
    assert f"{saved} is saved" in text_of(interrupted)
    assert (error_of(first), error_of(again)) == ("", "")
    assert "1 of 1 steps" in text_of(again)


# what `splitppo train` prints; its exit status; what the cell says at its end
ENDS = {
    "a wrong setting": (["step 1", "error: seed=x: wrong"], 2, "seed=x: wrong"),
    "a crash": (
        [
            "ValueError: of a row",
            "step 1",
            "Traceback",
            "  line 3",
            "a.b.SomeError: x",
            "on rank 1",
        ],
        1,
        "a.b.SomeError: x\non rank 1",
    ),
    "a killed rank": (
        ["step 1", "rank 1 was killed by SIGKILL"],
        1,
        "rank 1 was killed by SIGKILL",
    ),
    "nothing": ([], 1, ""),
}


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In place of Python, of which a cell starts another process."""
    path = tmp_path / "python"
    path.touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(path))
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    return path


@pytest.mark.ranks
@pytest.mark.parametrize("name", ENDS)
def test_a_failure_ends_the_cell_with_its_cause(name: str, program: Path, capsys) -> None:
    lines, status, cause = ENDS[name]
    said = "".join(f"{line}\n" for line in lines)
    program.write_text(f"#!/bin/sh\nprintf '{said}' >&2\nexit {status}\n")
    with pytest.raises(UserError) as error:
        run(Config(steps=3))
    assert str(error.value) == cause
    assert capsys.readouterr().out == said


@pytest.mark.ranks
def test_flags_of_a_cell(program: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the kernel's own command line are none."""
    monkeypatch.setattr(sys, "argv", ["ipykernel", "-f", "/tmp/kernel.json"])
    program.write_text('#!/bin/sh\necho "$@"\n')
    run(Config(steps=3), argv=["--nproc_per_node", "2", "--seed", "4"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    run(Config(steps=3))
    begin = "-m splitppo train --standalone --nproc-per-node="
    assert capsys.readouterr().out.splitlines() == [
        f"{begin}1 --steps 3 --nproc_per_node 2 --seed 4",
        f"{begin}4 --steps 3",
    ]
    with pytest.raises(UserError, match=r"more\.py: unknown word"):
        run(Config(), argv=["more.py"])


@pytest.mark.ranks
def test_the_cells_of_the_page(program: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    """Without ranks: both runs are of a reward that scores, and of settings that are allowed."""
    program.write_text('#!/bin/sh\necho "$@"\n')
    cells = [cell for cell in cells_of_the_page() if not cell.startswith("!")]
    cell_by_cell(monkeypatch, tmp_path, *cells)
    *started, formulas = capsys.readouterr().out.splitlines()
    assert formulas.startswith("tensor([")
    row: dict[str, Any] = {"data_source": "", "ground_truth": "12", "extra_info": None}
    for line, steps in zip(started, (40, 60), strict=True):
        flags, argv = launcher.split(line.partition(" train ")[2].split())
        assert flags[-1] == "--nproc_per_node=2"  # the last one counts
        config = parse(argv)
        check(config)
        assert (config.steps, config.run_dir) == (steps, "runs/cell")
        (function,) = config.reward.function
        assert find_function(function)(solution_str="12", **row) == {
            "score": pytest.approx(1 + 0.1 / 3), "right": 1, "brief": pytest.approx(1 / 3),
        }  # fmt: skip


@pytest.mark.ranks
def test_an_interrupt_is_handed_on(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once, although Jupyter interrupts all processes of the kernel's group. What is printed after
    it is shown."""
    trap = "trap 'echo saving; echo saved; exit 75' INT"
    program.write_text(
        f"#!/bin/bash\n{trap}\nps -o sid= $$; echo $$; while :; do sleep 0.01; done\n"
    )
    caller = threading.main_thread().ident
    assert caller

    class Screen:
        def write(self, text: str) -> None:
            lines.append(text)
            if len("".join(lines).split()) == 2:
                signal.pthread_kill(caller, signal.SIGINT)

        def flush(self) -> None: ...

    lines: list[str] = []
    monkeypatch.setattr(sys, "stdout", Screen())
    # a shell's background job ignores the signal
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with pytest.raises(KeyboardInterrupt):
        run(Config(steps=3))
    signal.signal(signal.SIGINT, before)
    session, process, *more = "".join(lines).split()
    assert (session, more) == (process, ["saving", "saved"])


@pytest.mark.ranks
def test_the_ranks_of_a_cell_end_with_it(program: Path, capsys) -> None:
    """The launcher gets SIGTERM when the thread of the kernel's cells ends. The first number of
    ranks is the cell's, and a later one wins."""
    code = "import ctypes as c; n = c.c_int(); c.CDLL(None).prctl(2, c.byref(n)); print(n)"
    program.write_text(f'#!/bin/sh\nexec {REAL} -c "{code}"\n')
    run(Config(steps=3))
    assert capsys.readouterr().out == f"c_int({int(signal.SIGTERM)})\n"
    flags, _ = launcher.split(["--nproc-per-node=1", "--nproc_per_node", "2"])
    assert torchrun.get_args_parser().parse_args([*flags, "x"]).nproc_per_node == "2"


def cell_by_cell(monkeypatch: pytest.MonkeyPatch, folder: Path, *cells: str) -> ModuleType:
    """The `__main__` of a kernel that has run the cells."""
    main = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.chdir(folder)
    for number, text in enumerate(cells):
        name = f"<cell {folder.name} {number}>"
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        exec(compile(text, name, "exec"), vars(main))
    return main


WORKS = {
    "all that the cell has": (
        "", "import math as m\nfrom collections import Counter as C\nWORDS = ['a']\n"
        "WORDS.append('b')\nclass Judge:\n    def depth(self, n): return depth(n)\n"
        "def depth(n): return n if n < 2 else 1 + Judge().depth(n - 1)\n"
        "def score(solution_str, **row):\n"
        "    return C(solution_str)['a'] + m.floor(m.pi) + depth(5) + len(WORDS)\n", 12.0,
    ),
    "decorators": (
        "",
        "import functools\ndef twice(f):\n    @functools.wraps(f)\n"
        "    def call(**row): return 2 * f(**row)\n    return call\n"
        "@twice\n@functools.cache\ndef score(solution_str, ground_truth, **row): return 4\n", 8.0,
    ),
    "a local name, and one of Python's, that are other things in a cell": (
        "text = open(__import__('os').devnull)\nimport builtins\n",
        "def score(solution_str, **row):\n    text = solution_str\n    return len(text)\n", 3.0,
    ),
    "a function in an if": (
        "",
        "if True:\n    def score(solution_str, **row):\n        return len(solution_str)\n", 3.0,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WORKS)
def test_a_cells_reward_is_written_to_a_file(name: str, tmp_path: Path, monkeypatch) -> None:
    others, cell, number = WORKS[name]
    main = cell_by_cell(monkeypatch, tmp_path, others, cell)
    written = name_function(main.score)
    assert written == name_function(main.score), "the same text is the same file"
    row = {"data_source": "", "solution_str": "aab", "ground_truth": "", "extra_info": None}
    imported = find_function(written)
    assert imported(**row) == number
    assert inspect.unwrap(imported).__globals__ is not vars(main)
    assert [*tmp_path.glob("runs/cells/*.py")] == [Path(written.rpartition(":")[0])]


NOT_WRITTEN = {
    "a lambda": ("", "score = lambda **row: 1.0\n", "write it with def"),
    "a closure": (
        "def make(n):\n    def score(**row): return n\n    return score\n", "score = make(1)\n",
        "make.<locals>.score",
    ),
    "another cell's names": (
        "import re\nONE = 1\ndef short(text): return len(text)\n",
        "TWO = 2\ndef score(solution_str, **row):\n    def inner(): return [ONE for c in row]\n"
        "    return short(re.escape(solution_str)) + TWO + len(inner())\n",
        "its cell uses ONE, re, short of other cells; move",
    ),
    "no text": ("", "exec('def score(**row): return 1.0')\n", "write it with def"),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_WRITTEN)
def test_what_no_file_can_hold_is_refused(name: str, tmp_path: Path, monkeypatch) -> None:
    others, cell, told = NOT_WRITTEN[name]
    main = cell_by_cell(monkeypatch, tmp_path, others, cell)
    with pytest.raises(UserError) as error:
        name_function(main.score)
    assert told in str(error.value)
    assert [*tmp_path.iterdir()] == []
