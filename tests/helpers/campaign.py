"""Random configurations: do placements, sets, stops and resumes change what a run computes?

    python tests/helpers/campaign.py [--seed 1] [--count 150]

A configuration has a seed that says all of it: the options of the algorithm, and two runs with
them. The first one runs without a stop. The second has another placement, other sets and other
options that must change no result; it may be stopped in a random step, by SIGTERM or a crash, and
goes on under a third placement. Then the metrics of all steps, the last checkpoint's state and the
weights of both are compared.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from mixtures import write_mixture
from ranks import run_ranks
from runs import assert_same, figures
from transformers import LlamaForCausalLM, LlamaForSequenceClassification

from splitppo import train
from splitppo.config import OF_VALUES
from splitppo.config.cli import parse
from splitppo.config.rules import check
from splitppo.critic import Critic
from splitppo.errors import UserError
from splitppo.generator import Generator
from splitppo.job.ends import RESUMABLE
from splitppo.models.tiny import build_tokenizer, model_config
from splitppo.placement import ROLES, StepPlan, check_sets, place
from splitppo.policy import Policy
from splitppo.run import checkpoint
from splitppo.run.life import Run

STEPS, LIMIT, CRASHED = 4, 120, 9
FIXED = f"""steps={STEPS} rollout.batch-size=12 rollout.max-new-tokens=8 checkpoint.every=1
    checkpoint.keep=0 timeout=30 value.head=normal policy.optim.lr=5e-4
    value.optim.lr=5e-4 policy.optim.eps=1e-4 value.optim.eps=1e-4 reward.function=SCORE
    log.validate-every=0 log.validate-samples=2 compute.device=cpu log.validate-temperature=0.8"""
# options of the algorithm: of each kind a configuration has one or none
ALGORITHM = [
    [
        "ppo.kl-coef=0.05",
        "ppo.kl-coef=0.05 ppo.kl-kind=k2",
        "ppo.kl-coef=0.1 ppo.kl-target=0.002 ppo.kl-horizon=60",
    ],
    ["ppo.kl-loss-coef=0.1", "ppo.kl-loss-coef=0.1 ppo.kl-loss-kind=k2"],
    ["ppo.lam=1", "ppo.lam=adaptive ppo.lam-alpha=0.3", "ppo.lam-value=1", "ppo.gamma=0.97"],
    ["ppo.epochs=2", "ppo.epochs=2 ppo.value-epochs=1", "ppo.value-epochs=2"],
    [
        "ppo.mini-batches=2",
        "ppo.mini-batches=3 ppo.value-mini-batches=1",
        "ppo.value-mini-batches=4",
    ],
    [
        "ppo.clip-mode=mask",
        "ppo.dual-clip=1.5",
        "ppo.clip-low=0.05 ppo.clip-high=0.1",
        "ppo.value-clip=None",
    ],
    ["ppo.aggregate=seq_mean_token_sum", "ppo.aggregate=seq_mean_token_mean"],
    [
        "ppo.importance=token ppo.old-logprobs=trainer",
        "ppo.importance=sequence",
        "ppo.old-logprobs=engine",
    ],
    [
        "ppo.mask-truncated",
        "ppo.baseline=batch",
        "ppo.baseline=group",
        "ppo.no-whiten",
        "ppo.entropy-coef=0.01",
    ],
    [
        "value.pretrain-steps=1 value.pretrain-epochs=1",
        "value.pretrain-steps=2 value.pretrain-epochs=2",
        "value.pretrain-steps=3",
    ],
    ["value.layers=1", "value.freeze=attention", "policy.freeze=embeddings"],
    ["rollout.samples=2", "rollout.samples=3"],
    ["rollout.window=3", "rollout.window=4", "rollout.window=6"],
    [
        "rollout.lengths=MIXED",
        "rollout.lengths=MIXED",
        "rollout.lengths=LONG",
        "rollout.temperature=0.7",
    ],
    ["policy.optim.schedule=linear policy.optim.warmup-steps=2", "value.optim.schedule=cosine"],
    ["reward.normalize=running", "reward.missing-eos-penalty=0.2", "reward.overlong-tokens=3"],
    [
        "reward.model=REWARD",
        "reward.model=REWARD reward.function=none",
        "reward.model=REWARD reward.model-weight=0.5",
    ],
    [
        "log.validate-every=2 reward.validation=exact_match",
        "log.validate-every=3 reward.validation=SCORE",
    ],
]
# options of a run that change no result
FREE = [
    ["compute.packing=on", "compute.packing=off"],
    ["compute.activation-checkpointing"],
    ["compute.micro-batch-tokens=24", "compute.micro-batch-tokens=90"],
    ["rollout.chunks=1", "rollout.chunks=2", "engine.max-rows=3"],
    ["policy.offload=all", "value.offload=all", "policy.offload=optimizer value.offload=optimizer"],
    ["reference.offload", "reward.model-offload", "placement.reference=critic"],
    ["fsdp.shard-size=1", "fsdp.shard-size=2"],
]
MOMENTS = {
    "rollout": Generator.generate,
    "score": Critic.submit,
    "gae": Critic.advantages,
    "update": Policy.update,
}
SCORE = """
def score(data_source, solution_str, ground_truth, extra_info):
    return sum(map(ord, solution_str)) % 37 / 37
"""


@dataclass(frozen=True)
class Case:
    """A configuration: options of the algorithm; ranks and flags of the first run, of the second,
    and of what goes on with it. The second is ended in a step at one of `MOMENTS` by a rank: by
    SIGTERM, by a crash, or not (`none`)."""

    options: list[str]
    runs: list[tuple[int, list[str]]]
    stop: str
    step: int
    rank: int
    moment: str


def inputs(folder: Path) -> dict[str, str]:
    """Models with four heads, a reward function, lengths of responses: their names in the options
    -> their paths."""
    config = model_config()
    config.num_attention_heads = config.num_key_value_heads = 4
    torch.manual_seed(7)
    for name, kind, labels in (
        ("POLICY", LlamaForCausalLM, 2),
        ("REWARD", LlamaForSequenceClassification, 1),
    ):
        config.num_labels = labels
        kind(config).save_pretrained(folder / name)
        build_tokenizer().save_pretrained(folder / name)
    write_mixture(folder / "MIXTURE", "qwen3_moe", 7, num_key_value_heads=4)
    (folder / "score.py").write_text(SCORE)
    (folder / "MIXED").write_text("\n".join(map(str, [1, 7, 4, 2, 8, 5, 3, 6, 8, 1, 6, 4, 8])))
    (folder / "LONG").write_text("12\n11\n12\n")  # with windows no row ends in the first steps
    paths = {name: str(folder / name) for name in ("POLICY", "MIXTURE", "REWARD", "MIXED", "LONG")}
    return paths | {"SCORE": f"{folder / 'score.py'}:score"}


def command(flags: list[str], paths: dict[str, str]) -> list[str]:
    """The command line of a run."""
    words = [f"--{word}" for word in FIXED.split()] + flags
    words += ["--rollout.max-new-tokens=12"] * ("--rollout.lengths=LONG" in flags)
    if any(word.startswith("--ppo.baseline=") for word in flags):  # there is no value model
        words = [w for w in words if not w[2:].replace("-", "_").startswith(OF_VALUES)]
    return ["=".join(paths.get(part, part) for part in word.split("=")) for word in words]


def some(draw: random.Random, kinds: list[list[str]], part: float) -> list[str]:
    """Of this part of the kinds one option each, as flags."""
    return [
        f"--{word}" for kind in kinds if draw.random() < part for word in draw.choice(kind).split()
    ]


def allowed(world: int, flags: list[str], paths: dict[str, str]) -> bool:
    try:
        config = parse(command(flags, paths))
        check(config)
        placement = place(config.placement, world=world, local_world=world)
        check_sets(config, placement, local_world=world)
    except UserError:
        return False
    at_critic = config.placement.reference == "critic"
    if placement.colocated:
        return not at_critic
    return bool(config.has_value or config.reward.model or at_critic)


def drawn(seed: int, paths: dict[str, str]) -> Case:
    """The configuration of a seed: the first one that no rule refuses. Of every third the policy
    is a mixture."""
    draw = random.Random(seed)
    policy = "POLICY" if seed % 3 else "MIXTURE"
    fixed = [f"--seed={seed}", f"--policy.path={policy}"]
    while not allowed(1, options := [*fixed, *some(draw, ALGORITHM, 0.4)], paths):
        pass
    runs = [(1, some(draw, FREE[:3], 0.3))] * (draw.random() < 0.7)  # one rank is the quickest
    while len(runs) < 3:
        world = draw.choice([2, 2, 3, 4])
        flags = [
            draw.choice(
                ["--placement.mode=colocated", f"--placement.actor={draw.randrange(1, world)}"]
            )
        ]
        for model in ("fsdp", "value", "reference", "reward"):
            for axis in ("tensor", "sequence"):
                size = draw.choice([1, 2, 4])
                if axis == "tensor" and model != "reward" and policy == "MIXTURE":
                    size = 1
                flags += [f"--{model}.{axis}-parallel={size}"] * (draw.random() < 0.3)
        flags += some(draw, FREE, 0.3)
        if allowed(world, [*options, *flags], paths):
            runs.append((world, flags))
    stop = draw.choice(["none", "SIGTERM", "SIGTERM", "crash"])
    return Case(
        options,
        runs,
        stop,
        draw.randint(2, STEPS),
        draw.randrange(runs[1][0]),
        draw.choice([*MOMENTS]),
    )


def rank_main(rank: int, argv: list[str], folder: Path, case: Case | None) -> int:
    """A rank of a run, which a case may end early. The weights that its group has in the end are
    saved."""
    screen = os.open(folder / "screen.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(screen, 1)
    os.dup2(screen, 2)
    save_in_the_end(folder)
    if case and case.rank == rank:
        former = MOMENTS[case.moment]

        def ended(self: Any, step: int | StepPlan, *args: Any, **kwargs: Any) -> Any:
            if getattr(step, "step", step) == case.step:
                os._exit(CRASHED) if case.stop == "crash" else os.kill(os.getpid(), signal.SIGTERM)
            return former(self, step, *args, **kwargs)

        owner, _, name = former.__qualname__.partition(".")
        setattr(globals()[owner], name, ended)
    return train.main(argv)


def save_in_the_end(folder: Path) -> None:
    """Has a run save the weights of policy and value model when all its steps are done."""
    begin = Run.begin
    end = Run.end
    parts: list[Any] = []

    def begun(self: Run, generator: Any, policy: Any, critic: Any) -> None:
        parts.extend(part for part in (policy, critic) if part)
        begin(self, generator, policy, critic)

    def ended(self: Run) -> None:
        for part in parts:
            weights = (w for learner in part.learners for w in learner.weights(torch.float32))
            held = {name: weight.clone() for name, weight in weights}
            if part.group.is_first:
                torch.save(held, folder / f"{type(part).__name__}.pt")
        end(self)

    Run.begin = begun
    Run.end = ended


def play(case: Case, paths: dict[str, str], folder: Path) -> None:
    """Makes the runs of a case. Raises an AssertionError if they differ, or what a run raised."""
    folders = [folder / "first", folder / "second"]

    def run(number: int, into: Path, ended: Case | None, *more: str) -> set[int]:
        world, flags = case.runs[number]
        into.mkdir(parents=True, exist_ok=True)
        argv = [*command([*case.options, *flags], paths), f"--run-dir={into / 'run'}", *more]
        try:
            return set(run_ranks(world, rank_main, argv, into, ended, timeout=LIMIT))
        except RuntimeError as error:
            if not (ended and f"died with exit status {CRASHED}" in str(error)):
                raise
            return {CRASHED}

    assert run(0, folders[0], None) == {0}
    status = run(1, folders[1], case if case.stop != "none" else None)
    if status != {0}:
        assert status == {CRASHED if case.stop == "crash" else RESUMABLE}, f"exit status {status}"
        # a crash may come before a checkpoint is complete
        assert run(2, folders[1], None, *["--force"] * (case.stop == "crash")) == {0}
    compare(*folders)


def compare(first: Path, second: Path) -> None:
    """Raises an AssertionError that names the first difference."""
    for role in ROLES:
        due, got = (figures(path / "run", role) for path in (first, second))
        for record in (*due.values(), *got.values()):
            # told where the reference is; critic/ref_kl is told everywhere
            record.pop("actor/ref_kl", None)
        assert_same(got, due)
        states = [
            checkpoint.step_folder(path / "run", STEPS) / role / "state.json"
            for path in (first, second)
        ]
        due, got = (list(numbers(json.loads(path.read_text()))) for path in states)
        assert got == pytest.approx(due, rel=1e-4, abs=1e-5), f"{role}/state.json"
    for name in ("Policy.pt", "Critic.pt"):
        due, got = (torch.load(path / name) for path in (first, second))
        assert due.keys() == got.keys()
        for weight, value in due.items():
            torch.testing.assert_close(
                got[weight], value, rtol=0, atol=2e-5, msg=f"{name} {weight}"
            )


def numbers(value: Any) -> Iterator[float]:
    """All numbers of a JSON file."""
    if isinstance(value, int | float):
        yield float(value)
    for part in (
        value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    ):
        yield from numbers(part)


def run_all(first: int, count: int) -> list[int]:
    """Plays the cases of these seeds and prints a line for each. Returns the seeds of those with a
    fault."""
    wrong, began = [], time.monotonic()
    with tempfile.TemporaryDirectory() as root:
        paths = inputs(Path(root))
        for seed in range(first, first + count):
            start, case, folder = time.monotonic(), drawn(seed, paths), Path(root) / str(seed)
            said = (
                f"seed {seed}, ranks {' '.join(str(world) for world, _ in case.runs)}, {case.stop}"
            )
            try:
                play(case, paths, folder)
                print(f"{said}: ok, {time.monotonic() - start:.1f} s", flush=True)
            except Exception as error:
                wrong.append(seed)
                screens = [
                    path.read_text(errors="replace")[-2000:] for path in folder.glob("*/screen.txt")
                ]
                print(
                    *screens, f"{said}: {type(error).__name__}: {error}", case, sep="\n", flush=True
                )
    print(
        f"{count} configurations, {len(wrong)} with a fault {wrong or ''}; "
        f"{time.monotonic() - began:.0f} s in all"
    )
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=150)
    options = parser.parse_args()
    return 1 if run_all(options.seed, options.count) else 0


if __name__ == "__main__":
    sys.exit(main())
