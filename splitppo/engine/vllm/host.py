"""The engine's process: vLLM, stepped here, for the ranks that are connected to it.

    python -m splitppo.engine.vllm.host PARENT     (started by vllm_process.Process of the process PARENT)

It imports vLLM, reads its Plan from its input, builds the engine and lets the ranks connect. A rank says `hello`, then
`attach` (its buckets), and in each step `load`, `load`, ..., `verify`, `generate`; `halt`, `sleep`, `wake` and `close`
where needed. Rows come back as `samples` when they finish, `done` answers everything, `generate` with the milliseconds
of a step. What changes the engine as a whole is done when all its ranks have said it.
"""

# pyright: reportMissingImports=false
# (vLLM is not installed everywhere)

import importlib
import json
import os
import sys
import time
import traceback
from collections import deque
from collections.abc import Sequence, Set
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any

from splitppo.engine import Sampling
from splitppo.engine.vllm.process import Plan, vllm_version
from splitppo.engine.vllm.rows import Rows, params_of
from splitppo.engine.vllm.weight_check import judge
from splitppo.job.child import end_with_parent
from splitppo.rollout import Sample

STEADY = ("0.26.", "0.32.")  # versions whose scheduler vllm_scheduler.py was written and tested for
EXTENSION = "splitppo.engine.vllm.worker.WeightReceiver"
# in-process: this process is the engine's own already. The rest: nothing goes out, nothing is read from elsewhere.
SETTINGS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "VLLM_HOST_IP": "127.0.0.1"}
SETTINGS |= {"VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "0"}  # what comes late of an aborted row is told apart by it
SETTINGS |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}  # the trainer's ranks share the cores


def graph_sizes(rows: int) -> list[int]:
    """Batch sizes to capture CUDA graphs for: two a doubling, up to all rows. A batch runs in the next larger one."""
    powers = [2**i for i in range(rows.bit_length())]
    between = [3 * power // 2 for power in powers if power >= 16]
    return sorted({size for size in powers + between if size < rows} | {rows})


def build_llm(plan: Plan) -> Any:
    """The engine, with weights that mean nothing until the first load."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models import registry
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.llm_engine import LLMEngine

    if plan.clients == 1:
        # vLLM looks at the model's class in a process of its own, lest this one touch the GPU before it forks workers;
        # without workers that only costs time (12 s where nothing is cached yet)
        registry._run_in_subprocess = lambda inspect: inspect()
    # the kernels of this run's sampling are warmed up, not all that vLLM has, which would be compiled for it
    warm = params_of(plan.sampling, seed=0, eos=plan.eos)
    SamplingParams.for_sampler_warmup = staticmethod(lambda: warm)
    _without_a_port(Path(plan.address).parent)
    if plan.device == "cuda":
        sizes = {} if plan.eager else {"cudagraph_capture_sizes": graph_sizes(plan.max_rows)}
        # its memory is given in bytes; the fraction is only compared with what is free
        place: dict[str, Any] = {"gpu_memory_utilization": 0.01, "enable_sleep_mode": plan.sleep, **sizes}
        place["max_num_batched_tokens"] = max(8192, plan.max_rows)  # a rollout begins with all its prompts
    else:
        import torch

        torch.set_num_threads(plan.threads)
        # prompts are not cut: vLLM winds back the noise of a row whose prompt was, and generators of the CPU can't
        place = {"enable_chunked_prefill": False, "max_num_batched_tokens": max(8192, plan.max_tokens, plan.max_rows)}
    return LLMEngine.from_engine_args(
        EngineArgs(
            model=plan.folder,
            tokenizer=plan.folder,
            skip_tokenizer_init=not plan.sampling.stop,  # it is given ids; only strings that end a row need text
            load_format="dummy",
            dtype=plan.dtype,
            max_model_len=plan.max_tokens,
            max_num_seqs=plan.max_rows,
            kv_cache_memory_bytes=plan.kv_bytes,
            tensor_parallel_size=plan.clients,
            enforce_eager=plan.eager,
            logprobs_mode="processed_logprobs",
            generation_config="vllm",  # its own defaults, not those of the folder
            enable_prefix_caching=True,
            worker_extension_cls=EXTENSION,
            disable_log_stats=True,
            **place,
        )
    )


def start_llm(plan: Plan) -> tuple[Any, dict[str, Any]]:
    """The engine, limited to the plan's vocabulary, and what the log says of it."""
    began = time.monotonic()
    llm = build_llm(plan)
    llm.collective_rpc("splitppo_limit", args=(plan.vocabulary,))
    quick = plan.steady and (vllm_version() or "").startswith(STEADY)
    if quick:
        from splitppo.engine.vllm.scheduler import steady

        quick = steady(llm.engine_core.engine_core.scheduler, plan.eos)
    compilation, cache = llm.vllm_config.compilation_config, llm.vllm_config.cache_config
    return llm, {
        "version": vllm_version(),
        "build_s": time.monotonic() - began,
        "compile_s": compilation.compilation_time,
        "graphs": len(compilation.cudagraph_capture_sizes or []),
        "kv_tokens": (cache.num_gpu_blocks or 0) * cache.block_size,
        "steady": quick,
    }


def _without_a_port(folder: Path) -> None:
    """Lets the workers meet through a file in the engine's own folder: vLLM before 0.27 takes a TCP port for it, later
    versions leave a file behind. They name their shared memory after it, so it has a name of its own."""
    from vllm.v1.executor import multiproc_executor, uniproc_executor

    for module in (multiproc_executor, uniproc_executor):
        module.get_distributed_init_method = lambda ip, port: f"file://{folder}/{folder.name}"
        module.get_file_store_init_method = lambda: f"file://{folder}/{folder.name}"


class Host:
    """The engine and the ranks that it serves."""

    def __init__(self, llm: Any, conns: Sequence[Connection], plan: Plan):
        self.llm, self.conns, self.rows = llm, conns, Rows(llm, plan.eos)
        self.inbox: list[deque[tuple[str, Any]]] = [deque() for _ in conns]
        self.generating = [False for _ in conns]
        self.steps, self.seconds = 0, 0.0  # of vLLM's, since the start
        self.begun = [(0, 0.0) for _ in conns]  # what these were when a rank's rollout began
        self.stale = False  # whether the prefix cache holds keys of other weights
        self.asleep: set[str] = set()  # what of its memory is given back
        self.closing = False

    def serve(self) -> None:
        """Until all ranks have said `close`."""
        left = list(self.conns)  # a rank that has said `close` hangs up, and the others may need a while yet
        while not self.closing:
            said: Any = wait(left, timeout=0 if self.rows.open else None)
            for conn in said:
                message = conn.recv()
                if message[0] == "close":
                    left.remove(conn)
                self._hear(self.conns.index(conn), message)
            if self.rows.open:
                start = time.monotonic()
                ended = self.rows.step()
                self.steps, self.seconds = self.steps + 1, self.seconds + time.monotonic() - start
                self._route(ended)

    def _hear(self, rank: int, message: tuple[str, Any]) -> None:
        kind, value = message
        if kind == "generate":
            self.generating[rank] = True
            self.begun[rank] = self.steps, self.seconds
            self.rows.add(rank, *value)
            self._end({rank} - self.rows.ranks())
        elif kind == "halt":
            self.rows.abort(rank)
            self._end({rank})
        else:
            self.inbox[rank].append(message)
            if all(self.inbox):
                messages = [inbox.popleft() for inbox in self.inbox]
                if len({kind for kind, _ in messages}) > 1:
                    raise RuntimeError(f"the ranks of one engine disagree: {[kind for kind, _ in messages]}")
                answer = getattr(self, f"_{kind}")([value for _, value in messages])
                for conn in [] if self.closing else self.conns:
                    conn.send(("done", answer))

    def _attach(self, handles: Sequence[Any]) -> None:
        self.llm.collective_rpc("splitppo_attach", args=(list(handles),))

    def _load(self, buckets: Sequence[tuple[int, list[Any]]]) -> None:
        if not self.stale:
            self._settle()
        self.stale = True
        self.llm.collective_rpc("splitppo_load", args=buckets[0])

    def _verify(self, sent: Sequence[dict[str, tuple[int, int]]]) -> tuple[list[str], list[str]]:
        """Names of the tensors that are not in the engine as a whole, and of those that differ there."""
        lost, wrong = judge(sent, self.llm.collective_rpc("splitppo_report"))
        if not lost and not wrong:
            self._settle()
            self.stale = False
        return lost, wrong

    def _sleep(self, levels: Sequence[int]) -> int:
        """The level that it took: the deepest that was asked for."""
        if level := max(levels):
            self._settle()
            self.llm.sleep(level)
            self.asleep = {"weights", "kv_cache"}
        return level

    def _wake(self, tags: Sequence[list[str]]) -> None:
        """One after the other, and only what sleeps: vLLM leaves all as it is if it is told of another."""
        for tag in [tag for tag in tags[0] if tag in self.asleep]:
            self.llm.wake_up([tag])
            self.asleep.remove(tag)

    def _close(self, _: Sequence[None]) -> None:
        self.closing = True

    def _settle(self) -> None:
        """Runs what vLLM has still under way of rows that have ended, and drops the prefix cache."""
        for _ in range(8):
            if self.llm.reset_prefix_cache():
                return
            self.llm.step()
        raise RuntimeError("vLLM keeps cache blocks of rows that have ended")

    def _route(self, ended: Sequence[tuple[int, Sample]]) -> None:
        """Sends the rows that have ended to the ranks that asked for them."""
        ranks = {rank for rank, _ in ended}
        for rank in ranks:
            self.conns[rank].send(("samples", [sample for of, sample in ended if of == rank]))
        if ranks:
            self._end(ranks - self.rows.ranks())

    def _end(self, ranks: Set[int]) -> None:
        for rank in ranks:
            if self.generating[rank]:
                self.generating[rank] = False
                steps, seconds = self.steps - self.begun[rank][0], self.seconds - self.begun[rank][1]
                self.conns[rank].send(("done", 1e3 * seconds / steps if steps else 0.0))


def connect(plan: Plan) -> list[Connection]:
    """The connections of the plan's ranks, in their order."""
    with Listener(plan.address, "AF_UNIX", backlog=plan.clients) as listener:
        by_rank: dict[int, Connection] = {}
        while len(by_rank) < plan.clients:
            conn = listener.accept()
            _, rank = conn.recv()  # hello
            by_rank[rank] = conn
    return [by_rank[rank] for rank in range(plan.clients)]


def read_plan() -> Plan | None:
    """The plan from the input, once it is there; what is said from here on goes to its log. None: the rank is gone."""
    line = sys.stdin.readline()
    if not line:
        return None
    told = json.loads(line)
    plan = Plan(**told | {"sampling": Sampling(**told["sampling"])})
    early = os.pread(1, 2**24, 0)
    with open(plan.log, "ab", buffering=0) as log:
        log.write(early)
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    return plan


def main() -> int:
    end_with_parent(int(sys.argv[1]), "engine")
    os.environ.update(SETTINGS)
    start = time.monotonic()
    for module in ("vllm.engine.arg_utils", "vllm.v1.engine.llm_engine", "vllm.v1.worker.gpu_worker"):
        importlib.import_module(module)
    imported = time.monotonic()
    plan = read_plan()
    if plan is None:
        return 1
    os.environ["VLLM_RPC_BASE_PATH"] = str(Path(plan.address).parent)
    conns: list[Connection] = []
    try:
        llm, facts = start_llm(plan)
        conns = connect(plan)
        for conn in conns:
            conn.send(("done", facts | {"import_s": imported - start}))
        Host(llm, conns, plan).serve()
        if plan.clients > 1:
            llm.engine_core.shutdown()  # its workers; alone, the process just ends, which is quicker
    except (EOFError, ConnectionResetError, BrokenPipeError):
        print("a rank of this engine is gone", file=sys.stderr)
        return 1
    except Exception:
        told = traceback.format_exc()
        print(told, file=sys.stderr, flush=True)
        for conn in conns:
            try:
                conn.send(("error", told))
            except OSError:  # gone, too
                continue
        return 1
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # no waiting for the threads of libraries
