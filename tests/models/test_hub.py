"""Names on the hub: against a small hub of the tests' own, never the real one."""

import json
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub.constants as constants
import pytest
from hub import Hub, settings
from huggingface_hub import file_download
from ranks import run_ranks
from safetensors.torch import load_file
from transformers import LlamaForCausalLM, dynamic_module_utils

from splitppo import train
from splitppo.config.cli import parse
from splitppo.config.toml import to_toml
from splitppo.errors import UserError, one_line
from splitppo.job.launch import ERROR_FILE
from splitppo.models.build import build, read_config
from splitppo.models.hub import find
from splitppo.models.tiny import build_tiny
from splitppo.models.tokenizer import read_tokenizer
from splitppo.models.weights import check_folder
from splitppo.run.folder import facts_of, inputs_of
from splitppo.run.resolve import pin
from splitppo.tools import export

SMALL = "--steps=2 --rollout.batch-size=4 --rollout.max-new-tokens=4 --ppo.mini-batches=1".split()
OTHERS = {
    "README.md": b"#",
    "own.py": b"",
    "pytorch_model.bin": b"x",
    "consolidated.safetensors": b"x",
    "original/a.json": b"{}",
}
OWN = """
from pathlib import Path

from transformers import LlamaConfig, LlamaForCausalLM

Path(__file__).with_name("has_run").touch()


class OwnConfig(LlamaConfig):
    model_type = "own"


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny"
    build_tiny(path, seed=3)
    return path


@pytest.fixture(scope="module")
def files(folder: Path) -> dict[str, bytes]:
    return contents(folder)


@pytest.fixture(scope="module")
def shards(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    path = tmp_path_factory.mktemp("model") / "sharded"
    shutil.copytree(folder, path)
    (path / "model.safetensors").unlink()
    LlamaForCausalLM.from_pretrained(folder).save_pretrained(path, max_shard_size="150KB")
    return contents(path)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    found = Hub()
    found.use(monkeypatch, cache)
    for name in (ERROR_FILE, "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    # before it goes on with a file
    monkeypatch.setattr(file_download, "time", SimpleNamespace(sleep=lambda _: None))
    yield found
    found.close()


def own_code(files: dict[str, bytes]) -> dict[str, bytes]:
    """The same model, as code of its own."""
    config = json.loads(files["config.json"]) | {
        "model_type": "own",
        "architectures": ["OwnForCausalLM"],
    }
    config["auto_map"] = {
        "AutoConfig": "own.OwnConfig",
        "AutoModelForCausalLM": "own.OwnForCausalLM",
    }
    return files | {"config.json": json.dumps(config).encode(), "own.py": OWN.encode()}


def left(cache: Path, setting: str, name: str, patch: pytest.MonkeyPatch) -> list[str]:
    """Half files in the cache, and what is taken without a network."""
    with patch.context() as offline:
        offline.setattr(constants, "HF_HUB_OFFLINE", True)
        try:
            return list(find(setting, name))
        except UserError:
            return [str(path) for path in cache.rglob("*.incomplete")]


def test_a_name_is_a_folder_of_the_cache_with_what_a_run_reads_and_fetched_once(hub, cache, files):
    commit = hub.push("acme/tiny", files | OTHERS)
    name, path = find("policy.path", "acme/tiny")
    assert (name, path) == (
        f"acme/tiny@{commit}",
        str(cache / "models--acme--tiny" / "snapshots" / commit),
    )
    assert contents(Path(path)) == files
    assert hub.gets() == dict.fromkeys(files, 1)
    assert [find("value.path", given) for given in ("acme/tiny", name)] == [(name, path)] * 2
    assert hub.gets() == dict.fromkeys(files, 1)
    assert [ref.read_text() for ref in (cache / "models--acme--tiny" / "refs").iterdir()] == [
        commit
    ]


def test_shards_at_a_revision(hub, files, shards, folder):
    hub.push("acme/tiny", files)
    commit = hub.push("acme/tiny", shards, revision="refs/pr/1")
    assert sum(name.endswith(".safetensors") for name in shards) > 1
    name, path = find("policy.path", "acme/tiny@refs/pr/1")
    assert name == f"acme/tiny@{commit}"
    assert contents(Path(path)) == shards
    check_folder(read_config(path), path, "policy", random_init=False)
    whole = load_file(folder / "model.safetensors")
    assert {key for file in Path(path).glob("model-*") for key in load_file(file)} == whole.keys()


def test_an_adapter_has_its_weights(hub):
    files = dict.fromkeys(("adapter_config.json", "adapter_model.safetensors"), b"{}")
    hub.push("acme/adapter", files)
    assert contents(Path(find("teacher.path", "acme/adapter")[1])) == files


def test_a_file_of_a_data_set(hub, cache):
    main = hub.push(
        "acme/qa",
        {"main/train.jsonl": b"1", "main/test.jsonl": b"2", "a.jsonl": b"3"},
        kind="dataset",
    )
    other = hub.push(
        "acme/qa", {"x/0.jsonl": b"4"}, kind="dataset", revision="refs/convert/parquet"
    )
    snapshots = cache / "datasets--acme--qa" / "snapshots"
    for given, commit, file, data in (
        ("acme/qa/main/test.jsonl", main, "main/test.jsonl", b"2"),
        ("acme/qa/a.jsonl", main, "a.jsonl", b"3"),
        ("acme/qa@refs/convert/parquet/x/0.jsonl", other, "x/0.jsonl", b"4"),
        (f"acme/qa@{main}/a.jsonl", main, "a.jsonl", b"3"),
    ):
        name, path = find("data.files", f"hf://datasets/{given}")
        assert name == f"hf://datasets/acme/qa@{commit}/{file}"
        assert path == str(snapshots / commit / file)
        assert Path(path).read_bytes() == data
    assert [*hub.gets().values()] == [1, 1, 1], "each is fetched once"


def test_what_is_no_hub_name_stays_as_it_is(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "acme" / "tiny").mkdir(parents=True)
    for setting, name in (
        ("policy.path", "tiny"),
        ("policy.path", "acme/tiny"),
        ("data.files", "acme/none.jsonl"),
    ):
        assert find(setting, name) == (name, name)
    for setting, name in (
        ("policy.path", "none"), ("value.path", "./acme/none"), ("reward.model", "/acme/none"),
        ("policy.path", "a/b/c"), ("data.files", "hf://datasets/qa/train.parquet"),
        ("data.files", "hf://acme/qa/train.parquet"),
    ):  # fmt: skip
        with pytest.raises(UserError, match="OWNER/NAME") as error:
            find(setting, name)
        assert str(error.value).startswith(f"{setting}={name}: ")
    assert not hub.requests


def find_on_rank(rank: int, endpoint: str, cache: str) -> tuple[str, ...]:
    for name, value in settings(endpoint, cache).items():
        setattr(constants, name, value)
    try:
        return find("policy.path", "acme/tiny")
    except UserError as error:
        return (str(error),)


def test_two_ranks_fetch_each_file_once(hub, cache, shards):
    hub.push("acme/tiny", shards)
    hub.slow = 0.2
    first, second = run_ranks(2, find_on_rank, hub.endpoint, str(cache))
    assert first == second
    assert len(first) == 2
    assert hub.gets() == dict.fromkeys(shards, 1)


def test_two_ranks_fail_alike(hub, cache, files, monkeypatch):
    hub.push("acme/tiny", files)
    hub.broken.add("model.safetensors")
    first, second = run_ranks(2, find_on_rank, hub.endpoint, str(cache))
    assert first == second
    assert "policy.path=acme/tiny: " in first[0]
    assert not left(cache, "policy.path", "acme/tiny", monkeypatch)


def test_offline(hub, cache, files, monkeypatch):
    commit = hub.push("acme/tiny", files)
    data = hub.push("acme/qa", {"main/a.jsonl": b"1"}, kind="dataset")
    there = [("policy.path", "acme/tiny"), ("data.files", "hf://datasets/acme/qa/main/a.jsonl")]
    found = [find(*each) for each in there]
    hub.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert [find(*each) for each in there] == found
    assert find("policy.path", f"acme/tiny@{commit}")[0] == f"acme/tiny@{commit}"
    assert find("data.files", f"hf://datasets/acme/qa@{data}/main/a.jsonl") == found[1]
    for setting, name in (
        ("policy.path", "acme/none"), ("policy.path", "acme/tiny@v2"),
        ("policy.path", f"acme/tiny@{'0' * 40}"),
        ("data.files", "hf://datasets/acme/qa/main/b.jsonl"),
    ):  # fmt: skip
        with pytest.raises(UserError, match="HF_HUB_OFFLINE") as error:
            find(setting, name)
        assert str(error.value).startswith(f"{setting}={name}: ")
        assert "hf download acme/" in str(error.value)
    assert not hub.requests
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert find("policy.path", "acme/tiny", fetch=False) == found[0]
    assert not hub.requests


@contextmanager
def small_files() -> Iterator[None]:
    """A write beyond the 100,000th byte of a file fails as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


FAULTS: dict[str, tuple[str, Callable[[Hub], Any], tuple[str, ...]]] = {
    "gated": (
        "acme/tiny", lambda hub: hub.gated.add("acme/tiny"), ("gated", "HF_TOKEN", "/acme/tiny"),
    ),
    "no such model": (
        "acme/none", lambda hub: None, ("no such folder", "no such model", "HF_TOKEN"),
    ),
    "no such revision": ("acme/tiny@v2", lambda hub: None, ("no such revision", "/acme/tiny/tree")),
    "no such data set": ("hf://datasets/acme/none/a.jsonl", lambda hub: None, ("no such dataset",)),
    "no such file": (
        "hf://datasets/acme/qa/none/b.jsonl", lambda hub: None, ("no such revision or file",),
    ),
    "out of order": (
        "acme/tiny", lambda hub: setattr(hub, "status", 503),
        ("503", "HF_ENDPOINT", "HF_HUB_OFFLINE"),
    ),
    "refused": ("acme/tiny", Hub.close, ("ConnectError", "HF_ENDPOINT", "HF_HUB_OFFLINE")),
    "forbidden": (
        "acme/tiny", lambda hub: hub.forbidden.add("model.safetensors"), ("403", "HF_TOKEN"),
    ),
    "short": (
        "acme/tiny", lambda hub: hub.broken.add("model.safetensors"), ("failed", "start again"),
    ),
    "cut": ("acme/tiny", lambda hub: hub.cut.add("model.safetensors"), ("RemoteProtocolError",)),
    "full": ("acme/tiny", lambda hub: None, ("can't be written to", "File too large", "HF_HOME")),
    "no cache": (
        "acme/tiny", lambda hub: setattr(constants, "HF_HUB_CACHE", "/dev/null/a"),
        ("HF_HOME", "/null"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failure_is_one_line_and_leaves_nothing_half_written(
    fault, hub, cache, files, monkeypatch
):
    name, begin, words = FAULTS[fault]
    commit = hub.push("acme/tiny", files)
    hub.push("acme/qa", {"main/a.jsonl": b"1"}, kind="dataset")
    setting = "data.files" if name.startswith("hf:") else "policy.path"
    if fault != "full":
        begin(hub)
    with small_files() if fault == "full" else nullcontext(), pytest.raises(UserError) as error:
        find(setting, name)
    text = str(error.value)
    assert text.startswith(f"{setting}={name}: ")
    assert text == one_line(text)
    assert len(text) < 500
    for word in words:
        assert word in text
    for each in (name, f"acme/tiny@{commit}"):
        assert not left(
            cache, "data.files" if each[:2] == "hf" else "policy.path", each, monkeypatch
        )


def test_after_a_failure_only_what_is_missing_is_fetched(hub, cache, files, monkeypatch):
    hub.push("acme/tiny", files)
    hub.broken.add("model.safetensors")
    hub.slow = 0.05  # all files are on their way when the first one fails
    with pytest.raises(UserError):
        find("policy.path", "acme/tiny")
    hub.broken.clear()
    kept = {file for file in hub.gets() if file != "model.safetensors"}
    assert len(kept) > 1
    _, path = find("policy.path", "acme/tiny")
    assert contents(Path(path)) == files
    assert hub.gets() == dict.fromkeys(files, 1) | {"model.safetensors": 2}


def test_a_hub_that_does_not_answer_and_a_cache_that_does(hub, files):
    hub.push("acme/tiny", files)
    found = find("policy.path", "acme/tiny")
    hub.status = 503
    assert find("policy.path", "acme/tiny") == found


def test_a_cache_for_reading_only(hub, cache, files, monkeypatch):
    commit = hub.push("acme/tiny", files)
    found = find("policy.path", "acme/tiny")

    def refuse(self: Path, *_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    for name in ("touch", "mkdir", "write_text"):
        monkeypatch.setattr(Path, name, refuse)
    assert find("policy.path", "acme/tiny") == found == (f"acme/tiny@{commit}", found[1])


def test_a_run_that_goes_on_keeps_its_commits_and_other_nodes_must_have_the_same(
    hub, files, shards, tmp_path
):
    given = [
        "--policy.path=acme/tiny",
        "--data.files",
        "hf://datasets/acme/qa/a.jsonl",
        f"--run-dir={tmp_path}",
    ]
    model, data = (
        hub.push("acme/tiny", files),
        hub.push("acme/qa", {"a.jsonl": b"1"}, kind="dataset"),
    )
    config, local = pin(parse(given))
    assert config.policy.path == f"acme/tiny@{model}"
    assert config.data.files == (f"hf://datasets/acme/qa@{data}/a.jsonl",)
    assert local.keys() == {config.policy.path, *config.data.files}
    (tmp_path / "config.toml").write_text(to_toml(config))
    hub.push("acme/tiny", shards)
    hub.push("acme/qa", {"a.jsonl": b"2"}, kind="dataset")
    assert pin(parse(given)) == (config, local)
    assert (
        pin(parse([*given, "--policy.path=acme/tiny@main"]))[0].policy.path != config.policy.path
    ), "it was asked for"
    moved, _ = pin(parse([*given, f"--run-dir={tmp_path / 'other'}"]))
    assert moved.policy.path != config.policy.path
    assert moved.data.files != config.data.files
    facts = [facts_of(each) for each in (config, moved)]
    assert {name for name in facts[0] if facts[0][name] != facts[1][name]} == {
        "--policy.path",
        "--data.files",
    }


def test_models_that_are_not_loaded_are_not_fetched(hub, files):
    hub.push("acme/tiny", files)
    config, local = pin(
        parse(["--reference.path=acme/none", "--value.path=acme/tiny", "--ppo.kl-coef=0"])
    )
    assert config.reference.path == "acme/none"
    assert list(local) == [config.value.path]


def test_inputs_do_not_depend_on_where_the_cache_lies(hub, cache, files, monkeypatch, tmp_path):
    hub.push("acme/tiny", files)
    hub.push("acme/qa", {"a.jsonl": b"1"}, kind="dataset")
    found = []
    for place in ("cache", "elsewhere"):
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / place))
        config, local = pin(
            parse(["--policy.path=acme/tiny", "--data.files", "hf://datasets/acme/qa/a.jsonl"])
        )
        found.append(
            inputs_of(config, {"policy": config.policy.path, "value": config.policy.path}, local)
        )
    assert found[0] == found[1]
    assert {name.partition(" ")[0] for name in found[0]} == {"policy.path", "data.files"}
    assert len(found[0]) == len(files) + 1
    (cache / "other").mkdir()
    plain = inputs_of(
        parse(["--policy.path=cache/other"]), {"policy": str(cache), "value": "tiny"}, {}
    )
    assert not plain


def test_dry_run_by_name(hub, files, capfd):
    model = hub.push("acme/tiny", files)
    rows = [{"prompt": f"{n}=", "answer": str(n)} for n in range(4)]
    text = "\n".join(map(json.dumps, rows)).encode()
    data = hub.push("acme/qa", {"main/train.jsonl": text}, kind="dataset")
    argv = (
        "--policy.path=acme/tiny --data.files=hf://datasets/acme/qa/main/train.jsonl --dry-run"
    ).split()
    argv += [
        "--data.answer-key=answer",
        "--log.validate-every=0",
        "--reward.function=exact_match",
        *SMALL,
    ]
    assert train.main(argv) == 0
    out = capfd.readouterr().out
    assert f'path = "acme/tiny@{model}"' in out
    assert f"hf://datasets/acme/qa@{data}/main/train.jsonl" in out
    assert f"models--acme--tiny/snapshots/{model}" in out
    assert "data: 4 prompts" in out
    argv[0] = "--policy.path=acme/none"
    assert train.main(argv) == 2
    (error,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert error.startswith("error: policy.path=acme/none: ")


def test_a_models_own_code_does_not_run_unless_it_may(files, tmp_path, monkeypatch):
    modules = tmp_path / "modules"
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(modules))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a prompt"))
    given = own_code(files)
    known = files | {"own.py": given["own.py"]}
    config = json.loads(files["config.json"]) | {
        "auto_map": json.loads(given["config.json"])["auto_map"]
    }
    known["config.json"] = json.dumps(config).encode()
    for name, content in {"own": given, "known": known}.items():
        (tmp_path / name).mkdir()
        for file, data in content.items():
            (tmp_path / name / file).write_bytes(data)
    with pytest.raises(UserError, match="trust-remote-code"):
        read_config(str(tmp_path / "own"))
    model: Any = build(read_config(str(tmp_path / "known")), "policy")
    assert type(model.causal) is LlamaForCausalLM
    tokens = json.loads(files["tokenizer_config.json"]) | {
        "auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]}
    }
    tokens["tokenizer_class"] = "OwnTokenizer"
    (tmp_path / "own" / "tokenizer_config.json").write_text(json.dumps(tokens))
    with pytest.raises(UserError, match="trust-remote-code"):
        read_tokenizer(str(tmp_path / "own"))
    assert not [*modules.glob("**/has_run")]


def train_on_rank(rank: int, endpoint: str, cache: str, modules: str, argv: list[str]) -> int:
    for name, value in settings(endpoint, cache).items():
        setattr(constants, name, value)
    dynamic_module_utils.HF_MODULES_CACHE = modules
    return train.main(argv)


def test_two_ranks_train_a_model_with_code_of_its_own_by_name(
    hub, cache, files, tmp_path, monkeypatch
):
    commit = hub.push("acme/own", own_code(files))
    argv = [
        "--policy.path=acme/own",
        "--policy.trust-remote-code",
        f"--run-dir={tmp_path / 'run'}",
        *SMALL,
    ]
    argv += (
        "--engine.kind=hf --checkpoint.every=2 --ppo.kl-coef=0.01 --log.validate-every=0"
    ).split()
    arguments = hub.endpoint, str(cache), str(tmp_path / "modules"), argv
    assert run_ranks(2, train_on_rank, *arguments) == [0, 0]
    assert hub.gets() == dict.fromkeys([*files, "own.py"], 1)
    assert [*(tmp_path / "modules").glob("**/has_run")]
    models = json.loads((tmp_path / "run" / "resolved.json").read_text())["models"]
    assert {model["name"] for model in models.values()} == {f"acme/own@{commit}"}
    assert models["value"]["type"] == "own"
    assert models["value"]["folder"].endswith(commit)
    hub.close()  # the tools need the cache alone
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    out = export.export(tmp_path / "run")
    for kind in ("policy", "value"):
        assert (out / kind / "own.py").read_text() == OWN
        check_folder(
            read_config(str(out / kind), own_code=True), str(out / kind), kind, random_init=False
        )  # type: ignore
