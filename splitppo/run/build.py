"""The parts of a run, built from its resolved configuration: data, models, actor, critic,
channels."""

import functools
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from splitppo import data
from splitppo.actor import Actor
from splitppo.channel import Exchange, Links, Wire
from splitppo.config import RewardConfig
from splitppo.context import Context
from splitppo.critic import Critic
from splitppo.engine import RolloutEngine
from splitppo.engine.build import kv_cache, most_rows
from splitppo.engine.hf import HFEngine
from splitppo.engine.vllm.client import VLLMEngine
from splitppo.engine.vllm.plan import Plan
from splitppo.engine.vllm.process import Process
from splitppo.errors import say
from splitppo.job.runtime import Runtime
from splitppo.learner import Learner
from splitppo.models import build, weights
from splitppo.models.heads import PolicyOutputs
from splitppo.models.runner import Reference, Runner
from splitppo.models.sharding import parallelize
from splitppo.models.tokenizer import read_tokenizer
from splitppo.placement import Ownership, Role, data_parallel, own
from splitppo.rewards.model import RewardModel, RewardText, longest_text
from splitppo.rewards.scorer import Scorer, check_prompts
from splitppo.rollout import Prompt
from splitppo.run import memory
from splitppo.run.files import read_file, write_rows
from splitppo.run.folder import TRAINING, VALIDATION, inputs_of
from splitppo.run.resolve import Resolved, check_sizes
from splitppo.sampler import Sampler
from splitppo.validation import Validator


def load_data(resolved: Resolved) -> tuple[Resolved, tuple[data.PromptSet, data.PromptSet]]:
    """The run, in which the longest prompt of the data stands for an unset
    `rollout.max_prompt_tokens`; training prompts and held-out prompts, checked against what scores
    them."""
    config = resolved.config
    reward = resolved.config.reward
    read = functools.partial(
        data.load_prompts,
        resolved.data,
        resolved.tokenizer,
        seed=config.seed,
        max_prompt_tokens=config.rollout.max_prompt_tokens,
        now=resolved.now,
    )
    training = read(split="train", check=functools.partial(check_prompts, reward.function))
    setting = "reward.validation" if reward.validation else "reward.function"
    check = functools.partial(check_prompts, reward.validation or reward.function, setting=setting)
    validation = read(split="validation", check=check)
    if config.rollout.max_prompt_tokens is None:
        longest = max(len(prompt.tokens) for prompt in training.prompts + validation.prompts)
        check_sizes(config, resolved.models, resolved.vocabulary_size, longest)
        resolved = memory.with_setting(resolved, "rollout", "max_prompt_tokens", longest)
    return resolved, (training, validation)


def all_inputs(
    resolved: Resolved, training: data.PromptSet, validation: data.PromptSet
) -> dict[str, str]:
    """What identifies all that the run reads: its files (`inputs_of`), and the prompts as they are
    rendered."""
    return inputs_of(
        resolved.config,
        {name: model.name for name, model in resolved.models.items()},
        resolved.local,
        {TRAINING: training.prompts, VALIDATION: validation.prompts},
    )


def build_sampler(resolved: Resolved, training: data.PromptSet) -> Sampler:
    """The rows of all slots, from the training prompts."""
    config = resolved.config
    rollout = config.rollout

    def prompt(row: int) -> Prompt:
        place = row // rollout.samples
        return training.prompts[data.prompt_index(len(training.prompts), place, config.seed)]

    return Sampler(
        rollout.batch_size,
        prompt,
        limit=rollout.max_new_tokens,
        window=rollout.window,
        lengths=data.read_lengths(rollout),
    )


def build_context(
    resolved: Resolved, runtime: Runtime, sampler: Sampler, held_out: Sequence[Prompt]
) -> Context:
    """What both roles know of the run."""
    config = resolved.config
    sizes = data_parallel(resolved.config, resolved.placement)
    rollout = config.rollout

    @functools.lru_cache(maxsize=4)
    def owned(step: int) -> Ownership:
        contexts: list[int] = []
        if (
            rollout.window and sizes["actor"] > 1
        ):  # rank 0 is an actor rank, and knows the rows that go on
            contexts = json.loads(
                runtime.broadcast(f"contexts/{step}", lambda: json.dumps(sampler.contexts()))
            )
            # all ranks have read it: rank 0 is no step ahead, and asks for a step's plan in the
            # step before
            runtime.store.delete_key(f"contexts/{step - 3}")
        return own(
            seed=config.seed,
            step=step,
            batch_size=rollout.batch_size,
            samples=rollout.samples,
            mini_batches=config.ppo.mini_batches,
            sizes=sizes,
            contexts=contexts,
        )

    def decode(ids: Sequence[int]) -> str:
        return resolved.tokenizer.decode(list(ids), skip_special_tokens=True)

    return Context(config, owned, sampler.prompt, held_out, decode, resolved.vocabulary_size)


def check_open_rows(sampler: Sampler, found: Path | None) -> None:
    """Raises UserError if rows of this checkpoint go on, and can't in this run."""
    if found:
        read_file(
            found / "actor" / "state.json",
            lambda text: sampler.load_state(json.loads(text).get("open", ())),
            f"remove {found}",
        )


class Builder:
    """Builds what this rank's role needs. All ranks of a group build the same parts in the same
    order. `engine`: the process of this rank's engine (`launch_engine`), if it has one. `prompts`:
    what `load_data` returned."""

    def __init__(
        self, resolved: Resolved, runtime: Runtime, folder: Path, engine: Process | None,
        prompts: tuple[data.PromptSet, data.PromptSet],
    ):  # fmt: skip
        self.resolved = resolved
        self.config = resolved.config
        self.runtime = runtime
        self.folder = folder
        self.engine_process = engine
        self.training, self.validation = prompts
        self.prompts = self.training.prompts + self.validation.prompts
        self.sampler = build_sampler(resolved, self.training)
        self.context = build_context(resolved, runtime, self.sampler, self.validation.prompts)
        temperature = self.config.rollout.temperature
        self.outputs = PolicyOutputs(
            temperature, resolved.vocabulary_size, compiled=resolved.compiled
        )

    def actor(self) -> Actor:
        """Policy, reference, engine. vLLM is built in a process of its own meanwhile;
        `connect_engine` waits for it."""
        runner = self._runner("actor")
        engine = self._engine()
        try:
            policy = self._learner("policy", runner)
            reference = self._reference("actor", runner)
            validator = self._validator(engine, runner)
            actor = Actor(
                self.context,
                policy,
                self.outputs,
                reference,
                engine,
                self.sampler,
                engine_dtype=self.resolved.dtype,
                validator=validator,
            )
            self._warm_up(actor)
        except BaseException:
            engine.close()
            raise
        return actor

    def _engine(self) -> RolloutEngine:
        """This rank's engine. Begins to build a vLLM engine on the rank that has its process."""
        resolved = self.resolved
        config = self.config
        runtime = self.runtime
        device = self.runtime.device
        policy = resolved.models["policy"]
        tokenizer = resolved.tokenizer
        dtype = resolved.dtype
        engine = config.engine
        model = policy.config
        folder = policy.folder(self.folder)
        ranks = runtime.placement.groups["actor"]
        if resolved.engine == "hf":
            return HFEngine(
                model,
                tokenizer,
                device=device,
                dtype=dtype,
                max_rows=engine.max_rows,
                folder=folder,
            )
        number, index = divmod(ranks.index(runtime.launch.rank), engine.tensor_parallel)
        if process := self.engine_process:
            rows = min(engine.max_rows, most_rows(config, len(ranks))) * engine.tensor_parallel
            tokens = (
                max(len(prompt.tokens) for prompt in self.prompts) + config.rollout.max_new_tokens
            )
            total = memory.gpu_memory(resolved) or os.sysconf("SC_PAGE_SIZE") * os.sysconf(
                "SC_PHYS_PAGES"
            )
            plan = Plan(
                config=config,
                folder=str(folder),
                log=str(self.folder / "logs" / f"engine_{runtime.launch.rank:03d}.log"),
                address=str(process.folder / "engine"),
                dtype=str(dtype).removeprefix("torch."),
                max_rows=rows,
                max_tokens=tokens,
                kv_bytes=kv_cache(config, model, dtype, rows=rows, tokens=tokens, total=int(total)),
                eos=tuple(sorted(resolved.eos)),
                vocabulary=resolved.vocabulary_size,
                device=device.type,
                threads=max(1, (os.cpu_count() or 1) // runtime.launch.local_world),
            )
            process.begin(plan)
            runtime.store.set(f"engine/address/{number}", plan.address)
        address = runtime.store.get(f"engine/address/{number}").decode()
        known = {"dtype": dtype, "device": device}
        if device.type == "cuda":
            known |= {"sleep": engine.sleep, "peak": memory.trainer_peak(resolved)}
        return VLLMEngine(model, address, index, process, timeout=config.timeout, **known)

    def connect_engine(self, actor: Actor) -> None:
        """Waits until the actor's engine is ready. Whatever takes time and needs no engine should
        come before."""
        self._begin_phase("starting the engine")
        line = actor.engine.connect()
        if actor.group.is_first:
            say(f"engine: {line}")

    def critic(self) -> Critic:
        """Value model, reward functions, reward model, reference."""
        runner = self._runner("critic")
        scorer = self._scorer(self.config.reward, self.training.prompts, runner)
        values = [
            self._learner("value", runner, number) for number in range(self.config.value_models)
        ]
        reference = self._reference("critic", runner)
        save = functools.partial(self._save_value, *values[:1])
        critic = Critic(
            self.context, runner.group, values, scorer, self._reward_model(runner), reference, save
        )
        self._warm_up(critic)
        return critic

    def links(self) -> Links:
        """This rank's end of the three channels."""
        runtime = self.runtime
        rollout = self.config.rollout
        wire = Wire(
            runtime.launch.rank,
            runtime.wire,
            runtime.wire_store,
            runtime.device,
            self.config.timeout,
            runtime.status.describe,
        )
        (group,) = runtime.groups.values()
        return Links(
            wire,
            runtime.placement,
            self.context.ownership,
            group,
            chunks=rollout.messages,
            window=rollout.window,
        )

    def exchange(self) -> Exchange:
        """What stands in the place of the channels on a rank that plays both roles."""
        return Exchange(self.runtime.groups, self.context.ownership)

    def _warm_up(self, column: Actor | Critic) -> None:
        if self.resolved.compiled:
            self._begin_phase("compiling")
            column.warm_up()

    def _runner(self, role: Role) -> Runner:
        return Runner(
            self.runtime.groups[role], self.runtime.device, self.config.compute.micro_batch_tokens
        )

    def _save_value(self, value: Learner) -> None:
        """Writes the value model beside the checkpoints, with the tokenizer, for other runs to
        start from."""
        folder = self.folder / "pretrained_value"
        first = value.runner.group.is_first
        found = self.resolved.models["value"]
        weights.save_trained(
            found.config,
            "value",
            value.weights(torch.float32),
            folder,
            found.folder(self.folder),
            self.resolved.models["policy"].folder(self.folder),
            own_code=self.config.policy.trust_remote_code,
            write=first,
        )
        if first:
            say(f"[critic] the value model is pretrained: --value.path {folder}")

    def _learner(self, name: str, runner: Runner, number: int = 0) -> Learner:
        chosen = self.config.policy if name == "policy" else self.config.value
        return Learner(
            self._model(name, runner, number),
            runner,
            chosen.optim,
            offload=chosen.offload,
            steps=self.config.steps,
            aggregate=self.config.ppo.aggregate,
            gather_once=self.config.compute.gather == "mini_batch",
        )

    def _reference(self, role: Role, runner: Runner) -> Reference | None:
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
            chat=reward.model_chat,
            longest=longest_text(model.config, tokenizer),
        )
        if runner.group.is_first:
            say(f"reward model: reads {text.reads}")
        return RewardModel(
            self._model("reward", runner), runner, text, offload=reward.model_offload
        )

    def _scorer(self, reward: RewardConfig, prompts: Sequence[Prompt], runner: Runner) -> Scorer:
        """Runs reward functions, in processes of its own; on the first rank of a set, for all of
        it."""
        if not runner.group.speaks:
            reward = replace(reward, function=("none",), weights=())
        return Scorer(reward, {prompt.data_source for prompt in prompts})

    def _validator(self, engine: RolloutEngine, runner: Runner) -> Validator:
        reward = self.config.reward
        if held_out := reward.validation if self.config.log.validate_every else ("none",):
            reward = replace(reward, function=held_out, weights=())
        scorer = self._scorer(reward, self.validation.prompts, runner)
        return Validator(
            self.context,
            engine,
            runner.group,
            scorer,
            functools.partial(write_rows, self.folder / "validation"),
        )

    def _model(self, name: str, runner: Runner, number: int = 0) -> Any:
        """Builds, shards and fills a model; `number` counts in an ensemble."""
        self._begin_phase(f"loading the {name}")
        resolved = self.resolved
        found = self.resolved.models[name]
        config = self.config
        frozen = name in ("reference", "reward")  # held in the precision in which it runs
        model = build.build(
            found.config,
            found.kind,
            resolved.dtype if frozen else torch.float32,
            packed=found.packed,
        )
        # with gradients, the reference's layers are to the compiler what the policy's are; it runs
        # without them
        model.requires_grad_(name != "reward")
        build.freeze(model, found.frozen, f"{name}.freeze")
        # a reward model runs padded, over texts of its own: compiling it would take longer than it
        # saves
        compiled = resolved.compiled and name != "reward"
        role = resolved.role_of(name)
        parallelize(
            model,
            self.runtime.shards[role],
            dtype=resolved.dtype,
            activation_checkpointing=config.compute.activation_checkpointing and not frozen,
            compiled=compiled,
            tensor=self.runtime.sets[role].get(config.tensor_parallel(name)),
        )
        weights.fill(
            model,
            str(found.folder(self.folder)),
            device=runner.device,
            random_init=found.random_init,
            head=config.value.head,
            seed=config.seed + number,
        )
        return model

    def _begin_phase(self, name: str) -> None:
        """Names a phase of the start: to the other ranks, and on the screen if this is the first
        rank of a group."""
        self.runtime.status.set_phase(name)
        if any(group.is_first for group in self.runtime.groups.values()):
            say(f"[{'+'.join(self.runtime.groups)}] {name} ...")
