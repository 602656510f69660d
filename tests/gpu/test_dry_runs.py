"""What needs a GPU runs on the CPU too, on less: so these tests and benchmarks do not rot where there is none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
CHECKS = {
    "test_kernels.py": ("reference-", "repeats-route"),
    "test_torch.py": ("grouped-bf16", "step-window-f32"),
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


COMPILE = """
import gpu_limits, kernel_cases, offline
for variant in gpu_limits.variants() + kernel_cases.variants():
    found = offline.facts(variant)
    good = found["waits"] == found["launches_dependents"] == variant.pdl and found["vector_loads"] >= variant.vectors
    print(variant.kernel.__name__, found, "good" if good else "wrong")
"""
SWEEP = """
import inspect, gpu_cases, gpu_kernels
for case in gpu_cases.cases(large=True):
    file = gpu_kernels.module(case.kernel)
    known = inspect.signature(gpu_kernels.functions(file, case)[0]).parameters
    with gpu_kernels.configured(file, {name: values[0] for name, values in case.sweep.items()}) as keywords:
        print(case.kernel, case.name, "good" if known.keys() >= keywords.keys() else "wrong")
"""


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is published for Linux alone")
def test_own_kernels_compile(root: Path) -> None:
    """Those of the benchmark and of these tests, for a GPU that is not there; dependent launch only where meant."""
    folders = (root / "benchmarks", HERE, root / "tests/backends/torch/kernels")
    begin = f"import sys; sys.path[:0] = {[str(folder) for folder in folders]}"
    lines = run("-W", "ignore", "-c", begin + COMPILE, root=root).splitlines()
    assert len(lines) == 8
    assert all(line.endswith("good") for line in lines), lines


def test_cases_and_sweeps_name_what_is_there(root: Path) -> None:
    begin = f"import sys; sys.path[:0] = [{str(root / 'benchmarks')!r}]"
    lines = run("-c", begin + SWEEP, root=root).splitlines()
    assert {line.split()[0] for line in lines} >= set(kernels_with_variants(root))
    assert all(line.endswith("good") for line in lines), lines


def kernels_with_variants(root: Path) -> list[str]:
    """The kernel files that ship, and have a launcher of their name."""
    texts = {file.stem: file.read_text(encoding="utf-8") for file in (root / "backends/torch/kernels").glob("*.py")}
    return [name for name, text in texts.items() if "\ndef variants(" in text and f"\ndef {name}(" in text]
