"""From a configuration to a run: the checks before it, its folder, its data, and the models of each role."""

import functools
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from splitppo.actor import Actor
from splitppo.channel import Links, Wire
from splitppo.config import Config
from splitppo.context import Shared
from splitppo.critic import Critic
from splitppo.data import prompts as data
from splitppo.data.files import read_lengths
from splitppo.engine import RolloutEngine
from splitppo.engine.build import finish_start, start_engine
from splitppo.engine.vllm.process import Process
from splitppo.errors import UserError
from splitppo.job.device import compiles, dtype_of
from splitppo.job.nodes import Peer
from splitppo.job.runtime import Runtime
from splitppo.learner import Learner, Runner
from splitppo.models import build as models
from splitppo.models import weights
from splitppo.models.heads import PolicyOutputs
from splitppo.models.reference import Reference
from splitppo.models.sharding import parallelize
from splitppo.placement import Ownership, Placement, Role, own
from splitppo.rewards.functions import check_prompts
from splitppo.rewards.model import RewardModel, RewardText, longest_text
from splitppo.rewards.scorer import Scorer
from splitppo.rollout import Prompt
from splitppo.run import checkpoint
from splitppo.run.checks import MODEL_KINDS, is_drawn, model_folders, packs
from splitppo.run.lock import Lock
from splitppo.run.metrics import ColumnLog
from splitppo.run.profiler import Profiler
from splitppo.run.progress import Progress, begin_folder
from splitppo.run.saver import load
from splitppo.run.trackers import Trackers
from splitppo.tools.cost import Split, advice, may_move, run_work
from splitppo.validation import Validator, write_rows

ADVICE = 8  # steps after which the log says which split would be faster


def advise(config: Config, placement: Placement, folder: Path, start: int) -> list[str]:
    """What the cost model says of a run's placement; [] where the actor's metrics can't be read from here yet."""
    critics = 0 if placement.colocated else len(placement.critic)
    split = Split(len(placement.actor), critics, config.placement.reference)
    try:
        work = run_work(folder, split, config.rollout.batch_size, start)
    except UserError:
        return []
    movable = may_move(config.ppo.kl_coef, config.ppo.kl_loss_coef)
    return [f"[plan] {line}" for line in advice(work, split, split.actor + split.critic, movable=movable)[:3]]


def owners(config: Config, placement: Placement, step: int) -> Ownership:
    """Who owns which row of a step."""
    return own(
        seed=config.seed,
        step=step,
        batch_size=config.rollout.batch_size,
        samples=config.rollout.samples,
        mini_batches=config.ppo.mini_batches,
        actor_size=len(placement.actor),
        critic_size=len(placement.critic),
    )


def load_data(config: Config, tokenizer: Any) -> tuple[data.PromptSet, data.PromptSet]:
    """Training prompts and held-out prompts, checked against what scores them."""
    longest = config.rollout.max_prompt_tokens
    read = functools.partial(data.load_prompts, config.data, tokenizer, max_prompt_tokens=longest, seed=config.seed)
    training, validation = read(split="train"), read(split="validation")
    check_prompts(config.reward.function, training.prompts)
    setting = "reward.validation" if config.reward.validation else "reward.function"
    check_prompts(config.reward.validation or config.reward.function, validation.prompts, setting)
    return training, validation


def prepare(config: Config, runtime: Runtime, engine: Process | None = None) -> "Run":
    """Agrees on the run's folder and where it starts, and reads the data; all ranks call it.

    Args:
        engine: the process of this rank's engine (`launch_engine`).
    """
    runtime.phase("reading the data")
    lock = Lock(Peer.of_this_process(runtime.device))
    try:
        return Run(config, runtime, *begin_folder(config, runtime, lock), engine, lock)
    except BaseException as error:
        lock.release()
        if isinstance(error, OSError):
            wrong = f"run_dir={config.run_dir or 'runs'}: {error}; mend that, or choose another --run-dir"
            raise UserError(wrong) from error
        raise


class Run:
    """A run as one rank sees it.

    Attributes:
        folder: the run's folder.
        resumed: the checkpoint it goes on from.
        start: the step after which it was written, or 0.
        progress: its steps and checkpoints.
    """

    def __init__(
        self, config: Config, runtime: Runtime, folder: Path, resumed: Path | None, engine: Process | None, lock: Lock
    ):
        self.lock = lock
        self.engine_process = engine
        self.config, self.runtime, self.folder, self.resumed = config, runtime, folder, resumed
        self.start = checkpoint.step_of(resumed) if resumed else 0
        self.progress = Progress(config, runtime, folder, self.start)
        runtime.last_good = self.progress.last_good
        self.folders = {n: str(folder / "tiny") if p == "tiny" else p for n, p in model_folders(config).items()}
        told = runtime.share(
            "packed", lambda: json.dumps({n: packs(config, n, runtime.device.type) for n in self.folders})
        )
        self.packed: dict[str, bool] = json.loads(told)
        self.tokenizer = models.read_tokenizer(self.folders["policy"])
        self.dtype = dtype_of(config, runtime.device)
        self.shared = self._shared()
        self.logs: dict[Role, ColumnLog] = {}
        self.took: list[tuple[str, float]] = []  # seconds of each phase of the start
        self._began: tuple[str, float] | None = None
        self.wire: Wire | None = None

    def log(self, role: Role) -> ColumnLog:
        """The role's log, made on first use."""
        if role not in self.logs:
            first = self.runtime.mesh[role].get_local_rank() == 0
            self.logs[role] = ColumnLog(role, self.folder, first=first, phase=self.runtime.phase, start=self.start)
        return self.logs[role]

    def links(self) -> Links:
        """This rank's end of the three channels."""
        runtime = self.runtime
        rank, timeout = runtime.launch.rank, self.config.timeout
        self.wire = Wire(rank, runtime.wire, runtime.post, runtime.device, timeout, runtime.describe)
        return Links(self.wire, runtime.placement, self.shared.ownership, chunks=self.config.rollout.messages)

    def actor(self) -> Actor:
        """The actor role's models, from the checkpoint if the run resumes."""
        config, runner = self.config, self._runner("actor")
        log = self.folder / "logs" / f"engine_{self.runtime.launch.rank:03d}.log"
        where: Any = {"longest_prompt": self.longest_prompt, "log": log}
        folder = Path(self.folders["policy"])
        # in a process of its own, where it is built while the models are loaded
        where |= {"tokenizer": self.tokenizer, "dtype": self.dtype, "process": self.engine_process}
        engine = start_engine(config, self.runtime, runner.mesh, folder, **where)
        try:
            policy = self._learner("policy", runner)
            parts: Any = {"outputs": self._outputs, "reference": self._reference("actor", runner)}
            parts |= {"engine_dtype": self.dtype, "validator": self._validator(engine, runner.mesh)}
            actor = Actor(self.shared, policy, engine=engine, **parts)
            if compiles(config, runner.device):
                self._phase("compiling")
                actor.warm_up()
            self.progress.allocate("actor", policy)
            self._phase("the engine's start")
            told = finish_start(engine)
            self._phase("")
            if self.runtime.mesh["actor"].get_local_rank() == 0:
                print(f"{told}\nstart-up: {', '.join(f'{name} {took:.1f} s' for name, took in self.took)}", flush=True)
            return actor
        except BaseException:
            engine.close()
            raise

    def critic(self) -> Critic:
        """The critic role's models, from the checkpoint if the run resumes."""
        runner = self._runner("critic")
        scorer = self._scorer(self.config.reward.function, self.config.reward.weights)
        value, reference = self._learner("value", runner), self._reference("critic", runner)
        critic = Critic(self.shared, value, scorer, self._reward_model(runner), reference)
        if compiles(self.config, runner.device):
            critic.warm_up()
        self.progress.allocate("critic", value)
        return critic

    @property
    def logprobs(self) -> int:
        """Fields of the channel of that name: the old ones, and the reference's if it is the actor group's."""
        return 1 + ("reference" in self.folders and self.config.placement.reference == "actor")

    @property
    def _outputs(self) -> PolicyOutputs:
        compiled = compiles(self.config, self.runtime.device)
        return PolicyOutputs(self.config.rollout.temperature, self.shared.vocabulary, compiled=compiled)

    def _reference(self, role: Role, runner: Runner) -> Reference | None:
        if "reference" not in self.folders or self.config.placement.reference != role:
            return None
        return Reference(self._model("reference", runner), runner, self._outputs, offload=self.config.reference.offload)

    def _scorer(self, functions: Sequence[str], weights: Sequence[float]) -> Scorer:
        """What runs reward functions, in processes of its own."""
        reward = self.config.reward
        limits: Any = {"workers": reward.workers, "timeout": reward.timeout, "failed_score": reward.failed_score}
        return Scorer(functions, weights, self.data_sources, **limits)

    def _validator(self, engine: RolloutEngine, mesh: DeviceMesh) -> Validator:
        reward, shared = self.config.reward, self.shared
        functions, weights = (reward.validation, ()) if reward.validation else (reward.function, reward.weights)
        if not self.config.log.validate_every:
            functions, weights = ("none",), ()  # no workers for nothing
        scorer = self._scorer(functions, weights)
        return Validator(self.config, shared.held_out, shared.decode, engine, mesh, scorer, self.folder)

    def _reward_model(self, runner: Runner) -> RewardModel | None:
        reward = self.config.reward
        if reward.model is None:
            return None
        tokenizer, config = models.read_tokenizer(reward.model), models.read_config(reward.model)
        longest = longest_text(config, tokenizer)
        text = RewardText(tokenizer, self.tokenizer, chat=reward.model_chat, longest=longest)
        if runner.mesh.get_local_rank() == 0:
            print(f"reward model: reads {text.reads}", flush=True)
        return RewardModel(self._model("reward", runner), runner, text, offload=reward.model_offload)

    def begin(self, *, actor: Actor | None = None, critic: Critic | None = None) -> None:
        """Loads the checkpoint, if any, and validates before the first step."""
        steps, ranks = self.config.log.profile_steps, self.config.log.profile_ranks
        self.profiler = Profiler(steps, ranks, self.runtime.launch.rank, self.folder / "profile")
        first = "actor" in self.runtime.mesh and self.runtime.mesh["actor"].get_local_rank() == 0
        self.trackers = Trackers(self.config, self.folder, self.start, active=first)
        if self.resumed:
            for role, holder in (("actor", actor), ("critic", critic)):
                if holder:
                    load(holder.learner, self.resumed / role, holder.load_state)
                    holder.learner.updates = self.start
        elif actor:
            log = self.log("actor")
            with log.span("validate"):
                metrics = actor.validate(0)
            if metrics:
                log.finish(0, metrics)
        self.profiler.boundary(self.start + 1)

    def may_stop(self, step: int) -> None:
        """Makes this step the last if somebody asked for an end: the actor group's first rank says so here, before any
        rank can be through with the step, since all need its rows' log-probs for that."""
        mesh = self.runtime.mesh.get("actor")
        if mesh is not None and mesh.get_local_rank() == 0 and self.runtime.asked_to_stop():
            self.runtime.stop_after(step)

    def finish(self, role: Role, step: int, metrics: dict[str, Any]) -> None:
        """Ends a step: its line, then the word that its checkpoint counts, so that a resumed run has every line."""
        log = self.log(role)
        if self.config.placement.barrier:
            with log.span("wait_barrier"):
                self.runtime.meet(f"barrier of step {step}")
        log.finish(step, metrics | (self.wire.spent() if self.wire else {}))
        self.progress.finish(role, step, metrics)
        due = max(self.start, self.config.ppo.critic_warmup) + ADVICE
        if role == "critic" and log.first and step == due and self.runtime.device.type == "cuda":
            for line in advise(self.config, self.runtime.placement, self.folder, self.start):
                print(line, flush=True)
        if role == "actor":
            self.trackers.update()
        self.profiler.boundary(step + 1)

    def write_samples(self, step: int, samples: Sequence[dict[str, Any]]) -> None:
        """Writes a step's samples; the critic group's first rank does."""
        if self.runtime.mesh["critic"].get_local_rank() == 0 and samples:
            write_rows(self.folder / "samples", step, samples)

    def end(self) -> None:
        """Waits for the checkpoints and the other column's last update, and names the run's folder."""
        self.progress.close()
        self.runtime.end_work()
        self.trackers.close()
        if self.runtime.launch.rank == 0:
            if why := self.progress.stopped:
                where = checkpoint.complete(self.folder)[-1].name
                print(f"stopped by {why}: {where} is saved; the same command with --run-dir {self.folder} goes on")
            print(f"run folder: {self.folder}", flush=True)
        self.runtime.wait_for_all()
        self.lock.release()

    def _shared(self) -> Shared:
        config = self.config
        training, validation = load_data(config, self.tokenizer)
        prompts, held_out = training.prompts, validation.prompts
        if self.runtime.launch.rank == 0:
            for line in training.told + validation.told:
                print(line, flush=True)
        self.data_sources = {prompt.data_source for prompt in prompts + held_out}
        self.longest_prompt = max(len(prompt.tokens) for prompt in prompts + held_out)
        per_step = config.rollout.batch_size // config.rollout.samples

        @functools.lru_cache(maxsize=4)
        def batch(step: int) -> list[Prompt]:
            weights, seed = config.data.weights, config.seed
            if weights:
                indices = data.mixed_indices(training.sizes, weights, per_step, step, seed)
            else:
                indices = data.batch_indices(len(prompts), per_step, step, seed)
            return [prompts[i] for i in indices for _ in range(config.rollout.samples)]

        ownership = functools.lru_cache(maxsize=4)(functools.partial(owners, config, self.runtime.placement))
        decode = functools.partial(self.tokenizer.decode, skip_special_tokens=True)
        return Shared(
            config, ownership, batch, held_out, decode, models.known_ids(self.tokenizer), read_lengths(config.rollout)
        )

    def _runner(self, role: Role) -> Runner:
        return Runner(self.runtime.mesh[role], self.runtime.device, self.config.compute.micro_batch_tokens)

    def _learner(self, name: str, runner: Runner) -> Learner:
        optim = self.config.policy.optim if name == "policy" else self.config.value.optim
        steps, aggregate = self.config.steps, self.config.ppo.aggregate
        once = self.config.compute.gather == "mini_batch"
        how: Any = {"steps": steps, "aggregate": aggregate, "gather_once": once}
        return Learner(self._model(name, runner), runner, optim, **how)

    def _phase(self, name: str) -> None:
        """Times the phases of the start, and tells the other ranks; "" ends the last."""
        if self._began:
            self.took.append((self._began[0], time.monotonic() - self._began[1]))
        self._began = (name, time.monotonic()) if name else None
        self.runtime.phase(name or "started")

    def _model(self, name: str, runner: Runner) -> Any:
        """Builds, shards and fills a model; the reference is held in the precision it runs in."""
        self._phase(f"loading the {name}")
        frozen, folder = name in ("reference", "reward"), self.folders[name]
        config = models.read_config(folder)
        dtype = self.dtype if frozen else torch.float32
        model = models.build(config, MODEL_KINDS[name], dtype, packed=self.packed[name])
        # the reference's layers are then to the compiler what the policy's are; it is run without gradients
        model.requires_grad_(name != "reward")
        checkpointing = self.config.compute.activation_checkpointing and not frozen
        # a reward model is run padded, over texts of its own: not worth the time that compiling takes
        compiled = name != "reward" and compiles(self.config, self.runtime.device)
        role: Role = self.config.placement.reference if name == "reference" else "critic"
        shards = self.runtime.shards["actor" if name == "policy" else role]
        parallelize(model, shards, dtype=self.dtype, activation_checkpointing=checkpointing, compiled=compiled)
        seed, head = self.config.seed, self.config.value.head
        drawn = seed if is_drawn(self.config, name) else None
        weights.fill(model, folder, device=runner.device, random_seed=drawn, head=head, seed=seed)
        return model
