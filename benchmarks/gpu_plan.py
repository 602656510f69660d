"""Four runs of gpu.py that measure what the goals ask for, each of less than ten minutes, within half an hour."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from gpu_pool import Work

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
    return f'PYTHONPATH=src python3 benchmarks/gpu.py {shown} --budget {budget} --out "$OUT"'
