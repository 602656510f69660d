"""What the PyTorch backend is to reach on an H200, and whether a run of gpu.py shows it.

A goal compares two numbers of the result files of one folder, which may come from several runs. Beside each speed of a
decoder stands how its logits agree with those of f32: a speed counts only with that.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

Results = Mapping[str, Mapping[str, Any]]  # stage -> measurement -> what was found
Spread = tuple[float, float, float]  # median, smallest, largest
WEFT = ("weft_step", "weft_runtime")
COMPILED = ("hf_static_compiled", "hf_static_autotuned")
EXPERTS = ("experts_batched", "experts_grouped", "experts_eager", "experts_compiled")
BOUND = 2.0  # of the divergence of Hugging Face's own decoding in bf16 from f32


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
        """Goal, measurement, spread, and whether it is reached; None where nothing was measured."""
        wanted = f"≥ {self.least:g}" if self.least is not None else f"≤ {self.most:g}"
        found = self.measure(results)
        verdict: dict[str, Any] = {"goal": f"{wanted} {self.unit}".strip(), "measured": None, "pass": None}
        if found is not None:
            reached = found[0] >= self.least if self.least is not None else found[0] <= (self.most or 0)
            verdict |= {"measured": found[0], "spread": [*found[1:]], "pass": reached}
        quality = results.get("quality", {}).get(self.decoder, {})
        return verdict | {key: quality[key] for key in ("same_first_choice", "mean_kl_nats") if key in quality}


def of(results: Results, stage: str, name: str, key: str, *peer: str) -> Spread | None:
    """A spread found by a measurement, or by one of its peers."""
    found: Any = results.get(stage, {}).get(name, {})
    for part in (*peer, key):
        found = found.get(part) if isinstance(found, Mapping) else None
    return (found["median"], found["min"], found["max"]) if found else None


def over(numerator: Spread | None, denominator: Spread | None) -> Spread | None:
    """The ratio of the medians, and the smallest and the largest that there could be."""
    if numerator is None or denominator is None:
        return None
    (a, a_low, a_high), (b, b_low, b_high) = numerator, denominator
    return round(a / b, 3), round(a_low / b_high, 3), round(a_high / b_low, 3)


def fastest(times: Iterable[Spread | None]) -> Spread | None:
    return min((t for t in times if t is not None), default=None)


def _share(results: Results, stage: str, name: str, key: str, time: str) -> Spread | None:
    """A share of a limit, spread as the `time` that it was made of."""
    share, times = results.get(stage, {}).get(name, {}).get(key), of(results, stage, name, time)
    if share is None or times is None:
        return None
    return share, round(share * times[0] / times[2], 3), round(share * times[0] / times[1], 3)


def _step(label: str, length: int, name: str, results: Results) -> Spread | None:
    return of(results, "decode", f"{label}_{length}_{name}", "step_us")


def _best_step(label: str, length: int, names: Iterable[str], results: Results) -> Spread | None:
    return fastest(_step(label, length, name, results) for name in names)


def _over_step(label: str, length: int, names: Iterable[str], results: Results) -> Spread | None:
    return over(_best_step(label, length, names, results), _best_step(label, length, WEFT, results))


def _of_floor(label: str, length: int, results: Results) -> Spread | None:
    return _share(results, "decode", f"{label}_{length}_weft_step", "of_copy", "step_us")


def _prefill(rows: int, results: Results) -> Spread | None:
    ways = (f"{name}_{rows}" for name in ("weft", "weft_compiled"))
    found = (_share(results, "prefill", name, "floor_of_it", "ms") for name in ways)
    return max((share for share in found if share is not None), default=None)


def _over_peers(case: str, peers: Iterable[str], results: Results) -> Spread | None:
    """How many times faster a kernel is than the fastest of its `peers`."""
    best = fastest(of(results, "kernels", case, "us", peer) for peer in peers)
    return over(best, of(results, "kernels", case, "us"))


def _of_copy(case: str, results: Results) -> Spread | None:
    return _share(results, "kernels", case, "of_copy", "us")


def _divergence(label: str, name: str, results: Results) -> Spread | None:
    """The divergence of a decoder from f32 as a multiple of that of Hugging Face in the same dtype."""
    found = [results.get("quality", {}).get(f"{label}_{n}", {}).get("mean_kl_nats") for n in (name, "hf_eager")]
    if None in found or not found[1]:
        return None
    ratio = round(found[0] / found[1], 3)
    return ratio, ratio, ratio


def goals() -> Iterator[Goal]:
    """Every goal, the headlines first."""
    for length in (32, 1024):
        agrees = {"decoder": "8b_weft_step"}
        floor = partial(_of_floor, "8b", length)
        yield Goal(f"8B decode after {length}, of the byte floor at copy speed", floor, least=0.9, **agrees)
        peers = partial(_over_step, "8b", length, COMPILED)
        yield Goal(f"8B decode after {length}, over HF static cache compiled", peers, least=1.2, unit="×", **agrees)
        for name, least in (("hf_eager", 5.0), ("hf_static_graph", 1.0)):
            peers = partial(_over_step, "8b", length, (name,))
            yield Goal(f"8B decode after {length}, over {name}", peers, least=least, unit="×", **agrees)
    step = partial(_best_step, "1b", 32, WEFT)
    for most, name in ((795, "1B decode after 32"), (760, "1B decode after 32, the record")):
        yield Goal(name, step, most=most, unit="µs", decoder="1b_weft_step")
    for rows in (2048, 4096, 8192):
        yield Goal(f"8B prefill of {rows}, of bare products and attention", partial(_prefill, rows), least=0.95)
    for model in ("mistral", "gpt_oss", "gemma3"):
        for seq in (8192, 32_768):
            flex = partial(_over_peers, f"window_attention.{model}_{seq}", ("flex_window",))
            yield Goal(f"sliding window {model} {seq}, over flex_attention", flex, least=1.3, unit="×")
    for model in ("8b", "1b"):
        attention = partial(_of_copy, f"decode_attention.{model}_32k")
        yield Goal(f"GQA decode {model} at 32k, of copy speed", attention, least=0.85)
    for model in ("mixtral", "qwen3_30b", "gpt_oss_20b"):
        experts = partial(_over_peers, f"moe_decode.{model}", EXPERTS)
        yield Goal(f"MoE decode {model}, over transformers' fastest experts", experts, least=2.0, unit="×")
    for label in ("1b", "8b"):
        for name in WEFT:
            worse = partial(_divergence, label, name)
            yield Goal(f"divergence from f32, {label} {name}, over HF eager's", worse, most=BOUND, unit="×")


def read(folder: Path) -> dict[str, dict[str, Any]]:
    """The results of every stage in a folder."""
    files = (path for path in folder.glob("gpu_*.json") if path.stem != "gpu_goals")
    return {path.stem[4:]: json.loads(path.read_text(encoding="utf-8"))["results"] for path in sorted(files)}


def judge(folder: Path) -> dict[str, dict[str, Any]]:
    """Every goal's verdict by the results in a folder, written there as gpu_goals.json."""
    results = read(folder)
    verdicts = {goal.name: goal.verdict(results) for goal in goals()}
    text = json.dumps(verdicts, indent=2, ensure_ascii=False) + "\n"
    (folder / "gpu_goals.json").write_text(text, encoding="utf-8")
    return verdicts


def table(verdicts: Mapping[str, Mapping[str, Any]]) -> str:
    """A line per goal: what was wanted, what was measured and between what, and the agreement with f32."""
    lines = []
    for name, v in verdicts.items():
        said = {True: "pass", False: "FAIL", None: "not measured"}[v["pass"]]
        spread = "{:g} to {:g}".format(*v["spread"]) if "spread" in v else ""
        rest = "  ".join(f"{key} {v[key]}" for key in ("same_first_choice", "mean_kl_nats") if key in v)
        measured = "" if v["measured"] is None else f"{v['measured']:g}"
        lines.append(f"{said:12}  {name:58} {v['goal']:>10} {measured:>8}  {spread:18} {rest}".rstrip())
    return "\n".join(lines)
