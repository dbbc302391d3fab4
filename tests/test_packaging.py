"""The wheel and the sdist: what is inside, and the first commands after an install, from an empty
folder."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BUILD = "import setuptools.build_meta as build; build.build_sdist({!r}); build.build_wheel({!r})"


def run(*command: str | Path, cwd: Path, path: Path | None = None) -> str:
    environ = {
        key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "COLUMNS")
    }
    environ |= {"PYTHONPATH": str(path)} if path else {}
    done = subprocess.run(
        [*command], cwd=cwd, env=environ, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def contents(folder: Path) -> dict[str, bytes]:
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


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
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, clone)
    return clone


@pytest.fixture(scope="module")
def built(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-c", BUILD.format(str(out), str(out)), cwd=clone)
    return out


def test_wheel_holds_the_package_and_the_presets_that_need_no_clone(built: Path) -> None:
    found = contents(built)
    due = {path.relative_to(ROOT): path for path in (ROOT / "splitppo").rglob("*.py")}
    others = [ROOT / "splitppo/py.typed", ROOT / "splitppo/config/tiny.toml"]
    others += (ROOT / "splitppo/tools/web").iterdir()
    due |= {path.relative_to(ROOT): path for path in others}
    for preset in (ROOT / "configs").glob("*/*.toml"):
        if '"configs/' not in preset.read_text():  # a setting that names a file of the clone
            recipe = [preset, *preset.parent.glob("*.py")]
            due |= {
                Path("splitppo/config/presets") / file.relative_to(ROOT / "configs"): file
                for file in recipe
            }
    assert {name for name in found if ".dist-info/" not in name} == {str(path) for path in due}
    assert all(found[str(path)] == file.read_bytes() for path, file in due.items())
    assert any(name.endswith("licenses/LICENSE") for name in found)


def test_sdist_builds_the_same_wheel(built: Path, tmp_path: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    shutil.unpack_archive(sdist, tmp_path / "unpacked", filter="data")
    (source,) = (tmp_path / "unpacked").iterdir()
    run(sys.executable, "-c", BUILD.format(str(tmp_path), str(tmp_path)), cwd=source)
    assert contents(tmp_path) == contents(built)


def test_first_commands_after_an_install(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    target, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    install = (
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-index",
        "--no-deps",
        "--no-compile",
        "--target",
        target,
        wheel,
    )
    run(sys.executable, *install, cwd=empty)
    where = run(
        sys.executable, "-c", "import splitppo; print(splitppo.__file__)", cwd=empty, path=target
    )
    assert Path(where.strip()).is_relative_to(target)
    assert "prepare" in run(
        sys.executable, target / "bin" / "splitppo", "--help", cwd=empty, path=target
    )
    # a preset by its name, and the settings of the embedded model
    flags = ("--config=smollm2/two_digits", "--policy.path=tiny", "--dry-run", "--world-size=2")
    said = run(sys.executable, "-m", "splitppo.train", *flags, cwd=empty, path=target)
    assert "digits = 2" in said
    assert "resolved: " in said
    assert list(empty.iterdir()) == []


@pytest.mark.parametrize("command", ["pyright --pythonpath", "mypy --python-executable"])
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
