"""What a GPU reaches, what weft's PyTorch backend and its kernels reach on it, and what their peers do, in one run.

Stages, each with a result file gpu_STAGE.json that is rewritten after every measurement:

    limits   reading, copying, bf16 products, chains of kernels with and without dependent launch
    kernels  every kernel at shapes of real models, beside plain torch and the best peer; with --sweep, configurations
    decode   tokens after prompts of 32, 1k and 32k: Hugging Face eager, static, compiled; weft
    prefill  prompts of 2k to 8k, beside the sum of their bare products and attentions
    quality  the logits of every decoder, beside those of f32
    ort      ONNX Runtime with and without CUDA graphs

A run ends before --budget seconds are over with what it has; `--only REGEX` picks measurements by stage/name, and
`--again` goes on where an earlier run with the same --out stopped. What all runs with the same --out show of the goals
of gpu_goals.py is printed at the end, and kept in gpu_goals.json. gpu.md says what to run on a GPU, in which order.

    python benchmarks/gpu.py [STAGE ...] [--budget 540] [--quick] [--only REGEX] [--sweep] [--out FOLDER] [--device cpu]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import gpu_goals
import gpu_table
from gpu_run import Run
from machine import RESULTS

STAGES = ("kernels", "decode", "quality", "prefill", "ort")


def parsed() -> argparse.Namespace:
    """The command line; `deadline` is when the budget is over, and stays the same when the program is started anew."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"limits {' '.join(STAGES)}; all by default")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to check this script")
    parser.add_argument("--budget", type=float, default=570, help="seconds")
    parser.add_argument("--deadline", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--only", default="", metavar="REGEX", help="measurements by stage/name")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller measurements")
    parser.add_argument("--slow", action="store_true", help="also what takes minutes to compile")
    parser.add_argument("--sweep", action="store_true", help="kernels: every configuration that a kernel offers")
    parser.add_argument("--no-pdl", action="store_true", help="kernels wait for those before them to end")
    parser.add_argument("--again", action="store_true", help="go on where an earlier run stopped")
    parser.add_argument("--out", type=Path, default=RESULTS)
    group = parser.add_argument_group("ONNX Runtime")
    group.add_argument(
        "--model", default="llama3.2-1b", help="a shape of gpu_models.py, or a source that weft compiles"
    )
    group.add_argument("--dtypes", nargs="+", default=["f16", "bf16"])
    group.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    group.add_argument("--prompts", nargs="+", type=int, default=[512, 2048], help="decoding follows the first")
    group.add_argument("--steps", type=int, default=128)
    group.add_argument("--rounds", type=int, default=5)
    group.add_argument("--reference", action="store_true", help="also compile for the CPU in f32, and compare")
    args = parser.parse_args()
    if wrong := {*args.stages} - {"limits", *STAGES}:
        parser.error(f"no stage {' '.join(sorted(wrong))}: limits {' '.join(STAGES)}")
    args.stages = args.stages or ["limits", *STAGES]
    args.deadline = args.deadline or time.time() + args.budget
    return args


def main() -> None:
    args = parsed()
    if args.no_pdl:
        import_module("weft.backends.torch.kernels.shared.launch").PDL_SINCE = (99, 0)
    run = Run(args)
    for stage in ("limits", *args.stages):  # everything is measured against the limits of the same run
        work: Callable[[Run], Any] = getattr(import_module(f"gpu_{stage}"), stage)
        if stage not in run.results:
            run.attempt(stage, work)
        verdicts = gpu_goals.judge(run.out)
    print(gpu_table.table(run.results), gpu_goals.table(verdicts), sep="\n\n")


if __name__ == "__main__":
    main()
