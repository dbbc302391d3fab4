"""A teacher beside or in the place of rewards, against the reference program and literal loops."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from episodes import episode
from ranks import run_ranks, run_threads
from runs import figures, in_one_process, main_rank, records
from safetensors.torch import load_file, save_file
from test_flagship import compare, inputs, reference, run
from tiers import wide
from transformers import AutoModelForCausalLM

from splitppo import algo
from splitppo.config import Config
from splitppo.config.cli import parse
from splitppo.config.models import DistillConfig
from splitppo.critic.baselines import Estimate
from splitppo.critic.teacher import Teacher
from splitppo.errors import UserError
from splitppo.job.collectives import Group, ModelSet
from splitppo.job.launch import Launch
from splitppo.models.runner import Frozen
from splitppo.models.tiny import build_tiny, build_tokenizer
from splitppo.placement import place
from splitppo.rollout import Episode, Rollout
from splitppo.run import memory
from splitppo.run.folder import TRAINING
from splitppo.run.main import dry_run, load_data
from splitppo.run.resolve import Resolved, resolve

__all__ = ["inputs"]  # the fixture

ALONE = {"reward__function": "none", "ppo__kl_coef": 0.0}
TOP = {"top_k": 5}
HINT = "{0}1+2={0}"  # the prompt that a teacher reads, of the policy's
# the embedded model with a teacher alone
TINY = "--reward.function=none --log.validate-every=0 --rollout.batch-size=12".split()


def ids_of(text: str) -> list[int]:
    return build_tokenizer()(text)["input_ids"]


def text_of(ids: list[int]) -> str:
    return str(build_tokenizer().decode(ids))


@pytest.fixture(scope="module")
def taught(inputs):
    """The inputs with a teacher."""
    build_tiny(inputs / "teacher", seed=3)
    return inputs


def check(inputs: Any, tmp_path: Any, world: int, distill: Any = None, **changes: Any) -> dict:
    """Runs the program and the reference; returns what was recorded of the program. `distill`:
    settings of that table. With a prompt of its own the teacher is the policy before training."""
    distill = {"coef": 0.5} | (distill or {})
    flags = {f"distill__{name}": value for name, value in distill.items()}
    has_prompt = "teacher__prompt_key" in changes
    changes |= {} if has_prompt else {"teacher__path": inputs / "teacher"}
    seen = run(inputs, tmp_path, world, odd="exact", **flags, **changes)
    due: Any = {name.removeprefix("ppo__"): v for name, v in changes.items() if name[:5] == "ppo__"}
    due |= {"baseline": "batch"} if changes.get("reward__function") == "none" else {}
    due |= {"window": changes["rollout__window"]} if "rollout__window" in changes else {}
    if has_prompt:
        due["heard"] = lambda row, _: replace(row, hint=ids_of(HINT.format(text_of(row.prompt))))
    teacher = "policy" if has_prompt else "teacher"
    compare(seen, reference(inputs, seen, teacher=teacher, **due | distill))
    return seen


def resolve_config(config: Config) -> Resolved:
    placement = place(config.placement, world=1, local_world=1)
    return resolve(config, placement, 1, torch.device("cpu"), probe=False)


def hinted(inputs: Path) -> dict[str, Any]:
    """Settings of rows with two prompts: one that the policy reads, and one for the teacher, which
    is the policy before training."""
    texts = [f"{number % 4}{number // 4 % 4}{number % 3}=" for number in range(40)]
    rows = [{"prompt": text, "hint": HINT.format(text), "answer": text} for text in texts]
    (inputs / "hints.jsonl").write_text("\n".join(map(json.dumps, rows)))
    files = {"data__files": inputs / "hints.jsonl", "data__answer_key": "answer"}
    return files | {"teacher__prompt_key": "hint"}


@pytest.mark.parametrize(
    ("world", "distill", "changes"),
    [
        wide(2, {}, ALONE | {"placement__actor": 1}),
        (1, TOP, {}),
        wide(3, {}, {"placement__actor": 2}),
        wide(3, TOP | {"divergence": "jsd"}, ALONE | {"placement__actor": 2}),
        wide(3, TOP | {"divergence": "reverse"}, {"placement__actor": 1, "teacher__offload": ""}),
        wide(3, TOP, ALONE | {"placement__actor": 1, "teacher__tensor_parallel": 2}),
        wide(3, TOP, {"placement__actor": 1, "teacher__sequence_parallel": 2}),
        wide(2, TOP, {"placement__mode": "colocated", "fsdp__sequence_parallel": 2}),
        wide(
            4,
            TOP,
            {
                "placement__mode": "colocated",
                "fsdp__sequence_parallel": 2,
                "fsdp__shard_size": 2,
                "value__sequence_parallel": 1,
                "value__tensor_parallel": 2,
            },
        ),
        wide(2, {}, ALONE | {"placement__mode": "colocated"}),
        wide(3, TOP, {"placement__actor": 2, "rollout__window": 4, "ppo__old_logprobs": "engine"}),
    ],
)
def test_every_placement_follows_the_teacher(taught, tmp_path, world, distill, changes):
    seen = check(taught, tmp_path, world, distill, **changes)
    assert not (seen["value"] and changes.get("reward__function"))


@pytest.mark.parametrize(
    ("world", "distill", "changes"),
    [
        (1, {}, ALONE),
        wide(3, TOP, {"placement__actor": 2}),
        wide(2, {}, {"placement__mode": "colocated", "teacher__offload": ""}),
    ],
)
def test_a_teacher_may_read_more(taught, tmp_path, world, distill, changes):
    check(taught, tmp_path, world, distill, **hinted(taught), **changes)


def test_a_teachers_prompt_counts_where_prompts_do(taught):
    settings = hinted(taught)
    argv = [f"--{name.replace('__', '.')}={x}" for name, x in settings.items()]
    argv = [*argv, *TINY, "--rollout.max-new-tokens=9"]
    inputs = []
    for hint in (HINT, HINT + "7"):
        rows = [{"prompt": p, "answer": p, "hint": hint.format(p)} for p in ("312=", "11=")]
        (taught / "hints.jsonl").write_text("\n".join(map(json.dumps, rows)))
        resolved = resolve_config(parse(argv))
        resolved, prompts = load_data(resolved)
        inputs.append(resolved.inputs(*prompts)[TRAINING])
        assert resolved.config.rollout.max_prompt_tokens == 4
        longest = len(ids_of(hint.format("312=")))
        rows_of = {name: resolved.row_tokens(name) for name in ("policy", "teacher")}
        assert rows_of == {"policy": 4 + 9, "teacher": longest + 9}
        assert f"{12 * rows_of['teacher']} tokens" in str(memory.phases(resolved)["critic score"])
    assert inputs[0] != inputs[1]
    rows = [{"prompt": "1=", "answer": "1", "hint": "1=1"}, {"prompt": "2=", "answer": "2"}]
    # the embedded model can read 1,024 tokens
    rows += [{"prompt": "3=", "answer": "3", "hint": "7" * n} for n in (1015, 1016)]
    no_prompt = {"prompt": "", "answer": "3", "hint": "7" * 1016}
    for wrong, says in ((rows[:2], "row 2 has no .*teacher"), (rows[2:], "row 2 has 1016 tokens")):
        (taught / "hints.jsonl").write_text("\n".join(map(json.dumps, wrong)))
        with pytest.raises(UserError, match=rf"^teacher.prompt_key=hint: .* {says}"):
            load_data(resolve_config(parse(argv)))
    (taught / "hints.jsonl").write_text("\n".join(map(json.dumps, [*rows, no_prompt])))
    _, (training, _) = load_data(resolve_config(parse([*argv, "--data.invalid=filter"])))
    assert [prompt.teacher.text for prompt in training.prompts if prompt.teacher] == [
        "1=1",
        "7" * 1015,
    ]


def frozen(group: Group) -> list[list[float]]:
    """All outputs of a frozen model that the ranks run together, of each rank's rows."""

    def forward(model: Any, rollout: Rollout, outputs: Any) -> list[torch.Tensor]:
        assert rollout.rows == [0, 1, 2], "the rows of all ranks"
        ids = torch.cat([torch.tensor(e.response) for e in rollout.episodes])
        return [ids.float(), torch.stack([ids, -ids], 1).int()]

    runner: Any = SimpleNamespace(forward=forward)
    model: Any = SimpleNamespace(ranks=ModelSet(peers=group))
    parts = [[episode(1, [1], [10, 11])], [episode(2, [1], [20]), episode(0, [1], [30])]]
    outputs = Frozen(model, runner, cast(Any, None)).run(parts[group.dp_rank])
    assert outputs[1].dtype == torch.int32
    return [out.flatten().tolist() for out in outputs]


def test_a_frozen_model_that_several_ranks_run_gives_all_its_outputs():
    first, second = run_threads((2, 1), frozen)
    assert first == [[10, 11], [10, -10, 11, -11]]
    assert second == [[20, 30], [20, -20, 30, -30]]


def test_a_teacher_may_be_an_adapter_of_peft_over_the_policys_base(taught, tmp_path):
    """Its log-probs are those of the merged model."""
    peft = pytest.importorskip("peft")
    plain = AutoModelForCausalLM.from_pretrained(taught / "policy")
    options = {"r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"]}
    torch.manual_seed(0)
    model = peft.get_peft_model(plain, peft.LoraConfig(**options))
    for number, (name, weight) in enumerate(model.named_parameters()):
        if "lora_B" in name:
            torch.manual_seed(number)
            weight.data.normal_(0, 0.1)
    model.save_pretrained(tmp_path / "adapter")
    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    for file in (taught / "policy").glob("tokenizer*"):
        shutil.copy(file, tmp_path / "merged")
    argv = [*TINY, f"--policy.path={taught / 'policy'}", "--steps=1", "--distill.top-k=4"]
    folders = [
        [f"--teacher.path={tmp_path / name}", f"--run-dir={tmp_path / name / 'run'}"]
        for name in ("adapter", "merged")
    ]
    results = in_one_process(tmp_path, *([*argv, *words] for words in folders))
    assert [status for status, _ in results] == [0, 0], results
    one, other = (records(tmp_path / name / "run", "critic") for name in ("adapter", "merged"))
    assert one[0]["distill/kl"] == pytest.approx(other[0]["distill/kl"], rel=1e-5)
    assert one[0]["distill/kl"] > 1e-3
    (facts,) = (json.loads((tmp_path / "adapter/run/resolved.json").read_text())["models"],)
    assert facts["teacher"]["trained"] == 0
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    moved = {name.replace(".layers.0.", ".layers.9."): x for name, x in load_file(file).items()}
    save_file(moved, file, {"format": "pt"})
    argv = [*argv, f"--teacher.path={tmp_path / 'adapter'}"]
    with pytest.raises(UserError, match=r"^teacher.path=\S+adapter: targets=\S+9\S+ matches no"):
        dry_run(parse(argv), Launch())


def test_a_teacher_that_is_the_policy_says_nothing_new(taught, tmp_path):
    argv = [*TINY, f"--teacher.path={taught / 'policy'}", "--distill.top-k=4", "--steps=1"]
    argv += ["--ppo.epochs=1", "--ppo.mini-batches=1", f"--run-dir={tmp_path / 'run'}"]
    run_ranks(1, main_rank, [*argv, f"--policy.path={taught / 'policy'}"])
    (actor,), (critic,) = (records(tmp_path / "run", role) for role in ("actor", "critic"))
    kl = {name: x for name, x in critic.items() if name.startswith("distill/")}
    assert kl.keys() > {"distill/kl", "distill/kl/first", "distill/kl/token_2"}
    assert [*kl.values(), actor["actor/divergence"]] == pytest.approx(
        [0.0] * (len(kl) + 1), abs=1e-6
    )
    assert actor["actor/teacher_agrees"] == 1
    assert actor["actor/grad_norm"] == 0, "AdamW would make steps of rounding"
    assert "critic/values/mean" not in critic


def test_a_run_goes_on_with_no_other_teacher(taught, tmp_path):
    argv = [*TINY, f"--teacher.path={taught / 'teacher'}", f"--run-dir={tmp_path / 'run'}"]
    run_ranks(1, main_rank, [*argv, "--steps=1"])
    last = [*argv, "--steps=2"]
    assert "resolved" in dry_run(parse(last), Launch())
    other = [*last, f"--teacher.path={taught / 'value'}"]
    with pytest.raises(UserError, match=r"teacher.path \S+safetensors was .* or --force"):
        dry_run(parse(other), Launch())
    assert "resolved" in dry_run(parse([*other, "--force"]), Launch())


@pytest.mark.wide
def test_a_run_goes_on_with_its_teacher(taught, tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    argv = [*TINY, f"--teacher.path={taught / 'teacher'}", "--checkpoint.every=2"]
    run_ranks(1, main_rank, [*argv, "--steps=3", f"--run-dir={whole}"])
    run_ranks(1, main_rank, [*argv, "--steps=2", f"--run-dir={cut}"])
    run_ranks(1, main_rank, [*argv, "--steps=3", f"--run-dir={cut}"])
    for role in ("actor", "critic"):
        assert figures(cut, role) == figures(whole, role)
    assert figures(cut, "critic")[3]["distill/kl"] != figures(cut, "critic")[2]["distill/kl"]


def test_settings_of_a_value_model_that_is_not_there_are_named():
    argv = [*TINY, "--teacher.path=tiny", "--value.layers=1"]
    text = dry_run(parse(argv), Launch(), ["value.layers", "steps"])
    assert "warning: value.layers is not used: with a teacher and no rewards" in text
    both = dry_run(parse([*argv, "--ppo.kl-coef=0.1"]), Launch(), ["value.layers"])
    assert "not used" not in both


def logprobs_of(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).log_softmax(-1)


def literal(p: list[float], q: list[float], kind: str) -> float:
    """The divergence of two distributions, by its definition."""

    def kl(a: list[float], b: list[float]) -> float:
        return sum(x * math.log(x / y) for x, y in zip(a, b, strict=True) if x > 0)

    m = [(x + y) / 2 for x, y in zip(p, q, strict=True)]
    return {"forward": kl(q, p), "reverse": kl(p, q), "jsd": (kl(p, m) + kl(q, m)) / 2}[kind]


@pytest.mark.parametrize("kind", ["forward", "reverse", "jsd"])
@pytest.mark.parametrize("k", [1, 4, 9])
def test_a_divergence_is_that_of_the_likeliest_tokens_and_the_rest(kind, k):
    """With all tokens it is the divergence of the whole distributions."""
    policy, teacher = logprobs_of(6, 9, seed=1), logprobs_of(6, 9, seed=2)
    top, ids = teacher.topk(k)
    chosen = policy.gather(-1, ids).requires_grad_()
    divergences = algo.divergence(chosen, algo.buckets(top), kind)
    for at, divergence in enumerate(divergences.tolist()):
        p, q = policy[at].exp().tolist(), teacher[at].exp().tolist()
        if k < 9:
            named = ids[at].tolist()
            p, q = ([x[i] for i in named] + [1 - sum(x[i] for i in named)] for x in (p, q))
        assert divergence == pytest.approx(literal(p, q, kind), abs=1e-5 if k == 9 else 1e-12)
    divergences.sum().backward()
    assert cast(torch.Tensor, chosen.grad).abs().min() > 0


def test_a_rest_that_is_nothing_has_a_bound():
    sure = torch.tensor([[0.0, -40.0]])
    assert algo.buckets(sure).tolist() == [[0.0, -40.0, pytest.approx(math.log(1e-6))]]
    far = algo.divergence(
        sure.requires_grad_(), algo.buckets(torch.tensor([[-30.0, -31.0]])), "forward"
    )
    assert far.item() == pytest.approx(math.log(1e6), abs=1e-4)


@pytest.mark.parametrize("kind", ["forward", "reverse", "jsd"])
def test_rounding_on_the_way_is_no_divergence(kind):
    policy = logprobs_of(500, 9, seed=3).float()
    top, ids = policy.topk(4)
    sent = algo.buckets(top).half()
    assert algo.divergence(policy.gather(-1, ids), sent, kind).abs().max() < 1e-6


def leading(group: Group, parts: list[list[Episode]], top_k: int) -> tuple[list[float], dict]:
    """What a rank of a critic group makes of its rows, whose log-probs follow from their tokens."""
    rollout = Rollout(parts[group.dp_rank])
    config = replace(Config(), distill=DistillConfig(coef=0.7, top_k=top_k))
    teacher = cast(Any, Teacher.__new__(Teacher))
    teacher.distill, teacher.runner = config.distill, SimpleNamespace(group=group)
    ids = torch.tensor([i for episode in rollout.episodes for i in episode.response]).float()
    estimate = Estimate(torch.ones(len(ids)), torch.zeros(len(ids)), {"before": 1})
    led = teacher.lead(estimate, rollout, -ids, [-ids.sqrt(), ids[:, None].int()])
    assert [x.shape for x in led.signals] == [ids.shape, (len(ids), 1)]
    assert torch.equal(led.columns["surprise"], ids.sqrt())
    return led.advantages.tolist(), led.metrics


@pytest.mark.parametrize("top_k", [0, 3])
def test_a_tokens_advantage_has_what_the_teacher_finds_better_than_the_mean(top_k):
    """Of the whole batch, over all ranks: one of them has no rows."""
    parts = [
        [episode(0, [1], [4, 9, 2, 7, 30])],
        [],
        [episode(1, [1], [3]), episode(2, [1], [5, 6])],
    ]
    found = run_threads((3, 1), leading, parts, top_k)
    tokens = [[4, 9, 2, 7, 30], [], [3, 5, 6]]
    differences = [i - math.sqrt(i) for part in tokens for i in part]
    mean = sum(differences) / 8
    for part, (advantages, metrics) in zip(tokens, found, strict=True):
        coef = 0.0 if top_k else 0.7
        due = [1 + coef * (i - math.sqrt(i) - mean) for i in part]
        assert advantages == pytest.approx(due, rel=0, abs=1e-5)
        of_places = {
            "": differences,
            "/first": [2.0, 3 - math.sqrt(3), 5 - math.sqrt(5)],
            "/token_2": [6.0, 2 - math.sqrt(2), 6 - math.sqrt(6)],
            "/token_4": [7 - math.sqrt(7), 30 - math.sqrt(30)],
        }
        kl = {f"distill/kl{p}": -sum(x) / len(x) for p, x in of_places.items()}
        assert metrics == {"before": 1} | {name: pytest.approx(x) for name, x in kl.items()}


def test_a_teacher_without_finite_log_probs_is_named():
    """On all ranks, and not blamed on the policy; rows without tokens are no figure."""
    parts = [[episode(0, [1], [4, 9])], []]
    with pytest.raises(UserError, match=r"teacher's log-probs are not finite; .*teacher\.path"):
        run_threads((2, 1), leading, [[episode(0, [1], [4, -1])], []], 0)
    assert all(figures["before"] for _, figures in run_threads((2, 1), leading, parts, 0))
    ((_, figures),) = run_threads((1, 1), leading, [[]], 0)
    assert figures == {"before": 1}
