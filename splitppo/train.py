"""The program: `torchrun --nproc_per_node N -m splitppo.train [--config preset.toml] [--flags]`.

Every rank runs this module, and its rank decides which loop it plays:

    actor ranks                                  critic ranks
    sync: the policy's weights into the engine   value.update of the step before still runs here
    plan: who owns which slot
    generate; finished rows leave as chunks ---> score(chunk): values, scores
    old and reference log-probs             ---> KL rewards, GAE, whitening over the whole batch
                                            <--- advantages
    policy.update                                value.update (both at once)

The groups exchange rows and tensors over the three channels of `links`, and nowhere else. No
barrier joins them: the actor starts step t+1 while the critic still trains on step t.
`colocated_loop` is the same algorithm with both roles on every rank; `exchange` stands in the place
of `links`.
"""

import os
import sys
from collections.abc import Sequence
from functools import partial
from typing import cast

from splitppo.channel import Exchange, Links
from splitppo.critic import Critic, join
from splitppo.generator import Generator
from splitppo.policy import Policy
from splitppo.rollout import Rollout
from splitppo.run.life import Run
from splitppo.run.main import run_rank


def actor_loop(run: Run, generator: Generator, policy: Policy, links: Links) -> None:
    """Generates and sends finished rows, receives advantages, updates the policy."""
    log = run.logs["actor"]
    for step in run.steps():
        with log.span("sync"):
            generator.load_weights(policy.weights())
        episodes = []
        with log.span("rollout"):
            plan = run.plan(step)
            generator.move_open_rows(plan)
            for finished in generator.generate(plan):
                episodes += finished
                links.rollouts.offer(plan, finished)
            generator.release_engine(trained=policy.trained)
        posted = links.rollouts.flush(plan)
        with log.span("barrier_wait"):
            generator.group.barrier()
        rollout = Rollout(episodes)
        run.answer_stop(step)
        with log.span("logprobs"):
            logprobs, metrics = policy.logprobs(rollout)
            policy.release_reference()
            metrics |= generator.gather_open_rows(rollout)
        with log.span("wait_critic"):
            posted.result()
        with log.span("wait_advantages"):
            links.logprobs.send(plan, rollout, logprobs)
            signals, waits = links.advantages.recv(plan, rollout, [*policy.signals.values()])
        with log.span("update"):
            metrics |= policy.update(plan, rollout, logprobs, signals, waits=waits)
        with log.span("validate"):
            metrics |= generator.validate(step, policy.weights())
        run.answer_stop(step, metrics)
        with log.span("checkpoint"):
            run.save("actor", step, generator, policy)
        run.finish("actor", step, metrics)


def critic_loop(run: Run, critic: Critic, links: Links) -> None:
    """Scores rows as they arrive, sends advantages, updates the value model during the actor's next
    rollout."""
    log = run.logs["critic"]
    for step in run.steps():
        with log.span("wait_rollouts"):
            plan = run.plan(step)
        parts = []
        for chunk in range(links.chunks):
            with log.span("wait_rollouts"):
                rollout = Rollout(links.rollouts.recv(plan, chunk))
                # rewards begin while this rank waits for its group
                pending = critic.submit(step, rollout)
                critic.group.barrier()
            with log.span("score"):
                parts.append(critic.score(step, rollout, pending))
        critic.release_models()
        scored = join(parts)
        with log.span("wait_logprobs"):
            logprobs, _ = links.logprobs.recv(plan, scored.rollout, run.logprob_columns)
        with log.span("advantages"):
            estimate = critic.advantages(step, scored, logprobs)
            links.advantages.send(plan, scored.rollout, estimate.signals, flag=estimate.waits)
        with log.span("update"):  # a thread writes the samples, until the step's end
            run.write_samples(step, partial(critic.samples, step, scored, estimate))
            metrics = estimate.metrics | critic.update(plan, scored, estimate)
        with log.span("checkpoint"):
            run.save("critic", step, critic)
        run.finish("critic", step, metrics)


def colocated_loop(
    run: Run, generator: Generator, policy: Policy, critic: Critic, exchange: Exchange
) -> None:
    """The same algorithm on ranks that play both roles, one after the other."""
    log = run.logs["actor"]
    critic_log = run.logs["critic"]
    for step in run.steps():
        with log.span("sync"):
            generator.load_weights(policy.weights())
        with log.span("rollout"):
            plan = run.plan(step)
            generator.move_open_rows(plan)
            rollout = Rollout([row for finished in generator.generate(plan) for row in finished])
            generator.release_engine(trained=policy.trained)
        with log.span("barrier_wait"):
            critic_rollout = exchange.rollouts(plan, rollout)
            pending = critic.submit(step, critic_rollout)
            critic.group.barrier()
        with critic_log.span("score"):
            scored = critic.score(step, critic_rollout, pending)
            critic.release_models()
        run.answer_stop(step)
        with log.span("logprobs"):
            logprobs, metrics = policy.logprobs(rollout)
            policy.release_reference()
            metrics |= generator.gather_open_rows(rollout)
        with critic_log.span("advantages"):
            critic_logprobs = exchange.logprobs(plan, rollout, critic_rollout, logprobs)
            estimate = critic.advantages(step, scored, critic_logprobs)
            signals = exchange.advantages(plan, critic_rollout, rollout, estimate.signals)
        run.write_samples(step, partial(critic.samples, step, scored, estimate))
        with log.span("update"):
            metrics |= policy.update(plan, rollout, logprobs, signals, waits=estimate.waits)
        with critic_log.span("update"):
            critic_metrics = estimate.metrics | critic.update(plan, scored, estimate)
        with log.span("validate"):
            metrics |= generator.validate(step, policy.weights())
        run.answer_stop(step, metrics)
        with log.span("checkpoint"):
            run.save("actor", step, generator, policy)
            run.save("critic", step, critic)
        run.finish("actor", step, metrics)
        run.finish("critic", step, critic_metrics)


def train(run: Run) -> None:
    """Plays this rank's part of the run."""
    roles = run.runtime.groups
    generator, policy = run.build.actor() if "actor" in roles else (None, None)
    critic = run.build.critic() if "critic" in roles else None
    run.begin(generator, policy, critic)
    if generator and policy and critic:
        colocated_loop(run, generator, policy, critic, Exchange(run.runtime.groups))
    elif generator and policy:
        actor_loop(run, generator, policy, cast(Links, run.links))
    elif critic:
        critic_loop(run, critic, cast(Links, run.links))
    for part in filter(None, (generator, critic)):
        part.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Trains; returns the exit status (`run_rank`)."""
    return run_rank(train, lambda: sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    # leaves at once: after a failure, threads of the communication libraries may wait for a peer
    # that never comes
    os._exit(main(sys.argv[1:]))
