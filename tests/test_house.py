"""The package's rooms import one way, downward, and no file imports in a circle."""

import ast
import re
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "splitppo"
# A room, a file or a folder at the top of the package, may import from its own floor and from those
# below.
FLOORS = [
    {"__main__"},
    {"train", "tools"},
    {"run"},
    {"generator", "policy", "critic"},
    {"engine", "rewards", "envs"},
    {"models"},
    {"channel", "workers"},
    {"job"},
    {"context"},
    {"placement", "data"},
    {"config"},
    {"algo", "rollout"},
    {"errors"},
]
FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
FILES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
    if path != PACKAGE / "__init__.py"
}


def imports(module: str) -> set[str]:
    """Modules of the package that a module names in an import of any kind: in functions and for
    types, too."""
    found: set[str] = set()
    for node in ast.walk(parsed(module)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: a relative import"
            # of a module, or of a name in one
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    inside = {name.removeprefix("splitppo.") for name in found if name.startswith("splitppo.")}
    named = {name if name in FILES else name.rpartition(".")[0] for name in inside}
    return {name for name in named if name in FILES} - {module}


def bound(module: str) -> set[str]:
    """Names that a module binds: variables, arguments, attributes, functions."""
    names: set[str] = set()
    for node in ast.walk(parsed(module)):
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.id if isinstance(node, ast.Name) else node.attr)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
    return names


def test_names_say_what_they_hold():
    empty = {"found", "own", "theirs", "noted", "told"}
    assert {module: bound(module) & empty for module in FILES if bound(module) & empty} == {}


@cache
def parsed(module: str) -> ast.Module:
    return ast.parse(FILES[module].read_text())


@cache
def graph() -> dict[str, set[str]]:
    return {module: imports(module) for module in FILES}


def test_every_room_has_a_floor():
    assert {module.split(".")[0] for module in FILES} == set(FLOOR)
    assert "rollout" in graph()["models.runner"], "imports are not found"


def test_flags_in_messages_are_written_as_the_help_writes_them():
    texts = {
        f"{module}: {text}"
        for module in FILES
        for node in ast.walk(parsed(module))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for text in re.findall(r"(?<!\w)--[a-z][\w.-]*_\w*", node.value)
    }
    # torchrun's flag, in the texts of --help and of modules
    assert {text for text in texts if "--nproc_per_node" not in text} == set()


def test_imports_go_down():
    wrong = []
    for module, others in graph().items():
        room = module.split(".")[0]
        for other in others:
            target = other.split(".")[0]
            if target != room and FLOOR[target] <= FLOOR[room]:
                wrong.append(f"{module} imports {other}, which is not below it")
            if target == "tools" != room and room != "__main__":
                wrong.append(f"{module} imports {other}, a tool")
    assert not wrong, "\n".join(wrong)


def test_no_file_imports_in_a_circle():
    try:
        TopologicalSorter(graph()).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' <- '.join(error.args[1])}")
