"""Time a mixture-of-experts layer in three ONNX forms: ONNX Runtime's operator, grouped products, batched products.

weft emits the operator for ort-cpu, and the grouped form for onnx (and where the operator does not fit); the batched
form computes every token by every expert. Rounds interleave the forms; times are the fastest of a round.

    python benchmarks/bench_moe.py [--rounds 5]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from machine import facts, save, spread

from weft.backends.onnx.export import build_model, serialize_model
from weft.backends.onnx.lowering import list_refusals
from weft.backends.runtime.ort.session import import_onnxruntime
from weft.backends.target import TARGETS
from weft.ir import Graph, Node, TensorType, ops
from weft.ir.recipes import Normal
from weft.ir.types import dtypes, sizes
from weft.passes import legalize

LAYERS = {  # experts, dim, hidden, k
    "8 experts, 2 active (Mixtral's proportions)": (8, 1024, 3584, 2),
    "128 experts, 8 active (Qwen3-MoE's)": (128, 512, 192, 8),
}
TOKENS = (1, 8, 64, 512)
FORMS = {"operator": "ort-cpu", "grouped": "onnx", "batched": "ort-cpu"}


def build_layer(experts: int, dim: int, hidden: int, k: int) -> Graph:
    """Build x and router logits [seq, ...] → y [seq, dim], with SwiGLU experts of random weights."""
    graph, seq = Graph("layer"), sizes.sym("seq")
    x = graph.add_input("x", TensorType(dtypes.f32, (seq, dim)))
    logits = graph.add_input("logits", TensorType(dtypes.f32, (seq, experts)))

    def weight(name: str, out: int, width: int) -> object:
        shape = (experts, out, width)
        return graph.add_param(name, TensorType(dtypes.f32, shape), Normal(shape, width**-0.5, name))

    gate, up, down = weight("gate", hidden, dim), weight("up", hidden, dim), weight("down", dim, hidden)
    graph.add_output("y", ops.moe(x, ops.route(logits, k=k), up, down, gate, active=k))
    return graph


def open_session(graph: Graph, form: str) -> Any:
    """Open a session of the layer in one of the forms."""
    target = TARGETS[FORMS[form]]

    def accepts(node: Node) -> list[str] | None:
        return ["batched"] if form == "batched" and node.op is ops.moe else list_refusals(node, target)

    lowered = graph.clone()
    legalize(lowered, accepts)
    ort = import_onnxruntime()
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1  # so that ratios depend less on other load
    return ort.InferenceSession(
        serialize_model(build_model(lowered, target, max_length=1)), options, ["CPUExecutionProvider"]
    )


def time_fastest(call: Callable[[], object], seconds: float = 0.4) -> float:
    """Return milliseconds of the fastest call within `seconds`, of three calls at least."""
    call()
    times, end = [], time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - start))
    return min(times)


def measure(shape: tuple[int, int, int, int], rounds: int) -> dict[str, dict[str, dict[str, float]]]:
    """Return milliseconds by number of tokens and form."""
    experts, dim, _, _ = shape
    graph, rng = build_layer(*shape), np.random.default_rng(0)
    sessions = {form: open_session(graph, form) for form in FORMS}
    feeds = {
        t: {
            "x": rng.standard_normal((t, dim), np.float32),
            "logits": rng.standard_normal((t, experts), np.float32),
        }
        for t in TOKENS
    }
    runs: dict[int, dict[str, list[float]]] = {t: {form: [] for form in FORMS} for t in TOKENS}
    for _ in range(rounds):
        for t in TOKENS:
            for form, s in sessions.items():
                runs[t][form].append(time_fastest(lambda s=s, t=t: s.run(None, feeds[t])))
    return {f"{t} tokens": {form: spread(times) for form, times in by.items()} for t, by in runs.items()}


def measure_by_active(rounds: int) -> dict[str, dict[str, float]]:
    """Return milliseconds of 64 tokens by the operator, by the number of active experts of 16."""
    rng, rows = np.random.default_rng(1), {}
    feeds = {"x": rng.standard_normal((64, 512), np.float32), "logits": rng.standard_normal((64, 16), np.float32)}
    for k in (1, 2, 4, 8, 16):
        s = open_session(build_layer(16, 512, 512, k), "operator")
        rows[f"{k} active"] = spread([time_fastest(lambda s=s: s.run(None, feeds)) for _ in range(rounds)])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    result = {
        "what": "milliseconds of one mixture-of-experts layer on one core, f32",
        "machine": facts("numpy", "onnxruntime"),
        "layers": {name: measure(shape, rounds) for name, shape in LAYERS.items()},
        "operator, 64 tokens, 16 experts": measure_by_active(rounds),
    }
    save("moe", result)


if __name__ == "__main__":
    main()
