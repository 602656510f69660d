"""Result files of the stages, the tables that a run ends with, and the goals that results are judged by.

A goal compares two values of the result files of one or more folders; later folders replace results of earlier ones.
Next to the speed of a decoder the table shows how its logits agree with those of f32: a speed counts only with that.
"""

from __future__ import annotations

import json
import subprocess
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from machine import facts

from .pool import Result, Task

Results = dict[str, dict[str, Result]]  # stage → task → result
Spread = tuple[float, float, float]  # median, smallest, largest
SHARES = {"gb_per_s": ("read", "copy"), "tflop_per_s": ("product",)}  # rates, and the limits to give them as shares of
QUERY = "name,driver_version,memory.total,clocks.sm,clocks.mem,temperature.gpu,power.draw,clocks_event_reasons.active"
UNITS = {"step_us": "µs", "us": "µs", "ms": "ms", "floor_ms": "ms", "gb_per_s": "GB/s", "tflop_per_s": "TFLOP/s"}
AGREEMENT = ("mean_kl_nats", "same_first_choice")
RATIOS = ("floor_us", "of_copy", "of_read", "of_product", "speedup")
COLUMNS = ("best_us", "best", "tokens_per_s", *RATIOS, *AGREEMENT, "error", "not_reached")
WEFT = ("weft_step", "weft_runtime")
COMPILED = ("hf_static_compiled", "hf_static_autotuned")
EXPERTS = ("experts_batched", "experts_grouped", "experts_eager", "experts_compiled")


def load(path: Path) -> Results:
    """Return the results in a file by task.

    Raises:
        SystemExit: if it is not a result file.
    """
    try:
        results = json.loads(path.read_text(encoding="utf-8"))["results"]
        return dict(results.items())
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise SystemExit(f"{path} is not a result file ({type(error).__name__}): remove it") from None


def read(folders: Iterable[Path]) -> Results:
    """Return the results in all folders; of two results of one task that of the later folder."""
    results: Results = {}
    for path in [path for folder in folders for path in sorted(folder.glob("gpu_*.json"))]:
        stage = results.setdefault(path.stem[4:], {})
        for name, result in load(path).items():
            if name not in stage or "not_reached" not in result:
                stage[name] = result
    return results


def gpu_state() -> dict[str, str]:
    """Return clocks, memory, temperature, power and reasons for held clocks by nvidia-smi, without changing any."""
    command = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return {"nvidia-smi": str(error)}
    return dict(zip(QUERY.split(","), map(str.strip, output.splitlines()[0].split(",")), strict=True))


class Book:
    """The results of this run in the files of its folder; with --again they also keep those of earlier runs."""

    def __init__(self, args: Namespace) -> None:
        self.args, self.out = args, Path(args.out)
        self.out.mkdir(parents=True, exist_ok=True)
        triton = ("triton",) if find_spec("triton") else ()
        self.head = {**facts("numpy", "torch", "transformers", *triton), "device": args.device}
        if args.device == "cuda":
            self.head["gpu"] = gpu_state()
        self.known = read([*args.results, self.out]) if args.again else {}
        self.new: Results = {}  # of tasks that this run has begun or not reached
        self.lines: dict[str, dict[str, str]] = {}  # of the files, by stage and task

    def memory(self) -> float:
        """Return the GiB of the device that tasks may use together."""
        if self.args.device != "cuda":
            return float("inf")
        total = self.head["gpu"].get("memory.total", "").split()
        return 0.9 * (float(total[0]) / 1024 if total else 80)

    def missing(self, task: Task) -> bool:
        """Return whether this run has to measure a task: without --again, or if no earlier run has a result."""
        stage, _, name = task.name.partition("/")
        result = self.known.get(stage, {}).get(name, {"running": True})
        return "not_reached" in result or "running" in result

    def note(self, task: Task, result: Result | None) -> None:
        """Print and record that a task begins (None), or its result."""
        stage, _, name = task.name.partition("/")
        if result is None:
            print(f"{task.name} …", flush=True)
            result = {"running": True}
        else:
            if "not_reached" not in result:
                result = {"ok": "error" not in result, **result, **self.shares(result)}
            output = [result[key] for key in ("trace", "printed") if result.get(key)]
            shown = {key: value for key, value in result.items() if key not in ("trace", "printed")}
            print(f"{task.name}: {json.dumps(shown)}", *output)
        self.new.setdefault(stage, {})[name] = result
        path = self.out / f"gpu_{stage}.json"
        if stage not in self.lines:
            before = load(path) if self.args.again and path.exists() else {}
            self.lines[stage] = {key: _line(key, value) for key, value in before.items()}
        self.lines[stage][name] = _line(name, result)
        if stage in self.args.stages:  # else these are limits that another stage measures first; its own file has them
            self.write(path, stage)

    def shares(self, result: Result) -> Result:
        """Return the rates of a result as shares of the limits of this run, and the time to read its bytes."""
        limits, shares = self.new.get("limits", {}), {}
        for rate, names in SHARES.items():
            for name in names if isinstance(result.get(rate), float) else ():
                if limit := limits.get(name, {}).get(rate, {}).get("median"):
                    shares[f"of_{name}"] = round(result[rate] / limit, 3)
        bandwidth = limits.get("read", {}).get("gb_per_s", {}).get("median")
        if bandwidth and result.get("bytes"):
            shares["floor_us"] = round(result["bytes"] / bandwidth / 1e3, 2)
        return shares

    def write(self, path: Path, stage: str) -> None:
        """Write the file of a stage atomically, one line per task."""
        limits = {"limits": self.new.get("limits", {})} if stage != "limits" else {}
        head = json.dumps({**self.head, **limits}, indent=2)
        part = path.with_suffix(".part")
        lines = ",\n".join(self.lines[stage].values())
        part.write_text(f'{head[:-2]},\n  "results": {{\n{lines}\n  }}\n}}\n', encoding="utf-8")
        part.replace(path)


def _line(name: str, result: Result) -> str:
    return f"    {json.dumps(name)}: {json.dumps(result)}"


def measurement_table(results: Results) -> str:
    """Return a line per measurement: its time or rate, and the ratios to limits and peers."""
    lines = []
    for stage, tasks in results.items():
        for name, result in tasks.items() if stage != "tests" else ():
            time = ""
            if (key := next((key for key in UNITS if result.get(key) is not None), None)) is not None:
                value = result[key]
                time = f"{value['median'] if isinstance(value, dict) else value:.6g} {UNITS[key]}"
            rest = [f"{key} {result[key]}".partition("\n")[0][:90] for key in COLUMNS if key in result]
            lines.append(f"{stage + '/' + name:56} {time:>14}  {'  '.join(rest)}".rstrip())
    return "\n".join(lines)


def summary(results: Results) -> str:
    """Return a line per stage: how many tasks succeeded, failed, hung and were not reached."""
    lines = []
    for stage, tasks in results.items():
        counts = {"ok": 0, "failed": 0, "hung": 0, "not reached": 0}
        for result in tasks.values():
            error = "hung" if str(result.get("error", "")).startswith("hung") else "failed"
            counts["not reached" if "not_reached" in result else error if result.get("error") else "ok"] += 1
        lines.append(f"{stage}: " + ", ".join(f"{count} {fate}" for fate, count in counts.items()))
    return "\n".join(lines)


@dataclass(frozen=True)
class Goal:
    """`measure` returns a value of the results, None if it was not measured; it is to be at `least` or at `most` that.

    `decoder` names the measurement of the stage `quality` that belongs to it.
    """

    name: str
    measure: Callable[[Results], Spread | None]
    least: float | None = None
    most: float | None = None
    unit: str = ""
    decoder: str = ""

    def judge(self, results: Results) -> str:
        """Return a line: whether the goal is met or by what part it is missed, the measurement, and the agreement."""
        goal = self.least if self.least is not None else self.most or 0.0
        bound = f"{'≥' if self.least is not None else '≤'} {goal:g} {self.unit}".strip()
        verdict, median, spread = "not measured", "", ""
        if (value := self.measure(results)) is not None:
            short = goal - value[0] if self.least is not None else value[0] - goal
            missed = round(max(short / goal, 0), 6)
            verdict = f"missed by {missed:.2%}" if missed else "met"
            median, spread = f"{value[0]:g}", f"{value[1]:g} to {value[2]:g}"
        quality = results.get("quality", {}).get(self.decoder, {})
        rest = "  ".join(f"{key} {quality[key]}" for key in reversed(AGREEMENT) if key in quality)
        return f"{verdict:15}  {self.name:56} {bound:>14} {median:>8}  {spread:18} {rest}".rstrip()


def goal_table(results: Results) -> str:
    """Return the verdict on every goal, a line each."""
    return "\n".join(goal.judge(results) for goal in goals())


def spread_of(results: Results, stage: str, name: str, key: str, *peer: str) -> Spread | None:
    """Return the spread of a measurement or of one of its peers; a single value is its own spread."""
    value: Any = results.get(stage, {}).get(name, {})
    for part in (*peer, key):
        value = value.get(part) if isinstance(value, Mapping) else None
    if isinstance(value, Mapping):
        return value["median"], value["min"], value["max"]
    return None if value is None else (value, value, value)


def ratio(numerator: Spread | None, denominator: Spread | None) -> Spread | None:
    """Return the ratio of the medians, with the smallest and the largest possible ratio."""
    if numerator is None or denominator is None:
        return None
    (a, a_low, a_high), (b, b_low, b_high) = numerator, denominator
    return round(a / b, 3), round(a_low / b_high, 3), round(a_high / b_low, 3)


def fastest(times: Iterable[Spread | None]) -> Spread | None:
    return min((t for t in times if t is not None), default=None)


def _step(case: str, names: Iterable[str], results: Results) -> Spread | None:
    """Return the time of a decode step of the fastest of the named decoders."""
    return fastest(spread_of(results, "decode", f"{case}_{name}", "step_us") for name in names)


def _tokens_per_second(case: str, results: Results) -> Spread | None:
    return ratio((1e6, 1e6, 1e6), _step(case, WEFT, results))


def _step_speedup(case: str, results: Results) -> Spread | None:
    return ratio(_step(case, COMPILED, results), _step(case, WEFT, results))


def _floor_share(stage: str, case: str, key: str, results: Results) -> Spread | None:
    """Return the time to read the bytes over the time taken."""
    return ratio(spread_of(results, stage, case, "floor_us"), spread_of(results, stage, case, key))


def _prefill_share(rows: int, results: Results) -> Spread | None:
    names = ("weft", "weft_module", "weft_compiled")
    times = (spread_of(results, "prefill", f"{name}_{rows}", "ms") for name in names)
    return ratio(spread_of(results, "prefill", f"floor_{rows}", "floor_ms"), fastest(times))


def _kernel_speedup(case: str, peers: Iterable[str], results: Results) -> Spread | None:
    """Return the speedup of a kernel over the fastest of its `peers`."""
    times = (spread_of(results, "kernels", case, "us", peer) for peer in peers)
    return ratio(fastest(times), spread_of(results, "kernels", case, "us"))


def _sampling_cost(results: Results) -> Spread | None:
    """Return ONNX Runtime's step whose tokens PyTorch samples, over a bare step, run after run."""
    steps = (("drawn", "step_us"), ("cuda_graphs", "device_step_us"))
    return ratio(*(spread_of(results, "ort", "f16", key, name, "decode_batch_1") for name, key in steps))


def _divergence(label: str, name: str, results: Results) -> Spread | None:
    """Return the divergence of a decoder from f32 as a multiple of that of Hugging Face in the same dtype."""
    return ratio(*(spread_of(results, "quality", f"{label}_{n}", "mean_kl_nats") for n in (name, "hf_eager")))


def goals() -> Iterator[Goal]:
    """Yield what the PyTorch backend is to reach on an H200, the headlines first."""
    tokens = partial(_tokens_per_second, "8b_batch_1_after_32")
    yield Goal("8B decode", tokens, least=260, unit="tokens/s", decoder="8b_weft_step")
    batch_32 = partial(_floor_share, "decode", "8b_batch_32_after_1024_weft_step", "step_us")
    yield Goal("8B decode of 32 texts, of its floor", batch_32, least=0.85, decoder="8b_weft_step")
    step = partial(_step, "1b_batch_1_after_32", WEFT)
    yield Goal("1B decode, a step", step, most=740, unit="µs", decoder="1b_weft_step")
    yield Goal(
        "8B decode with int4", partial(_tokens_per_second, "8b_int4_batch_1_after_32"), least=520, unit="tokens/s"
    )
    yield Goal("8B decode with FP8", partial(_tokens_per_second, "8b_fp8_batch_1_after_32"), least=480, unit="tokens/s")
    yield Goal("ONNX Runtime's step with tokens drawn, over the device's", _sampling_cost, most=1.1, unit="×")
    for rows in (2048, 8192):
        yield Goal(f"8B prefill of {rows}, of bare products and attention", partial(_prefill_share, rows), least=0.95)
    for batch, length in ((1, 32), (1, 1024), (8, 1024), (32, 1024)):
        for label, model in {"8b": "8B", "1b": "1B", "8b_int4": "8B with int4", "moe": "MoE"}.items():
            speedup = partial(_step_speedup, f"{label}_batch_{batch}_after_{length}")
            name = f"{model} decode of {batch} text{'s' * (batch > 1)} after {length}, over HF compiled"
            decoder = "" if label == "8b_int4" else f"{label}_weft_step"
            yield Goal(name, speedup, least=1, unit="×", decoder=decoder)
    for model in ("mistral", "gpt_oss", "gemma3"):
        for seq in (8192, 32_768):
            flex = partial(_kernel_speedup, f"window_attention.{model}_{seq}", ("flex_window",))
            yield Goal(f"sliding window {model} {seq}, over flex_attention", flex, least=1.3, unit="×")
    for model in ("8b", "1b"):
        attention = partial(_floor_share, "kernels", f"decode_attention.{model}_32k", "us")
        yield Goal(f"GQA decode {model} at 32k, of its floor", attention, least=0.85)
    for model in ("mixtral", "qwen3_30b", "gpt_oss_20b"):
        experts = partial(_kernel_speedup, f"moe_decode.{model}", EXPERTS)
        yield Goal(f"MoE kernel {model}, over transformers' fastest experts", experts, least=2, unit="×")
    for label in ("1b", "8b"):
        for name in WEFT:
            goal = f"divergence from f32, {label} {name}, over HF eager's"
            yield Goal(goal, partial(_divergence, label, name), most=2, unit="×")
