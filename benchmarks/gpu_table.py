"""The short tables that a run of gpu.py ends with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gpu_results import Found, Results

SHOWN = (
    "best_us",
    "best",
    "tokens_per_s",
    "floor_us",
    "of_copy",
    "of_read",
    "of_product",
    "speedup",
    "mean_kl_nats",
    "same_first_choice",
    "error",
    "not_reached",
)
UNITS = {"step_us": "µs", "us": "µs", "ms": "ms", "floor_ms": "ms", "gb_per_s": "GB/s", "tflop_per_s": "TFLOP/s"}


def _time(found: Found) -> str:
    """The number that a measurement is about."""
    for key, unit in UNITS.items():
        value = found.get(key)
        if value is not None:
            return f"{value['median'] if isinstance(value, dict) else value:.6g} {unit}"
    return ""


def table(results: Results) -> str:
    """A line per measurement: its time, and the ratios that it was made for."""
    lines = []
    for stage, kept in results.items():
        for name, found in kept.items() if stage != "tests" else ():
            rest = [f"{key} {found[key]}".partition("\n")[0][:90] for key in SHOWN if key in found]
            lines.append(f"{stage + '/' + name:56} {_time(found):>14}  {'  '.join(rest)}".rstrip())
    return "\n".join(lines)


def summary(results: Results) -> str:
    """How many works of each stage ended how."""
    lines = []
    for stage, kept in results.items():
        counts = {"ok": 0, "failed": 0, "hung": 0, "not reached": 0}
        for found in kept.values():
            counts[_fate(found)] += 1
        lines.append(f"{stage}: " + ", ".join(f"{count} {fate}" for fate, count in counts.items()))
    return "\n".join(lines)


def _fate(found: Found) -> str:
    if "not_reached" in found:
        return "not reached"
    error = found.get("error", "")
    return "hung" if error.startswith("hung") else "failed" if error else "ok"


def failed(checks: Mapping[str, Found]) -> Iterator[str]:
    """The checks that failed, each with its reason."""
    return (f"tests/{name}: {found['error']}" for name, found in checks.items() if "error" in found)
