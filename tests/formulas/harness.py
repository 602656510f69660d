"""Modules run on random numbers by the interpreter, ONNX Runtime and PyTorch, for formulas to be held against."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnxruntime as ort

from weft.backends.onnx.export import build, in_memory
from weft.backends.onnx.lowering import refusals
from weft.backends.target import TARGETS
from weft.frontends.dsl import trace
from weft.ir import Graph, MemoryReader, TensorType, interpret
from weft.ir.recipes import Source
from weft.ir.types import dtypes, sizes
from weft.passes import legalize

from ..backends.torch.generated import call, tensors
from ..lowered import build_module

Array = np.ndarray[Any, Any]
Weights = dict[str, Array]
RUNNERS = ("interpreter", "onnx", "ort-cpu", "torch")
BATCH = 2


@dataclass(frozen=True)
class Row:
    """`module` means `formula`: of one sequence x [length, dim] and the weights, its output [length, dim].

    `positions` are where the sequence stands, 0, 1, … by default; `extra` are shapes of further inputs of normal
    numbers, by name, which the formula gets by keyword; `std` is the deviation of the weights. Not `exact` is what is
    computed from numbers that are stored in float32.
    """

    module: Any
    formula: Callable[..., Array]
    dim: int = 16
    length: int = 11
    positions: Array | None = None
    extra: dict[str, tuple[int, ...]] = field(default_factory=dict)
    std: float = 0.5
    exact: bool = True


def check(row: Row, runner: str) -> None:
    """The module, run by `runner`, equals the formula on every sequence of a batch."""
    rng = np.random.default_rng(7)
    graph = trace(row.module, {"x": TensorType(dtypes.f32, (sizes.sym("batch"), sizes.sym("seq"), row.dim))})
    weights = randomize(graph, rng, row.std)
    at = np.arange(row.length) if row.positions is None else row.positions
    drawn = {name: rng.standard_normal((BATCH, row.length, *shape)) for name, shape in row.extra.items()}
    x = rng.standard_normal((BATCH, row.length, row.dim)).astype(np.float32).astype(np.float64)
    feeds = {"x": x, "position_ids": np.tile(at, (BATCH, 1)), **drawn}
    more = [{name: array[b] for name, array in drawn.items()} for b in range(BATCH)]
    want = np.stack([row.formula(x[b], weights, **more[b]) for b in range(BATCH)])
    close(run(graph, feeds, runner)["output"], want, row.exact and runner == "interpreter")


def close(got: Array, want: Array, exact: bool) -> None:
    """Equal up to the roundings of float64, or of float32 if not `exact`, through sums of some dozen terms."""
    eps = np.finfo(np.float64 if exact else np.float32).eps
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=0, atol=256 * eps * max(1.0, np.abs(want).max()))


def randomize(graph: Graph, rng: np.random.Generator, std: float = 0.5) -> Weights:
    """Give every learned parameter random numbers; returns them in float64."""
    weights = {}
    for name, param in graph.params.items():
        if not param.recipe.constant:
            weights[name] = (std * rng.standard_normal(param.shape)).astype(np.float32)
            param.recipe = Source(name)
    graph.reader = MemoryReader(weights)
    return {name: array.astype(np.float64) for name, array in weights.items()}


def run(graph: Graph, feeds: dict[str, Array], runner: str) -> dict[str, Array]:
    """The outputs of `graph` by name: from its float64 meaning, from a generated module, or from ONNX Runtime after
    lowering to a target."""
    feeds = {name: array for name, array in feeds.items() if name in graph.inputs}
    if runner == "interpreter":
        return interpret(graph, feeds)
    if runner == "torch":
        made = call(build_module(graph).eval(), tensors(feeds))
        return dict(zip(graph.outputs, (tensor.numpy() for tensor in made), strict=True))
    target = TARGETS[runner]
    lowered = graph.clone()
    legalize(lowered, lambda node: refusals(node, target))
    length = 1 + max((int(a.max()) for a in feeds.values() if a.dtype.kind == "i"), default=0)
    session = ort.InferenceSession(in_memory(build(lowered, target, length)), providers=["CPUExecutionProvider"])
    narrow = {n: a.astype(np.float32) if a.dtype.kind == "f" else a.astype(np.int64) for n, a in feeds.items()}
    used = {i.name for i in session.get_inputs()}
    got = session.run(None, {n: a for n, a in narrow.items() if n in used})
    return dict(zip((o.name for o in session.get_outputs()), got, strict=True))
