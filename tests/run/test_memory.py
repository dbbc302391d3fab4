"""The memory that is told beforehand is what the allocator counts; what does not fit is told with the ways that fit."""

import contextlib
import gc
import io
import json
import os
from pathlib import Path
from typing import Any

import torch.distributed as dist
from peaks import count_peaks, estimated
from transformers import Qwen2Config

from splitppo import train
from splitppo.models.tiny import VOCABULARY, build_tokenizer
from splitppo.run.build import Builder

PROMPT, RESPONSE = 48, 16
BASE = ["--engine.kind=hf", "--policy.random-init", f"--rollout.max-prompt-tokens={PROMPT}", "--checkpoint.no-last"]
BASE += [f"--rollout.max-new-tokens={RESPONSE}", "--rollout.batch-size=32", "--ppo.mini-batches=2", "--steps=2"]
BASE += ["--data.answer-key=answer", "--reward.function=exact_match", "--ppo.kl-coef=0.1"]
SETTINGS = {
    1: {
        "plain": [],
        "checkpointing": ["--compute.activation-checkpointing"],
        "small micro-batches": ["--compute.micro-batch-tokens=256"],
        "packed": ["--compute.packing=on"],
        "offload": ["--policy.offload=all", "--value.offload=all", "--reference.offload"],
    },
    2: {
        "sharded": ["--value.offload=optimizer"],
        "whole mini-batches": ["--compute.gather=mini_batch", "--compute.micro-batch-tokens=256"],
        "split": ["--placement.mode=per_node", "--placement.reference=critic"],
    },
}


def write_inputs(folder: Path) -> list[str]:
    """A model's shape, prompts of the full length, and lengths of the responses; the flags that name them."""
    config = Qwen2Config(
        vocab_size=1000, hidden_size=128, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=False, eos_token_id=1,
    )  # fmt: skip
    config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained(folder / "model")
    build_tokenizer().save_pretrained(folder / "model")
    row = json.dumps({"prompt": "7" * PROMPT, "answer": "1", "data_source": "mine"})
    (folder / "rows.jsonl").write_text((row + "\n") * 40)
    (folder / "lengths").write_text(f"{RESPONSE}\n")
    assert len(VOCABULARY) < config.vocab_size
    named = {"policy.path": "model", "data.files": "rows.jsonl", "rollout.lengths": "lengths"}
    return [f"--{name}={folder / file}" for name, file in named.items()]


def measured_rank(rank: int, folder: Path, world: int, flags: list[str]) -> dict[str, Any]:
    """Setting -> phase -> (bytes counted, bytes estimated) of this rank."""
    if world == 1:
        del os.environ["RANK"]
    found, resolved = {}, []
    init = Builder.__init__

    def noting(self: Any, given: Any, *args: Any) -> None:
        resolved.append(given)
        init(self, given, *args)

    setattr(Builder, "__init__", noting)  # noqa: B010 -- a wrapper, not a method of ours
    for name, extra in SETTINGS[world].items():
        peaks: dict[str, list[int]] = {}
        count_peaks(peaks)
        argv = [*BASE, "--placement.mode=colocated", *flags, *extra, f"--run-dir={folder / name}"]
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            status = train.main(argv)
        assert status == 0, said.getvalue()
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.unfreeze()
        gc.collect()
        due = estimated(resolved[-1])
        found[name] = {phase: (sizes[-1], due[phase]) for phase, sizes in peaks.items()}
    return found
