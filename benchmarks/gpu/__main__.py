"""Test and time weft's kernels and models on one GPU, next to the limits of the device and to peers.

Each stage writes a result file gpu_STAGE.json into the folder --out, anew after every measurement:

    limits   reads, copies, bf16 products, chains of kernels with and without programmatic dependent launch
    tests    the checks of tests/gpu
    decode   tokens of 1, 8 and 32 sequences after prompts of 32, 1k and 32k: Hugging Face eager, static, compiled; weft
    quality  the logits of every decoder against those of f32
    kernels  every kernel at shapes of real models, against plain torch and the best peer
    prefill  prompts of 2k to 8k, against the sum of their bare products and attentions
    ort      ONNX Runtime with and without CUDA graphs
    sweep    kernels in every configuration that they offer

Two other commands measure nothing:

    plan     print four commands that measure everything that the goals compare
    goals    judge the goals by the folders of --results

A run ends within --budget seconds and prints its results and the state of the goals. gpu.md has the details.

    python benchmarks/gpu [STAGE ...] [--budget 540] [--quick] [--only REGEX] [--out FOLDER] [--device cpu]
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

if __name__ == "__main__":  # Python puts this folder first on the path, but its modules import each other as `gpu`
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from gpu import results
from gpu.pool import STAGES, Pool, Task, list_tasks, load_tasks

UNTIMED = {"limits", "tests", "quality"}  # stages that need no limits before them
BRIEF = ("limits/read", "limits/copy", "limits/product")  # limits that results are given as shares of
PLAN = (  # runs without their budgets
    "limits tests --only '^(limits|tests/(kernels|torch))/'",
    "decode quality --only '^decode/.*_after_(32|1024)_(weft_step|weft_runtime|hf_static_compiled)$"
    "|^quality/.*_(weft_step|weft_runtime|hf_eager)$'",
    "kernels prefill",
    "tests ort sweep --only '^(tests/ort_cuda/|ort/f16(_xqa)?$|sweep/(decode_attention|latent_decode))'",
)
PLAN_SECONDS, RUN_SECONDS = 1560, 560  # of all planned runs together without machine starts, and of one run at most


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("stages", nargs="*", metavar="STAGE", help=f"{' '.join(STAGES)}; plan; goals; all stages by default")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to check this script")
    add("--budget", type=float, default=540, help="seconds")
    add("--jobs", type=int, default=os.cpu_count() or 1, help="processes that prepare tasks side by side")
    add("--only", default="", metavar="REGEX", help="select tasks by stage/name")
    add("--quick", action="store_true", help="fewer and smaller measurements")
    add("--slow", action="store_true", help="also measure what takes minutes to compile; one process")
    add("--no-pdl", action="store_true", help="disable programmatic dependent launch")
    add("--again", action="store_true", help="skip the tasks that --results and --out contain")
    add("--results", nargs="+", type=Path, default=[], metavar="FOLDER", help="of earlier runs")
    add("--out", type=Path, default=Path("gpu"), metavar="FOLDER", help="for results; gpu by default")
    add = parser.add_argument_group("ONNX Runtime").add_argument
    add("--model", default="llama3.2-1b", help="a shape of models.py, or a source that weft compiles")
    add("--batches", nargs="+", type=int, default=[1, 8])
    add("--prompts", nargs="+", type=int, default=[512, 2048], help="decoding follows the first")
    add("--steps", type=int, default=128)
    add("--rounds", type=int, default=5)
    add("--reference", action="store_true", help="also compile for the CPU in f32, and compare")
    return parser


def parse(line: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse and check a command line, by default that of this process."""
    parser = build_parser()
    args = parser.parse_args(line)
    if args.stages not in (["plan"], ["goals"]) and (unknown := {*args.stages} - {*STAGES}):
        parser.error(f"no stage {' '.join(sorted(unknown))}: {' '.join(STAGES)}, or plan or goals alone")
    if empty := [folder for folder in args.results if not [*folder.glob("gpu_*.json")]]:
        parser.error(f"{empty[0]} holds no results of benchmarks/gpu")
    if args.stages == ["goals"] and not args.results:
        parser.error("goals needs --results FOLDER")
    try:
        re.compile(args.only)
    except re.error as error:
        parser.error(f"--only {args.only!r} is not a regular expression: {error}")
    args.stages = args.stages or [*STAGES]
    args.jobs = 1 if args.slow else max(1, args.jobs)
    return args


def choose_tasks(args: argparse.Namespace, missing: Callable[[Task], bool], tasks: Iterable[Task]) -> list[Task]:
    """Return the tasks of the stages that match --only and are `missing`, after the limits that their results need."""
    only, tasks = re.compile(args.only), [*tasks]
    chosen = [t for t in tasks if t.name.split("/")[0] in args.stages and only.search(t.name) and missing(t)]
    timed = any(task.name.split("/")[0] not in UNTIMED for task in chosen)
    return [task for task in tasks if timed and task.name in BRIEF and task not in chosen] + chosen


def select_tasks(line: str) -> list[Task]:
    """Return the tasks that a command line asks for."""
    args = parse(shlex.split(line))
    return choose_tasks(args, lambda _: True, list_tasks(args))


def estimate_seconds(tasks: Sequence[Task], jobs: int = 16, memory: float = 125.0, start: float = 20.0) -> float:
    """Estimate the seconds of a run on a machine with `jobs` cores and `memory` GiB on the device, the start included.

    Tasks are prepared in rounds that fill the processes and the device, then timed one by one.
    """
    timed = [task for task in tasks if task.alone]
    rounds: list[list[Task]] = []
    for task in timed:
        for others in rounds:
            if len(others) < jobs and sum(t.memory for t in others) + task.memory <= memory:
                others.append(task)
                break
        else:
            rounds.append([task])
    prepare = sum(max(task.seconds for task in others) for others in rounds)
    return start + prepare + sum(t.alone for t in timed) + sum(t.seconds for t in tasks if not t.alone) / jobs


def plan() -> list[str]:
    """Return the planned runs as shell commands; their budgets share PLAN_SECONDS by the estimates."""
    seconds = [estimate_seconds(select_tasks(line)) for line in PLAN]
    budgets = [min(RUN_SECONDS, int(PLAN_SECONDS * each / sum(seconds))) for each in seconds]
    command = 'PYTHONPATH=src python3 benchmarks/gpu {} --budget {} --out "$OUT"'
    return [command.format(line, budget) for line, budget in zip(PLAN, budgets, strict=True)]


def main() -> int:
    """Run the command line; return 1 if a check has failed."""
    args = parse()
    if args.stages == ["plan"]:
        print(*plan(), sep="\n")
        return 0
    if args.stages == ["goals"]:
        print(results.goal_table(results.read(args.results)))
        return 0
    cores = str(max(1, (os.cpu_count() or 1) // args.jobs))
    for name in ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"):  # processes share the cores
        os.environ.setdefault(name, cores)
    book = results.Book(args)
    choose = partial(choose_tasks, args, book.missing)
    with tempfile.TemporaryDirectory(prefix="weft-gpu-") as args.scratch:
        Pool(partial(load_tasks, args), choose, book.note, args.jobs, time.time() + args.budget, book.memory()).run()
    goals = results.goal_table(results.read([*args.results, args.out]))
    print(results.measurement_table(book.new), goals, results.summary(book.new), sep="\n\n")
    failed = [f"tests/{name}: {r['error']}" for name, r in book.new.get("tests", {}).items() if "error" in r]
    print(*failed, sep="\n")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
