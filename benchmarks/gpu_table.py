"""The short table that a run of gpu.py ends with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SHOWN = (
    "best_us",
    "best",
    "tokens_per_s",
    "of_copy",
    "of_read",
    "of_product",
    "floor_of_it",
    "speedup",
    "mean_kl_nats",
    "same_first_choice",
)
UNITS = {"step_us": "µs", "us": "µs", "ms": "ms", "floor_ms": "ms", "gb_per_s": "GB/s", "tflop_per_s": "TFLOP/s"}


def _time(found: Mapping[str, Any]) -> str:
    """The number that a measurement is about."""
    for key, unit in UNITS.items():
        value = found.get(key)
        if value is not None:
            return f"{value['median'] if isinstance(value, dict) else value:.6g} {unit}"
    return ""


def table(results: Mapping[str, Any]) -> str:
    """A line per measurement: its time, and the ratios that it was made for."""
    lines = []
    for stage, kept in results.items():
        for name, found in kept["results"].items():
            rest = [f"{key} {found[key]}" for key in SHOWN if key in found]
            trouble = [f"{key}: {found[key]}"[:90] for key in ("error", "not_run") if key in found]
            lines.append(f"{stage + '/' + name:44} {_time(found):>14}  {'  '.join(rest + trouble)}".rstrip())
    return "\n".join(lines)
