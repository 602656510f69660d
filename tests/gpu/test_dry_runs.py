"""GPU tests and benchmarks run smaller on the CPU, so that they keep working on machines without a GPU."""

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
    "test_torch.py": ("grouped-bf16", "step-window-f32", "window_kernel-sinks-f32", "training-window-f32"),
    "test_ort_cuda.py": ("graph_equals", "op-linear-f16", "ragged_batch-grouped-f16"),
}
STAGES = ("kernels", "decode", "quality", "prefill", "ort")
SMALL = ("--model", "tiny", "--prompts", "16", "--steps", "12", "--batches", "1", "--rounds", "1")  # for ort


SCRIPT = """
import os, runpy, sys
from pathlib import Path
from tests.interpreter import quicken
os.environ["TRITON_INTERPRET"] = "1"  # as the script sets it
quicken(load=True)
sys.argv = sys.argv[1:]
sys.path[0] = str(Path(sys.argv[0]).parent)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run(*command: str | Path, root: Path) -> str:
    """Return the output of a script, or of Python with other arguments.

    Raises:
        AssertionError: if it fails.
    """
    paths = os.pathsep.join(map(str, (root / "src", root)))
    env = {**os.environ, "WEFT_DEVICE": "cpu", "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    env.pop("TRITON_INTERPRET", None)  # which the scripts set themselves
    prefix = ["-c", SCRIPT] if isinstance(command[0], Path) and find_spec("triton") else []
    done = subprocess.run([sys.executable, *prefix, *command], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("script", CHECKS)
def test_checks(script: str, root: Path) -> None:
    printed = run(HERE / script, *CHECKS[script], root=root)
    assert " 0 failed" in printed.splitlines()[-1]
    assert not printed.splitlines()[-1].startswith("cpu: 0 passed")


def test_checks_end_in_time(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_SECONDS", "0")
    assert run(HERE / "test_kernels.py", "repeats-route", root=root).strip() == "cpu: 0 passed, 0 failed, 1 not run"


def test_benchmark(root: Path, tmp_path: Path) -> None:
    """All stages but what takes seconds to compile; no measurement fails, and the table shows every one."""
    more = ("--device", "cpu", "--only", "^(?!.*compiled)", "--quick", "--out", tmp_path, *SMALL)
    printed = run(root / "benchmarks/gpu.py", *STAGES, *more, root=root)
    for stage in STAGES:
        found = json.loads((tmp_path / f"gpu_{stage}.json").read_text())["results"]
        assert found
        assert not [name for name, result in found.items() if "error" in result or "not_run" in result], printed
        assert all(f"\n{stage}/{name}" in printed for name in found)
    verdicts = json.loads((tmp_path / "gpu_goals.json").read_text())
    assert verdicts
    assert all(f"not measured  {goal}" in printed for goal in verdicts)  # they are those of large models


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


GOALS = """
import json, sys
from pathlib import Path
import gpu_cases, gpu_decode, gpu_goals, gpu_models
known = {("kernels", f"{case.kernel}.{case.name}") for case in gpu_cases.cases(large=True)}
decoders = [*gpu_decode.OURS, *gpu_decode.PEERS, *gpu_decode.AUTOTUNED]
for label in ("1b", "8b"):
    known |= {("decode", f"{label}_{length}_{name}") for length, _ in gpu_decode.CASES for name in decoders}
    known |= {("quality", f"{label}_{name}") for name in decoders}
known |= {("prefill", f"{name}_{rows}") for name in ("weft", "weft_compiled") for rows in (2048, 4096, 8192)}

class Stage(dict):
    def __init__(self, name): self.name = name
    def get(self, key, default=None):
        asked.add((self.name, key))
        return default

asked = set()
stages = {name: Stage(name) for name in ("decode", "kernels", "prefill", "quality")}
for goal in gpu_goals.goals():
    goal.verdict(stages)
print(sorted(item for item in asked - known if item[1]))

def write(stage, results):
    Path(sys.argv[1], f"gpu_{stage}.json").write_text(json.dumps({"results": results}))

def us(value):
    return {"median": value, "min": 0.9 * value, "max": 1.25 * value}

write("decode", {
    "1b_32_weft_step": {"step_us": us(800.0)}, "1b_32_weft_runtime": {"step_us": us(795.0)},
    "8b_32_weft_step": {"step_us": us(4000.0), "of_copy": 0.88},
    "8b_32_hf_static_compiled": {"step_us": us(4800.0)}, "8b_32_hf_eager": {"error": "out of memory"},
})
write("quality", {
    "8b_weft_step": {"mean_kl_nats": 0.003, "same_first_choice": 0.98}, "8b_hf_eager": {"mean_kl_nats": 0.002},
})
write("prefill", {"weft_2048": {"ms": us(10.0), "floor_of_it": 0.91},
    "weft_compiled_2048": {"ms": us(9.5), "floor_of_it": 0.96}})
write("kernels", {"moe_decode.mixtral": {"us": us(10.0), "experts_batched": {"us": us(30.0)},
    "experts_grouped": {"us": us(19.0)}, "experts_eager": {"error": "it waits"}}})
print(json.dumps(gpu_goals.judge(Path(sys.argv[1]))))
"""


def test_goals_ask_for_what_is_measured_and_judge_it(root: Path, tmp_path: Path) -> None:
    begin = f"import sys; sys.path[:0] = [{str(root / 'benchmarks')!r}]"
    unknown, verdicts = run("-c", begin + GOALS, tmp_path, root=root).splitlines()
    assert unknown == "[]"
    found = {goal: verdict for goal, verdict in json.loads(verdicts).items() if verdict["pass"] is not None}
    assert found == {
        "8B decode after 32, of the byte floor at copy speed": {
            **{"goal": "≥ 0.9", "measured": 0.88, "spread": [0.704, 0.978], "pass": False},
            **{"same_first_choice": 0.98, "mean_kl_nats": 0.003},
        },
        "8B decode after 32, over HF static cache compiled": {
            **{"goal": "≥ 1.2 ×", "measured": 1.2, "spread": [0.864, 1.667], "pass": True},
            **{"same_first_choice": 0.98, "mean_kl_nats": 0.003},
        },
        "1B decode after 32": {"goal": "≤ 795 µs", "measured": 795.0, "spread": [715.5, 993.75], "pass": True},
        "1B decode after 32, the record": {
            **{"goal": "≤ 760 µs", "measured": 795.0, "spread": [715.5, 993.75], "pass": False}
        },
        "8B prefill of 2048, of bare products and attention": {
            **{"goal": "≥ 0.95", "measured": 0.96, "spread": [0.768, 1.067], "pass": True}
        },
        "MoE decode mixtral, over transformers' fastest experts": {
            **{"goal": "≥ 2 ×", "measured": 1.9, "spread": [1.368, 2.639], "pass": False}
        },
        "divergence from f32, 8b weft_step, over HF eager's": {
            **{"goal": "≤ 2 ×", "measured": 1.5, "spread": [1.5, 1.5], "pass": True}
        },
    }


FAILING = """
import argparse, json, sys, time
from pathlib import Path
from gpu_run import Run

def broken(run):
    run.begin("broken")
    run.measure("broken", "first", lambda: {"us": 1.0})
    run.measure("broken", "second", lambda: 1 / 0)
    run.measure("broken", "third", lambda: {"us": 3.0})
    raise MemoryError("no room between measurements")

args = argparse.Namespace(out=Path(sys.argv[1]), device="cpu", quick=False, deadline=time.time() + 60, only="")
run = Run(args)
run.attempt("broken", broken)
run.attempt("next", lambda run: (run.begin("next"), run.measure("next", "only", lambda: {"us": 4.0})))
"""


def test_what_fails_is_told_and_the_rest_goes_on(root: Path, tmp_path: Path) -> None:
    begin = f"import sys; sys.path[:0] = [{str(root / 'benchmarks')!r}]"
    run("-c", begin + FAILING, tmp_path, root=root)
    found = json.loads((tmp_path / "gpu_broken.json").read_text())["results"]
    assert [found[name]["us"] for name in ("first", "third")] == [1.0, 3.0]
    assert found["second"]["error"] == "ZeroDivisionError: division by zero"
    assert found["stage"]["error"] == "MemoryError: no room between measurements"
    assert json.loads((tmp_path / "gpu_next.json").read_text())["results"]["only"]["us"] == 4.0


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
