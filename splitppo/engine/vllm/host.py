"""The engine's process: it runs vLLM's steps for the ranks that are connected to it.

    python -m splitppo.engine.vllm.host PARENT   (started by process.Process of the process PARENT)

messages.py has what they say to each other.
"""

# pyright: reportMissingImports=false

import os
import pickle
import sys
import time
import traceback
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any

import torch

from splitppo.engine.vllm import TESTED, vllm_version
from splitppo.engine.vllm.messages import Entry
from splitppo.engine.vllm.plan import Plan
from splitppo.engine.vllm.rows import Rows, params_of
from splitppo.engine.vllm.weight_check import Sums, compare
from splitppo.job.child import end_with_parent
from splitppo.models.tokenizer import read_tokenizer

SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # this process is the engine's own already
    "VLLM_NO_USAGE_STATS": "1",
    # latent attention would keep products of the weights, which a sync leaves as they were
    "VLLM_MLA_DISABLE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    # random ids tell the late output of an aborted row from a new row
    "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the trainer's ranks use the same cores
}


def graph_sizes(rows: int) -> list[int]:
    """Batch sizes for CUDA graphs: two for each doubling, up to `rows`. A batch runs in the next
    larger size."""
    powers = [2**i for i in range(rows.bit_length())]
    between = [3 * power // 2 for power in powers if power >= 16]
    return sorted({size for size in powers + between if size < rows} | {rows})


def build_llm(plan: Plan) -> Any:
    """The engine, with random weights until the first load."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    _patch_vllm(plan)
    engine = plan.config.engine
    if plan.device == "cpu":
        torch.set_num_threads(plan.threads)
        # No chunked prefill: vLLM would rewind the generator of a cut prompt, which CPU generators
        # do not support.
        options: dict[str, Any] = {
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(8192, plan.max_tokens, plan.max_rows),
            "enforce_eager": True,
        }
    else:
        options = {
            # a rollout starts with all its prompts
            "max_num_batched_tokens": max(8192, plan.max_rows),
            # vLLM only compares it with the free memory; kv_bytes sets the size
            "gpu_memory_utilization": 0.01,
            "enable_sleep_mode": engine.sleep != "off",
            "enforce_eager": engine.eager,
            # others reorder experts once, after which new weights could not be loaded
            "moe_backend": "triton",
            **({} if engine.eager else {"cudagraph_capture_sizes": graph_sizes(plan.max_rows)}),
        }
    extension = "routes.RouteTeller" if plan.routes else "worker.WeightReceiver"
    quantized = "quantization_config" in (Path(plan.folder) / "config.json").read_text()
    return LLMEngine.from_engine_args(
        EngineArgs(
            model=plan.folder,
            trust_remote_code=plan.config.policy.trust_remote_code,
            skip_tokenizer_init=True,  # requests are ids
            load_format="dummy",
            # the trainer sends floats, also where its folder holds FP8
            hf_overrides={"quantization_config": None} if quantized else {},
            dtype=plan.dtype,
            max_model_len=plan.max_tokens,
            max_num_seqs=plan.max_rows,
            kv_cache_memory_bytes=plan.kv_bytes,
            tensor_parallel_size=engine.tensor_parallel,
            logprobs_mode="processed_logprobs",
            generation_config="vllm",  # ignore the folder's defaults
            enable_prefix_caching=True,
            worker_extension_cls=f"splitppo.engine.vllm.{extension}",
            disable_log_stats=True,
            **options,
        )
    )


def _patch_vllm(plan: Plan) -> None:
    from vllm.model_executor.models import registry
    from vllm.sampling_params import SamplingParams
    from vllm.v1.executor import multiproc_executor, uniproc_executor

    if plan.config.engine.tensor_parallel == 1:
        # vLLM inspects the model's class in another process, so that it can still fork workers.
        # Without any that only costs time: 12 s with a cold cache.
        registry._run_in_subprocess = lambda inspect: inspect()
    # Warm up only the kernels for this run's sampling; vLLM would compile all of its kernels.
    rollout = plan.config.rollout
    warm = params_of(rollout, seed=0, eos=plan.eos, tokens=rollout.max_new_tokens)
    SamplingParams.for_sampler_warmup = staticmethod(lambda: warm)
    # Workers find each other through a file in the engine's folder. vLLM before 0.27 opens a TCP
    # port for this, later versions leave a file behind. vLLM names its shared memory after the
    # file, so the name is unique.
    folder = Path(plan.address).parent
    for module in (multiproc_executor, uniproc_executor):
        module.get_distributed_init_method = lambda ip, port: f"file://{folder}/{folder.name}"
        module.get_file_store_init_method = lambda: f"file://{folder}/{folder.name}"


def start_llm(plan: Plan) -> tuple[Rows, str]:
    """Builds the engine, limited to the plan's vocabulary. Returns its rows, none yet, with a line
    about it for the log."""
    start = time.monotonic()
    llm = build_llm(plan)
    llm.collective_rpc("splitppo_limit", args=(plan.vocabulary,))
    policy = plan.config.policy
    tokenizer = (
        read_tokenizer(plan.folder, own_code=policy.trust_remote_code)
        if plan.config.rollout.stop
        else None
    )
    rows = Rows(llm, plan.eos, tokenizer)
    installed = vllm_version() or ""
    scheduling = "vLLM's own scheduling, "
    if installed.startswith(TESTED):
        from splitppo.engine.vllm.scheduler import steady

        if steady(llm.engine_core.engine_core.scheduler, plan.eos, rows.open):
            scheduling = ""
    cache = llm.vllm_config.cache_config
    return rows, (
        f"vLLM {installed}, built in {time.monotonic() - start:.1f} s, {scheduling}"
        f"KV cache for {(cache.num_gpu_blocks or 0) * cache.block_size:,} tokens"
    )


class Host:
    """The engine and the ranks that it serves, which call its methods (messages.py)."""

    def __init__(self, rows: Rows, conns: Sequence[Connection]):
        self.llm = rows.llm
        self.conns = conns
        self.rows = rows
        # calls of ranks that wait for the others
        self.calls: list[deque[Any]] = [deque() for _ in conns]

    def serve(self) -> None:
        """Runs until all ranks have called `close`."""
        serving = list(self.conns)
        while serving:
            ready: Any = wait(serving, timeout=0 if self.rows.open else None)
            for conn in ready:
                name, *arguments = conn.recv()
                rank = self.conns.index(conn)
                if name == "close":
                    serving.remove(conn)
                elif name in ("submit", "halt"):
                    getattr(self, name)(rank, *arguments)
                else:
                    self.calls[rank].append(arguments)
                    if all(self.calls):
                        of_ranks = zip(*(calls.popleft() for calls in self.calls), strict=True)
                        result = getattr(self, name)(*of_ranks)
                        for other in self.conns:
                            other.send(result)
            if self.rows.open:
                self._step()

    def submit(self, rank: int, *request: Any) -> None:
        self.rows.add(rank, *request)

    def halt(self, rank: int) -> None:
        self.rows.abort(rank)
        self.conns[rank].send(None)

    def load(self, buckets: Sequence[int], entries: Sequence[list[Entry]]) -> None:
        self.llm.collective_rpc("splitppo_load", args=(buckets[0], entries[0]))

    def verify(self, sums: Sequence[Sums]) -> tuple[list[str], list[str]]:
        """The names of tensors that the engine does not have completely, and of tensors that differ
        there."""
        self._drain()  # the prefix cache holds keys of the old weights
        return compare(sums, self.llm.collective_rpc("splitppo_report"))

    def sleep(self, levels: Sequence[int]) -> int:
        """Goes to the deepest level; returns it."""
        if level := max(levels):
            self._drain()
            self.llm.sleep(level)
        return level

    def wake(self, tags: Sequence[list[str]]) -> None:
        """Wakes the parts one by one."""
        for tag in tags[0]:
            self.llm.wake_up([tag])

    def _drain(self) -> None:
        """Runs vLLM's remaining steps of ended rows, then drops the prefix cache."""
        for _ in range(8):
            if self.llm.reset_prefix_cache():
                return
            self.llm.step()
        raise RuntimeError("vLLM keeps cache blocks of rows that have ended")

    def _step(self) -> None:
        """Runs vLLM's next step, and sends each rank what has ended of its rows."""
        ended = self.rows.step()
        for rank in {rank for rank, _ in ended}:
            self.conns[rank].send([piece for owner, piece in ended if owner == rank])


def connect(plan: Plan) -> list[tuple[Connection, Any]]:
    """The connections of the engine's ranks, in their order, each with the rank's buckets."""
    size = plan.config.engine.tensor_parallel
    with Listener(plan.address, "AF_UNIX", backlog=size) as listener:
        accepted = [listener.accept() for _ in range(size)]
    hellos = [(conn.recv(), conn) for conn in accepted]
    ordered = sorted(hellos, key=lambda hello: hello[0][1])
    return [(conn, buckets) for (_, _, buckets), conn in ordered]


def main() -> int:
    end_with_parent(int(sys.argv[1]), "engine")
    os.environ.update(SETTINGS)
    try:
        plan = pickle.load(sys.stdin.buffer)
        os.environ["VLLM_RPC_BASE_PATH"] = str(Path(plan.address).parent)
        rows, line = start_llm(plan)
        conns, buckets = zip(*connect(plan), strict=True)
        rows.llm.collective_rpc("splitppo_attach", args=(buckets,))
        for conn in conns:
            conn.send(line)
        Host(rows, conns).serve()
        if len(conns) > 1:
            # ends the workers, which then remove their shared memory
            rows.llm.engine_core.shutdown()
    except (EOFError, ConnectionResetError, BrokenPipeError):
        print("a rank of this engine has ended", file=sys.stderr)
        return 1
    except Exception:
        traceback.print_exc()  # into the log, whose end the rank shows
        return 1
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # does not wait for the libraries' threads
