"""How near to a GPU's limit a job may come, and what it costs: estimates, peaks, fragments, retries
of the allocator.

    python tests/gpu/limit.py limit      one GPU: colocated jobs of 1.5B, at 92, 95 and 98 % of it
    python tests/gpu/limit.py updates    two GPUs: updates of 64 rows of 128 + 512 tokens

Both draw weights at random and need no network. Each case is a run of the trainer in processes of
its own, since what one leaves in fragments stays with its process. Rows are made up, so that no
case waits for an engine; all else is the trainer's. Cases that would begin after --limit seconds
are left out. A case that fails for want of memory is a result; any other failure ends the script.
--cap GIB: PyTorch may take no more of the GPU, as on a smaller one.

`limit` has rows of 448 to 512 new tokens, so that the sizes of tensors differ from one micro-batch
to the next. `updates` tells the causes of slow updates apart: `emptied` gives the allocator's cache
back before each step, as the trainer does for a sleeping vLLM; `growing` has expandable segments;
`alone` is one GPU with the same work and no link; the first line is the link's speed.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests/helpers")]

GIB = 2**30
PEAK = 989e12  # of an H100 or H200 in dense bfloat16
PROMPT, RESPONSE = 128, 512
STEPS = 4  # the first one compiles what is left, and its memory grows
MINI_BATCHES = 2
SHAPES: dict[str, dict[str, Any]] = {
    "1.5B": {
        "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
        "num_attention_heads": 12, "num_key_value_heads": 2,
        "vocab_size": 151936, "tie_word_embeddings": True,
    },
    "7B": {
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4,
        "vocab_size": 152064, "tie_word_embeddings": False,
    },
    "tiny": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": 512, "tie_word_embeddings": True,
    },
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A run of the trainer."""

    name: str
    gpus: int
    rows: int  # of a step
    tokens: int  # of a micro-batch
    growing: bool  # whether segments are expandable
    emptied: bool = False  # whether the cache is given back before each step
    varied: bool = False  # whether responses have 448 to 512 tokens; else all have 512


UPDATES = (
    Case("32k", 2, 128, 32768, False),
    Case("32k emptied", 2, 128, 32768, False, emptied=True),
    Case("32k growing", 2, 128, 32768, True),
    Case("16k emptied", 2, 128, 16384, False, emptied=True),
    Case("16k alone", 1, 64, 16384, False),
    Case("32k growing emptied", 2, 128, 32768, True, emptied=True),
    Case("16k growing emptied", 2, 128, 16384, True, emptied=True),
)


def write_inputs(folder: Path, shape: dict[str, Any]) -> None:
    """A model folder without weights, prompts and lengths."""
    from tokenizers import Tokenizer, decoders
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast, Qwen2Config

    folder.mkdir(parents=True, exist_ok=True)
    texts = ["<pad>", "<eos>", *map(chr, range(32, 127))]
    size = min(151666, shape["vocab_size"] - 1)
    ids = {
        text: i for i, text in enumerate([*texts, *(f"<|{i}|>" for i in range(len(texts), size))])
    }
    backend = Tokenizer(BPE(vocab=ids, merges=[]))
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>"
    )
    tokenizer.save_pretrained(folder)
    config = Qwen2Config(**shape, max_position_embeddings=4096, eos_token_id=1)
    config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained(folder)
    row = json.dumps({"prompt": "7" * PROMPT, "answer": "1", "data_source": "mine"})
    (folder / "rows.jsonl").write_text((row + "\n") * 256)
    (folder / "fixed").write_text(f"{RESPONSE}\n")
    varied = [448 + i * 37 % 65 for i in range(65)]  # 448 to 512, each once
    (folder / "varied").write_text("".join(f"{length}\n" for length in varied))


def flags_of(case: Case, folder: Path, device: str) -> list[str]:
    argv = [
        f"--policy.path={folder}",
        f"--data.files={folder}/rows.jsonl",
        "--data.no-chat",
        "--policy.random-init",
    ]
    argv += [
        f"--rollout.lengths={folder}/{'varied' if case.varied else 'fixed'}",
        "--data.answer-key=answer",
    ]
    argv += [
        f"--rollout.max-prompt-tokens={PROMPT}",
        f"--rollout.max-new-tokens={RESPONSE}",
        f"--steps={STEPS}",
    ]
    argv += [
        f"--rollout.batch-size={case.rows}",
        f"--ppo.mini-batches={MINI_BATCHES}",
        "--ppo.kl-coef=0.01",
    ]
    argv += [
        "--engine.kind=hf",
        "--placement.mode=colocated",
        "--checkpoint.no-last",
        "--reward.function=exact_match",
    ]
    argv += [
        "--policy.offload=none",
        "--value.offload=none",
        f"--compute.micro-batch-tokens={case.tokens}",
    ]
    return [*argv, f"--compute.device={device}"]


def resolved_of(case: Case, folder: Path, device: str) -> Any:
    """The run as the trainer resolves it, for an estimate without a GPU."""
    from splitppo.config.cli import parse
    from splitppo.placement import place
    from splitppo.run.resolve import resolve

    config = parse(flags_of(case, folder, device))
    placement = place(
        config.placement, world=case.gpus, local_world=case.gpus, gpu=device == "cuda"
    )
    return resolve(config, placement, case.gpus, torch.device(device), probe=False)


def cases_near_the_limit(folder: Path, device: str, card: float) -> list[Case]:
    """With as many rows in a micro-batch as a part of the GPU holds by the estimate, and two
    micro-batches in each mini-batch."""
    from splitppo.run import memory

    base = resolved_of(Case("", 1, 2, 4096, False, varied=True), folder, device)
    needs: dict[int, tuple[float, int]] = {}
    for rows in range(4, 256, 4):  # of a step
        tokens = rows // 4 * (PROMPT + RESPONSE)
        sized = memory.with_setting(base, "compute", "micro_batch_tokens", tokens)
        needs[tokens] = (
            memory.highest(memory.with_setting(sized, "rollout", "batch_size", rows), card)[0],
            rows,
        )
    cases = []
    for share in (0.95, 0.98, 0.92):
        tokens = max(n for n, (need, _) in needs.items() if need <= share * card)
        for growing in (False, True):
            name = f"{share:.0%}{' growing' * growing}"
            cases.append(Case(name, 1, needs[tokens][1], tokens, growing, varied=True))
    return cases


def run_job(case: Case, folder: Path, device: str, cap: float) -> None:
    """Runs in a process of its own, or under torchrun; the first rank prints a line of JSON."""
    from peaks import estimated

    from splitppo import policy, train
    from splitppo.engine import Piece, hf
    from splitppo.run import memory
    from splitppo.run.build import Builder

    rank, on_gpu = int(os.environ.get("RANK", 0)), device == "cuda"
    kept: dict[str, Any] = {}
    init, load, report = Builder.__init__, hf.HFEngine._load, memory.out_of_memory
    draw = torch.Generator().manual_seed(rank)

    def noting(self: Any, given: Any, *args: Any) -> None:
        kept["resolved"] = given
        if cap and on_gpu:
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, cap * GIB / total))
        init(self, given, *args)

    def submit(self: Any, asks: Any, *_: Any) -> None:
        level = -torch.log(torch.tensor(float(self.vocabulary))).item()
        for ask in asks:
            ids = torch.randint(2, self.vocabulary, (ask.tokens,), generator=draw).tolist()
            kept.setdefault("pieces", []).append(Piece(ask.row, ids, [level] * ask.tokens, "limit"))

    def poll(_: Any) -> Any:
        return kept.pop("pieces", [])

    def emptying(self: Any, weights: Any) -> None:
        if on_gpu and case.emptied:
            torch.cuda.empty_cache()
        load(self, weights)

    def out_of_memory(*args: Any) -> list[str]:
        kept["died"] = True
        return report(*args)

    setattr(Builder, "__init__", noting)  # noqa: B010
    setattr(hf.HFEngine, "_submit", submit)  # noqa: B010
    setattr(hf.HFEngine, "_poll", poll)  # noqa: B010
    setattr(hf.HFEngine, "_load", emptying)  # noqa: B010
    setattr(memory, "out_of_memory", out_of_memory)  # noqa: B010
    # made up rows are not the policy's
    policy.MISMATCH.update(dict.fromkeys(policy.MISMATCH, (99.0, 99.0)))
    run = folder.parent / "runs" / case.name.replace(" ", "_")
    status = train.main([*flags_of(case, folder, device), f"--run-dir={run}"])
    if rank == 0 and (status == 0 or "died" in kept):
        found: dict[str, Any] = {"died": "died" in kept}
        if on_gpu:
            free, total = torch.cuda.mem_get_info()
            most = torch.cuda.max_memory_reserved()
            growing = any(segment["is_expandable"] for segment in torch.cuda.memory_snapshot())
            assert growing == case.growing, torch.cuda.memory_snapshot()[:3]
            outside = total - free - torch.cuda.memory_reserved()
            found |= {
                "allocated": torch.cuda.max_memory_allocated(),
                "reserved": most,
                "outside": outside,
            }
        card = torch.cuda.get_device_properties(0).total_memory if on_gpu else memory.GPU
        found["estimate"] = max(estimated(kept["resolved"], card).values())
        print("RESULT " + json.dumps(found), flush=True)
    sys.stdout.flush()
    os._exit(status)


def run_link(folder: Path, device: str) -> None:
    """Under torchrun: seconds of an all-gather and a reduce-scatter of 1 GiB in bfloat16, alone on
    the link."""
    rank = int(os.environ["RANK"])
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    numbers = 2**29 if device == "cuda" else 2**20
    whole = torch.zeros(numbers, dtype=torch.bfloat16, device=device)
    part = torch.zeros(numbers // 2, dtype=torch.bfloat16, device=device)
    found = {}
    works: dict[str, Any] = {"all-gather": lambda: dist.all_gather_into_tensor(whole, part)}
    if device == "cuda":
        works["reduce-scatter"] = lambda: dist.reduce_scatter_tensor(part, whole)
    for name, work in works.items():
        for repeat in range(8):
            if repeat == 3:
                _wait(device)
                began = time.monotonic()
            work()
        _wait(device)
        found[name] = part.nbytes * 5 / (time.monotonic() - began) / 1e9
    if rank == 0:
        print("RESULT " + json.dumps(found), flush=True)
    sys.stdout.flush()
    os._exit(0)


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
    dist.barrier()


def steps(run: Path, role: str) -> list[dict[str, Any]]:
    file = run / "metrics" / f"{role}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def start(
    options: argparse.Namespace, gpus: int, job: list[str], growing: bool, log: Path
) -> dict[str, Any]:
    """Runs this file again, in `gpus` processes. Returns what the first rank found. Ends the script
    if nothing came."""
    command = [sys.executable]
    if gpus > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(gpus)]
    command += [
        __file__,
        *job,
        "--shape",
        options.shape,
        "--device",
        options.device,
        "--out",
        str(options.out),
    ]
    command += ["--cap", str(options.cap)]
    environ = {name: value for name, value in os.environ.items() if not name.endswith("ALLOC_CONF")}
    environ["OMP_NUM_THREADS"] = "4"
    if not growing:  # else the trainer's own setting
        environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:False"
    with log.open("w") as file:
        running = subprocess.Popen(
            command, stdout=file, stderr=file, cwd=ROOT, env=environ, start_new_session=True
        )
        try:
            running.wait(150)
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)  # torchrun's ranks, too
            print("took more than 150 s", file=file)
    lines = log.read_text(errors="replace").splitlines()
    found = next((json.loads(line[7:]) for line in lines if line.startswith("RESULT ")), None)
    if found is None:
        sys.exit("\n    ".join(["failed:", *lines[-30:]]))
    asked = re.search(
        r"Tried to allocate ([\d.]+ [KMG]iB).*?([\d.]+ [KMG]iB) is reserved by PyTorch but",
        " ".join(lines),
    )
    return found | {"asked": asked.groups() if asked else ("", "")}


def line_of(case: Case, found: dict[str, Any], run: Path) -> str:
    cells = [f"{case.name:20} {case.gpus} {case.rows:5} {case.tokens:6}"]
    sizes = [found.get(name, 0) / GIB for name in ("estimate", "allocated", "reserved", "outside")]
    cells += ["".join(f"{size:9.1f}" for size in sizes)]
    for role in ("actor", "critic"):
        done = steps(run, role)
        retries = " ".join(f"{step.get('perf/alloc_retries', 0)}" for step in done) or "-"
        cell = f"  {retries:9}"
        if last := done[1:]:
            seconds = sum(step["timing_s/update"] for step in last) / len(last)
            rate = (
                sum(step["perf/update_tflop"] for step in last) / len(last) * 1e12 / seconds / PEAK
            )
            cell += f" {seconds:6.2f} s {rate:4.0%}"
        cells.append(f"{cell:27}")
    if done := steps(run, "actor")[1:]:
        cells.append(f" {sum(step['timing_s/step'] for step in done) / len(done):6.2f} s")
    asked, unused = found["asked"]
    outcome = (
        f"OUT OF MEMORY in step {len(steps(run, 'critic')) + 1}: asked for {asked}, {unused} in "
        f"fragments"
    )
    return "".join(cells) + f"  {outcome if found['died'] else 'ran'}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "what", choices=("limit", "updates", "case", "link"), metavar="limit|updates"
    )
    parser.add_argument("--only", nargs="*", help="names of cases")
    parser.add_argument("--limit", type=float, default=240.0)
    parser.add_argument("--cap", type=float, default=0.0)
    parser.add_argument("--shape", default="1.5B", choices=list(SHAPES))
    parser.add_argument("--out", type=Path, default=Path("/tmp/splitppo-limit"))
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args()
    folder = options.out / options.shape
    if options.what == "case":
        run_job(Case(**json.loads(options.job)), folder, options.device, options.cap)
    if options.what == "link":
        run_link(folder, options.device)
    began = time.monotonic()
    runs = options.out / "runs"
    subprocess.run(["rm", "-rf", str(runs)], check=True)
    runs.mkdir(parents=True)
    write_inputs(folder, SHAPES[options.shape])
    # asked in a process of its own: this one must not hold a part of the GPU
    ask = (
        "import torch; p = torch.cuda.get_device_properties(0); print(p.total_memory, p.name, "
        "sep='|')"
    )
    told = subprocess.run(
        [sys.executable, "-c", ask], capture_output=True, text=True, check=False
    ).stdout.strip()
    total, name = told.split("|") if told else (str(80 * 0.99 * GIB), "no GPU")
    card = min(float(total), options.cap * GIB or float(total))
    print(
        f"{name}, {float(total) / GIB:.1f} GiB, of which PyTorch may take {card / GIB:.1f}; torch "
        f"{torch.__version__}"
    )
    cases = (
        list(UPDATES)
        if options.what == "updates"
        else cases_near_the_limit(folder, options.device, card)
    )
    if options.what == "updates":
        speeds = start(options, 2, ["link"], False, runs / "link.log")
        print(
            "link: "
            + ", ".join(f"{work} {speeds[work]:.0f} GB/s" for work in speeds if work != "asked"),
            flush=True,
        )
    heads = "estimate allocated reserved  outside"
    print(
        f"{'case':20} G  rows tokens  {heads}   retries, update and MFU of actor, then of critic  "
        f"            step"
    )
    for case in (
        cases if options.only is None else [case for case in cases if case.name in options.only]
    ):
        if time.monotonic() - began > options.limit - 20:
            print(f"{case.name:20} left out: no time left", flush=True)
            continue
        job = ["case", "--job", json.dumps(replace(case).__dict__)]
        log = runs / f"{case.name.replace(' ', '_')}.log"
        found = start(options, case.gpus, job, case.growing, log)
        print(line_of(case, found, log.with_suffix("")), flush=True)
    print(
        f"{time.monotonic() - began:.0f} s; estimates and the rest in GiB, of the first rank",
        flush=True,
    )


if __name__ == "__main__":
    main()
