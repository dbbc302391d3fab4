"""Mutation testing of the pure rooms: `python tests/helpers/mutate.py [ROOM ...]`. How to read it:
CONTRIBUTING.md.

mutmut (its settings: pyproject.toml) changes one place of a function at a time and runs the tests
that call it. Below the table stands each change that no test noticed, unless
tests/helpers/survivors.txt knows it.
"""

import json
import os
import re
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PLACES = (
    "algo",
    "placement",
    "models.runner",
    "rewards.shaping",
    "run.metrics",
    "tools.cost",
    "validation",
)
# name -> module in the package
ROOMS = {place.rpartition(".")[2]: place for place in (*PLACES, "run.checkpoint")}
KNOWN = ROOT / "tests" / "helpers" / "survivors.txt"
# by a test, or by its time; no test noticed, or calls it
KILLED, SURVIVED = ((1, 3, 24, -24, 36, 152, 255), (0, 5, 33))


def mutmut(arguments: list[str]) -> None:
    """mutmut's command, which passes functions with decorators over; those under torch.no_grad()
    are half of algo."""
    import libcst as cst  # pyright: ignore[reportMissingImports]
    from mutmut.__main__ import cli  # pyright: ignore[reportMissingImports]
    from mutmut.mutation.file_mutation import MutationVisitor  # pyright: ignore[reportMissingImports]

    skips = MutationVisitor._skip_node_and_children

    def skips_others(self: Any, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.FunctionDef) and node.decorators:
            names = [
                cst.Module([]).code_for_node(decorator.decorator) for decorator in node.decorators
            ]
            if names == ["torch.no_grad()"]:
                return False
        return skips(self, node)

    MutationVisitor._skip_node_and_children = skips_others
    cli(arguments)


def changed(name: str) -> tuple[str, str]:
    """The lines of a mutant, as they were and as they are, without white space at their ends."""
    from mutmut.mutation.diff_apply import get_diff_for_mutant  # pyright: ignore[reportMissingImports]

    lines = [
        line
        for line in get_diff_for_mutant(name).splitlines()
        if line[:1] in ("-", "+") and line[:3] not in ("---", "+++")
    ]
    before, after = ([line[1:].strip() for line in lines if line[0] == sign] for sign in "-+")
    return " ".join(before), " ".join(after)


def report(rooms: list[str]) -> int:
    """Prints the table and what is new; the number of the latter."""
    listed = [line for line in KNOWN.read_text().splitlines() if " -> " in line]
    known = {line for line in listed if not line.startswith("~ ")}
    rules = [re.compile(line.removeprefix("~ ")) for line in listed if line.startswith("~ ")]
    new: list[str] = []
    print(f"\n{'room':<12}{'mutants':>8}{'killed':>8}{'known':>8}{'new':>6}{'score':>7}")
    for room in rooms:
        found: dict[str, int] = json.loads(
            (ROOT / "mutants" / "splitppo" / f"{ROOMS[room].replace('.', '/')}.py.meta").read_text()
        )["exit_code_by_key"]
        counts: Counter[str] = Counter()
        for name, status in found.items():
            if status not in SURVIVED:
                counts["killed" if status in KILLED else "unclear"] += 1
                continue
            function = (
                name.split("__mutmut")[0]
                .replace("x_", "", 1)
                .replace("xǁ", "", 1)
                .replace("ǁ", ".")
            )
            line = "{}: {} -> {}".format(function[function.index(f"{room}.") :], *changed(name))
            if line in known or any(rule.fullmatch(line) for rule in rules):
                counts["known"] += 1
            else:
                counts["new"] += 1
                new.append(f"{line}    (mutmut show {name})")
        score = counts["killed"] / max(1, len(found))
        print(
            f"{room:<12}{len(found):>8}{counts['killed']:>8}{counts['known']:>8}{counts['new']:>6}{score:>7.1%}"
        )
    print("\n".join(["", *new]))
    return len(new)


def main() -> int:
    rooms = sys.argv[1:] or list(ROOMS)
    os.chdir(ROOT)
    # what it remembers of a test is as old as the test's name
    shutil.rmtree(ROOT / "mutants", ignore_errors=True)
    if pid := os.fork():  # mutmut imports, forks and exits as it likes
        if os.waitpid(pid, 0)[1]:
            return 2
        return 1 if report(rooms) else 0
    mutmut(["run", *(f"splitppo.{ROOMS[room]}.*" for room in rooms)])
    return 0


if __name__ == "__main__":
    sys.exit(main())
