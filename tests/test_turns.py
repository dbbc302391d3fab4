"""A row with turns is trained on as its turns are, each after all that came before: the same
log-probs, values, losses and gradients. And the turns are one sequence in time: GAE passes over
what the environment said."""

from array import array
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from episodes import episode
from ranks import run_threads
from torch import Tensor

from splitppo import algo
from splitppo.config import (
    Config,
    EnvConfig,
    LogConfig,
    OptimConfig,
    PlacementConfig,
    PPOConfig,
    RewardConfig,
    RolloutConfig,
)
from splitppo.context import Context
from splitppo.critic import Critic, ScoredRows
from splitppo.critic.baselines import Mean, Values
from splitppo.job.collectives import Group
from splitppo.job.nodes import Launch
from splitppo.job.runtime import Runtime
from splitppo.models.build import Kind, build, read_config
from splitppo.models.heads import PolicyOutputs, value_outputs
from splitppo.models.learner import Learner
from splitppo.models.runner import Runner
from splitppo.models.sharding import local, parallelize
from splitppo.models.tiny import build_tiny
from splitppo.models.weights import fill
from splitppo.placement import place
from splitppo.rewards.scorer import Scored
from splitppo.rollout import Episode, Prompt, Rollout

CPU = torch.device("cpu")
OUTPUTS = PolicyOutputs(0.7, 80)
# (prompt, (what the policy said, what the environment answered), ...)
EPISODES: list[tuple[int, list[tuple[int, int]]]] = [
    (3, [(2, 2), (2, 0)]),  # P | a1 a2 | o1 o2 | a3 a4
    (1, [(4, 3), (1, 1), (2, 0)]),
    (5, [(6, 0)]),
    (2, [(1, 4), (3, 2)]),  # ends with an observation
]


def draw(name: str, count: int) -> list[int]:
    return torch.randint(
        3, 80, (count,), generator=torch.Generator().manual_seed(sum(map(ord, name)))
    ).tolist()


def with_turns() -> list[Episode]:
    found = []
    for row, (prompt, turns) in enumerate(EPISODES):
        lengths = [part for turn in turns for part in turn]
        response = draw(f"response {row}", sum(lengths))
        mask = [number % 2 == 0 for number, length in enumerate(lengths) for _ in range(length)]
        sizes = torch.tensor([said for said, _ in turns])
        found.append(
            episode(
                row,
                draw(f"prompt {row}", prompt),
                response,
                [0.0] * int(sizes.sum()),
                "environment",
                mask=mask,
            )
        )
    return found


def turn_by_turn() -> list[Episode]:
    """Each turn as a plain row, whose prompt is all that came before."""
    found: list[Episode] = []
    for sample, (_, turns) in zip(with_turns(), EPISODES, strict=True):
        before, rest = list(sample.prompt), list(sample.response)
        for said, answered in turns:
            found.append(episode(len(found), before, rest[:said], [0.0] * said, "eos"))
            before, rest = before + rest[: said + answered], rest[said + answered :]
    return found


def fields(tokens: int) -> dict[str, Tensor]:
    """Of the response tokens, which come in the same order either way."""
    generator = torch.Generator().manual_seed(1)
    return {
        "old": -4 - torch.rand(tokens, generator=generator),
        "wanted": torch.randn(tokens, generator=generator),
    }


def policy_objective(model: Any, batch: Any, given: dict[str, Tensor]) -> Any:
    logprobs, entropy = OUTPUTS(model, batch, entropy=True)
    clips: Any = {"clip_low": 0.2, "clip_high": 0.3, "aggregate": "token_mean"}
    loss, metrics = algo.policy_loss(
        logprobs, given["old"], given["wanted"], batch.lengths, **clips
    )
    return loss - 0.01 * algo.aggregate_loss(entropy, batch.lengths, "token_mean"), metrics


def value_objective(model: Any, batch: Any, given: dict[str, Tensor]) -> Any:
    old = given["old"] + 4.5
    return algo.value_loss(
        value_outputs(model, batch),
        old,
        given["wanted"],
        batch.lengths,
        clip=0.5,
        aggregate="token_mean",
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    build_tiny(path, seed=3)
    return path


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    runtime = Runtime(Launch(), place(PlacementConfig(), world=1, local_world=1), CPU, 60.0)
    yield runtime
    runtime.close()


def trained(folder: Path, group: Group, kind: Kind, samples: list[Episode], *, packed: bool) -> Any:
    """A forward pass and an update: outputs `[N]`, figures, the gradient by name, the weights
    after."""
    model = build(read_config(str(folder)), kind, packed=packed)
    parallelize(model, group.mesh, dtype=torch.float32, activation_checkpointing=False)
    fill(model, str(folder), device=CPU, head="normal", seed=9)
    runner = Runner(
        group, CPU, 20
    )  # tokens: several micro-batches, cut in other ways for turns than for rows
    optim = OptimConfig(lr=1e-2, eps=1e-3, max_grad_norm=0.0)
    learner = Learner(model, runner, optim, steps=4, aggregate="token_mean")
    rollout = Rollout(samples)
    objective = policy_objective if kind == "policy" else value_objective
    outs = runner.forward(
        model, rollout, 
        lambda m, b: OUTPUTS(m, b, entropy=True) if kind == "policy" else [value_outputs(m, b)],
    )  # fmt: skip
    (figures,) = learner.update(
        rollout, [rollout.places(rollout.rows)], fields(rollout.tokens), objective, step=1, epochs=1
    )
    named = {id(parameter): name for name, parameter in learner.sharded().items()}
    # of AdamW's first step
    gradient = {
        named[id(p)]: local(state["exp_avg"]) / 0.1 for p, state in learner.optimizer.state.items()
    }
    after = {name: local(parameter).detach() for name, parameter in learner.sharded().items()}
    return outs, figures, gradient, after


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("kind", ["policy", "value"])
def test_a_row_with_turns_is_trained_on_as_its_turns_are(folder, runtime, kind, packed):
    group = runtime.groups["actor"]
    rows, turns = with_turns(), turn_by_turn()
    assert rows[0].places.tolist() == [0, 1, 4, 5]
    assert (
        sum(sample.tokens for sample in rows) == sum(len(sample.response) for sample in turns) == 21
    )
    outs, figures, gradient, after = trained(folder, group, kind, rows, packed=packed)
    due_outs, due, due_gradient, due_after = trained(folder, group, kind, turns, packed=packed)
    for out, expected in zip(outs, due_outs, strict=True):
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)
    names = [
        "loss",
        "grad_norm",
        *(["ppo_kl", "pg_clipfrac"] if kind == "policy" else ["vf_clipfrac", "vpred_mean"]),
    ]
    assert {name: figures[name] for name in names} == pytest.approx(
        {name: due[name] for name in names}, abs=1e-6
    )
    assert due["grad_norm"] > 0.1
    assert gradient.keys() == due_gradient.keys()
    for name, expected in due_gradient.items():
        torch.testing.assert_close(gradient[name], expected, rtol=0, atol=1e-6, msg=name)
    for name, expected in due_after.items():
        torch.testing.assert_close(after[name], expected, rtol=0, atol=1e-5, msg=name)


GAMMA, LAM, KL_COEF = 0.9, 0.8, 0.5
VALUES = [0.5, -1.0, 2.0, 0.25]


def advantages_of(
    group: Group, samples: list[Episode], scores: list[float]
) -> tuple[list[float], list[float]]:
    """Of rows whose first has VALUES and a KL of 0.1 a token, and the others nothing."""
    rollout = Rollout(samples)
    ppo = PPOConfig(gamma=GAMMA, lam=LAM, kl_coef=KL_COEF, kl_kind="k1", whiten=False)
    config = Config(ppo=ppo, rollout=RolloutConfig(batch_size=len(samples)))
    value: Any = SimpleNamespace(runner=SimpleNamespace(group=group))
    context: Any = SimpleNamespace(config=config, named=config)
    critic = Critic(context, group, Values(context, value), cast(Any, None), None)
    padded = torch.zeros(rollout.tokens - 4)
    scored = ScoredRows(
        rollout, torch.cat([torch.tensor(VALUES), padded]), torch.tensor(scores), {}, []
    )
    old = torch.cat([torch.full((4,), -1.0), padded])
    ref = torch.cat([torch.full((4,), -1.1), padded])
    found = critic.advantages(1, scored, [old, ref])
    return found.advantages[:4].tolist(), found.returns[:4].tolist()


HELD = [[0, 2, 3], [1]]  # rows of each rank; rows 0 and 1 have one prompt, 2 and 3 another


def without_values(group: Group, baseline: Any) -> tuple[list[int], list[float], dict[str, Any]]:
    """What a critic without a value model makes of rows with a KL of 0.1 a token."""
    every = with_turns()
    rollout = Rollout([every[row] for row in HELD[group.dp_rank]])
    ppo = PPOConfig(gamma=GAMMA, kl_coef=KL_COEF, kl_kind="k1", whiten=False, baseline=baseline)
    config = Config(ppo=ppo, rollout=RolloutConfig(batch_size=4, samples=2))
    context = cast(Any, SimpleNamespace(config=config, named=config))
    critic = Critic(context, group, Mean(context, group), cast(Any, None), None)
    scored = ScoredRows(
        rollout,
        torch.zeros(rollout.tokens),
        torch.tensor([1.0 + row for row in rollout.rows]),
        {},
        [],
    )
    old = torch.full((rollout.tokens,), -1.0)
    found = critic.advantages(1, scored, [old, old - 0.1])
    return rollout.rows, found.advantages.tolist(), found.metrics


def test_numbers_of_a_reward_hide_none_of_the_critics():
    rollout = Rollout(with_turns())
    config = Config(rollout=RolloutConfig(batch_size=len(rollout.rows)))
    context = cast(Any, SimpleNamespace(config=config, named=config, decode=None))
    old = torch.full((rollout.tokens,), -1.0)

    def metrics_of(group: Group, names: list[str]) -> dict[str, Any]:
        learner: Any = SimpleNamespace(runner=SimpleNamespace(group=group), forward=forward)
        critic = Critic(context, group, Values(context, learner), cast(Any, None), None)
        rows = [Scored(1.0 + row, dict.fromkeys(names, 7.0), ()) for row in rollout.rows]
        scored = critic.score(1, rollout, lambda: rows)
        return critic.advantages(1, scored, [old, old - 0.1]).metrics

    def forward(*_: Any, **__: Any) -> list[torch.Tensor]:
        return [torch.linspace(0, 1, rollout.tokens)]

    (known,) = run_threads(1, metrics_of, [])
    names = {name.removeprefix("critic/").removesuffix("/mean") for name in known}
    (named,) = run_threads(1, metrics_of, sorted(names))
    assert {name: named[name] for name in known} == known
    assert {f"critic/reward/{name}/mean" for name in names} < named.keys()


@pytest.mark.parametrize("baseline", ["batch", "group"])
def test_baselines_without_values_go_by_turns(baseline):
    """Rewards-to-go by hand; of other rows what they have as the same turn begins."""
    togo, begins = [], []
    for row, (_, turns) in enumerate(EPISODES):
        rewards = [-0.05] * sum(said for said, _ in turns)
        rewards[-1] += 1.0 + row
        line = [
            sum(GAMMA ** (k - t) * rewards[k] for k in range(t, len(rewards)))
            for t in range(len(rewards))
        ]
        first = [sum(said for said, _ in turns[:turn]) for turn in range(len(turns))]
        togo.append(line)
        begins.append([line[t] for t in first])
    due = {}
    for row, (_, turns) in enumerate(EPISODES):
        means = []
        for turn, (said, _) in enumerate(turns):
            if baseline == "batch":
                among = [begin[turn] for begin in begins if turn < len(begin)]
            else:
                among = (begins[row ^ 1] + [0.0] * 3)[turn : turn + 1]
            means += [sum(among) / len(among)] * said
        due[row] = [g - mean for g, mean in zip(togo[row], means, strict=True)]
    for rows, advantages, metrics in run_threads(2, without_values, baseline):
        assert advantages == pytest.approx([x for row in rows for x in due[row]], abs=1e-6)
        assert not [name for name in metrics if "value" in name or "explained" in name]
        assert metrics["critic/returns/max"] == pytest.approx(max(map(max, togo)), abs=1e-6)


def samples_of(group: Group) -> list[dict[str, Any]]:
    """What a critic writes of its rows, of which it keeps two."""
    config = Config(
        ppo=PPOConfig(gamma=1.0, lam=1.0),
        rollout=RolloutConfig(batch_size=4),
        log=LogConfig(samples=2),
    )
    prompt = Prompt("", [], "", "", {})
    context = Context(config, lambda row: prompt, (), lambda ids: "".join(f"{i} " for i in ids), 10)
    value: Any = SimpleNamespace(runner=SimpleNamespace(group=group))
    critic = Critic(context, group, Values(context, value), cast(Any, None), None)
    rollout = Rollout(with_turns())
    scored = ScoredRows(
        rollout,
        torch.arange(rollout.tokens) + 0.123456,
        torch.tensor([10.0, 20.0, 30.0, 40.0]),
        {},
        [],
    )
    found = critic.advantages(1, scored, [torch.zeros(rollout.tokens)])
    return critic.samples(1, scored, found)


def test_what_is_written_of_a_rows_tokens():
    """Values, advantages before whitening, rewards; none for what the environment said: P | a1 a2 |
    o1 o2 | a3 a4."""
    (rows,) = run_threads(1, samples_of)
    tokens = rows[0]["tokens"]
    assert [row["row"] for row in rows] == [0, 1]
    assert (
        "".join(tokens["text"])
        == rows[0]["response"]
        == "".join(f"{i} " for i in draw("response 0", 6))
    )
    assert tokens["value"] == [0.1235, 1.1235, None, None, 2.1235, 3.1235]
    assert tokens["reward"] == [0.0, 0.0, None, None, 0.0, 10.0]
    assert tokens["advantage"] == [9.8765, 8.8765, None, None, 7.8765, 6.8765]
    assert rows[1]["tokens"]["value"][:4] == [4.1235, 5.1235, 6.1235, 7.1235]


def test_gae_goes_over_the_response_tokens_in_sequence():
    """By hand: the score is the last response token's, and an observation is no step in time."""
    first = with_turns()[0]
    rewards = [-0.05, -0.05, -0.05, 3.0 - 0.05]
    nexts = [*VALUES[1:], 0.0]
    deltas = [r + GAMMA * n - v for r, n, v in zip(rewards, nexts, VALUES, strict=True)]
    due = [sum((GAMMA * LAM) ** (k - t) * deltas[k] for k in range(t, 4)) for t in range(4)]
    longer = episode(1, [5], [6] * 7, [0.0] * 7, "eos")  # so that the row is padded
    for samples, scores in (([first], [3.0]), ([first, longer], [3.0, 0.0])):
        ((advantages, returns),) = run_threads(1, advantages_of, samples, scores)
        assert advantages == pytest.approx(due, abs=1e-6)
        assert returns == pytest.approx([a + v for a, v in zip(due, VALUES, strict=True)], abs=1e-6)


def drawn(tokens: int) -> list[Tensor]:
    """Values, old and reference log-probs of response tokens."""
    return [*torch.randn(3, tokens, generator=torch.Generator().manual_seed(2))]


def of_rows(group: Group, rows: list[Episode], lam: Any) -> tuple[Tensor, Tensor]:
    """Advantages and returns of all response tokens; row r has the score r."""
    ppo = PPOConfig(
        gamma=GAMMA, lam=lam, lam_alpha=0.4, kl_coef=KL_COEF, kl_kind="k1", whiten=False
    )
    config = Config(ppo=ppo, rollout=RolloutConfig(batch_size=len(rows)), env=EnvConfig(path="e:E"))
    context = cast(Any, SimpleNamespace(config=config, named=config))
    learner: Any = SimpleNamespace(runner=SimpleNamespace(group=group))
    rollout = Rollout(rows)
    values, old, ref = drawn(rollout.tokens)
    scored = ScoredRows(rollout, values, torch.arange(float(len(rows))), {}, [])
    critic = Critic(context, group, Values(context, learner), cast(Any, None), None)
    estimate = critic.advantages(1, scored, [old, ref])
    return estimate.advantages, estimate.returns


@pytest.mark.parametrize("lam", [LAM, "adaptive"])
def test_gae_is_a_loop_over_the_whole_row_with_its_observations(lam):
    """And longer observations change no bit."""
    rows = []
    for row in with_turns():
        segments = [
            segment._replace(reward=0.0 if segment.logprobs is None else 0.5 * number - row.row)
            for number, segment in enumerate(row.segments)
        ]
        rows.append(replace(row, segments=tuple(segments)))
    values, old, ref = (iter(part.tolist()) for part in drawn(Rollout(rows).tokens))
    due = []
    for row in rows:
        own = [(next(values), next(old), next(ref)) for _ in range(row.tokens)]
        steps: list[Any] = []  # of each id of the response: value and reward, or None: observed
        for segment in row.segments:
            if segment.logprobs is None:
                steps += [None] * len(segment.ids)
                continue
            mine = own[: len(segment.ids)]
            own = own[len(segment.ids) :]
            steps += [[value, -KL_COEF * (log_p - log_ref)] for value, log_p, log_ref in mine]
            steps[-1][1] += segment.reward
        assert len(steps) == len(row.response)
        last = max(at for at, step in enumerate(steps) if step)
        steps[last][1] += row.row  # the score
        factor = max(0.0, 1 - 1 / (0.4 * row.tokens)) if lam == "adaptive" else lam
        advantage = after = 0.0
        line = []
        for step in reversed(steps):
            if step is None:
                continue
            value, reward = step
            advantage = reward + GAMMA * after - value + GAMMA * factor * advantage
            line.append((advantage, advantage + value))
            after = value
        due += line[::-1]
    ((advantages, returns),) = run_threads(1, of_rows, rows, lam)
    assert list(zip(advantages.tolist(), returns.tolist(), strict=True)) == [
        pytest.approx(pair, abs=1e-5) for pair in due
    ]
    ten = array("i", [7] * 10)
    longer = [
        replace(
            row,
            segments=tuple(
                s._replace(ids=s.ids + ten) if s.logprobs is None else s for s in row.segments
            ),
        )
        for row in rows
    ]
    assert max(row.total for row in longer) > max(row.total for row in rows) + 9
    for one, two in zip(
        run_threads(1, of_rows, longer, lam)[0], (advantages, returns), strict=True
    ):
        assert torch.equal(one, two)


def rewarded(group: Group, reward: RewardConfig) -> list[list[float]]:
    """The token rewards of two rows of two turns, whose environment gave 1 and 2, and 0 and -1; the
    scores are 0.5 and 1."""
    rows = []
    for row, given in enumerate([(1.0, 2.0), (0.0, -1.0)]):
        made = episode(
            row, [5], [6, 7, 8, 9, 9], [0.0] * 4, "limit", mask=[True, True, False, True, True]
        )
        segments = list(made.segments)
        for at, part in zip((0, 2), given, strict=True):
            segments[at] = segments[at]._replace(reward=part)
        rows.append(replace(made, segments=tuple(segments)))
    config = Config(env=EnvConfig(path="env.py:Env"), reward=reward)
    context = cast(Any, SimpleNamespace(config=config, named=config))
    critic = Critic(context, group, Mean(context, group), cast(Any, None), None)
    rollout = Rollout(rows)
    scored = ScoredRows(rollout, torch.zeros(rollout.tokens), torch.tensor([0.5, 1.0]), {}, [])
    found = critic.advantages(1, scored, [torch.zeros(8)])
    assert found.metrics["critic/score/max"] == 3.5
    return [part.tolist() for part in rollout.split(found.columns["reward"])]


def test_rewards_of_turns_stand_where_their_turn_ends():
    """Both rows together have 3.5 and 0: a deviation of 2.47."""

    def found(**reward: Any) -> list[list[float]]:
        return run_threads(1, rewarded, RewardConfig(**reward))[0]

    assert found() == [[0, 1, 0, 2.5], [0, 0, 0, 0]]
    assert found(clip=(0.5, 2.0), missing_eos_penalty=0.25) == [[0, 1, 0, 0.75], [0, 0, 0, 0.25]]
    scaled = found(normalize="running")
    spread = 3.5 / 2**0.5
    for row, due in zip(scaled, ([0, 1, 0, 2.5], [0, 0, 0, 0]), strict=True):
        assert row == pytest.approx([part / spread for part in due], abs=1e-6)
