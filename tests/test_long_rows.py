"""Rows of thousands of tokens: memory grows with the tokens of a micro-batch, however long its
longest row is, and with the part of them that a rank has."""

import ctypes
import json
import re
import resource
from pathlib import Path
from typing import Any

import long_rows
import pytest
import torch
from episodes import episode
from peaks import counted
from ranks import run_ranks
from runs import records
from torch import nn
from transformers import LlamaForCausalLM

from splitppo import algo, train
from splitppo.config import Config, EnvConfig, OptimConfig, PlacementConfig
from splitppo.context import Context
from splitppo.job.launch import Launch
from splitppo.job.runtime import Runtime
from splitppo.models.build import build
from splitppo.models.heads import PolicyOutputs
from splitppo.models.learner import Learner
from splitppo.models.runner import Runner
from splitppo.models.sharding import parallelize
from splitppo.models.tiny import build_tokenizer, model_config
from splitppo.models.weights import fill
from splitppo.placement import Role, SetShape, place
from splitppo.rewards.samples import RECORDED_TOKENS, record
from splitppo.rollout import Prompt, Rollout
from splitppo.run.files import shown

CPU = torch.device("cpu")
LONG, SHORT, MANY = 16_000, 100, 500
BUDGET = LONG + MANY * SHORT
OUTPUTS = PolicyOutputs(1.0, 80)
# of the runs with a limit: so many layers that what one of them computes with is little beside what
# all keep
ROW, LAYERS, INNER = 3000, 8, 1024
M_MMAP_THRESHOLD = -3  # of mallopt


def rollout_of(*lengths: int) -> Rollout:
    return Rollout(
        episode(row, [5], [7 + row % 9] * (length - 1), [-4.0] * (length - 1), "eos")
        for row, length in enumerate(lengths)
    )


def objective(model: nn.Module, batch: Any, given: dict[str, torch.Tensor]) -> Any:
    logprobs, _ = OUTPUTS(model, batch, entropy=False)
    kinds: Any = {"clip_low": 0.2, "clip_high": 0.2, "aggregate": "seq_mean_token_mean"}
    return algo.policy_loss(logprobs, given["old"], given["advantages"], batch.lengths, **kinds)


def make_learner(runtime: Runtime, role: Role, budget: int, width: int) -> Learner:
    config = model_config()
    config.update({"hidden_size": width, "intermediate_size": 2 * width})
    config.update({"max_position_embeddings": LONG, "num_hidden_layers": 1})
    model = build(config, "policy", packed=True)
    (ranks,) = runtime.sets[role].values()
    parallelize(
        model, runtime.shards[role], dtype=torch.float32, activation_checkpointing=True, ranks=ranks
    )
    fill(model, "", device=CPU, random_init=True, seed=3)
    runner = Runner(runtime.groups[role], CPU, budget)
    return Learner(model, runner, OptimConfig(lr=1e-6), steps=9, aggregate="seq_mean_token_mean")


def peak(learner: Learner, rollout: Rollout) -> tuple[int, float]:
    """Bytes at the peak of an update with these rows, and its FLOPs in 10^12."""
    found: list[int] = []
    fields = {name: torch.zeros(rollout.tokens) - 4 for name in ("old", "advantages")}
    with counted(found.append):
        (figures,) = learner.update(
            rollout, [rollout.places(rollout.rows)], fields, objective, step=1, epochs=1
        )
    return found[0], figures["update_tflop"]


@pytest.mark.wide
def test_a_long_row_among_short_ones_costs_its_tokens():
    """Padded, a tensor of the losses would have 501 x 16,000 numbers: 32 MB, and there are many.
    The model is so narrow that this is more than what it needs itself."""
    runtime = Runtime(Launch(), place(PlacementConfig(), world=1, local_world=1), CPU, 60.0)
    learner = make_learner(runtime, "actor", BUDGET, 8)
    even, _ = peak(learner, rollout_of(*[SHORT] * (BUDGET // SHORT)))
    uneven, _ = peak(learner, rollout_of(LONG, *[SHORT] * MANY))
    runtime.close()
    assert uneven == pytest.approx(even, rel=0.1)


def cut_rank(rank: int) -> list[tuple[int, float]]:
    """Peaks with a long row on the first rank alone, and with the row cut over both."""
    placement = place(PlacementConfig(mode="colocated"), world=2, local_world=2)
    shapes: Any = {"actor": [SetShape()], "critic": [SetShape(sequence=2)]}
    runtime = Runtime(Launch(rank, 2, rank, 2), placement, CPU, 60.0, set_shapes=shapes)
    found = []
    for role in ("actor", "critic"):
        learner = make_learner(runtime, role, 2048, 64)
        has_row = learner.runner.group.dp_rank == 0
        found.append(peak(learner, rollout_of(*[4096] * has_row)))
    return found


def test_a_row_too_long_for_one_rank_trains_on_two():
    ((alone, cut), (_, other)) = run_ranks(2, cut_rank)
    assert max(cut[0], other[0]) < 0.65 * alone[0]
    assert cut[1] == other[1] == alone[1], "a rank's FLOPs are half of the row's either way"


def limited_rank(rank: int, argv: list[str], allowed: int) -> int:
    """A run whose updates may have so many bytes more than the rank had before the first one."""
    # what is freed goes back to the system: else the limit would count it
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 20)
    update = Learner.update

    def limited(self: Learner, *args: Any, **kwargs: Any) -> Any:
        had = Path("/proc/self/status").read_text().partition("VmData:")[2].split()[0]
        resource.setrlimit(resource.RLIMIT_DATA, ((int(had) << 10) + allowed, -1))
        try:
            return update(self, *args, **kwargs)
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, (-1, -1))

    Learner.update = limited
    return train.main(argv)


@pytest.mark.wide
def test_a_run_whose_rows_do_not_fit_one_rank_trains_where_they_are_cut(tmp_path, capfd):
    """Two ranks, a row for each. Of a whole row the gated products alone take all that is allowed;
    of half of it all activations and all else take about three quarters."""
    config = model_config()
    config.update({"intermediate_size": INNER, "num_hidden_layers": LAYERS})
    config.update({"max_position_embeddings": ROW + 100})
    tokenizer = build_tokenizer()
    tokenizer.model_max_length = ROW + 100
    for part in (LlamaForCausalLM(config), tokenizer):
        part.save_pretrained(tmp_path / "model")
    rows = [
        {"prompt": "7" * (ROW - 1) + str(i), "reward_model": {"ground_truth": str(i)}}
        for i in range(2)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    argv = [
        *(f"--policy.path={tmp_path / 'model'}", f"--data.files={tmp_path / 'rows.jsonl'}"),
        *("--rollout.batch-size=2", f"--rollout.max-prompt-tokens={ROW}", "--ppo.baseline=batch"),
        *("--rollout.max-new-tokens=4", "--placement.mode=colocated", "--compute.device=cpu"),
        *("--ppo.mini-batches=1", "--ppo.entropy-coef=0.01", "--compute.packing=on", "--steps=1"),
        *(f"--compute.micro-batch-tokens={ROW // 2 + 100}", "--reward.function=exact_match"),
        *("--log.validate-every=0", "--checkpoint.no-last"),
    ]
    # a layer keeps what the gate says, its activation, what it lets through, and their product
    allowed = ROW * LAYERS * 4 * INNER * 4

    def run(sequence: int) -> tuple[list[int], str]:
        flags = [f"--fsdp.sequence-parallel={sequence}", f"--run-dir={tmp_path / str(sequence)}"]
        return run_ranks(2, limited_rank, [*argv, *flags], allowed), capfd.readouterr().err

    statuses, said = run(1)
    assert statuses == [1, 1]
    assert "can't allocate memory" in said
    assert run(2)[0] == [0, 0]
    assert records(tmp_path / "2", "actor")[0]["actor/grad_norm"] > 0


def test_figures_of_a_long_rows_first_tokens_are_written():
    length = RECORDED_TOKENS + 1000
    turns = [True] * (length - 10) + [False] * 5 + [True] * 5
    row = episode(0, [5], [7] * length, [-1.0] * (length - 5), mask=turns)
    config = Config(env=EnvConfig(path="env.py:Env"))
    context = Context(config, lambda _: Prompt("", [5], "", "", {}), (), lambda ids: "7" * len(ids),
                      10)  # fmt: skip
    tokens = {"text": ["7"] * length, "value": [*range(length)]}
    found = record(context, 1, context.prompt(0), row, 1.0, tokens)
    assert found["tokens"] == {name: line[:RECORDED_TOKENS] for name, line in tokens.items()}
    assert len(found["response"]) == length
    # a turn's value is there all the same
    assert [turn["value"] for turn in found["turns"] if "value" in turn] == [0, length - 5]
    assert "tokens" not in shown(found)


def test_the_script_for_gpus_goes_on_after_each_case_in_the_order_of_worth(monkeypatch, capsys):
    """tests/gpu/long_rows.py with jobs that end at once: a GPU of 80 GiB holds 20, and 1 for each
    1,024 tokens; of cut rows half of that. FSDP alone does not fit."""
    asked = []

    def start(options: Any, shape: str, case: str, tokens: int, patience: float) -> Any:
        asked.append((shape, case, tokens))
        peak = 20 + tokens / 1024 * {"fsdp": 2, "sequence": 0.5, "tensor": 0.75}[case]
        if peak > 80 or tokens == 73728:  # fragments
            return long_rows.TOO_LONG
        return {"log-probs": 1.0, "update": 1.0, "peak": peak, "held": 20.0, "total": 80.0}

    monkeypatch.setattr(long_rows, "start", start)
    monkeypatch.setattr("sys.argv", ["long_rows.py", "--shapes", "1.5B", "7B"])
    long_rows.main()
    first = [("fsdp", 32768), ("sequence", 32768), ("tensor", 32768)]
    grown = [("sequence", 112640), ("tensor", 73728), ("tensor", 53248)]
    assert asked == [(shape, *case) for shape in ("1.5B", "7B") for case in first + grown]
    said = capsys.readouterr().out
    assert said.count("\n") == 2 + len(asked) + 1
    assert re.search(r"^1\.5B  fsdp +32768 out of memory$", said, re.M)
    monkeypatch.setattr("sys.argv", ["long_rows.py", "--limit", "30"])
    long_rows.main()
    assert capsys.readouterr().out.count("left out: no time left") == 6
    assert len(asked) == 12
