"""Builds the parts of a run from its resolved configuration: models, actor, critic, channels."""

import functools
import os
from dataclasses import replace
from pathlib import Path

import torch

from splitppo import data
from splitppo.channel import Links
from splitppo.config import RewardConfig
from splitppo.context import Context
from splitppo.critic import Critic
from splitppo.critic.baselines import Baseline, BoundedValues, Mean, UsersAdvantages, Values
from splitppo.critic.teacher import Teacher
from splitppo.engine import RolloutEngine
from splitppo.engine.build import most_rows
from splitppo.engine.hf import HFEngine
from splitppo.engine.vllm.client import VLLMEngine
from splitppo.engine.vllm.plan import Plan, kv_bytes_per_token, kv_cache_bytes
from splitppo.engine.vllm.process import Process, visible_device
from splitppo.envs.player import Player, SingleTurn, players_of
from splitppo.errors import say
from splitppo.generator import Generator
from splitppo.generator.sampler import Sampler
from splitppo.generator.validation import Validator
from splitppo.job.runtime import Runtime
from splitppo.job.wire import Wire
from splitppo.models import build, sharding, weights
from splitppo.models.heads import PolicyOutputs
from splitppo.models.learner import Learner
from splitppo.models.runner import Reference, Runner
from splitppo.models.tokenizer import read_tokenizer
from splitppo.placement import Role
from splitppo.policy import Policy, UsersLoss
from splitppo.rewards.model import RewardModel, RewardText, longest_text
from splitppo.rewards.scorer import Scorer
from splitppo.run import memory
from splitppo.run.files import write_rows
from splitppo.run.folder import fingerprint
from splitppo.run.models import Model
from splitppo.run.parts import find_parts
from splitppo.run.resolve import Resolved


def build_sampler(resolved: Resolved, training: data.PromptSet) -> Sampler:
    """The rows of all slots, from the training prompts."""
    config = resolved.config
    rollout = config.rollout
    prompts = training.prompts
    index = functools.partial(data.prompt_index, len(prompts), seed=config.seed)
    named = [config.environment.path or "", *config.env.tools]
    files = [name.rpartition(":")[0] for name in (config.env.path or "", *config.env.tools)]
    contents = [fingerprint(Path(file)) for file in files if file]
    return Sampler(
        rollout.batch_size,
        lambda number: prompts[index(number)],
        samples=rollout.samples,
        limit=rollout.max_new_tokens,
        context=rollout.max_context,
        window=rollout.window,
        lengths=data.read_lengths(rollout),
        origin={"seed": config.seed, "environment": [[*map(os.path.basename, named)], contents]},
    )


class Builder:
    """Builds what this rank's role needs. All ranks of a group build the same parts in the same
    order. `prompts`: what `load_data` returned."""

    def __init__(
        self,
        resolved: Resolved,
        runtime: Runtime,
        folder: Path,
        prompts: tuple[data.PromptSet, data.PromptSet],
    ):
        self.resolved = resolved
        self.config = resolved.config
        self.runtime = runtime
        self.folder = folder
        self.connected = False  # whether the engine is ready
        self.modules: dict[str, torch.nn.Module] = {}  # by the model whose base it is
        self.parts = find_parts(self.config)
        self.training, self.validation = prompts
        self.sampler = build_sampler(resolved, self.training)
        self.context = Context(
            self.config,
            self.sampler.prompt,
            self.validation.prompts,
            lambda ids: resolved.tokenizer.decode(list(ids), skip_special_tokens=True),
            resolved.vocabulary_size,
        )
        self.outputs = PolicyOutputs(
            self.config.rollout.temperature, resolved.vocabulary_size, compiled=resolved.compiled
        )

    def generator(self) -> Generator:
        """Engine, environments, validation. vLLM is built in a process of its own meanwhile;
        `connect_engine` waits for it."""
        runner = self._runner("actor")
        engine = self._engine()
        self.sampler.player, held_out = players_of(self.config, self.resolved.tokenizer)
        validator = self._validator(engine, runner, held_out)
        return Generator(self.context, runner.group, engine, self.sampler, validator)

    def actor(self) -> tuple[Generator, Policy]:
        """What generates; policy and reference."""
        generator = self.generator()
        runner = self._runner("actor")
        try:
            learner = self._learner("policy", runner)
            reference = self._reference("actor", runner, learner)
            policy = Policy(
                self.context,
                learner,
                replace(self.outputs, replays=not self.resolved.unreplayed),
                reference,
                dtype=self.resolved.dtype,
            )
            if not memory.fits_awake(self.resolved):
                self.connect_engine(generator)
                generator.engine.release_memory(trained=True)
            self._warm_up(policy)
            if users_loss := self.parts.get("loss"):  # the rows of a warm-up are none for it
                policy.surrogate = UsersLoss(self.context, users_loss)
        except BaseException:
            generator.engine.close()
            raise
        return generator, policy

    def _engine(self) -> RolloutEngine:
        """This rank's engine. The first of a vLLM engine's ranks starts its process."""
        resolved = self.resolved
        config = self.config
        runtime = self.runtime
        device = runtime.device
        policy = resolved.models["policy"]
        if resolved.engine == "hf":
            return HFEngine(
                policy.config,
                resolved.tokenizer,
                device=device,
                dtype=resolved.dtype,
                max_rows=config.engine.max_rows,
                folder=policy.folder(self.folder),
                routes=not resolved.unreplayed,
            )
        ranks = runtime.placement.groups["actor"]
        size = config.engine.tensor_parallel
        number, index = divmod(ranks.index(runtime.launch.rank), size)
        key = f"engine/address/{number}"
        on_gpu = device.type == "cuda"
        process = None
        if index == 0:
            gpus = ranks[number * size :][:size] if on_gpu else ()
            devices = [visible_device(rank % runtime.launch.local_world) for rank in gpus]
            process = Process(devices, self._plan(policy, len(ranks)))
            runtime.store.set(key, process.address)
        return VLLMEngine(
            policy.config,
            runtime.store.get(key).decode(),
            index,
            process,
            device=device,
            dtype=resolved.dtype,
            sleep=config.engine.sleep if on_gpu else "off",
            peak=memory.trainer_peak(resolved) if on_gpu else 0.0,
            timeout=config.timeout,
        )

    def _plan(self, policy: Model, ranks: int) -> Plan:
        """What the process of a vLLM engine needs to know, of which there is one in so many actor
        ranks."""
        resolved = self.resolved
        config = self.config
        launch = self.runtime.launch
        size = config.engine.tensor_parallel
        rows = min(config.engine.max_rows, most_rows(config, ranks)) * size
        prompts = self.training.prompts + self.validation.prompts
        longest = max(len(prompt.tokens) for prompt in prompts)
        tokens = config.rollout.max_context or longest + config.rollout.max_new_tokens
        host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        total = int(memory.gpu_memory(resolved) or host)
        return Plan(
            config=config,
            folder=str(policy.folder(self.folder)),
            log=str(self.folder / "logs" / f"engine_{launch.rank:03d}.log"),
            dtype=str(resolved.dtype).removeprefix("torch."),
            max_rows=rows,
            max_tokens=tokens,
            kv_bytes=kv_cache_bytes(
                kv_bytes_per_token(policy.config, resolved.dtype, size),
                rows=rows,
                tokens=tokens,
                weights=policy.counts.parameters * resolved.dtype.itemsize // size,
                total=total,
                fraction=config.engine.memory_fraction,
            ),
            eos=tuple(sorted(resolved.eos)),
            vocabulary=resolved.vocabulary_size,
            routes=not resolved.unreplayed,
            device=self.runtime.device.type,
            threads=max(1, (os.cpu_count() or 1) // launch.local_world),
        )

    def connect_engine(self, generator: Generator) -> None:
        """Waits until the engine is ready, if it has not been awaited yet. Whatever takes time and
        needs no engine should come before."""
        if self.connected:
            return
        self.connected = True
        self._begin_phase("starting the engine")
        line = generator.engine.connect()
        if generator.group.is_first:
            say(f"engine: {line}")

    def critic(self) -> Critic:
        """Value model, reward functions, reward model, reference, teacher."""
        runner = self._runner("critic")
        scorer = self._scorer(self.config.reward, self.training, runner)
        baseline = self._baseline(runner)
        if "advantages" in self.parts:
            baseline = UsersAdvantages(self.context, baseline, self.parts["advantages"])
        critic = Critic(
            self.context,
            runner.group,
            baseline,
            scorer,
            reference=self._reference("critic", runner),
            reward_model=self._reward_model(runner),
            teacher=Teacher(self.context, self._model("teacher", runner), runner, self.outputs)
            if self.config.has_teacher
            else None,
        )
        self._warm_up(critic)
        return critic

    def _baseline(self, runner: Runner) -> Baseline:
        """Where advantages come from."""
        if not self.config.has_value:
            return Mean(self.context, runner.group)
        kind = BoundedValues if self.config.value.range else Values
        return kind(self.context, self._learner("value", runner))

    def links(self) -> Links:
        """This rank's end of the three channels."""
        runtime = self.runtime
        (group,) = runtime.groups.values()
        wire = Wire(
            runtime.launch.rank,
            runtime.wire,
            runtime.wire_store,
            runtime.device,
            self.config.timeout,
            runtime.status.describe,
        )
        rollout = self.config.rollout
        return Links(wire, runtime.placement, group, chunks=rollout.messages, window=rollout.window)

    def _warm_up(self, part: Policy | Critic) -> None:
        if self.resolved.compiled:
            self._begin_phase("compiling")
            part.warm_up()

    def _runner(self, role: Role) -> Runner:
        return Runner(
            self.runtime.groups[role], self.runtime.device, self.config.compute.micro_batch_tokens
        )

    def _learner(self, name: str, runner: Runner) -> Learner:
        chosen = self.config.policy if name == "policy" else self.config.value
        return Learner(
            self._model(name, runner),
            runner,
            chosen.optim,
            offload=chosen.offload,
            steps=self.config.steps,
            aggregate=self.config.ppo.aggregate,
            trainable=self.resolved.models[name].trainable,
            flops=self.resolved.cost(name).flops,
        )

    def _reference(
        self, role: Role, runner: Runner, policy: Learner | None = None
    ) -> Reference | None:
        if policy and self.config.base_is_reference:
            return Reference(policy.model, runner, self.outputs, shards=policy.shards)
        if "reference" not in self.resolved.models or self.resolved.role_of("reference") != role:
            return None
        return Reference(
            self._model("reference", runner),
            runner,
            self.outputs,
            offload=self.config.reference.offload,
        )

    def _reward_model(self, runner: Runner) -> RewardModel | None:
        reward = self.config.reward
        if reward.model is None:
            return None
        model = self.resolved.models["reward"]
        tokenizer = read_tokenizer(model.path, own_code=self.config.policy.trust_remote_code)
        text = RewardText(
            tokenizer,
            self.resolved.tokenizer,
            longest=longest_text(model.config, tokenizer),
            steps=reward.steps,
            step_token=reward.step_token,
            one_pass=model.packed,
        )
        return RewardModel(
            self._model("reward", runner), runner, text, offload=reward.model_offload
        )

    def _scorer(self, reward: RewardConfig, split: data.PromptSet, runner: Runner) -> Scorer:
        """Runs reward functions, in processes of its own; on the first rank of a set, for all of
        it."""
        if not runner.group.speaks:
            reward = replace(reward, function=("none",), weights=())
        return Scorer(reward, {prompt.data_source for prompt in split.prompts})

    def _validator(
        self, engine: RolloutEngine, runner: Runner, player: Player | SingleTurn
    ) -> Validator:
        reward = self.config.reward
        if held_out := reward.validation if self.config.validate_every else ("none",):
            reward = replace(reward, function=held_out, weights=())
        return Validator(
            self.context,
            engine,
            runner.group,
            self._scorer(reward, self.validation, runner),
            functools.partial(write_rows, self.folder / "validation"),
            player,
        )

    def _model(self, name: str, runner: Runner) -> torch.nn.Module:
        """Builds, shards and fills a model, and with it those that it is the base of."""
        resolved = self.resolved
        if (base := resolved.base_of(name)) in self.modules:
            return self.modules[base]
        self._begin_phase(f"loading the {name}")
        facts = resolved.models[name]
        config = self.config
        held = [
            resolved.models[other] for other in resolved.models if resolved.base_of(other) == name
        ]
        trainables = [model_facts.trainable for model_facts in held]
        model = build.build(
            held[-1].config,
            facts.kind if held == [facts] else "both",
            torch.float32 if facts.trainable.exact else resolved.dtype,
            packed=facts.packed,
        )
        facts.trainable.prepare(model)
        role = resolved.role_of(name)
        sharding.parallelize(
            model,
            self.runtime.shards[role],
            dtype=resolved.dtype,
            activation_checkpointing=config.compute.activation_checkpointing
            and facts.counts.trained > 0,
            # a reward model runs over texts of its own: compiling it would take longer than it
            # saves
            compiled=resolved.compiled and name != "reward",
            ranks=self.runtime.sets[role][config.set_shape(name)],
            adapt=lambda model: [trainable.add(model) for trainable in trainables],
        )
        weights.fill(
            model,
            str(facts.folder(self.folder)),
            device=runner.device,
            random_init=facts.random_init,
            head=config.value.head,
            seed=config.seed,
        )
        for trainable in trainables:
            trainable.read(model, config.seed)
        self.modules[name] = model
        return model

    def _begin_phase(self, name: str) -> None:
        """Names a phase of the start: to the other ranks, and on the screen if this is the first
        rank of a group."""
        self.runtime.status.set_phase(name)
        if any(group.is_first for group in self.runtime.groups.values()):
            say(f"[{'+'.join(self.runtime.groups)}] {name} ...")
