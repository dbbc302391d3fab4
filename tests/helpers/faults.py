"""Faults, injected into whole jobs: does the job end in time and say why, and does it go on as if
nothing had been?

    python tests/helpers/faults.py [--count 200] [--seed 0] [--placement P] [--kind K] [--policy F]

Each injection picks a placement, a rank, a step, a moment and a kind of fault from the seed. The
job runs under torch's elastic agent, as torchrun does it, but forked, to be quick. Half of the jobs
may restart by themselves (--max-restarts), the others are started again by hand. What is checked of
each:

* the job ended in time, with the cause among the last lines that it printed;
* no process of it is left;
* every checkpoint that counted before counts still and is whole (but for those that were to be
  removed);
* after the resume, the metrics of all steps are those of the run without a fault, bit by bit (up to
  rounding with environments);
* what reads the run's files meanwhile (readers.py: page, trackers, notices, samples) meets no line
  that is half written.
"""

import argparse
import contextlib
import errno
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import letters
import readers
import runs
import torch
from mixtures import write_mixture
from runs import Torchrun

from splitppo import train
from splitppo.critic import Critic
from splitppo.generator import Generator
from splitppo.job.ends import RESUMABLE
from splitppo.job.wire import Wire
from splitppo.models.learner import Learner
from splitppo.models.tiny import VOCABULARY
from splitppo.placement import StepPlan
from splitppo.policy import Policy
from splitppo.run import checkpoint
from splitppo.run import saver as saving
from splitppo.run.metrics import ColumnLog

STEPS, TIMEOUT, LIMIT = 4, 5, 30
FLAGS = [
    f"--steps={STEPS}",
    "--rollout.batch-size=8",
    "--ppo.mini-batches=2",
    "--ppo.kl-coef=0.01",
    "--seed=3",
]
FLAGS += ["--log.validate-every=0", "--ppo.epochs=1", "--checkpoint.every=1", "--checkpoint.keep=2"]
FLAGS += [f"--timeout={TIMEOUT}"]
# experts, turns of an environment, adapters, cut rows, windows at once: `--placement '2+1 all'`
ALL = [
    *("--placement.actor=2", "--fsdp.sequence-parallel=2", "--value.sequence-parallel=1"),
    *("--rollout.window=5", "--policy.lora.rank=2", "--value.lora.rank=2"),
    *(f"--env.path={letters.__file__}:Letters", "--rollout.max-new-tokens=12"),
    *("--value.head=normal", "--policy.optim.eps=1e-4", "--value.optim.eps=1e-4"),
    *("--policy.optim.lr=5e-4", "--value.optim.lr=5e-4", "--data.task=echo"),
    *("--log.samples=8", "--log.trackers=tensorboard"),
]
PLACEMENTS: dict[str, tuple[int, list[str]]] = {
    "1+1": (2, []),
    "2+1": (3, ["--placement.actor=2"]),
    "1+2": (3, ["--placement.critic=2"]),
    "colocated": (2, ["--placement.mode=colocated"]),
    "2+1 with windows": (3, ["--placement.actor=2", "--rollout.window=4"]),
    # ranks that share the policy's layers, and own the same rows
    "2+1 set": (
        3,
        ["--placement.actor=2", "--fsdp.tensor-parallel=2", "--value.tensor-parallel=1"],
    ),
    # and those that share its rows
    "2+1 cut": (
        3,
        ["--placement.actor=2", "--fsdp.sequence-parallel=2", "--value.sequence-parallel=1"],
    ),
    "2+1 all": (3, ALL),
    "colocated set": (
        2,
        ["--placement.mode=colocated", "--fsdp.tensor-parallel=2", "--value.tensor-parallel=1"],
    ),
}
MOMENTS = (
    "rollout",
    "exchange",
    "clear",
    "copy",
    "logprobs",
    "gae",
    "update",
    "save",
    "write",
    "commit",
    "line",
)
KINDS = ("raise", "kill", "stop", "exit", "memory", "sigterm", "sigusr1", "disk", "nan")
WIRE = ("exchange", "clear", "copy")
WRITING = ("save", "write", "commit")
SAID = {
    "raise": r"RuntimeError: injected",
    "memory": r"OutOfMemoryError: injected",
    "disk": r"No space left on device",
    "nan": r"error: weights are not finite",
    "kill": r"died without an error message|Signal 9|SIGKILL",
    "exit": r"died without an error message|exitcode *: 7",
    # the guilty one by name, wherever it was stopped
    "stop": r"caused by: \S+ rank RANK on \S+ \(in '.*'\) is suspended",
    "sigterm": r"stopped by SIGTERM to rank \d",
    "sigusr1": r"stopped by SIGUSR1 to rank \d",
}


@dataclass(frozen=True)
class Fault:
    """What happens: to which rank, in which step, at which moment."""

    placement: str
    rank: int
    step: int
    moment: str
    kind: str
    restarts: bool

    def __str__(self) -> str:
        again = ", restarts by itself" if self.restarts else ""
        return (
            f"{self.placement} rank {self.rank} step {self.step} {self.moment}: {self.kind}{again}"
        )


def draw(
    count: int, seed: int, placements: Sequence[str] = (), kinds: Sequence[str] = KINDS
) -> list[Fault]:
    """Every kind and moment comes in turn; what doesn't fit together is left out."""
    random_ = random.Random(seed)
    faults: list[Fault] = []
    placements = placements or [name for name in PLACEMENTS if name != "2+1 all"]
    for i in range(10 * count):
        kind, moment = kinds[i % len(kinds)], random_.choice(MOMENTS)
        if kind == "disk":
            moment = random_.choice(WRITING)
        placement = random_.choice(placements)
        world = PLACEMENTS[placement][0]
        rank = random_.randrange(world)
        colocated = placement.startswith("colocated")
        actors = world if colocated else int(placement[0])
        plays = {"actor", "critic"} if colocated else {"actor" if rank < actors else "critic"}
        if (moment in ("rollout", "logprobs") and "actor" not in plays) or (
            moment == "gae" and "critic" not in plays
        ):
            continue
        # a set's first rank speaks for it
        if moment in WIRE and (
            colocated or (placement, rank) in (("2+1 set", 1), ("2+1 cut", 1), ("2+1 all", 1))
        ):
            continue
        if moment in ("commit", "line") and rank not in (0, actors % world):
            continue  # these are the first ranks' doing
        # what is asked of a thread that writes must not be asked of the main one: it would end the
        # job as it should not
        if kind in ("nan", "sigterm", "sigusr1") and moment not in (
            "rollout",
            *WIRE,
            "logprobs",
            "gae",
        ):
            continue
        restarts = kind not in ("sigterm", "sigusr1") and random_.random() < 0.5
        step = random_.randint(2, STEPS - 1)
        if kind in ("sigterm", "sigusr1"):
            step = 2  # the run may end with the step after it, which must not be the last
        faults.append(Fault(placement, rank, step, moment, kind, restarts))
        if len(faults) == count:
            break
    return faults


def happen(kind: str, learner: Learner | None) -> None:
    """The fault itself."""
    me = os.getpid()
    if kind == "raise":
        raise RuntimeError("injected")
    if kind == "memory":
        raise torch.OutOfMemoryError("injected")
    if kind == "disk":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if kind == "exit":
        os._exit(7)
    if kind == "nan" and learner is not None:
        with torch.no_grad():
            learner.optimizer.param_groups[0]["params"][0].fill_(float("nan"))
    numbers = {
        "kill": signal.SIGKILL,
        "stop": signal.SIGSTOP,
        "sigterm": signal.SIGTERM,
        "sigusr1": signal.SIGUSR1,
    }
    if kind in numbers:
        os.kill(me, numbers[kind])


def inject(fault: Fault) -> None:
    """Arms this process, if it is the rank and this is the first start."""
    if (
        int(os.environ["RANK"]) != fault.rank
        or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    ):
        return
    left = [1]  # it happens once
    learners: list[Learner] = []

    def now(step: int) -> None:
        if step == fault.step and left:
            left.clear()
            happen(fault.kind, learners[0] if learners else None)

    def before(owner: Any, name: str, step_of: Callable[..., int]) -> None:
        former = getattr(owner, name)

        def armed(*args: Any, **kwargs: Any) -> Any:
            now(step_of(*args, **kwargs))
            return former(*args, **kwargs)

        setattr(owner, name, armed)

    made = Learner.__init__

    def noted(self: Learner, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        learners.append(self)

    Learner.__init__ = noted  # type: ignore[method-assign]
    updates = {
        "logprobs": lambda self, *_: self.learner.updates + 1,
        "gae": lambda _, step, *rest: step,
    }
    if fault.moment == "rollout":
        generate = Generator.generate

        def broken(self: Generator, plan: StepPlan) -> Any:
            for number, finished in enumerate(generate(self, plan)):
                if number == 1:
                    now(plan.step)
                yield finished
            now(plan.step)

        Generator.generate = broken  # type: ignore[method-assign]
    elif fault.moment == "exchange":
        before(Wire, "send", lambda self, hop, *_: hop.step)
        before(Wire, "recv", lambda self, hop, *_: hop.step)
    elif fault.moment == "clear":
        before(Wire, "_wait", lambda self, hop, word, _: hop.step if word == "go" else 0)
    elif fault.moment == "copy":
        before(Wire, "_copy", lambda self, hop, *_: hop.step)
    elif fault.moment == "logprobs":
        before(Policy, "logprobs", updates["logprobs"])
    elif fault.moment == "gae":
        before(Critic, "advantages", updates["gae"])
    elif fault.moment == "update":
        before(Learner, "_optimizer_step", lambda self: self.updates + 1)
    elif fault.moment == "save":
        before(saving.Saver, "begin", lambda self, step, *_: step)
    elif fault.moment == "write":
        before(
            saving.dcp,
            "save",
            lambda _, storage_writer, **__: step_of_part(Path(storage_writer.path)),
        )
    elif fault.moment == "commit":
        before(Path, "rename", lambda self, to: step_of_part(self))
    elif fault.moment == "line":
        before(ColumnLog, "finish", lambda self, step, *_: step)


def step_of_part(path: Path) -> int:
    found = re.fullmatch(r"step_(\d+)", path.parent.name)
    return int(found[1]) if found and path.suffix == checkpoint.PARTIAL else 0


def rank_main(fault: Fault | None, run_dir: str) -> int:
    """One rank, forked by the agent."""
    if fault:
        inject(fault)
    flags = [*FLAGS, *(PLACEMENTS[fault.placement][1] if fault else []), f"--run-dir={run_dir}"]
    if fault and fault.step > STEPS:  # none comes: a slow rank is no fault
        flags.append(f"--timeout={12 * TIMEOUT}")
    if fault and fault.placement == "2+1 all":
        flags.append(f"--policy.path={Path(run_dir).with_name('policy')}")
    return train.main(flags)


def talker(folder: Path) -> None:
    """Makes the policy of `ALL`: a mixture, most of whose tokens end a turn."""
    write_mixture(folder, "qwen3_moe", seed=0)
    file = folder / "generation_config.json"
    written = json.loads(file.read_text()) if file.exists() else {}
    ends = [*range(1, len(VOCABULARY), 5)]
    file.write_text(json.dumps(written | {"eos_token_id": ends}))


def figures(run_dir: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """(role, step) -> what doesn't depend on the clock."""
    found = {}
    for role in checkpoint.ROLES:
        for line in (run_dir / "metrics" / f"{role}.jsonl").read_text().splitlines():
            record = json.loads(line)
            told = {
                k: v
                for k, v in record.items()
                if not k.startswith(("timing_s", "perf", "spans", "time"))
            }
            found[role, record["step"]] = told
    return found


def run_job(fault: Fault, run_dir: Path, out: Path) -> tuple[int, float, Torchrun]:
    """Exit status, seconds, the job."""
    world, _ = PLACEMENTS[fault.placement]
    began = time.monotonic()
    job = Torchrun(world, rank_main, fault, str(run_dir), out=out, restarts=int(fault.restarts))
    return job.wait(2 * LIMIT + 6 * TIMEOUT), time.monotonic() - began, job


def due_figures(placement: str, folder: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """Of the run without a fault, made once."""
    run_dir = folder / f"whole_{placement}"
    if placement == "2+1 all" and not (folder / "policy").exists():
        talker(folder / "policy")
    if not run_dir.exists():
        never = Fault(placement, 0, STEPS + 9, "rollout", "raise", restarts=False)
        status, _, _ = run_job(never, run_dir, folder / f"whole_{placement}.log")
        if status:
            raise RuntimeError((folder / f"whole_{placement}.log").read_text()[-4000:])
    return figures(run_dir)


def trouble(fault: Fault, folder: Path) -> tuple[str, float]:
    """Injects a fault: what went wrong that should not have, "" if nothing, and the seconds that
    the job took."""
    due = due_figures(fault.placement, folder)
    run_dir, out = folder / uuid.uuid4().hex, folder / "out.log"
    status, took, job = run_job(fault, run_dir, out)
    said = out.read_text(errors="replace")
    wrong = []
    if status == 124:
        wrong.append(f"hung, {took:.0f} s")
    if took > LIMIT + (TIMEOUT if fault.kind == "stop" else 0) + (10 if fault.restarts else 0):
        wrong.append(f"took {took:.0f} s")
    if not fault.restarts and status == 0:
        wrong.append("exit status 0")
    if fault.restarts and status:
        wrong.append("did not go on by itself")
    told = said[said.index("\n", said.index("step")) if "step" in said else 0 :]
    if not re.search(
        SAID[fault.kind].replace("RANK", str(fault.rank)), told if fault.restarts else told[-6000:]
    ):
        wrong.append("did not say why")
    if fault.kind in ("sigterm", "sigusr1") and f"exitcode: {RESUMABLE}" not in re.sub(
        r"exitcode +:", "exitcode:", said
    ):
        wrong.append(f"no rank ended with {RESUMABLE}")
    if left := job.left():
        wrong.append(f"left behind: {left}")
    whole = checkpoint.complete(run_dir)
    wrong += [
        f"{folder.name} is damaged: {d}" for folder in whole if (d := checkpoint.damage(folder))
    ]
    newest = max([checkpoint.step_of(folder) for folder in whole], default=0)
    if newest < fault.step - 2:
        wrong.append(f"only step {newest} is left")
    if not fault.restarts:
        status, _, _ = run_job(
            Fault(fault.placement, 0, STEPS + 9, "rollout", "raise", False), run_dir, out
        )
        if status:
            wrong.append(f"the resume failed: {out.read_text(errors='replace')[-1500:]}")
    log = folder / "readers.log"
    if log.exists():
        wrong.append(f"a reader failed: {log.read_text()[-3000:]}")
        log.unlink()
    if not wrong and fault.placement == "2+1 all":
        wrong += differences(run_dir, folder / f"whole_{fault.placement}")
    elif not wrong and (found := figures(run_dir)) != due:
        differ = [key for key in due if found.get(key) != due[key]]
        wrong.append(f"after the resume, other metrics at {differ[:3]}")
    return ("; ".join(wrong) + (f"\n{said[-3000:]}" if wrong else "")), took


@contextlib.contextmanager
def reading(folder: Path) -> Iterator[None]:
    """Runs of this folder are read while they are written."""
    reader = subprocess.Popen([sys.executable, readers.__file__, str(folder)])
    try:
        yield
    finally:
        (folder / "done").touch()
        reader.wait()
        counts = json.loads((folder / "readers.count").read_text())
        print(f"{len(counts)} runs were read {sum(counts.values())} times under way")


def differences(run_dir: Path, whole: Path) -> list[str]:
    """How the metrics of two runs differ, beyond rounding: when an environment answers decides
    which rows the engine decodes together, and so how it rounds."""
    try:
        for role in checkpoint.ROLES:
            runs.assert_same(runs.figures(run_dir, role), runs.figures(whole, role))
    except AssertionError as error:
        return [f"after the resume, other metrics: {error}"]
    return []


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--placement", choices=PLACEMENTS, help="the only one")
    parser.add_argument("--kind", choices=KINDS, help="the only one")
    parser.add_argument("--policy", help="the folder of another policy, such as a mixture")
    options = parser.parse_args()
    if options.policy:
        FLAGS.append(f"--policy.path={options.policy}")
    failed, longest, began = 0, 0.0, time.monotonic()
    placements = [options.placement] if options.placement else []
    kinds = [options.kind] if options.kind else KINDS
    faults = draw(options.count, options.seed, placements, kinds)
    with tempfile.TemporaryDirectory() as folder, reading(Path(folder)):
        for number, fault in enumerate(faults, 1):
            wrong, took = trouble(fault, Path(folder))
            failed, longest = failed + bool(wrong), max(longest, took)
            print(f"{number:>4} {fault}: {wrong or f'ok, {took:.1f} s'}", flush=True)
    print(
        f"{options.count} injections, {failed} failed; longest {longest:.0f} s; "
        f"{time.monotonic() - began:.0f} s in all"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
