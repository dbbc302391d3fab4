"""The wheel and the sdist: what is inside, what an index shows of them, and the first commands
after an install, from an empty folder."""

import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from email import message_from_bytes
from pathlib import Path
from typing import Any

import pytest
import torch
from tiers import wide

from splitppo import __version__

ROOT = Path(__file__).parents[1]
BUILD = "import setuptools.build_meta as build; build.build_sdist({!r}); build.build_wheel({!r})"
DESCRIBE = "import setuptools.build_meta as build; build.prepare_metadata_for_build_wheel({!r})"
FILES = "https://host.example/owner/splitppo/blob/v0"  # of a release
LINK = re.compile(r"\]\((?!#)([^)]+)\)")


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    environ = {key: value for key, value in os.environ.items() if key != "COLUMNS"}
    environ |= {"PYTHONPATH": "", **variables}
    done = subprocess.run(
        [*command], cwd=cwd, env=environ, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def contents(folder: Path) -> dict[str, bytes]:
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def metadata(wheel: dict[str, bytes]) -> Any:
    (text,) = (text for name, text in wheel.items() if name.endswith(".dist-info/METADATA"))
    return message_from_bytes(text)


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a clone holds of the package."""
    clone = tmp_path_factory.mktemp("clone")
    for folder in ("splitppo", "configs"):
        shutil.copytree(
            ROOT / folder,
            clone / folder,
            symlinks=True,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    for file in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, clone)
    return clone


@pytest.fixture(scope="module")
def built(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist of a release."""
    out = tmp_path_factory.mktemp("dist")
    build = BUILD.format(str(out), str(out))
    run(sys.executable, "-c", build, cwd=clone, SPLITPPO_FILES=FILES)
    return out


def test_wheel_holds_the_package_and_the_presets_that_need_no_clone(built: Path) -> None:
    wheel = contents(built)
    due = {path.relative_to(ROOT): path for path in (ROOT / "splitppo").rglob("*.py")}
    others = [ROOT / "splitppo/py.typed", ROOT / "splitppo/config/tiny.toml"]
    others += (ROOT / "splitppo/tools/web").iterdir()
    due |= {path.relative_to(ROOT): path for path in others}
    presets = Path("splitppo/config/presets")
    for preset in (ROOT / "configs").glob("*/*.toml"):
        # scripts of a clone make what lies in models/; the hub has the others' models
        if not re.search('"(?:configs|models)/', preset.read_text()):
            due[presets / preset.relative_to(ROOT / "configs")] = preset
    assert {name for name in wheel if ".dist-info/" not in name} == {str(path) for path in due}
    assert all(wheel[str(path)] == file.read_bytes() for path, file in due.items())


def test_licences_of_what_is_inside(built: Path) -> None:
    about = metadata(contents(built))
    assert about["License-Expression"] == "Apache-2.0 AND MIT"
    assert about.get_all("License-File") == ["LICENSE", "splitppo/tools/web/uplot.LICENSE"]
    for file in about.get_all("License-File", []):
        (text,) = (
            text for name, text in contents(built).items() if name.endswith(f"licenses/{file}")
        )
        assert text == (ROOT / file).read_bytes()


def test_an_index_shows_readme_with_links_to_the_files_of_the_release(built: Path) -> None:
    """Else with none to a file."""
    about = metadata(contents(built))
    links = LINK.findall(about.get_payload())
    assert len(links) > 20
    for link in links:
        file = link.removeprefix(f"{FILES}/").partition("#")[0]
        assert (ROOT / file).is_file() if link.startswith(FILES) else link.startswith("https://")
    urls = dict(url.split(", ") for url in about.get_all("Project-URL", []))
    assert urls.pop("Source") == "https://host.example/owner/splitppo"
    assert urls.keys() == {"Documentation", "Changelog"}
    assert all((ROOT / url.removeprefix(FILES + "/")).is_file() for url in urls.values())


def test_readme_has_no_links_to_files_without_their_address(clone: Path, tmp_path: Path) -> None:
    run(sys.executable, "-c", DESCRIBE.format(str(tmp_path)), cwd=clone, SPLITPPO_FILES="")
    (file,) = tmp_path.glob("*/METADATA")
    about: Any = message_from_bytes(file.read_bytes())
    assert about["Project-URL"] is None
    assert all(link.startswith("https://") for link in LINK.findall(about.get_payload()))
    assert "\n## Limits\n" in about.get_payload()


def test_sdist_builds_the_same_wheel(built: Path, tmp_path: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    shutil.unpack_archive(sdist, tmp_path / "unpacked", filter="data")
    (source,) = (tmp_path / "unpacked").iterdir()
    run(sys.executable, "-c", BUILD.format(str(tmp_path), str(tmp_path)), cwd=source)
    assert contents(tmp_path) == contents(built)


def test_first_words_after_an_install(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    target, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    install = "-m pip install --quiet --no-index --no-deps --no-compile --target".split()
    run(sys.executable, *install, target, wheel, cwd=empty)

    def python(*words: str | Path) -> str:
        return run(sys.executable, *words, cwd=empty, PYTHONPATH=str(target)).strip()

    assert "prepare" in python(target / "bin" / "splitppo", "--help")
    version = python(target / "bin" / "splitppo", "--version")
    assert version == f"splitppo {__version__}"
    assert version.endswith(metadata(contents(built))["Version"])
    # a message that names a page
    lines = "from splitppo.config.cli import __file__, kept_rates, parse"
    flags = ["--config=gsm8k/qwen2.5_0.5b", "--policy.lora.rank=8"]
    said = python("-c", f"{lines}; print(__file__); print(kept_rates(parse({flags}), {flags}))")
    file, warned = said.splitlines()
    assert Path(file).is_relative_to(target)
    (page,) = re.findall(r"\((https://\S+)\)", warned)
    assert (ROOT / page.removeprefix(f"{FILES}/")).is_file()
    assert list(empty.iterdir()) == []


@pytest.mark.wide
def test_the_first_command_eval_and_report_from_the_wheel_alone(
    built: Path, tmp_path: Path
) -> None:
    """In an environment with nothing but the wheel and what it needs, which pip fetches."""
    (wheel,) = built.glob("*.whl")
    venv.create(tmp_path / "venv", with_pip=True)
    programs = tmp_path / "venv" / "bin"
    torch_here = f"torch=={torch.__version__.partition('+')[0]}"  # of any build
    run(programs / "pip", "install", "--quiet", "--no-compile", torch_here, wheel, cwd=tmp_path)
    run(programs / "pip", "check", cwd=tmp_path)
    variables = {"PATH": f"{programs}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (first,) = re.findall(r"&& (splitppo train .* && splitppo report)$", readme, re.M)
    dry = run(programs / "splitppo", "train", "--dry-run", "--world-size=2", cwd=tmp_path)
    assert "resolved: " in dry
    lines = run("bash", "-ec", f"{first} && splitppo eval runs/*", cwd=tmp_path, **variables)
    assert re.search(r"held-out     score 0\.000 at step 0, 1\.000 at step", lines), lines
    (page,) = tmp_path.glob("runs/*/report.html")
    assert "uPlot" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("command", [wide("pyright --pythonpath"), "mypy --python-executable"])
def test_editors_know_the_settings_of_an_editable_install(
    clone: Path, tmp_path: Path, command: str
) -> None:
    """`pip install -e .` as README has it, then its script with a setting that does not exist."""
    if not shutil.which(command.split()[0]):
        pytest.skip(f"{command.split()[0]} is not installed: pip install -e '.[test]'")
    build = f"import setuptools.build_meta as build; build.build_editable({str(tmp_path)!r})"
    run(sys.executable, "-c", build, cwd=clone)
    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv", cwd=tmp_path)
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (wheel,) = tmp_path.glob("*.whl")
    shutil.unpack_archive(wheel, site, "zip")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"^```python\n(.*?)^```", readme, re.M | re.S)
    (tmp_path / "right.py").write_text(script)
    (tmp_path / "wrong.py").write_text(script.replace("Config(batch_size=", "Config(batchsize="))
    python = tmp_path / "venv" / "bin" / "python"
    said = {}
    for name in ("right", "wrong"):
        checked = subprocess.run(
            [*command.split(), python, f"{name}.py"], cwd=tmp_path, capture_output=True, text=True
        )
        said[name] = checked.returncode, checked.stdout
    assert said["right"][0] == 0, said
    assert said["wrong"][0] == 1
    assert re.search(r"wrong\.py:\d+.*batchsize", said["wrong"][1]), said
