"""What needs a GPU runs on the CPU too, on less: so these tests and benchmarks do not rot where there is none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
CHECKS = {
    "test_kernels.py": ("reference-", "repeats-route"),
    "test_torch.py": ("grouped-bf16", "step-window-bf16"),
    "test_ort_cuda.py": ("graph_equals", "op-linear-f16", "ragged_batch-grouped-f16"),
}
STAGES = ("kernels", "decode", "quality", "prefill", "ort")
SMALL = ("--model", "tiny", "--prompts", "16", "--steps", "12", "--batches", "1", "--rounds", "1")  # for ort


def run(*command: str | Path, root: Path) -> str:
    """What a script prints.

    Raises:
        AssertionError: if it fails.
    """
    env = {**os.environ, "WEFT_DEVICE": "cpu", "PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1"}
    env.pop("TRITON_INTERPRET", None)  # which the scripts set themselves
    done = subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("script", CHECKS)
def test_checks(script: str, root: Path) -> None:
    printed = run(HERE / script, *CHECKS[script], root=root)
    assert " 0 failed" in printed.splitlines()[-1]
    assert not printed.splitlines()[-1].startswith("cpu: 0 passed")


def test_benchmark(root: Path, tmp_path: Path) -> None:
    """All stages but what takes seconds to compile; no measurement fails, and the table shows every one."""
    more = ("--device", "cpu", "--only", "^(?!.*compiled)", "--quick", "--out", tmp_path, *SMALL)
    printed = run(root / "benchmarks/gpu.py", *STAGES, *more, root=root)
    for stage in STAGES:
        found = json.loads((tmp_path / f"gpu_{stage}.json").read_text())["results"]
        assert found
        assert not [name for name, result in found.items() if "error" in result or "not_run" in result], printed
        assert all(f"\n{stage}/{name}" in printed for name in found)
