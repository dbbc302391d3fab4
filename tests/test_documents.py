"""README and docs/: measured figures stand once, in docs/figures.toml; links lead somewhere; each
command is one that the package takes, and a test runs it or the page says what it needs."""

import ast
import importlib
import inspect
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tyro
from measured import DOCS, HOME, read_figures, render_pages

from splitppo.__main__ import COMMANDS
from splitppo.config.cli import parse, read_call
from splitppo.config.rules import check
from splitppo.run import launcher
from splitppo.tools.bench import Bench

ROOT = DOCS.parent
WRITTEN = render_pages()
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in (ROOT / "README.md", *sorted(DOCS.glob("*.md")))
}
BY_HAND = [page for page in PAGES if Path(page).name not in WRITTEN]
ENTRIES = read_figures()[1]
LONGEST = 150
TABLES = {"docs/families.md"}  # pages that a program writes, of settings and models

NUMBER = r"(?<![\w.,^/\[{@#-])(?>\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)"
UNIT = r"(?:\s?(?:s|seconds?|ms|microseconds?|GiB|tokens/s|times)\b|\s?%|x\b)"
# numbers with a unit, and those before them that share it: 13.1 to 14.2 s
WITH_UNIT = re.compile(rf"{NUMBER}(?:(?:,| to| and| or| /) {NUMBER})*{UNIT}")
# a number with a point, such as a score; no version, and no part of a word, such as 1.5B
DECIMAL = re.compile(r"(?<![\w.])(?>\d*\.\d+)(?!\.?\w)")
BARE = re.compile(rf"{NUMBER}(?!\.?\w)")
IN_HEADS = re.compile(r"\b(?:s|seconds?|ms|microseconds?|GiB|tokens/s)\b|%")
MARK = re.compile(r"^<!-- (?:figures: ([\w, ]+)|definition) -->\n", re.M)
# sentences about what has not run are quoted from the table of what ran where
RAN_WHERE = "ran_where"
NOT_RUN = re.compile(
    r"\b(?<!does )(?:not|never) (?:yet )?(?:been )?(?:run|measured)\b|\bnever ran\b"
)

# groups of metrics; what is open in a name; names that rewards and environments choose
METRICS = "actor|critic|val|perf|timing_s|window|env|(?:response|prompt)_length"
OPEN = re.compile(r"[A-Z*]|\.\.\.")
KEYS = {
    *(f"critic/reward/KEY/{part}" for part in ("...", "mean", "min", "max")),
    "critic/reward/NAME/KEY/...", "critic/reward/NAME/score/...", "critic/reward/acc/...",
    "val/reward/KEY/mean", "val/reward/right/mean", "env/NAME/mean",
}  # fmt: skip

# a line that is a command, behind its variables; or flags alone
PROGRAMS = r"torchrun|splitppo|pip|python3?|sbatch|docker|sky|kubectl|launch/\S+"
COMMAND = re.compile(rf"^(?:[A-Z_]+=\S+ )*((?:{PROGRAMS}) |--\w)")

# what runs a command of a page, where no mark says what it needs
RUN_BY = {
    "train": "tests/run/test_run.py",
    "report": "tests/tools/test_report.py",
    "plan": "tests/tools/test_plan.py",
    "chat": "tests/tools/test_chat.py",
    "eval": "tests/test_commands.py",
    "export": "tests/run/test_run.py",
    "push": "tests/run/test_moved.py",
    "prepare": "tests/tools/test_prepare.py",
    "mine.py": "tests/test_script.py",
    "configs/rlhf/prepare_digits.py": "tests/test_recipes.py",
    "configs/sentiment/prepare_reward.py": "tests/test_recipes.py",
    "configs/calculator/prepare_calculator.py": "tests/config/test_calculator.py",
    "configs/smollm2/prepare_smollm2.py": "tests/rewards/test_prepare_reward.py",
    "pytest": ".ci/run",
    "pip": ".ci/run",
    "venv": ".ci/run",
}


def values(text: str) -> set[float]:
    found = re.findall(r"\d+(?:,\d{3})*(?:\.\d+)?|\.\d+", text)
    return {float(number.replace(",", "")) for number in found}


def figures_of(entry: dict[str, Any]) -> set[float]:
    """All numbers that an entry of docs/figures.toml says."""
    cells = [cell for row in entry.get("rows", []) for cell in row]
    return values(" ; ".join([entry["what"], entry.get("notes", ""), *cells]))


FIGURES = {key: figures_of(entry) for key, entry in ENTRIES.items()}


def slug(heading: str) -> str:
    """A heading's anchor on GitHub."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()
    return re.sub(r"[^\w\- ]", "", text).strip().replace(" ", "-")


# page#heading -> the entry that stands there
HEADINGS = {f"{entry['page']}.md#{slug(entry['title'])}": key for key, entry in ENTRIES.items()}


def prose(text: str) -> str:
    """A page without code."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    text = re.sub(r"(?:(?<=\n\n)|^)(?:    .*(?:\n|$)|\n)+", "\n", text)
    return re.sub(r"`[^`]*`", "code", text)


def blocks(page: str) -> Iterator[tuple[set[str] | None, str]]:
    """Paragraphs, lists and tables, each with the keys of the mark before it: None without one, and
    none of a definition."""
    for block in re.split(r"\n\s*\n", prose(page)):
        found = MARK.match(block)
        keys = set(re.findall(r"\w+", found[1] or "")) if found else None
        yield keys, block[found.end() :] if found else block


def measured_in(part: str, head: str, *, quoted: bool) -> list[str]:
    """The texts of a paragraph, point or row of a table that hold figures: numbers with a unit;
    cells whose column or row names one, or that are a number with a point; and, in what quotes
    figures, all numbers with a point."""
    found = WITH_UNIT.findall(part)
    if quoted:
        found += DECIMAL.findall(part)
    if head and part != head and not part.startswith("|--"):
        name, *cells = part.strip("|").split("|")
        for column, cell in zip(head.strip("|").split("|")[1:], cells, strict=False):
            if IN_HEADS.search(column) or IN_HEADS.search(name) or DECIMAL.fullmatch(cell.strip()):
                found += BARE.findall(cell)
    return found


def unknown_figures(page: str, entries: dict[str, set[float]]) -> list[str]:
    """What stands in a page as a figure and is in no entry that its block names. Where a row of a
    table or a point of a list links to some of these, it is theirs alone."""
    wrong = []
    for keys, block in blocks(page):
        named = keys or set()
        wrong += [f"no entry {key}" for key in named - entries.keys()]
        if RAN_WHERE not in named:
            wrong += NOT_RUN.findall(block)
        head = block[: block.find("\n|---")] if "\n|---" in block else ""
        for part in re.split(r"\n(?=[|*])", block) if keys != set() else []:  # no definition
            linked = {HEADINGS.get(target) for target in re.findall(r"\]\((?:docs/)?(.*?)\)", part)}
            sources = named & linked or named
            known = set().union(*(entries.get(key, set()) for key in sources))
            found = measured_in(re.sub(r"\]\(.*?\)", "]", part), head, quoted=bool(named))
            wrong += [text for text in found if not values(text) <= known]
    return wrong


@pytest.mark.parametrize("page", BY_HAND)
def test_figures_of_a_page_are_those_of_the_entries_that_it_names(page: str) -> None:
    assert unknown_figures(PAGES[page], FIGURES) == []


def test_the_pages_of_figures_are_written_from_their_home() -> None:
    """Else: python tests/helpers/measured.py"""
    assert len(HEADINGS) == len(ENTRIES)  # no title twice on a page
    assert [page for page, text in WRITTEN.items() if PAGES[f"docs/{page}"] != text] == []


@pytest.mark.parametrize("key", ENTRIES)
def test_an_entry_says_what_where_when_and_how(key: str) -> None:
    entry = ENTRIES[key]
    assert entry["page"] in {Path(page).stem for page in WRITTEN}
    assert all(entry[name].strip() for name in ("title", "what", "machine"))
    assert entry.get("command", "none").strip()
    assert re.match(r"2026-\d\d-\d\d", entry["date"])
    assert {len(row) for row in entry.get("rows", [])} <= {len(entry.get("columns", []))}
    assert FIGURES[key] or key == RAN_WHERE


def test_an_entry_that_goes_is_noticed() -> None:
    """On each page that quotes it; and where it is the only one, if it has other figures."""
    quoted = [(keys, page) for page in BY_HAND for keys, _ in blocks(PAGES[page]) if keys]
    assert len(set().union(*(keys for keys, _ in quoted))) > 20
    for keys, page in quoted:
        for key in keys:
            others = {name: figures for name, figures in FIGURES.items() if name != key}
            assert unknown_figures(PAGES[page], others), key
            if keys == {key} and key != RAN_WHERE:
                assert unknown_figures(PAGES[page], others | {key: set()}), key


def test_a_figure_that_changes_is_noticed() -> None:
    """By the page that is written from it, and by those that quote it."""
    text = HOME.read_text(encoding="utf-8")
    changed = text.replace('"13,670 ', '"13,680 ')
    assert render_pages(changed) != WRITTEN
    other = {key: figures_of(entry) for key, entry in read_figures(changed)[1].items()}
    assert "13,670" in " ".join(unknown_figures(PAGES["README.md"], other))
    assert unknown_figures("It takes 3 s.", FIGURES) == ["3 s"]
    assert unknown_figures("<!-- definition -->\nIt takes 3 s at most.", FIGURES) == []
    assert unknown_figures("| | GiB |\n|---|---|\n| 7B | 60 |", FIGURES) == ["60"]
    assert unknown_figures("| | share |\n|---|---|\n| whole rows | 0.97 |", FIGURES) == ["0.97"]


def metrics_in(text: str) -> set[str]:
    """The names of metrics in a page; `a/{b,c}` is two."""
    found = set()
    for name in re.findall(rf"`((?:{METRICS})/[^`\s]+)`", text):
        before, _, rest = name.partition("{")
        parts, _, behind = rest.partition("}")
        found |= {before + part + behind for part in parts.split(",")}
    return found


def unknown_metrics(text: str) -> set[str]:
    """The metrics in a page that the table of docs/metrics.md lacks; in both, what stands before
    capitals, dots or a star is how a name begins (`critic/explained/token_K`, `window/...`)."""
    table = metrics_in(PAGES["docs/metrics.md"]) - KEYS
    begun = tuple(OPEN.split(name)[0] for name in table if OPEN.search(name))
    wrong = set()
    for name in metrics_in(text) - KEYS:
        begins = OPEN.split(name)[0]
        fits = name in table or name.startswith(begun)
        if begins != name:
            fits = any(known.startswith(begins) for known in table)
        if not fits:
            wrong.add(name)
    return wrong


# the columns of TRL's names, and names of earlier versions, are others'
@pytest.mark.parametrize("page", sorted(PAGES.keys() - {"docs/from_trl.md"}))
def test_metrics_of_a_page_are_in_the_table_of_metrics(page: str) -> None:
    assert unknown_metrics(PAGES[page]) == set()


def test_a_metric_that_is_not_in_the_table_is_noticed() -> None:
    text = "`critic/vf_los`, `critic/explained/frist`, `actor/pg_{loss,los}`, `critic/explain_K`"
    wrong = {"critic/vf_los", "critic/explained/frist", "actor/pg_los", "critic/explain_K"}
    assert unknown_metrics(text) == wrong
    assert unknown_metrics("`critic/explained/token_K`, `window/rows`, `val/score/...`") == set()


@pytest.mark.parametrize("page", [*PAGES, "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"])
def test_links_lead_to_pages_and_headings(page: str) -> None:
    anchors = {
        name: {slug(heading) for heading in re.findall(r"^#+ (.*)$", text, re.M)}
        for name, text in PAGES.items()
    }
    text = (ROOT / page).read_text(encoding="utf-8")
    wrong = []
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", text):
        path = (ROOT / page).parent / target if target else ROOT / page
        name = str(path.resolve().relative_to(ROOT))
        if not path.exists() or (anchor and anchor not in anchors[name]):
            wrong.append(f"{target}#{anchor}")
    assert wrong == []


def test_what_a_user_reads_names_pages_by_their_address() -> None:
    """A message or help that says docs/... would name a file that no wheel has: errors.DOCS."""
    wrong = []
    for path in (ROOT / "splitppo").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        inside = {ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds)}
        texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
        for text in texts:
            if isinstance(text, str) and "docs/" in text and inspect.cleandoc(text) not in inside:
                wrong.append(f"{path.name}: {text}")
    assert wrong == []


def test_pages_are_short_and_listed_in_the_index() -> None:
    """README and each page by hand has at most 150 lines; docs/README.md has a line a page."""
    counts = {page: len(PAGES[page].splitlines()) for page in BY_HAND if page not in TABLES}
    assert {page: count for page, count in counts.items() if count > LONGEST} == {}
    listed = re.findall(r"^\* \[[^]]+\]\((\w+\.md)\)", PAGES["docs/README.md"], re.M)
    assert len(listed) == len(set(listed))
    assert {f"docs/{name}" for name in listed} == PAGES.keys() - {"README.md", "docs/README.md"}


def commands(page: str) -> Iterator[tuple[str, list[str]]]:
    """What the mark before a block of commands says that they need ('' without one), and the words
    of each command in it."""
    text = re.sub(r"^```.*?^```$", "", page, flags=re.M | re.S)
    for part in re.split(r"\n(?=\S)", text):
        before, *lines = part.split("\n")
        need = re.match(r"<!-- needs (\w+)", before)
        code = "\n".join(line[4:] for line in lines if line.startswith("    "))
        for command in re.split(r"\n| && ", code.replace("\\\n", " ")):
            if COMMAND.match(command):
                typed = re.sub(r"\s{2,}[^-\s].*", "", COMMAND.sub(r"\1", command))
                words = shlex.split(typed, comments=True)
                yield need[1] if need else "", [word for word in words if word != "..."]


COMMANDS_OF_PAGES = [
    (page, need, words) for page in BY_HAND for need, words in commands(PAGES[page])
]


@pytest.mark.parametrize(
    ("page", "need", "words"),
    COMMANDS_OF_PAGES,
    ids=[f"{Path(page).stem}:{' '.join(words)[:60]}" for page, _, words in COMMANDS_OF_PAGES],
)
def test_a_command_is_taken_and_run_or_says_what_it_needs(
    page: str, need: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its flags are read as the command reads them; what two ranks on CPUs can't run has a mark."""
    for name in ("training", "from_trl"):  # the presets of these pages, where a user has them
        text = re.findall(r"^```toml\n(.*?)^```", PAGES[f"docs/{name}.md"], re.M | re.S)[0]
        (tmp_path / {"training": "mine.toml", "from_trl": "tldr.toml"}[name]).write_text(text)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    monkeypatch.chdir(tmp_path)
    if words[0] in ("torchrun", "python") and "splitppo.train" in words:
        words = ["splitppo", "train", *words[1:]]
        for extra in ("-m", "splitppo.train"):
            words.remove(extra)
    elif words[0].startswith("--"):
        words = ["splitppo", "train", *words]
    if words[0] == "splitppo":
        name, arguments = words[1], words[2:]
        torchrun, own = launcher.split(arguments)
        own = own[len(launcher.script_of(own)) :]
        if name == "train":
            check(parse(own))
        elif name == "eval":
            check(parse(arguments[1:]))
        elif name == "bench":
            parse(tyro.cli(Bench, args=arguments, return_unknown_args=True)[1])
        else:
            module = importlib.import_module(COMMANDS[name][0])
            read_call(getattr(module, name), f"splitppo {name}", arguments)
        ranks = [int(flag.partition("=")[2]) for flag in torchrun if "nproc" in flag]
        assert need or (name in RUN_BY and max(ranks, default=1) <= 2), (
            "mark it: <!-- needs ... -->"
        )
    else:
        known = [key for key in RUN_BY if any(word == key for word in words)]
        assert need or known, "name the test in RUN_BY, or mark it: <!-- needs ... -->"


@pytest.mark.parametrize("command", RUN_BY)
def test_what_runs_a_command_names_it(command: str) -> None:
    assert Path(command).stem in (ROOT / RUN_BY[command]).read_text(encoding="utf-8")
