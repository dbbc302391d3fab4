"""Estimated and measured memory of small runs on one GPU, in about five minutes: models of real
shapes, random weights.

    python tests/gpu/memory.py [--only JOB ...] [--limit SECONDS] [--out FOLDER] [--model FOLDER]

A job is three steps of a run, colocated on one GPU with the engine `hf`. For each phase it prints
the estimate of run/memory.py and the peak of torch.cuda.max_memory_allocated in the last step. With
two GPUs or more there are jobs on two of them, one with tensor parallelism. A job that fails prints
its last lines, and the others go on. Jobs that would begin after `--limit` are left out.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers")]

PROMPT, RESPONSE = 384, 128
SHAPES: dict[str, dict[str, Any]] = {
    "0.5B": {
        "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
        "num_attention_heads": 14, "num_key_value_heads": 2,
        "vocab_size": 151936, "tie_word_embeddings": True,
    },
    "1.5B": {
        "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
        "num_attention_heads": 12, "num_key_value_heads": 2,
        "vocab_size": 151936, "tie_word_embeddings": True,
    },
    "7B": {
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4,
        "vocab_size": 152064, "tie_word_embeddings": False,
    },
}  # fmt: skip
SHAPES["7B, 8 layers"] = SHAPES["7B"] | {"num_hidden_layers": 8}
ALL = ["--policy.offload=all", "--value.offload=all", "--reference.offload"]
# name -> shape, GPUs, flags; the first ones matter most
JOBS: dict[str, tuple[str, int, list[str]]] = {
    "1.5B": ("1.5B", 1, ["--compute.micro-batch-tokens=8192"]),
    "1.5B-optimizer": ("1.5B", 1, ["--policy.offload=optimizer", "--value.offload=optimizer"]),
    "1.5B-all": ("1.5B", 1, ALL),
    "7B-all-ckpt": (
        "7B, 8 layers",
        1,
        [*ALL, "--compute.activation-checkpointing", "--value.layers=4"],
    ),
    "0.5B": ("0.5B", 1, ["--compute.micro-batch-tokens=4096"]),
    "0.5B-eager": ("0.5B", 1, ["--compute.compile=off"]),
    "0.5B-ckpt": ("0.5B", 1, ["--compute.activation-checkpointing"]),
    "1.5B-tp2": ("1.5B", 2, ["--fsdp.tensor-parallel=2", "--compute.micro-batch-tokens=8192"]),
    "1.5B-fsdp2": ("1.5B", 2, ["--compute.micro-batch-tokens=8192"]),
}


def write_inputs(folder: Path, shape: dict[str, Any]) -> list[str]:
    """A model folder without weights, prompts and lengths; the flags that name them."""
    from tokenizers import Tokenizer, decoders
    from tokenizers.models import BPE
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedTokenizerFast

    folder.mkdir(parents=True, exist_ok=True)
    texts = ["<pad>", "<eos>", *map(chr, range(32, 127))]
    ids = {
        text: i for i, text in enumerate([*texts, *(f"<|{i}|>" for i in range(len(texts), 151666))])
    }
    backend = Tokenizer(BPE(vocab=ids, merges=[]))
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>"
    )
    tokenizer.save_pretrained(folder)
    make: Any = CONFIG_MAPPING[shape.get("model_type", "qwen2")]
    config = make(**shape, max_position_embeddings=4096, eos_token_id=1)
    causal: Any = AutoModelForCausalLM
    config.architectures = [causal._model_mapping[type(config)].__name__]
    config.save_pretrained(folder)
    row = json.dumps({"prompt": "7" * PROMPT, "answer": "1", "data_source": "mine"})
    (folder / "rows.jsonl").write_text((row + "\n") * 256)
    (folder / "lengths").write_text(f"{RESPONSE}\n")
    named = {"policy.path": "", "data.files": "rows.jsonl", "rollout.lengths": "lengths"}
    return [f"--{name}={folder / file}" for name, file in named.items()]


def run_job(name: str, out: Path, model: str) -> None:
    """Runs in a process of its own, or under torchrun; the first rank prints a line of JSON."""
    from peaks import count_peaks, estimated

    from splitppo import train
    from splitppo.run.build import Builder

    shape, gpus, flags = JOBS[name]
    folder, rank = out / shape.replace(", ", "-").replace(" ", "-"), int(os.environ.get("RANK", 0))
    inputs = write_inputs(folder, SHAPES[shape]) if rank == 0 else []
    while rank and not (folder / "lengths").is_file():
        time.sleep(0.2)
    inputs = inputs or [f"--policy.path={folder}", f"--data.files={folder}/rows.jsonl"]
    inputs += [] if rank == 0 else [f"--rollout.lengths={folder}/lengths"]
    inputs += [f"--policy.path={model}", "--policy.no-random-init"] if model else []
    kept: list[Any] = []
    init = Builder.__init__

    def noting(self: Any, given: Any, *args: Any) -> None:
        kept.append(given)
        init(self, given, *args)

    setattr(Builder, "__init__", noting)  # noqa: B010
    peaks: dict[str, list[int]] = {}
    count_peaks(peaks)
    argv = [
        "--engine.kind=hf",
        "--policy.random-init",
        "--placement.mode=colocated",
        "--checkpoint.no-last",
    ]
    argv += [
        f"--rollout.max-prompt-tokens={PROMPT}",
        f"--rollout.max-new-tokens={RESPONSE}",
        "--steps=3",
    ]
    argv += [
        f"--rollout.batch-size={48 * gpus}",
        "--ppo.mini-batches=2",
        "--ppo.kl-coef=0.01",
        "--data.no-chat",
    ]
    argv += [
        "--data.answer-key=answer",
        "--reward.function=exact_match",
        "--compute.device=cuda",
        "--force",
    ]
    status = train.main([*argv, *flags, *inputs, f"--run-dir={out / 'runs' / name}"])
    if status == 0 and rank == 0:
        last = {role: steps(out / "runs" / name, role)[-1] for role in ("actor", "critic")}
        seconds = sum(line["timing_s/update"] for line in last.values())
        due = estimated(kept[-1], torch.cuda.get_device_properties(0).total_memory)
        phases = {phase: [due[phase], sizes[-1]] for phase, sizes in peaks.items()}
        found = {
            "phases": phases,
            "tokens_s": 48 * gpus * (PROMPT + RESPONSE) / seconds,
            "update_s": seconds,
            "sync_s": last["actor"]["timing_s/sync"],
            "step_s": last["actor"]["timing_s/step"],
            "mismatch": [
                line["actor/mismatch_mean"] for line in steps(out / "runs" / name, "actor")
            ],
        }
        print("RESULT " + json.dumps(found), flush=True)
    sys.stdout.flush()
    os._exit(status)


def steps(run: Path, role: str) -> list[dict[str, Any]]:
    return [
        json.loads(line) for line in (run / "metrics" / f"{role}.jsonl").read_text().splitlines()
    ]


def report(name: str, log: Path) -> None:
    lines = log.read_text(errors="replace").splitlines()
    found = next((json.loads(line[7:]) for line in lines if line.startswith("RESULT ")), None)
    if found is None:
        print(f"{name:16} failed:", *lines[-12:], sep="\n    ", flush=True)
        return
    for phase, (due, most) in found["phases"].items():
        gib = f"{due / 2**30:8.2f} {most / 2**30:8.2f}  {due / most:5.3f}"
        print(f"{name:16} {phase:16} {gib}", flush=True)
    due, most = (max(sizes) for sizes in zip(*found["phases"].values(), strict=True))
    speed = (
        f"updates {found['update_s']:.2f} s, {found['tokens_s']:,.0f} tokens/s, "
        f"sync {found['sync_s']:.2f} s, step {found['step_s']:.2f} s, "
        f"mismatch {' '.join(f'{mean:.4f}' for mean in found['mismatch'])}"
    )
    print(
        f"{name:16} {'highest':16} {due / 2**30:8.2f} {most / 2**30:8.2f}  {due / most:5.3f}  "
        f"{speed}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", default=list(JOBS), choices=list(JOBS))
    parser.add_argument("--limit", type=float, default=330.0)
    parser.add_argument("--out", type=Path, default=Path("/tmp/splitppo-memory"))
    parser.add_argument("--model", default="", help="folder for all jobs, in place of shapes")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        run_job(options.job, options.out, options.model)
    began = time.monotonic()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print(f"{'setting':16} {'phase':16} {'estimate':>8} {'measured':>8}  ratio   GiB", flush=True)
    (options.out / "runs").mkdir(parents=True, exist_ok=True)
    for name in options.only:
        gpus, left = JOBS[name][1], options.limit - (time.monotonic() - began)
        if gpus > torch.cuda.device_count() or left < 20:
            print(
                f"{name:16} left out: {'too few GPUs' if left >= 20 else 'no time left'}",
                flush=True,
            )
            continue
        start = (
            [sys.executable]
            if gpus == 1
            else [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        )
        start += [] if gpus == 1 else ["--nproc_per_node", str(gpus)]
        log, command = (
            options.out / f"{name}.log",
            [
                *start,
                sys.argv[0],
                "--job",
                name,
                "--out",
                str(options.out),
                "--model",
                options.model,
            ],
        )
        with log.open("w") as file:
            try:
                subprocess.run(
                    command,
                    stdout=file,
                    stderr=file,
                    timeout=min(left + 15, 600),
                    check=False,
                    cwd=ROOT,
                )
            except subprocess.TimeoutExpired:
                print("took too long", file=file)
        report(name, log)
    print(f"{time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
