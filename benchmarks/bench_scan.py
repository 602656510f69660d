"""Compare recurrences written with `scan` with the ops that compute the same: a prompt and training, on a CPU.

Layers of weft's target torch, fp32, one thread: gated linear attention with gates per head and per key (4 heads of 64),
Mamba (1,536 channels of 16 states), the delta rule (4 heads of 64). Written with `scan` they are a function of one
token; the generated code runs them in parallel, because the state is found to be affine. `loop` is the same code
without that: one token after the other. Times are CPU seconds; rounds interleave the contenders, and ratios are
computed within a round.

In ONNX Runtime, one thread on the CPU, models of target onnx: by the lowerings of the ops (`op`), and by the body of
the op, a Scan of its step (`scan`); a prompt of a quarter of the length, and a token.

    python benchmarks/bench_scan.py [--rounds 7] [--length 4096]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from machine import facts, save, spread

import weft
from weft import scan
from weft.backends.onnx.export import build_model, serialize_model
from weft.backends.onnx.lowering import list_refusals
from weft.backends.runtime.ort.session import import_onnxruntime
from weft.backends.target import TARGETS
from weft.ir import Graph, Node, TensorType, Value, dtypes, ops, sizes
from weft.passes import legalize

HEADS, DIM, CHANNELS, STATES = 4, 64, 1536, 16
WIDTH = HEADS * DIM
Layer = Callable[..., Value]
NAMED = (ops.gated_linear_attention, ops.gated_delta_rule, ops.selective_scan)


def heads(x: Value, *row: int) -> Value:
    return ops.reshape(x, shape=(*x.shape[:2], HEADS, *row))


def gated(q: Value, k: Value, v: Value, g: Value) -> Value:
    return ops.gated_linear_attention(q, k, v, g, heads=HEADS, groups=HEADS)


def gated_by_scan(q: Value, k: Value, v: Value, g: Value) -> Value:
    def step(s: Value, q: Value, k: Value, v: Value, g: Value) -> tuple[Value, Value]:
        s = ops.exp(ops.unsqueeze(g, axes=(3,))) * s + ops.unsqueeze(k, axes=(3,)) * ops.unsqueeze(v, axes=(2,))
        return s, ops.squeeze(ops.unsqueeze(q, axes=(2,)) @ s, axes=(2,))

    parts = [heads(x, DIM) for x in (q, k, v)]
    y = scan(step, *parts, heads(g, g.width // HEADS), state=(HEADS, DIM, DIM))
    return ops.reshape(y, shape=v.shape)


def mamba(x: Value, dt: Value, b: Value, c: Value, a: Value) -> Value:
    return ops.selective_scan(x, ops.softplus(dt), -ops.exp(a), b, c)


def mamba_by_scan(x: Value, dt: Value, b: Value, c: Value, a: Value) -> Value:
    rates = -ops.exp(a)

    def step(h: Value, x: Value, dt: Value, b: Value, c: Value) -> tuple[Value, Value]:
        h = ops.exp(ops.unsqueeze(dt, axes=(2,)) * rates) * h
        h = h + ops.unsqueeze(dt * x, axes=(2,)) * ops.unsqueeze(b, axes=(1,))
        return h, ops.sum(h * ops.unsqueeze(c, axes=(1,)), axes=(2,))

    y: Value = scan(step, x, ops.softplus(dt), b, c, state=(CHANNELS, STATES))
    return y


def delta_rule(q: Value, k: Value, v: Value, b: Value) -> Value:
    k = ops.reshape(ops.rms_norm(heads(k, DIM)) / DIM**0.5, shape=k.shape)
    return ops.gated_delta_rule(q, k, v, ops.sigmoid(b), heads=HEADS, groups=HEADS)


def delta_rule_by_scan(q: Value, k: Value, v: Value, b: Value) -> Value:
    def step(s: Value, q: Value, k: Value, v: Value, b: Value) -> tuple[Value, Value]:
        recalled = ops.squeeze(ops.unsqueeze(k, axes=(2,)) @ s, axes=(2,))
        change = ops.unsqueeze(b, axes=(2,)) * (v - recalled)
        s = s + ops.unsqueeze(k, axes=(3,)) * ops.unsqueeze(change, axes=(2,))
        return s, ops.squeeze(ops.unsqueeze(q, axes=(2,)) @ s, axes=(2,))

    parts = heads(q, DIM), ops.rms_norm(heads(k, DIM)) / DIM**0.5, heads(v, DIM)
    y = scan(step, *parts, ops.sigmoid(b), state=(HEADS, DIM, DIM))
    return ops.reshape(y, shape=v.shape)


CASES: dict[str, tuple[Layer, Layer, dict[str, tuple[int, ...]]]] = {
    "gates of heads": (gated, gated_by_scan, {"q": (WIDTH,), "k": (WIDTH,), "v": (WIDTH,), "g": (HEADS,)}),
    "gates of keys": (gated, gated_by_scan, {"q": (WIDTH,), "k": (WIDTH,), "v": (WIDTH,), "g": (WIDTH,)}),
    "mamba": (mamba, mamba_by_scan, {"x": (CHANNELS,), "dt": (CHANNELS,), "b": (STATES,), "c": (STATES,)}),
    "delta rule": (delta_rule, delta_rule_by_scan, {"q": (WIDTH,), "k": (WIDTH,), "v": (WIDTH,), "b": (HEADS,)}),
}


def module(layer: Layer, inputs: dict[str, tuple[int, ...]]) -> Any:
    """Return the generated PyTorch module of one layer."""
    return weft.torch(build_graph(layer, inputs))


def build_graph(layer: Layer, inputs: dict[str, tuple[int, ...]]) -> Graph:
    """Build the graph of one layer."""
    batch, seq = sizes.sym("batch"), sizes.sym("seq")
    with weft.building(Graph("layer")) as graph:
        values = [graph.add_input(n, TensorType(dtypes.f32, (batch, seq, *row))) for n, row in inputs.items()]
        if "dt" in inputs:
            values.append(graph.add_input("a", TensorType(dtypes.f32, (CHANNELS, STATES))))
        graph.add_output("y", layer(*values))
    return graph


def disable_parallel(net: Any) -> Any:
    """Return a function of the module `net` whose `scan` ignores the parallel form."""
    namespace = type(net).forward.__globals__
    copy = type(net).forward.__code__
    plain = {**namespace, "scan": lambda *args, many=None, size=0, **kwargs: namespace["scan"](*args, **kwargs)}
    forward = type(type(net).forward)(copy, plain)
    return lambda **feeds: forward(net, **feeds)


def seconds(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


def measure(name: str, length: int, rounds: int) -> dict[str, Any]:
    dedicated, written, inputs = CASES[name]
    rng = np.random.default_rng(0)
    feeds = {n: torch.from_numpy(rng.standard_normal((1, length, *row), np.float32)) for n, row in inputs.items()}
    if name == "mamba":
        feeds["a"] = torch.from_numpy(np.log(np.tile(np.arange(1, STATES + 1, dtype=np.float32), (CHANNELS, 1))))
    elif "g" in feeds:
        feeds["g"] = -torch.rand_like(feeds["g"])
    nets = {"op": module(dedicated, inputs), "scan": module(written, inputs)}
    runs: dict[str, Callable[..., Any]] = {**nets, "loop": disable_parallel(nets["scan"])}
    with torch.inference_mode():
        expected = runs["op"](**feeds)
        error = {n: float((run(**feeds) - expected).abs().max() / expected.abs().max()) for n, run in runs.items()}
    learned = {n: x.clone().requires_grad_() for n, x in feeds.items()}

    def prompt(run: Callable[..., Any]) -> None:
        with torch.inference_mode():
            run(**feeds)

    def training(run: Callable[..., Any]) -> None:
        run(**learned).sum().backward()

    samples: dict[str, dict[str, list[float]]] = {"prompt": {}, "training": {}}
    for r in range(rounds + 1):  # the first warms up
        for what, work in (("prompt", prompt), ("training", training)):
            for contender in list(runs)[:: 1 if r % 2 else -1]:
                elapsed = seconds(lambda work=work, run=runs[contender]: work(run))
                if r:
                    samples[what].setdefault(contender, []).append(elapsed)
                    print(f"{name}, round {r}, {what}, {contender}: {elapsed:.3f} s", flush=True)
    result: dict[str, Any] = {"largest_error": {n: e for n, e in error.items() if n != "op"}}
    for what, times in samples.items():
        result[what] = {f"{n}_seconds": spread(v, 4) for n, v in times.items()}
        for n in ("scan", "loop"):
            ratios = [a / b for a, b in zip(times[n], times["op"], strict=True)]
            result[what][f"{n}_over_op"] = spread(ratios)
    return result


def measure_onnx(name: str, length: int, rounds: int) -> dict[str, Any]:
    layer, _, inputs = CASES[name]
    ort = import_onnxruntime()
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    target, sessions = TARGETS["onnx"], {}
    for contender in ("op", "scan"):
        graph = build_graph(layer, inputs)

        def accepts(node: Node, by_step: bool = contender == "scan") -> list[str] | None:
            return ["measure its body"] if by_step and node.op in NAMED else list_refusals(node, target)

        legalize(graph, accepts)
        model = serialize_model(build_model(graph, target, max_length=length))
        sessions[contender] = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    rng, result = np.random.default_rng(0), dict[str, Any]()
    for what, tokens in (("prompt", length // 4), ("token", 1)):
        feeds = {n: rng.standard_normal((1, tokens, *row), np.float32) for n, row in inputs.items()}
        if name == "mamba":
            feeds["a"] = np.log(np.tile(np.arange(1, STATES + 1, dtype=np.float32), (CHANNELS, 1)))
        elif "g" in feeds:
            feeds["g"] = -np.abs(feeds["g"])
        times: dict[str, list[float]] = {n: [] for n in sessions}
        for r in range(rounds + 1):  # the first warms up
            for contender in list(sessions)[:: 1 if r % 2 else -1]:
                start = time.perf_counter()
                for _ in range(50 if tokens == 1 else 1):
                    sessions[contender].run(None, feeds)
                if r:
                    times[contender].append(time.perf_counter() - start)
        ratios = [a / b for a, b in zip(times["scan"], times["op"], strict=True)]
        result[what] = {**{f"{n}_seconds": spread(v, 4) for n, v in times.items()}, "scan_over_op": spread(ratios)}
        print(f"{name} in ONNX Runtime, {what}: {result[what]['scan_over_op']['median']}", flush=True)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--length", type=int, default=4096)
    args = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {
        "what": f"layers of {WIDTH} channels (Mamba: {CHANNELS}) on {args.length} tokens, fp32, CPU time of one thread",
        "machine": facts("torch", "onnxruntime"),
    }
    samples = {name: measure(name, args.length, args.rounds) for name in CASES}
    save("scan", result | samples | {"onnx": {name: measure_onnx(name, args.length, args.rounds) for name in CASES}})


if __name__ == "__main__":
    main()
