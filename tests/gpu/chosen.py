"""Helpers for tests of this folder run as scripts: the device, set before Triton is imported, and a report."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

DEVICE = os.environ.get("WEFT_DEVICE", "cuda")  # "cpu" checks these tests where there is no GPU
SECONDS = float(os.environ.get("WEFT_SECONDS", "inf"))  # after which no more checks of a script begin
if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"
sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

Check = Callable[[], None]


def report(checks: Iterable[tuple[str, Check]], run: Callable[[Check], None], wanted: Sequence[str]) -> int:
    """Run the checks whose names contain one of `wanted`, or all; say which failed as they do, and whether any did."""
    failed, ran, left, start = [], 0, 0, time.monotonic()
    for name, check in checks:
        if wanted and not any(part in name for part in wanted):
            continue
        if time.monotonic() - start > SECONDS:
            left += 1
            continue
        ran += 1
        try:
            run(check)
        except Exception:  # every check is reported, whatever stopped it
            failed.append(name)
            print(f"FAILED {name}\n{traceback.format_exc(limit=-3)}", flush=True)
    rest = f", {left} not run" if left else ""
    print(f"{DEVICE}: {ran - len(failed)} passed, {len(failed)} failed{rest} {' '.join(failed)}")
    return len(failed) > 0
