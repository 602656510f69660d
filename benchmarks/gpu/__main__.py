"""What a GPU reaches, what weft's PyTorch backend and its kernels reach on it, and what their peers do, in one run.

Stages, each with a result file gpu_STAGE.json in the folder --out, written anew after every measurement:

    limits   reading, copying, bf16 products, chains of kernels with and without dependent launch
    tests    the checks of tests/gpu
    decode   tokens of 1, 8 and 32 texts after prompts of 32, 1k and 32k: Hugging Face eager, static, compiled; weft
    quality  the logits of every decoder, beside those of f32
    kernels  every kernel at shapes of real models, beside plain torch and the best peer
    prefill  prompts of 2k to 8k, beside the sum of their bare products and attentions
    ort      ONNX Runtime with and without CUDA graphs
    sweep    kernels in every configuration that they offer

    plan     no stage: print four commands that measure what the goals ask for
    goals    no stage: judge the goals by the folders of --results

A run ends before --budget seconds are over, with what it has. What --results and --out show of the goals is printed at
the end. gpu.md says more.

    python benchmarks/gpu [STAGE ...] [--budget 540] [--quick] [--only REGEX] [--out FOLDER] [--device cpu]
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run as a folder: its modules are those of the package `gpu` beside machine.py
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from gpu import results
from gpu.pool import STAGES, Pool, Work, serving, works

UNTIMED = {"limits", "tests", "quality"}  # stages that need no limits before them
BRIEF = ("limits/read", "limits/copy", "limits/product")  # limits that results are shares of


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    found.add_argument("stages", nargs="*", metavar="STAGE", help=f"{' '.join(STAGES)}; plan; goals; all by default")
    found.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to check this script")
    found.add_argument("--budget", type=float, default=540, help="seconds")
    found.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes, none of which is timed")
    found.add_argument("--only", default="", metavar="REGEX", help="works by stage/name")
    found.add_argument("--quick", action="store_true", help="fewer and smaller measurements")
    found.add_argument("--slow", action="store_true", help="also what takes minutes to compile; one process")
    found.add_argument("--no-pdl", action="store_true", help="kernels wait for those before them to end")
    found.add_argument("--again", action="store_true", help="leave out what --results and --out hold already")
    found.add_argument("--results", nargs="+", type=Path, default=[], metavar="FOLDER", help="of earlier runs")
    found.add_argument("--out", type=Path, default=Path("gpu"), metavar="FOLDER", help="for results; gpu by default")
    group = found.add_argument_group("ONNX Runtime")
    group.add_argument("--model", default="llama3.2-1b", help="a shape of models.py, or a source that weft compiles")
    group.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    group.add_argument("--prompts", nargs="+", type=int, default=[512, 2048], help="decoding follows the first")
    group.add_argument("--steps", type=int, default=128)
    group.add_argument("--rounds", type=int, default=5)
    group.add_argument("--reference", action="store_true", help="also compile for the CPU in f32, and compare")
    return found


def parsed(line: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, checked."""
    known = parser()
    args = known.parse_args(line)
    if args.stages not in (["plan"], ["goals"]) and (wrong := {*args.stages} - {*STAGES}):
        known.error(f"no stage {' '.join(sorted(wrong))}: {' '.join(STAGES)}, or plan or goals alone")
    if missing := [folder for folder in args.results if not [*folder.glob("gpu_*.json")]]:
        known.error(f"{missing[0]} holds no results of benchmarks/gpu")
    if args.stages == ["goals"] and not args.results:
        known.error("goals needs --results FOLDER")
    try:
        re.compile(args.only)
    except re.error as error:
        known.error(f"--only {args.only!r} is no regular expression: {error}")
    args.stages = args.stages or [*STAGES]
    args.jobs = 1 if args.slow else max(1, args.jobs)
    return args


def chosen(args: argparse.Namespace, found: Iterable[Work], missing: Callable[[Work], bool]) -> list[Work]:
    """The works of the stages that --only names and that are `missing`, behind limits if they are shares of them."""
    only, found = re.compile(args.only), [*found]
    asked = [w for w in found if w.name.split("/")[0] in args.stages and only.search(w.name) and missing(w)]
    timed = any(work.name.split("/")[0] not in UNTIMED for work in asked)
    return [work for work in found if timed and work.name in BRIEF and work not in asked] + asked


def selected(line: Sequence[str]) -> list[Work]:
    """The works that a command line asks for."""
    args = parsed(line)
    return chosen(args, works(args), lambda _: True)


def main() -> int:
    """Run what the command line asks for; return 1 if a check has failed."""
    args = parsed()
    if args.stages == ["plan"]:
        print(*commands(selected), sep="\n")
        return 0
    if args.stages == ["goals"]:
        print(results.goal_table(results.judge(results.read(args.results))))
        return 0
    cores = str(max(1, (os.cpu_count() or 1) // args.jobs))
    for name in ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"):  # processes share the cores
        os.environ.setdefault(name, cores)
    book = results.Book(args)

    choose = partial(chosen, args, missing=book.missing)
    with tempfile.TemporaryDirectory(prefix="weft-gpu-") as args.scratch:
        Pool(partial(serving, args), choose, book.note, args.jobs, time.time() + args.budget, book.memory()).run()
    failed = [*results.failed(book.new.get("tests", {}))]
    verdicts = results.judge(results.read([*args.results, args.out]))
    print(results.measurement_table(book.new), results.goal_table(verdicts), results.summary(book.new), sep="\n\n")
    print(*failed, sep="\n")
    return bool(failed)


TOTAL, MOST = 1560, 560  # seconds of all runs together, beside the starts of a machine, and of one run
JOBS, MEMORY, START = 16, 125.0, 20.0  # cores, GiB of the device, seconds until the first work begins
CALLS = {  # stages: works by name
    "limits tests": "^(limits|tests/(kernels|torch))/",
    "decode quality": "^decode/.*_after_(32|1024)_(weft_step|weft_runtime|hf_static_compiled)$"
    "|^quality/.*_(weft_step|weft_runtime|hf_eager)$",
    "kernels prefill": "",
    "tests ort sweep": "^(tests/ort_cuda/|ort/f16(_xqa)?$|sweep/(decode_attention|latent_decode))",
}


def lines() -> list[list[str]]:
    """The arguments of every run but its budget."""
    return [[*stages.split(), *(["--only", only] if only else [])] for stages, only in CALLS.items()]


def expected(works: Iterable[Work], jobs: int = JOBS, memory: float = MEMORY) -> float:
    """Seconds until all are done: prepared in rounds that fill the processes and the device, timed one by one."""
    works = [*works]
    total = START + sum(work.seconds for work in works if not work.alone) / jobs + sum(work.alone for work in works)
    rounds: list[list[Work]] = []
    for work in (work for work in works if work.alone):
        for others in rounds:
            if len(others) < jobs and sum(w.memory for w in others) + work.memory <= memory:
                others.append(work)
                break
        else:
            rounds.append([work])
    return total + sum(max(work.seconds for work in others) for others in rounds)


def commands(select: Callable[[Sequence[str]], Iterable[Work]]) -> list[str]:
    """The runs as commands for a shell, `--budget` by what `select` finds for the arguments of each."""
    seconds = [expected(select(line)) for line in lines()]
    budgets = [min(MOST, int(TOTAL * each / sum(seconds))) for each in seconds]
    return [_command(line, budget) for line, budget in zip(lines(), budgets, strict=True)]


def _command(line: Sequence[Any], budget: int) -> str:
    shown = " ".join(part if part.replace("-", "").isalnum() else f"'{part}'" for part in line)
    return f'PYTHONPATH=src python3 benchmarks/gpu {shown} --budget {budget} --out "$OUT"'


if __name__ == "__main__":
    sys.exit(main())
