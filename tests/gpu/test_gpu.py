"""What only GPUs can show: `python tests/gpu/suite.py`. Skipped elsewhere.

The program runs as in the other tests, in new processes, on one GPU or two, and is held against the
same references: a PPO of one process on the CPU in float32, transformers' own models, a run that
nobody stopped.
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import needs_gpus, skip_without_vllm, whole_gpus
from memory import JOBS
from ranks import run_ranks
from runs import SMALL, Torchrun, assert_same, figures, main_rank, records
from test_engine import CLOSE, make_tokenizer, random_weights, some_requests, start_vllm
from test_engine import run as generate
from test_flagship import STEPS, inputs, reference, run
from test_vllm import differences
from test_weight_check import BASE
from test_windows import LENGTHS, WINDOW, lengths_file
from transformers import AutoConfig, AutoModelForCausalLM

from splitppo import train

__all__ = ["inputs"]  # the fixture

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.gpu, needs_gpus(1), pytest.mark.timeout(600)]
two_gpus = needs_gpus(2)

PLAIN = {
    "compute__device": "cuda",
    "compute__dtype": "float32",
    "engine__kind": "hf",
    "compute__compile": "off",
}
BFLOAT16 = {"compute__dtype": "bfloat16"}
OFFLOADED = {"policy__offload": "all", "value__offload": "all", "reference__offload": ""}
VLLM = {"engine__kind": "vllm"}
WHOLE: dict[str, Any] = {"placement__mode": "colocated"}
SPLIT: dict[str, Any] = {"placement__actor": 1}
# name -> GPUs, flags beside PLAIN
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "float32": (1, {}),
    "packed": (1, {"compute__packing": "on"}),
    "compiled": (1, {"compute__compile": "on"}),
    "offloaded": (1, OFFLOADED),
    "checkpointed": (1, {"compute__activation_checkpointing": ""}),
    "windows": (1, {"rollout__window": WINDOW}),
    "vllm": (1, VLLM),
    "vllm, windows": (1, VLLM | {"rollout__window": WINDOW}),
    "bfloat16, padded": (1, BFLOAT16 | {"compute__packing": "off"}),
    "bfloat16, packed": (1, BFLOAT16),
    "bfloat16, all defaults": (1, BFLOAT16 | VLLM | {"compute__compile": "auto"}),
    "1+1": (2, SPLIT | VLLM),
    "1+1, windows": (2, SPLIT | {"rollout__window": WINDOW}),
    "1+1, offloaded": (2, SPLIT | OFFLOADED),
    "two colocated": (2, WHOLE | VLLM),
    "two colocated, offloaded": (2, WHOLE | OFFLOADED),
    "reference at the critic": (
        2, SPLIT | {"placement__reference": "critic", "ppo__kl_loss_coef": 0.0},
    ),
    "sets of all models": (2, WHOLE | {"fsdp__tensor_parallel": 2}),
    "cut rows": (2, WHOLE | {"fsdp__sequence_parallel": 2}),
    "bfloat16, cut rows": (
        2, BFLOAT16 | WHOLE | VLLM | {"fsdp__sequence_parallel": 2, "compute__compile": "auto"},
    ),
    "bfloat16, 1+1": (2, BFLOAT16 | SPLIT | VLLM | {"compute__compile": "auto"}),
}  # fmt: skip
# largest difference from the reference: of a loss, of a gradient norm relative to its size, of all
# weights' changes relative to these changes
BOUNDS = {"float32": (1e-4, 1e-4, 1e-2), "bfloat16": (0.05, 0.5, 0.6)}
# where the loss is against vLLM's log-probs, whose attention is of TF32 in float32
BOUNDS["float32, vLLM's"] = (1e-3, 3e-3, 1e-2)


def distances(inputs: Path, seen: dict, due: dict) -> tuple[float, float, float]:
    """What BOUNDS limits."""
    losses, norms = [0.0], [0.0]
    for role, model in (("actor", "policy"), ("critic", "value")):
        for step in range(STEPS):
            found = seen[role][step]
            expected = due["results"][step]
            pairs = zip(found, getattr(expected, f"{model}_losses"), strict=True)
            losses += [abs(ours["loss"] - float(theirs)) for ours, theirs in pairs]
            pairs = zip(found, getattr(expected, f"{model}_grad_norms"), strict=True)
            norms += [
                abs(ours["grad_norm"] - float(theirs)) / max(float(theirs), 1e-3)
                for ours, theirs in pairs
            ]
    start: Any = AutoModelForCausalLM.from_pretrained(
        inputs / "policy", dtype=torch.float32
    ).state_dict()
    names = [name for name in seen["policy"] if name in start]
    off = sum(float((seen["policy"][name] - due["policy"][name]).square().sum()) for name in names)
    moved = sum(float((due["policy"][name] - start[name]).square().sum()) for name in names)
    return max(losses), max(norms), (off / moved) ** 0.5


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=needs_gpus(gpus)) for name, (gpus, _) in CASES.items()]
)
def test_the_program_is_the_paper(name: str, inputs: Path, tmp_path: Path) -> None:
    """Colocated, split, in windows, offloaded, packed and padded, compiled, with either engine, in
    both precisions."""
    world, changes = CASES[name]
    flags: dict[str, Any] = PLAIN | changes
    if flags["engine__kind"] == "vllm":
        skip_without_vllm()
    hyper: dict[str, Any] = {"kl_loss_coef": 0.0} if "ppo__kl_loss_coef" in flags else {}
    if window := flags.get("rollout__window", 0):
        hyper["old_logprobs"] = "engine"
        flags |= {
            "ppo__old_logprobs": "engine",
            "rollout__samples": 2,
            "rollout__max_new_tokens": 12,
        }
        flags["rollout__lengths"] = lengths_file(tmp_path, LENGTHS)
    seen = run(inputs, tmp_path, world, odd="exact", **flags)
    due = reference(inputs, seen, window=window, samples=flags.get("rollout__samples", 1), **hyper)
    found = distances(inputs, seen, due)
    print(
        f"MEASURED {name}: loss {found[0]:.1e}, gradient norm {found[1]:.1e}, change of the "
        f"weights {found[2]:.1e}"
    )
    bounds = BOUNDS["float32, vLLM's" if name == "vllm, windows" else flags["compute__dtype"]]
    assert all(far <= most for far, most in zip(found, bounds, strict=True)), found


RESUMED = [
    *SMALL,
    "--checkpoint.every=1",
    "--steps=6",
    "--engine.kind=hf",
    "--compute.dtype=float32",
]
RESUMED += ["--compute.compile=off", "--compute.device=cuda"]
SETS = ["--fsdp.tensor-parallel=2"]


@pytest.mark.parametrize(
    ("world", "before", "after"),
    [
        (1, [], []),
        (1, ["--policy.offload=all"], ["--value.offload=optimizer"]),
        pytest.param(2, ["--placement.actor=1"], ["--placement.mode=colocated"], marks=two_gpus),
        pytest.param(
            2,
            ["--fsdp.tensor-parallel=2", "--placement.mode=colocated"],
            ["--placement.actor=1"],
            marks=two_gpus,
        ),
    ],
)
def test_a_killed_run_resumes_as_if_nothing_had_been(
    world: int, before: list, after: list, tmp_path: Path
) -> None:
    """Also with other offloading, and under another placement."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    run_ranks(world, main_rank, [*RESUMED, *before, f"--run-dir={whole}"])
    job = Torchrun(
        world, train.main, [*RESUMED, *before, f"--run-dir={cut}"], out=tmp_path / "said"
    )
    deadline = time.monotonic() + 200
    while job.runs and not (cut / "checkpoints" / "step_000002").is_dir():
        assert time.monotonic() < deadline, job.said()
        time.sleep(0.02)
    job.wait(0)
    done = len(records(cut, "actor"))
    run_ranks(world, main_rank, [*RESUMED, *after, f"--run-dir={cut}"])
    for role in ("actor", "critic"):
        assert_same(figures(cut, role), figures(whole, role))
    print(f"MEASURED killed after step {done - 1} of 6")


SIZES = {"head_dim": 64, "hidden_size": 256, "max_position_embeddings": 4096, "eos_token_id": 1}


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3_text"])
def test_vllm_has_the_weights_of_a_family(family: str, tmp_path: Path) -> None:
    """An engine's process each. The sync compares the checksums of all tensors, and the log-probs
    show what it did."""
    skip_without_vllm()
    config: Any = AutoConfig.for_model(family, **BASE | SIZES)
    kinds: Any = AutoModelForCausalLM
    config.architectures = [kinds._model_mapping[type(config)].__name__]
    model = random_weights(kinds.from_config(config, attn_implementation="eager").eval(), 0.1)
    engine = start_vllm(tmp_path, config, make_tokenizer(), 2)
    try:
        engine.load_weights(model.state_dict().items())
        found = differences(generate(engine, some_requests(6)), model)
    finally:
        engine.close()
    print(f"MEASURED {family}: log-probs differ by {float(found.max()):.1e} at most")
    assert found.max() < CLOSE


def test_the_tools_work_on_a_run(tmp_path: Path) -> None:
    """With all defaults: vLLM if it is there, bfloat16, compiled layers."""
    folder = tmp_path / "run"
    run_ranks(1, main_rank, [*SMALL, "--compute.device=cuda", f"--run-dir={folder}"], timeout=400)

    def splitppo(*words: str, typed: str = "") -> str:
        command = [sys.executable, "-m", "splitppo", *words]
        done = subprocess.run(
            command, input=typed, capture_output=True, text=True, cwd=ROOT, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert str(folder) in splitppo("report", str(folder))
    assert splitppo("chat", str(folder), typed="312=\n").count("trained") >= 2
    splitppo("export", str(folder))
    (policy,) = folder.glob("export/step_*/policy")
    model: Any = AutoModelForCausalLM.from_pretrained(policy)
    assert model(torch.tensor([[5, 6, 7]])).logits.isfinite().all()


@pytest.mark.parametrize(
    "job",
    [
        pytest.param(job, marks=whole_gpus(JOBS[job][1]))
        for job in ("1.5B", "1.5B-all", "0.5B-ckpt", "1.5B-tp2")
    ],
)
def test_the_estimated_memory_is_what_pytorch_allocates(job: str, tmp_path: Path) -> None:
    """Of real shapes with random weights, by tests/gpu/memory.py. The highest phase within a
    tenth."""
    count = JOBS[job][1]
    start = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        str(count),
    ]
    command = [*start, str(ROOT / "tests/gpu/memory.py"), "--job", job, "--out", str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, timeout=500, check=False
    )
    told = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert told, (done.stdout + done.stderr)[-3000:]
    phases = json.loads(told[0].removeprefix("RESULT "))["phases"].values()
    due, most = (max(sizes) for sizes in zip(*phases, strict=True))
    print(
        f"MEASURED {job}: estimated {due / 2**30:.2f} GiB, allocated {most / 2**30:.2f} GiB, "
        f"{due / most:.3f}"
    )
    assert due == pytest.approx(most, rel=0.1)
