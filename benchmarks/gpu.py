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

    plan     no stage: print four commands that measure what the goals of gpu_goals.py ask for

A run ends before --budget seconds are over, with what it has. What --results and --out show of the goals is printed at
the end. gpu.md says more.

    python benchmarks/gpu.py [STAGE ...] [--budget 540] [--quick] [--only REGEX] [--out FOLDER] [--device cpu]
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import gpu_goals
import gpu_plan
import gpu_table
from gpu_pool import Pool, Work
from gpu_results import Book, read

STAGES = ("limits", "tests", "decode", "quality", "kernels", "prefill", "ort", "sweep")
UNTIMED = {"limits", "tests", "quality"}  # stages that need no limits before them
BRIEF = ("limits/read", "limits/copy", "limits/product")  # limits that results are shares of
ROOT = Path(__file__).resolve().parents[1]


def parser() -> argparse.ArgumentParser:
    """The command line."""
    found = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    found.add_argument("stages", nargs="*", metavar="STAGE", help=f"{' '.join(STAGES)}; plan; all stages by default")
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
    group.add_argument(
        "--model", default="llama3.2-1b", help="a shape of gpu_models.py, or a source that weft compiles"
    )
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
    if args.stages != ["plan"] and (wrong := {*args.stages} - {*STAGES}):
        known.error(f"no stage {' '.join(sorted(wrong))}: {' '.join(STAGES)}, or plan alone")
    if missing := [folder for folder in args.results if not folder.is_dir()]:
        known.error(f"no folder {missing[0]}")
    try:
        re.compile(args.only)
    except re.error as error:
        known.error(f"--only {args.only!r} is no regular expression: {error}")
    args.stages = args.stages or [*STAGES]
    args.jobs = 1 if args.slow else max(1, args.jobs)
    return args


def works(args: argparse.Namespace) -> Iterator[Work]:
    """All works of the stages, named stage/name, in a process that is to run them; limits first."""
    if args.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    if args.no_pdl:
        import_module("weft.backends.torch.kernels.shared.launch").PDL_SINCE = (99, 0)
    for stage in [stage for stage in STAGES if stage in {"limits", *args.stages}]:
        for work in import_module(f"gpu_{stage}").works(args):
            yield replace(work, name=f"{stage}/{work.name}", group=work.group and f"{stage}/{work.group}")


def chosen(args: argparse.Namespace, found: Iterable[Work], missing: Callable[[Work], bool]) -> list[Work]:
    """The works of the stages that --only names and that are `missing`, behind limits if they are shares of them."""
    only, found = re.compile(args.only), [*found]
    asked = [w for w in found if w.name.split("/")[0] in args.stages and only.search(w.name) and missing(w)]
    timed = any(work.name.split("/")[0] not in UNTIMED for work in asked)
    return [work for work in found if timed and work.name in BRIEF and work not in asked] + asked


def serving(args: argparse.Namespace) -> list[Work]:
    """The works of a process of the pool; on a CPU, kernels run in Triton's interpreter, quickened."""
    if args.device == "cpu" and find_spec("triton"):
        os.environ["TRITON_INTERPRET"] = "1"
        sys.path.append(str(ROOT))
        import_module("tests.interpreter").quicken(load=True)
    return [*works(args)]


def selected(line: Sequence[str]) -> list[Work]:
    """The works that a command line asks for."""
    args = parsed(line)
    return chosen(args, works(args), lambda _: True)


def main() -> int:
    """Run what the command line asks for; return 1 if a check has failed."""
    args = parsed()
    if args.stages == ["plan"]:
        print(*gpu_plan.commands(selected), sep="\n")
        return 0
    cores = str(max(1, (os.cpu_count() or 1) // args.jobs))
    for name in ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"):  # processes share the cores
        os.environ.setdefault(name, cores)
    book = Book(args)

    choose = partial(chosen, args, missing=book.missing)
    with tempfile.TemporaryDirectory(prefix="weft-gpu-") as args.scratch:
        Pool(partial(serving, args), choose, book.note, args.jobs, time.time() + args.budget, book.memory()).run()
    failed = [*gpu_table.failed(book.new.get("tests", {}))]
    verdicts = gpu_goals.judge(read([*args.results, args.out]))
    print(gpu_table.table(book.new), gpu_goals.table(verdicts), gpu_table.summary(book.new), sep="\n\n")
    print(*failed, sep="\n")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
