"""Result files of the stages: one per stage in the folder --out, written anew whenever a work begins or ends."""

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

from .pool import Found, Work

Results = dict[str, dict[str, Found]]  # stage -> work -> what was found
SHARES = {"gb_per_s": ("read", "copy"), "tflop_per_s": ("product",)}  # rates, and the limits that they are a share of


def load(path: Path) -> dict[str, Any]:
    """The contents of a result file.

    Raises:
        SystemExit: if it is none.
    """
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        found["results"].items()
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise SystemExit(f"{path} is no result file of benchmarks/gpu ({type(error).__name__}): remove it") from None
    return found


def read(folders: Iterable[Path]) -> Results:
    """What the files in all folders hold; of two results of one work that of the later folder."""
    results: Results = {}
    for path in [path for folder in folders for path in sorted(folder.glob("gpu_*.json"))]:
        for name, found in load(path)["results"].items():
            known = results.setdefault(path.stem[4:], {})
            if name not in known or "not_reached" not in found:
                known[name] = found
    return results


def gpu_state() -> dict[str, str]:
    """Clocks, memory, temperature, power and why clocks are held, as nvidia-smi reads them; nothing is changed."""
    names = (
        "name,driver_version,memory.total,clocks.sm,clocks.mem,temperature.gpu,power.draw,clocks_event_reasons.active"
    )
    query = ["nvidia-smi", f"--query-gpu={names}", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return {"nvidia-smi": str(error)}
    values = [value.strip() for value in found.splitlines()[0].split(",")]
    return dict(zip(names.split(","), values, strict=True))


class Book:
    """The results of this run, in the files of its folder; with --again those of earlier runs stay in them."""

    def __init__(self, args: Namespace) -> None:
        self.args, self.out = args, args.out
        self.out.mkdir(parents=True, exist_ok=True)
        triton = ("triton",) if find_spec("triton") else ()
        self.head = {**facts("numpy", "torch", "transformers", *triton), "device": args.device}
        if args.device == "cuda":
            self.head["gpu"] = gpu_state()
        self.known = read([*args.results, self.out]) if args.again else {}
        self.new: Results = {}  # of works that this run has begun or left out
        self.lines: dict[str, dict[str, str]] = {}

    def memory(self) -> float:
        """GiB of the device that works may share; without a device as much as there is."""
        if self.args.device != "cuda":
            return float("inf")
        total = self.head["gpu"].get("memory.total", "").split()
        return 0.9 * (float(total[0]) / 1024 if total else 80)

    def missing(self, work: Work) -> bool:
        """Return whether no run has found anything of a work, or this is not to go on where one stopped."""
        stage, _, name = work.name.partition("/")
        found = self.known.get(stage, {}).get(name, {"running": True})
        return "not_reached" in found or "running" in found

    def note(self, work: Work, found: Found | None) -> None:
        """Print and record that a work begins, or what it has `found`."""
        stage, _, name = work.name.partition("/")
        if found is None:
            print(f"{work.name} …", flush=True)
            found = {"running": True}
        else:
            found = {"ok": "error" not in found, **found, **self.shares(found)} if "not_reached" not in found else found
            told = {key: value for key, value in found.items() if key not in ("trace", "printed")}
            print(f"{work.name}: {json.dumps(told)}", *(found[k] for k in ("trace", "printed") if found.get(k)))
        self.new.setdefault(stage, {})[name] = found
        if stage not in self.lines:
            before = load(path)["results"] if self.args.again and (path := self.path(stage)).exists() else {}
            self.lines[stage] = {key: _line(key, value) for key, value in before.items()}
        self.lines[stage][name] = _line(name, found)
        if stage in self.args.stages:  # limits that others begin with are in the files of those
            self.write(stage)

    def shares(self, found: Found) -> Found:
        """The rates of a result as shares of the limits of this run, and the time that reading its bytes would take."""
        limits, shares = self.new.get("limits", {}), {}
        for rate, names in SHARES.items():
            for name in names if isinstance(found.get(rate), float) else ():
                if limit := limits.get(name, {}).get(rate, {}).get("median"):
                    shares[f"of_{name}"] = round(found[rate] / limit, 3)
        read = limits.get("read", {}).get("gb_per_s", {}).get("median")
        if read and found.get("bytes"):
            shares["floor_us"] = round(found["bytes"] / read / 1e3, 2)
        return shares

    def path(self, stage: str) -> Path:
        return Path(self.out) / f"gpu_{stage}.json"

    def write(self, stage: str) -> None:
        """Write the file of a stage, whole or not at all; every work is a line."""
        limits = {"limits": self.new.get("limits", {})} if stage != "limits" else {}
        head = json.dumps({**self.head, **limits}, indent=2)
        part = self.path(stage).with_suffix(".part")
        lines = ",\n".join(self.lines[stage].values())
        part.write_text(f'{head[:-2]},\n  "results": {{\n{lines}\n  }}\n}}\n', encoding="utf-8")
        part.replace(self.path(stage))


def _line(name: str, found: Found) -> str:
    return f"    {json.dumps(name)}: {json.dumps(found)}"


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


def measurement_table(results: Results) -> str:
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


Spread = tuple[float, float, float]  # median, smallest, largest
WEFT = ("weft_step", "weft_runtime")
COMPILED = ("hf_static_compiled", "hf_static_autotuned")
EXPERTS = ("experts_batched", "experts_grouped", "experts_eager", "experts_compiled")
BOUND = 2.0  # of the divergence of Hugging Face's own decoding in bf16 from f32
MODELS = {"8b": "8B", "1b": "1B", "8b_int4": "8B with int4", "moe": "MoE"}
BATCHES = ((1, 32), (1, 1024), (8, 1024), (32, 1024))  # texts, and the length of each


@dataclass(frozen=True)
class Goal:
    """`measure` gives a number of the results, or None where they do not hold it; it is to be `least` or `most`.

    `decoder` names the measurement of the stage `quality` that belongs to it.
    """

    name: str
    measure: Callable[[Results], Spread | None]
    least: float | None = None
    most: float | None = None
    unit: str = ""
    decoder: str = ""

    def verdict(self, results: Results) -> dict[str, Any]:
        """Goal, measurement, spread, and `missed`: by what part of the goal, 0 if it is met, None if not measured."""
        goal = self.least if self.least is not None else self.most or 0.0
        verdict: dict[str, Any] = {"goal": f"{'≥' if self.least is not None else '≤'} {goal:g} {self.unit}".strip()}
        verdict |= {"measured": None, "missed": None}
        if (found := self.measure(results)) is not None:
            short = goal - found[0] if self.least is not None else found[0] - goal
            verdict |= {"measured": found[0], "spread": [*found[1:]], "missed": round(max(short / goal, 0), 6)}
        quality = results.get("quality", {}).get(self.decoder, {})
        return verdict | {key: quality[key] for key in ("same_first_choice", "mean_kl_nats") if key in quality}


def of(results: Results, stage: str, name: str, key: str, *peer: str) -> Spread | None:
    """A spread found by a measurement, or by one of its peers; a number alone is one too."""
    found: Any = results.get(stage, {}).get(name, {})
    for part in (*peer, key):
        found = found.get(part) if isinstance(found, Mapping) else None
    if isinstance(found, Mapping):
        return found["median"], found["min"], found["max"]
    return None if found is None else (found, found, found)


def over(numerator: Spread | None, denominator: Spread | None) -> Spread | None:
    """The ratio of the medians, and the smallest and the largest that there could be."""
    if numerator is None or denominator is None:
        return None
    (a, a_low, a_high), (b, b_low, b_high) = numerator, denominator
    return round(a / b, 3), round(a_low / b_high, 3), round(a_high / b_low, 3)


def fastest(times: Iterable[Spread | None]) -> Spread | None:
    return min((t for t in times if t is not None), default=None)


def _step(case: str, names: Iterable[str], results: Results) -> Spread | None:
    """The time of a step of the fastest contender."""
    return fastest(of(results, "decode", f"{case}_{name}", "step_us") for name in names)


def _tokens(case: str, results: Results) -> Spread | None:
    return over((1e6, 1e6, 1e6), _step(case, WEFT, results))


def _over_step(case: str, names: Iterable[str], results: Results) -> Spread | None:
    return over(_step(case, names, results), _step(case, WEFT, results))


def _of_floor(stage: str, case: str, key: str, results: Results) -> Spread | None:
    """The least time by reading the bytes, over the time that was taken."""
    return over(of(results, stage, case, "floor_us"), of(results, stage, case, key))


def _prefill(rows: int, results: Results) -> Spread | None:
    times = (of(results, "prefill", f"{name}_{rows}", "ms") for name in ("weft", "weft_module", "weft_compiled"))
    return over(of(results, "prefill", f"floor_{rows}", "floor_ms"), fastest(times))


def _over_peers(case: str, peers: Iterable[str], results: Results) -> Spread | None:
    """How many times faster a kernel is than the fastest of its `peers`."""
    best = fastest(of(results, "kernels", case, "us", peer) for peer in peers)
    return over(best, of(results, "kernels", case, "us"))


def _drawn(results: Results) -> Spread | None:
    """A step of ONNX Runtime whose tokens PyTorch draws, over one by itself, run after run."""
    steps = (("drawn", "step_us"), ("cuda_graphs", "device_step_us"))
    return over(*(of(results, "ort", "f16", key, name, "decode_batch_1") for name, key in steps))


def _divergence(label: str, name: str, results: Results) -> Spread | None:
    """The divergence of a decoder from f32 as a multiple of that of Hugging Face in the same dtype."""
    return over(*(of(results, "quality", f"{label}_{n}", "mean_kl_nats") for n in (name, "hf_eager")))


def goals() -> Iterator[Goal]:
    """Every goal, the headlines first."""
    agrees = {"decoder": "8b_weft_step"}
    first = partial(_tokens, "8b_batch_1_after_32")
    yield Goal("8B decode", first, least=260, unit="tokens/s", **agrees)
    floor = partial(_of_floor, "decode", "8b_batch_32_after_1024_weft_step", "step_us")
    yield Goal("8B decode of 32 texts, of its floor", floor, least=0.85, **agrees)
    step = partial(_step, "1b_batch_1_after_32", WEFT)
    yield Goal("1B decode, a step", step, most=740, unit="µs", decoder="1b_weft_step")
    codes = partial(_tokens, "8b_int4_batch_1_after_32")
    yield Goal("8B decode with int4", codes, least=520, unit="tokens/s")
    yield Goal("8B decode with FP8", partial(_tokens, "8b_fp8_batch_1_after_32"), least=480, unit="tokens/s")
    yield Goal("ONNX Runtime's step with tokens drawn, over the device's", _drawn, most=1.1, unit="×")
    for rows in (2048, 8192):
        yield Goal(f"8B prefill of {rows}, of bare products and attention", partial(_prefill, rows), least=0.95)
    for batch, length in BATCHES:
        for label, model in MODELS.items():
            peers = partial(_over_step, f"{label}_batch_{batch}_after_{length}", COMPILED)
            texts = f"{batch} text{'s' * (batch > 1)} after {length}"
            decoder = "" if label == "8b_int4" else f"{label}_weft_step"
            yield Goal(f"{model} decode of {texts}, over HF compiled", peers, least=1, unit="×", decoder=decoder)
    for model in ("mistral", "gpt_oss", "gemma3"):
        for seq in (8192, 32_768):
            flex = partial(_over_peers, f"window_attention.{model}_{seq}", ("flex_window",))
            yield Goal(f"sliding window {model} {seq}, over flex_attention", flex, least=1.3, unit="×")
    for model in ("8b", "1b"):
        attention = partial(_of_floor, "kernels", f"decode_attention.{model}_32k", "us")
        yield Goal(f"GQA decode {model} at 32k, of its floor", attention, least=0.85)
    for model in ("mixtral", "qwen3_30b", "gpt_oss_20b"):
        experts = partial(_over_peers, f"moe_decode.{model}", EXPERTS)
        yield Goal(f"MoE kernel {model}, over transformers' fastest experts", experts, least=2, unit="×")
    for label in ("1b", "8b"):
        for name in WEFT:
            worse = partial(_divergence, label, name)
            yield Goal(f"divergence from f32, {label} {name}, over HF eager's", worse, most=BOUND, unit="×")


def judge(results: Results) -> dict[str, dict[str, Any]]:
    """Every goal's verdict by name."""
    return {goal.name: goal.verdict(results) for goal in goals()}


def goal_table(verdicts: Mapping[str, Mapping[str, Any]]) -> str:
    """A line per goal: whether it is met, what was measured and between what, and the agreement with f32."""
    lines = []
    for name, v in verdicts.items():
        said = "not measured" if v["missed"] is None else f"missed by {v['missed']:.2%}" if v["missed"] else "met"
        spread = "{:g} to {:g}".format(*v["spread"]) if "spread" in v else ""
        rest = "  ".join(f"{key} {v[key]}" for key in ("same_first_choice", "mean_kl_nats") if key in v)
        measured = "" if v["measured"] is None else f"{v['measured']:g}"
        lines.append(f"{said:15}  {name:56} {v['goal']:>14} {measured:>8}  {spread:18} {rest}".rstrip())
    return "\n".join(lines)
