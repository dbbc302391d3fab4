"""Written models are read by transformers 4, too, and hold what training did not change as it
was."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from test_families import CPU, HALF, configured, preflown, written
from transformers import AutoTokenizer

from splitppo.models.build import build, read_config
from splitppo.models.weights import fill, save

IDS = torch.arange(2, 40)[None]
TEXT = "What is 12 + 7?\n  19"
LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
LLAMA3 |= {"original_max_position_embeddings": 16}
LOCAL: dict[str, Any] = {
    "sliding_window": 4,
    "layer_types": ["sliding_attention", "full_attention"],
}
LOCAL["rope_parameters"] = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 9e3},
}
FACTORS: dict[str, Any] = {"short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [4.0] * 4}
LONG = {"max_position_embeddings": 128, "original_max_position_embeddings": 64}


def rope(**settings: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", **settings}}


# name -> (type, settings beside SIZE, the same positions in the words of transformers 4)
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2": ("qwen2", rope(rope_theta=1e6), {"rope_theta": 1e6}),
    "qwen3, tied": (
        "qwen3",
        rope(rope_theta=5e6) | {"tie_word_embeddings": True},
        {"rope_theta": 5e6},
    ),
    "llama3": (
        "llama",
        rope(rope_theta=5e5, **LLAMA3),
        {"rope_theta": 5e5, "rope_scaling": LLAMA3},
    ),
    "mistral": ("mistral", rope(rope_theta=2e6) | {"sliding_window": 4}, {"rope_theta": 2e6}),
    "gemma3": (
        "gemma3_text",
        LOCAL,
        {
            "rope_theta": 1e6,
            "rope_local_base_freq": 9e3,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
    "phi3": (
        "phi3",
        HALF | LONG | rope(rope_theta=3e4, rope_type="longrope", **FACTORS),
        {
            "rope_theta": 3e4,
            "partial_rotary_factor": 1.0,
            "original_max_position_embeddings": 64,
            "rope_scaling": {"type": "longrope", **FACTORS},
        },
    ),
    "gpt-neox": (
        "gpt_neox",
        rope(rope_theta=2e4, partial_rotary_factor=0.5),
        {"rotary_emb_base": 2e4, "rotary_pct": 0.5},
    ),
}


@torch.no_grad()
def trained(start: Path, kind: Any) -> Any:
    """The policy or value model of a folder, with other weights."""
    model = build(read_config(str(start)), kind)
    fill(model, str(start), device=CPU, head="normal", seed=3)
    for parameter in model.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@torch.no_grad()
def outputs(model: Any) -> torch.Tensor:
    """A policy's logits or a value model's values, `[T, ...]`."""
    if hasattr(model, "score"):
        return model(at=torch.arange(IDS.shape[1]), input_ids=IDS)
    return model.causal(input_ids=IDS, use_cache=False).logits[0]


def exported(folder: Path, name: str) -> dict[str, torch.Tensor]:
    """Writes FOLDER/start in the words of transformers 4, and from it FOLDER/policy and
    FOLDER/value. Returns what these models computed."""
    kind, settings, older = FAMILIES[name]
    start = folder / "start"
    written(start, configured(kind, settings))
    fields = json.loads((start / "config.json").read_text())
    for newer in ("rope_parameters", "dtype"):
        fields.pop(newer, None)
    (start / "config.json").write_text(json.dumps(fields | older | {"torch_dtype": "float32"}))
    AutoTokenizer.from_pretrained(start).save_pretrained(start)  # some types change it
    models = {part: trained(start, part) for part in ("policy", "value")}
    for part, model in models.items():
        save(model, folder / part, start, start)
    return {part: outputs(model) for part, model in models.items()}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_written_model_has_the_names_of_both_and_is_read_again(name: str, tmp_path: Path) -> None:
    due = exported(tmp_path, name)
    for part in ("policy", "value"):
        fields = json.loads((tmp_path / part / "config.json").read_text())
        older = {"torch_dtype": "float32"} | FAMILIES[name][2]
        assert {field: fields[field] for field in older} == older
        assert ("rope_scaling" in fields) == ("rope_scaling" in older)
        assert fields["dtype"] == "float32"
        again = build(read_config(str(tmp_path / part)), part)
        fill(again, str(tmp_path / part), device=CPU)
        torch.testing.assert_close(outputs(again), due[part], rtol=0, atol=0)
        settings = (tmp_path / "start" / "tokenizer_config.json").read_text()
        assert '"tokenizer_class": ' in settings
        settings = settings.replace('"TokenizersBackend"', '"PreTrainedTokenizerFast"')
        assert (tmp_path / part / "tokenizer_config.json").read_text() == settings
    preflown(tmp_path / "policy", f"--value.path={tmp_path / 'value'}")


def test_what_training_did_not_change_stays_as_it_was(tmp_path: Path) -> None:
    """A folder as transformers 4 wrote it, with settings that version 5 drops or rewords."""
    start = tmp_path / "start"
    written(start, configured("qwen2", rope(rope_theta=1e6)))
    given = json.loads((start / "config.json").read_text())
    del given["rope_parameters"], given["dtype"]
    given |= {
        "rope_theta": 1e6,
        "rope_scaling": None,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0",
    }
    given |= {
        "use_sliding_window": False,
        "sliding_window": 32,
        "do_sample": True,
        "note": "ours",
        "num_labels": 2,
    }
    (start / "config.json").write_text(json.dumps(given))
    settings = json.loads((start / "tokenizer_config.json").read_text())
    settings |= {
        "tokenizer_class": "Qwen2Tokenizer",
        "extra_special_tokens": {},
        "chat_template": "{{ 'é' }}",
    }
    mine = {
        "tokenizer_config.json": json.dumps(settings, ensure_ascii=False, separators=(",", ":")),
        "special_tokens_map.json": '{"eos_token": "<eos>"}',
        "vocab.json": "{}",
        "merges.txt": "#version: 0.2\n",
        "chat_template.jinja": "{{ messages }}",
        "generation_config.json": '{"eos_token_id": [1, 2], "temperature": 0.6}',
    }
    for name, text in mine.items():
        (start / name).write_text(text, encoding="utf-8")
    (start / "modeling_own.py").write_text("")
    for part in ("policy", "value"):
        save(trained(start, part).to(torch.float16), tmp_path / part, start, start)
        found = json.loads((tmp_path / part / "config.json").read_text())
        due = {name: value for name, value in given.items() if name != "num_labels"} | {
            "torch_dtype": "float16"
        }
        if part == "value":
            due["architectures"] = ["Qwen2ForTokenClassification"]
        assert {name: value for name, value in found.items() if name in given} == due
        assert found["dtype"] == "float16"
        assert len(found.get("id2label", "")) == (part == "value")
        for name in [*mine, "tokenizer.json"]:
            if name != "generation_config.json" or part == "policy":
                assert (tmp_path / part / name).read_bytes() == (start / name).read_bytes(), name
        assert not list((tmp_path / part).glob("*.py"))


def test_tokens_that_transformers_5_calls_extra_are_named_for_both(tmp_path: Path) -> None:
    start = tmp_path / "start"
    written(start, configured("llama", {}))
    tokenizer = AutoTokenizer.from_pretrained(start)
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|turn|>"]})
    tokenizer.save_pretrained(start)
    assert isinstance(
        json.loads((start / "tokenizer_config.json").read_text())["extra_special_tokens"], list
    )
    save(trained(start, "policy"), tmp_path / "policy", start, start)
    settings = json.loads((tmp_path / "policy" / "tokenizer_config.json").read_text())
    assert settings["additional_special_tokens"] == ["<|turn|>"]
    assert "extra_special_tokens" not in settings
    again = AutoTokenizer.from_pretrained(tmp_path / "policy")
    assert again.all_special_tokens == tokenizer.all_special_tokens
    assert again("1<|turn|>2").input_ids == tokenizer("1<|turn|>2").input_ids


READER = f"""
import sys, torch, transformers
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification, AutoTokenizer
assert transformers.__version__.startswith("4.57."), transformers.__version__
ids = torch.arange(2, 40)[None]
for folder in sys.argv[1:]:
    policy = AutoModelForCausalLM.from_pretrained(f"{{folder}}/policy", dtype=torch.float32).eval()
    found = {{"policy": policy(ids).logits[0].detach()}}
    if type(policy.config) in transformers.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING:
        kind = AutoModelForTokenClassification
        value = kind.from_pretrained(f"{{folder}}/value", dtype=torch.float32).eval()
        found["value"] = value(ids).logits[0].detach()
    for part in ("policy", "value"):
        tokenizer = AutoTokenizer.from_pretrained(f"{{folder}}/{{part}}")
        found[f"{{part}} tokens"] = tokenizer({TEXT!r}).input_ids
    torch.save(found, f"{{folder}}/found.pt")
"""


@pytest.mark.families
def test_transformers_4_computes_the_same_of_what_is_written(tmp_path: Path) -> None:
    """In an environment of its own, which PyPI must give."""
    older = tmp_path / "transformers4"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--retries=1", "--target", str(older)]
    fetched = subprocess.run([*pip, "transformers==4.57.*"], capture_output=True, text=True)
    if fetched.returncode:
        pytest.skip(
            f"PyPI does not give transformers 4.57: {fetched.stderr.strip().splitlines()[-1]}"
        )
    due = {}
    for number, name in enumerate(FAMILIES):
        due[tmp_path / f"model_{number}"] = exported(tmp_path / f"model_{number}", name)
    environ = os.environ | {"PYTHONPATH": str(older), "HF_HUB_OFFLINE": "1"}
    subprocess.run([sys.executable, "-c", READER, *map(str, due)], env=environ, check=True)
    values = 0
    for folder, figures in due.items():
        found = torch.load(folder / "found.pt")
        values += "value" in found
        for part in figures.keys() & found.keys():
            torch.testing.assert_close(found[part], figures[part], rtol=1e-4, atol=1e-4)
        tokens = AutoTokenizer.from_pretrained(folder / "start")(TEXT).input_ids
        assert found["policy tokens"] == found["value tokens"] == tokens
    assert values >= 5
