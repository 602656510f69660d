"""Describe the machine of a benchmark, summarize measurements and save results."""

from __future__ import annotations

import datetime
import json
import os
import platform
import statistics
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from weft.backends.cpu import detect_instruction_set

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # also of peers in their own processes
RESULTS = Path(__file__).parent / "results"


def facts(*packages: str) -> dict[str, Any]:
    """Return processor, vector instructions, cores, memory, Python and package versions."""
    cpu = next((line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), "")
    memory = next((int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0)
    return {
        "date": datetime.date.today().isoformat(),
        "cpu": cpu or platform.processor(),
        "instruction_set": detect_instruction_set(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**20, 1),
        "python": platform.python_version(),
        "versions": {p: metadata.version(p) for p in packages},
    }


def spread(values: Sequence[float], digits: int = 3) -> dict[str, float]:
    """Return median, minimum, maximum and number of measurements."""
    return {
        "median": round(statistics.median(values), digits),
        "min": round(min(values), digits),
        "max": round(max(values), digits),
        "runs": len(values),
    }


def save(name: str, result: dict[str, Any]) -> None:
    """Write `result` to results/`name`.json and print it; the name of a CPU without AVX-512 ends in its instruction
    set."""
    RESULTS.mkdir(exist_ok=True)
    text = json.dumps(result, indent=2) + "\n"
    instructions = detect_instruction_set()
    suffix = "" if instructions == "AVX-512" else f"_{instructions.lower()}"
    (RESULTS / f"{name}{suffix}.json").write_text(text, encoding="utf-8")
    print(text)


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []
