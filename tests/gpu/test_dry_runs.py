"""GPU tests and benchmarks run smaller on the CPU, so that they keep working on machines without a GPU.

`make test` runs one case of each kernel and one measurement of each kind; ``WEFT_TESTS=all`` runs the others too.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ..sampling import ALL

HERE = Path(__file__).resolve().parent
CHECKS = (
    f"kernels/reference-{'.*' if ALL else '[a-z_]+'}-bf16",  # without a space: the plain case of each kernel
    "kernels/repeats-route",
    "torch/[a-z]+-grouped-bf16",
    "torch/step-window-f32",
    "torch/window_kernel-sinks-f32",
    "torch/training-window-f32",
    "ort_cuda/(graph_equals|op-linear-f16|ragged_batch-grouped-f16)",
)
# Of decoders, each way once, and the step for each kind of weights; of draws of a token, the one of all at once.
REPEATED = r"(int4|fp8|moe)_batch_4|(int4|fp8|moe).*(runtime|module|hf)|choose_tokens.tiny_(all|top)"
STAGES = ("kernels", "decode", "quality", "prefill", "ort", "sweep")
SMALL = ("--model", "tiny", "--prompts", "16", "--steps", "12", "--batches", "1", "--rounds", "1")  # for ort


def run(*command: str | Path, root: Path, status: int = 0) -> str:
    """Return the output of a script, or of Python with other arguments.

    Raises:
        AssertionError: if it ends with another status.
    """
    paths = os.pathsep.join(map(str, (root / "src", root, root / "benchmarks")))
    env = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    env.pop("TRITON_INTERPRET", None)  # which the scripts set themselves
    done = subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


def measured(root: Path, out: Path, *arguments: str, jobs: int = 1) -> tuple[str, dict[str, dict[str, Any]]]:
    """Run on the CPU: what is printed, and what the result files hold by stage."""
    arguments = (*arguments, "--device", "cpu", "--jobs", str(jobs), "--out", str(out))
    printed = run(root / "benchmarks/gpu", *arguments, root=root)
    return printed, {path.stem[4:]: json.loads(path.read_text())["results"] for path in out.glob("gpu_*.json")}


@pytest.mark.long
def test_gpu_checks_run_on_a_cpu(root: Path, tmp_path: Path) -> None:
    _, found = measured(root, tmp_path, "tests", "--only", f"^tests/({'|'.join(CHECKS)})")
    assert all(any(re.match(check, name) for name in found["tests"]) for check in CHECKS)
    assert all(result["ok"] for result in found["tests"].values())


@pytest.mark.long
def test_gpu_benchmark_runs_on_a_cpu(root: Path, tmp_path: Path) -> None:
    """All stages but what takes seconds to compile; no measurement fails, and the table shows every one."""
    left_out = "compiled" if ALL else f"compiled|{REPEATED}"
    only = f"^(?!.*({left_out}))(?!sweep)|^sweep/decode_attention"
    printed, files = measured(root, tmp_path, *STAGES, "--only", only, "--quick", *SMALL, jobs=2 if ALL else 1)
    assert {*files} == {*STAGES}
    for stage, found in files.items():
        assert found and all(result["ok"] for result in found.values()), printed
        assert all(f"\n{stage}/{name}" in f"\n{printed}" for name in found)
    assert "met " not in printed  # the goals are those of large models
    again, _ = measured(root, tmp_path, "kernels", "--only", "route", "--quick", "--again")
    assert "kernels/route" not in again  # what is known is not measured anew


@pytest.fixture(scope="module")
def listed(root: Path) -> dict[str, Any]:
    """The plan, the works that it measures, what goals ask for, and sweeps, by one process that imports all of it."""
    *lines, found = run("-c", LISTS, root=root).splitlines()
    return {"lines": lines, **json.loads(found)}


@pytest.mark.long
def test_plan_covers_every_goal(listed: dict[str, Any]) -> None:
    """In four runs of less than ten minutes, half an hour with the starts of a machine."""
    lines = listed["lines"]
    budgets = [int(word) for line in lines for word in re.findall(r"--budget (\d+)", line)]
    assert len(lines) == len(budgets) == 4
    assert max(budgets) < 600 and sum(budgets) <= 1600
    named = {tuple(work.split("/", 1)) for work in listed["named"]}
    asked = {(stage, name) for stage, name in listed["asked"] if "autotuned" not in name}
    # The runtime decodes one text; where a goal takes the faster of step and runtime, the step is there.
    missing = {(stage, name.replace("weft_runtime", "weft_step")) for stage, name in asked - named}
    assert asked and missing <= named, sorted(missing - named)


LISTS = """
import inspect, json, sys
from gpu import __main__ as command, results

sys.argv = ["gpu", "plan"]
assert command.main() == 0
named = [task.name for line in command.PLAN for task in command.select_tasks(line)]

class Stage(dict):
    def __init__(self, name): self.name = name
    def get(self, key, default=None):
        asked.add((self.name, key))
        return default

class Stages(dict):
    def get(self, key, default=None): return Stage(key)

asked = set()
for goal in results.goals():
    goal.judge(Stages())

from gpu import kernel_cases, kernel_timing  # which import PyTorch

swept = {}  # of a kernel, by case: the keywords that sweeps give and it does not take
for case in kernel_cases.cases(large=True):
    file = kernel_timing.find_module(case.kernel)
    known = inspect.signature(kernel_timing.find_functions(case)[0]).parameters
    with kernel_timing.configure(file, {name: values[0] for name, values in case.sweep.items()}) as keywords:
        swept.setdefault(case.kernel, {})[case.name] = sorted(keywords.keys() - known.keys())
print(json.dumps({"named": named, "asked": sorted(item for item in asked if item[1]), "swept": swept}))
"""


def test_goals_are_judged_by_all_results(root: Path, tmp_path: Path) -> None:
    def us(value: float) -> dict[str, float]:
        return {"median": value, "min": 0.9 * value, "max": 1.25 * value}

    def write(folder: str, stage: str, results: dict[str, Any]) -> None:
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / f"gpu_{stage}.json").write_text(json.dumps({"results": results}))

    decoded = {"8b_batch_1_after_32_weft_step": {"step_us": us(4000)}}
    write("first", "decode", decoded | {"1b_batch_1_after_32_weft_step": {"step_us": us(9999)}})
    second = {"1b_batch_1_after_32_weft_step": {"step_us": us(800)}, "1b_batch_1_after_32_weft_runtime": {"error": "x"}}
    second["8b_batch_1_after_32_weft_step"] = {"not_reached": "the budget was over"}  # so the first run's counts
    write("second", "decode", second | {"8b_batch_1_after_32_hf_static_compiled": {"step_us": us(4800)}})
    compared = {
        "8b_weft_step": {"mean_kl_nats": 0.003, "same_first_choice": 0.98},
        "8b_hf_eager": {"mean_kl_nats": 0.002},
    }
    write("second", "quality", compared)
    experts = {"experts_batched": {"us": us(30)}, "experts_grouped": {"us": us(19)}, "experts_eager": {"error": "x"}}
    write("second", "kernels", {"moe_decode.mixtral": {"us": us(10), **experts}})
    folders = (tmp_path / "first", tmp_path / "second")
    lines = run(root / "benchmarks/gpu", "goals", "--results", *folders, root=root).splitlines()
    told = [" ".join(line.split()) for line in lines if not line.startswith("not measured")]
    assert told == [
        "missed by 3.85% 8B decode ≥ 260 tokens/s 250 200 to 277.778 same_first_choice 0.98 mean_kl_nats 0.003",
        "missed by 8.11% 1B decode, a step ≤ 740 µs 800 720 to 1000",
        "met 8B decode of 1 text after 32, over HF compiled ≥ 1 × 1.2 0.864 to 1.667 "
        "same_first_choice 0.98 mean_kl_nats 0.003",
        "missed by 5.00% MoE kernel mixtral, over transformers' fastest experts ≥ 2 × 1.9 1.368 to 2.639",
        "met divergence from f32, 8b weft_step, over HF eager's ≤ 2 × 1.5 1.5 to 1.5",
    ]


@pytest.mark.parametrize("line", [["nothing"], ["kernels", "--only", "("], ["plan", "ort"], ["--results", "nowhere"]])
def test_wrong_command_lines_are_refused(line: list[str], root: Path) -> None:
    run(root / "benchmarks/gpu", *line, root=root, status=2)


POOL = """
import os, signal, sys, time
from functools import partial
from gpu.pool import Pool, Task

def sleeps(): time.sleep(600)
def dies(): os.kill(os.getpid(), signal.SIGSEGV)
def fails(): return 1 / 0
def slow():
    print("is asleep", flush=True)
    return sleeps
def timed():
    order.append(time.monotonic())
    return lambda: {"us": 1.0}

order = []
def list_tasks():
    return [
        Task("good", lambda: {"us": 1.0}), Task("fails", fails), Task("dies", dies), Task("hangs", sleeps, 0.1),
        Task("hangs alone", slow, 0.1, 0.1), *(Task(f"timed {i}", timed, group="g") for i in range(3)),
        Task("too long", lambda: {}, 1000.0),
    ]

if __name__ == "__main__":
    found = {}
    def note(task, result):
        if result is not None:
            print(task.name, "|", result.get("error") or result.get("not_reached") or result.get("us"), flush=True)
    Pool(list_tasks, lambda all: all, note, 2, time.time() + 40, patience=2.0).run()
"""


@pytest.mark.long
def test_failed_and_hanging_stages_are_reported_and_others_run(root: Path, tmp_path: Path) -> None:
    script = tmp_path / "pool.py"
    script.write_text(POOL)
    told = dict(line.split(" | ", 1) for line in run(script, root=root).splitlines())
    assert told.pop("too long").endswith("s left, 1000 s needed")
    assert told == {
        "good": "1.0",
        "fails": "ZeroDivisionError: division by zero",
        "dies": "died of SIGSEGV",
        "hangs": "hung: no answer for 2 s",
        "hangs alone": "hung: no answer for 2 s",
        **dict.fromkeys(("timed 0", "timed 1", "timed 2"), "1.0"),
    }


COMPILE = """
import kernel_cases, offline
from gpu import limits

for fields in limits.variants() + kernel_cases.variants():
    variant = offline.Variant(**fields)
    found = offline.facts(variant)
    good = found["waits"] == found["launches_dependents"] == variant.pdl and found["vector_loads"] >= variant.vectors
    print(variant.kernel.__name__, found, "good" if good else "wrong")
"""


@pytest.mark.long
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is published for Linux alone")
def test_generated_kernels_compile(root: Path) -> None:
    """Those of the benchmark and of these tests, for a GPU that is not there; dependent launch only where meant."""
    folders = (root / "benchmarks", HERE, root / "tests/backends/torch/kernels")
    begin = f"import sys; sys.path[:0] = {[str(folder) for folder in folders]}"
    lines = run("-W", "ignore", "-c", begin + COMPILE, root=root).splitlines()
    assert len(lines) == 8
    assert all(line.endswith("good") for line in lines), lines


def test_cases_and_sweeps_name_existing_kernels(listed: dict[str, Any], root: Path) -> None:
    assert {*listed["swept"]} >= {*kernels_with_variants(root)}
    assert not [case for cases in listed["swept"].values() for case in cases.items() if case[1]]


def kernels_with_variants(root: Path) -> list[str]:
    """The kernel files that ship, and have a launcher of their name."""
    texts = {file.stem: file.read_text(encoding="utf-8") for file in (root / "backends/torch/kernels").glob("*.py")}
    listed = {file.stem for file in (root / "tests/backends/torch/kernels/variants").glob("*.py")}
    return [name for name, text in texts.items() if name in listed and f"\ndef {name}(" in text]
