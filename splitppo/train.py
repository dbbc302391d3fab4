"""The program: `torchrun --nproc_per_node N -m splitppo.train [--config preset.toml] [--flags]`.

Every rank runs this module; its rank says which of the loops below it plays. Read `actor_loop` and `critic_loop`
side by side: they meet in the three channels of `links`, and nowhere else. `colocated_loop` is the same algorithm
in one column. There is no barrier between the columns: the actor starts step t+1 while the critic still learns
from step t, and takes the first rows of t+1 when it is through.
"""

import os
import signal
import sys
from collections.abc import Sequence

import transformers

from splitppo.actor import Actor
from splitppo.channel import Links
from splitppo.config.cli import parse
from splitppo.config.rules import check
from splitppo.critic import Critic, join
from splitppo.engine.build import launch_engine
from splitppo.errors import as_users, command
from splitppo.job.device import pick_device
from splitppo.job.failure import report_failure
from splitppo.job.nodes import Launch, facts_of
from splitppo.job.runtime import Runtime
from splitppo.job.signals import RESUMABLE, StopSignals, note_early, tell_launcher
from splitppo.models.sharding import meet
from splitppo.placement import place
from splitppo.rollout import Rollout
from splitppo.run.build import Run, prepare
from splitppo.run.checks import preflight
from splitppo.run.dry_run import preview


def actor_loop(run: Run, actor: Actor, links: Links) -> None:
    """Generates, sends finished rows, takes advantages back, updates the policy."""
    log = run.log("actor")
    for step in run.progress.steps():
        with log.span("sync"):
            actor.sync()
        samples = []
        with log.span("rollout"):
            for finished in actor.generate(step):
                samples += finished
                links.rollouts.offer(step, finished)
        posted = links.rollouts.flush(step)
        with log.span("stragglers"):
            meet(actor.mesh)
        rollout = Rollout(samples)
        run.may_stop(step)
        with log.span("logprobs"):
            logprobs = actor.logprobs(rollout)
        with log.span("wait_critic"):
            posted.result()
        with log.span("wait_advantages"):
            links.logprobs.send(step, rollout, *logprobs)
            (advantages,) = links.advantages.recv(step, rollout, fields=1)
        with log.span("update"):
            metrics = actor.update(step, rollout, logprobs, advantages)
        with log.span("validate"):
            metrics |= actor.validate(step)
        with log.span("checkpoint"):
            run.progress.save("actor", step, actor)
        run.finish("actor", step, metrics)


def critic_loop(run: Run, critic: Critic, links: Links) -> None:
    """Scores rows as they come, sends advantages back, updates the value model under the actor's next rollout."""
    log = run.log("critic")
    for step in run.progress.steps():
        parts = []
        for chunk in range(links.chunks):
            with log.span("wait_rollouts"):
                rollout = Rollout(links.rollouts.recv(step, chunk))
            with log.span("score"):
                pending = critic.submit(step, rollout)
            with log.span("wait_rollouts"):
                meet(critic.mesh)
            with log.span("score"):
                parts.append(critic.score(step, rollout, pending))
        scored = join(parts)
        with log.span("wait_logprobs"):
            logprobs = links.logprobs.recv(step, scored.rollout, fields=run.logprobs)
        with log.span("advantages"):
            advantages, returns = critic.judge(scored, logprobs)
            links.advantages.send(step, scored.rollout, advantages)
        with log.span("update"):
            metrics = critic.update(step, scored, returns)
        with log.span("checkpoint"):
            run.write_samples(step, critic.samples(step, scored))
            run.progress.save("critic", step, critic)
        run.finish("critic", step, metrics)


def colocated_loop(run: Run, actor: Actor, critic: Critic) -> None:
    """The same algorithm in one column: every rank plays both roles, one after the other."""
    log, critic_log = run.log("actor"), run.log("critic")
    for step in run.progress.steps():
        with log.span("sync"):
            actor.sync()
        with log.span("rollout"):
            rollout = Rollout([sample for finished in actor.generate(step) for sample in finished])
        with critic_log.span("score"):
            pending = critic.submit(step, rollout)
        with log.span("stragglers"):
            meet(critic.mesh)
        with critic_log.span("score"):
            scored = critic.score(step, rollout, pending)
        run.may_stop(step)
        with log.span("logprobs"):
            logprobs = actor.logprobs(rollout)
        with critic_log.span("advantages"):
            advantages, returns = critic.judge(scored, logprobs)
        with log.span("update"):
            metrics = actor.update(step, rollout, logprobs, advantages)
        with critic_log.span("update"):
            critic_metrics = critic.update(step, scored, returns)
        with log.span("validate"):
            metrics |= actor.validate(step)
        with log.span("checkpoint"):
            run.write_samples(step, critic.samples(step, scored))
            run.progress.save("actor", step, actor)
            run.progress.save("critic", step, critic)
        run.finish("actor", step, metrics)
        run.finish("critic", step, critic_metrics)


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0, 1 after a failure, 2 for wrong input, 75 after a stop that the run can go on from,
    130 after Ctrl-C."""
    argv = sys.argv[1:] if argv is None else argv
    launch, runtime, run = Launch(), None, None
    if "RANK" in os.environ:
        note_early()
    transformers.logging.disable_progress_bar()
    try:
        launch = Launch.from_env()
        if launch.world > 1:
            # Ctrl-C ends the rank where it is: a wait in C++ would not hear of it, and torchrun gives it 30 s
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        # under torchrun a wrong flag is told as every other error is, once and last on the screen
        config = parse(argv, quiet=launch.world > 1 and not {"-h", "--help"} & set(argv))
        check(config)
        if config.dry_run:
            print(preview(config, launch))
            return 0
        launch.check_nodes()
        placement = place(config.placement, world=launch.world, local_world=launch.local_world)
        device = pick_device(config, launch)
        preflight(config, placement, device.type, launch.local_world, rank=launch.rank)
        engine = launch_engine(config, placement, launch, device)
        runtime = Runtime(
            launch, placement, device, config.timeout, shard_size=config.fsdp.shard_size, facts=facts_of(config)
        )
        signals = StopSignals(runtime)
        if runtime.stopped_before():
            print("not started anew: the run was told to stop", flush=True)
            return RESUMABLE
        run = prepare(config, runtime, engine)
        train(run)
        signals.close()
    except KeyboardInterrupt:
        told = "before the run began"
        if run:
            run.progress.settle()
            good = run.progress.last_good()
            told = f"the last good checkpoint is {good}" if good else "nothing is saved"
        print(f"interrupted: {told}", file=sys.stderr)
        return 128 + signal.SIGINT
    except Exception as error:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # an engine that ends from here on is a consequence
        if run:
            run.progress.settle()
        elif isinstance(error, BrokenPipeError):
            raise  # nobody reads the help, or the dry run, to its end
        if (told := as_users(error)) and told is not error:
            if runtime and run:
                told.add_note(f"on {runtime.describe(launch.rank)}")
            error = told
        if run and (good := run.progress.last_good()):
            error.add_note(f"the last good checkpoint is {good}")
        return report_failure(error, runtime, launch)
    if run.progress.stopped and launch.rank == 0:
        tell_launcher()
    runtime.close()
    return RESUMABLE if run.progress.stopped else 0


def train(run: Run) -> None:
    """Plays this rank's part of the run."""
    runtime = run.runtime
    if runtime.placement.colocated:
        actor, critic = run.actor(), run.critic()
        run.begin(actor=actor, critic=critic)
        colocated_loop(run, actor, critic)
        actor.close()
        critic.close()
    elif "actor" in runtime.mesh:
        actor = run.actor()
        run.begin(actor=actor)
        actor_loop(run, actor, run.links())
        actor.close()
    else:
        critic = run.critic()
        run.begin(critic=critic)
        critic_loop(run, critic, run.links())
        critic.close()
    run.end()


if __name__ == "__main__":
    # leaves at once: after a failure, threads of the communication libraries may wait for a peer that never comes
    os._exit(main())
