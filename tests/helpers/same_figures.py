"""Do two commits compute the same? Plays fourteen runs with each and compares all figures, bit for
bit.

    python tests/helpers/same_figures.py BEFORE AFTER [--runs NAME ...] [--keep FOLDER]

BEFORE and AFTER are git revisions (`.` is this folder as it stands). A run trains `STEPS` steps
of a small model. Its figures are the metrics of each step, without those of the clock, and the
samples: texts, values, rewards and advantages of all rows. Each run writes checkpoints, and one
that BEFORE wrote is resumed by AFTER: the figures must be those of BEFORE's whole run. With
`--keep` the runs stay in FOLDER, and those of a revision that are there are not played again.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# figures of the clock, of earlier versions alone, and those that were defined anew since
LEFT_OUT = (
    "timing_s", "perf/", "val/best_", "actor/stale_", "window/ess",
    "actor/ratio_ess", "critic/calibration", "critic/explained",
    "critic/turn_", "critic/vf_explained_var",
    "slots",
)  # fmt: skip
STEPS, RESUMED = 5, 3  # steps of a run; the step whose checkpoint AFTER resumes
COMMON = f"""--steps {STEPS} --rollout.batch-size 12 --rollout.max-new-tokens 8
    --rollout.temperature 0.9 --ppo.mini-batches 2 --ppo.kl-coef 0.02 --ppo.epochs 2
    --policy.path POLICY --policy.optim.lr 5e-4 --value.optim.lr 5e-4 --value.head normal
    --reward.function SCORE --log.validate-every 2 --log.samples 12
    --checkpoint.every 1 --checkpoint.keep 0 --compute.device cpu --timeout 60"""
NO_VALUES = ("--value.optim.lr", "--value.head")  # flags of a value model, which means refuse
AT_CRITIC = "--placement.reference critic"
COLOCATED = "--placement.mode colocated"
# name -> ranks and flags
RUNS: dict[str, tuple[int, str]] = {
    "1+1": (2, ""),
    "2+1": (3, "--placement.actor 2"),
    "1+3": (4, "--placement.actor 1"),
    "colocated": (2, COLOCATED),
    "reference_at_critic": (2, AT_CRITIC),
    "two_by_two": (4, f"--placement.actor 2 {AT_CRITIC} --ppo.value-mini-batches 4"),
    "windows_2+1": (3, "--placement.actor 2 --rollout.window 3"),
    "windows_colocated": (2, f"{COLOCATED} --rollout.window 4 --rollout.chunks 1"),
    "tensor_sequence": (
        4,
        "--placement.actor 2 --fsdp.tensor-parallel 2 --value.tensor-parallel 1"
        " --value.sequence-parallel 2",
    ),
    "unequal_offload": (
        3,
        f"{COLOCATED} --placement.reference actor --policy.offload all --value.offload all"
        " --reference.offload --compute.packing off",
    ),
    "batch_mean": (2, f"{COLOCATED} --ppo.baseline batch --rollout.window 4"),
    "group_mean": (2, f"{COLOCATED} --ppo.baseline group --rollout.samples 3"),
    "lora_shared_base": (
        2,
        f"{COLOCATED} --rollout.window 3 --policy.lora.rank 4 --value.lora.rank 4"
        " --value.share-base",
    ),
    "guess_windows_2+1": (
        3,
        # a row at a time: log-probs are rounded by who else is decoded, which here depends on time
        "--placement.actor 2 --rollout.window 6 --data.task guess --rollout.max-new-tokens 24"
        " --engine.max-rows 1",
    ),
}
SCORE = """
def score(data_source, solution_str, ground_truth, extra_info):
    return {"score": sum(map(ord, solution_str)) % 37 / 37, "length": len(solution_str)}
"""
MAKE = """
import sys, torch
from transformers import LlamaForCausalLM
from splitppo.models.tiny import build_tokenizer, model_config
config = model_config()
config.num_attention_heads = config.num_key_value_heads = 4
torch.manual_seed(7)
LlamaForCausalLM(config).save_pretrained(sys.argv[1])
build_tokenizer().save_pretrained(sys.argv[1])
"""


class Code:
    """A revision's code, and the runs that it makes under `root`."""

    def __init__(self, revision: str, root: Path) -> None:
        self.here = revision == "."
        commit = "here" if self.here else _git("rev-parse", "--short", f"{revision}^{{commit}}")
        self.runs = root / commit
        self.folder = Path.cwd() if self.here else root / f"code_{commit}"
        if not self.folder.exists():
            _git("worktree", "add", "--quiet", "--detach", str(self.folder), revision)
        if self.here:  # its runs may be another state's
            shutil.rmtree(self.runs, ignore_errors=True)
        self.runs.mkdir(exist_ok=True)

    def python(self, *words: str) -> None:
        """Runs a command with this code. Raises RuntimeError with what it printed if it fails."""
        env = {**os.environ, "PYTHONPATH": str(self.folder), "OMP_NUM_THREADS": "1"}
        process = subprocess.run(
            [sys.executable, *words],
            cwd=self.runs, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            check=False,
        )  # fmt: skip
        if process.returncode:
            raise RuntimeError(f"{' '.join(words)}\n{process.stdout[-3000:]}")

    def train(self, name: str, inputs: Path, folder: Path, *more: str) -> None:
        """Makes the run of this name in `folder`, unless it is there."""
        if (folder / "complete").exists():
            return
        shutil.rmtree(folder, ignore_errors=True)
        ranks, flags = RUNS[name]
        words = [*COMMON.split(), *flags.split()]
        if "--ppo.baseline" in words:
            for flag in NO_VALUES:
                at = words.index(flag)
                del words[at : at + 2]
        if "guess" in words:  # the environment gives the rewards
            at = words.index("--reward.function")
            words[at + 1] = "none"
            del words[words.index("--policy.path") :][:2]
        words = [str(inputs / word) if word == "POLICY" else word for word in words]
        words = [f"{inputs / 'score.py'}:score" if word == "SCORE" else word for word in words]
        launch = f"-m torch.distributed.run --standalone --nproc_per_node {ranks}".split()
        self.python(*launch, "-m", "splitppo.train", *words, "--run-dir", str(folder), *more)
        (folder / "complete").touch()

    def close(self) -> None:
        if not self.here:
            _git("worktree", "remove", "--force", str(self.folder))


def _git(*words: str) -> str:
    return subprocess.run(
        ["git", *words], check=True, capture_output=True, text=True
    ).stdout.strip()


def figures(folder: Path) -> Iterator[tuple[str, Any]]:
    """(where it stands, value) of all figures of a run, in a fixed order."""
    for path in sorted([*folder.glob("metrics/*.jsonl"), *folder.glob("samples/*.jsonl")]):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            where = f"{path.stem} {record['step']} {record.get('row', '')}"
            for key, value in sorted(record.items()):
                if key not in ("time", "spans") and not key.startswith(LEFT_OUT):
                    yield f"{where} {key}", value


def differences(before: Path, after: Path, first: int = 0) -> list[str]:
    """What differs from step `first` on, a line each."""
    due = {at: value for at, value in figures(before) if int(at.split()[1]) >= first}
    got = {at: value for at, value in figures(after) if int(at.split()[1]) >= first}
    assert due, f"{before} has no figures"
    return [
        f"{at}: {due.get(at, 'absent')} -> {got.get(at, 'absent')}"
        for at in sorted(due.keys() | got.keys())
        if due.get(at, "absent") != got.get(at, "absent")
    ]


def compare(before: Code, after: Code, inputs: Path, names: list[str]) -> int:
    """Plays and compares the runs; prints a line each. Returns the number that differ."""
    wrong = 0
    for name in names:
        before.train(name, inputs, before.runs / name)
        after.train(name, inputs, after.runs / name)
        lines = differences(before.runs / name, after.runs / name)
        resumed = after.runs / f"{name}.resumed_{before.runs.name}"
        checkpoint = before.runs / name / "checkpoints" / f"step_{RESUMED:06}"
        after.train(name, inputs, resumed, "--resume", str(checkpoint))
        lines += [
            f"resumed: {line}" for line in differences(before.runs / name, resumed, RESUMED + 1)
        ]
        count = sum(1 for _ in figures(before.runs / name))
        print(f"{name}: {f'{len(lines)} differ' if lines else 'equal'}, {count} figures")
        print(*[f"    {line[:200]}" for line in lines[:8]], sep="\n", end="\n" * bool(lines))
        wrong += bool(lines)
    print(f"{len(names) - wrong} of {len(names)} runs are equal")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before")
    parser.add_argument("after")
    parser.add_argument("--runs", nargs="+", choices=[*RUNS], default=[*RUNS])
    parser.add_argument("--keep", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        root = (options.keep or Path(temporary)).resolve()
        root.mkdir(parents=True, exist_ok=True)
        before = Code(options.before, root)
        after = Code(options.after, root)
        inputs = root / "inputs"
        if not inputs.exists():
            inputs.mkdir()
            (inputs / "score.py").write_text(SCORE)
            before.python("-c", MAKE, str(inputs / "POLICY"))
        try:
            return 1 if compare(before, after, inputs, options.runs) else 0
        finally:
            for code in (before, after) if not options.keep else ():
                code.close()


if __name__ == "__main__":
    sys.exit(main())
