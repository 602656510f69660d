"""Modules run on random values by the interpreter, ONNX Runtime and PyTorch, and compared with float64 references."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnxruntime as ort

from weft.backends.onnx.export import build_model, serialize_model
from weft.backends.onnx.lowering import list_refusals
from weft.backends.target import TARGETS
from weft.frontends.dsl import trace
from weft.ir import Graph, MemoryReader, TensorType, interpret, parse, verify
from weft.ir.recipes import Source
from weft.ir.types import dtypes, sizes
from weft.passes import legalize

from ...backends.torch.generated import call, tensors
from ...lowered import build_module
from .formulas.elementary import Array, Formula, Weights

RUNNERS = ("interpreter", "onnx", "ort-cpu", "torch")
BATCH, DIM = 2, 16
X = TensorType(dtypes.f32, (sizes.sym("batch"), sizes.sym("seq"), DIM))


@dataclass(frozen=True)
class Row:
    """`module` computes `formula` for every sequence x [length, dim].

    `positions` of the tokens are 0, 1, … by default. `extra` are shapes of further inputs of normal values, by name,
    which the formula gets by keyword. `std` is the deviation of the weights. A row that is not `exact` computes from
    values stored in float32.
    """

    module: Any
    formula: Formula
    dim: int = DIM
    length: int = 11
    positions: Array | None = None
    extra: dict[str, tuple[int, ...]] = field(default_factory=dict)
    std: float = 0.5
    exact: bool = True


def check(row: Row, runner: str = "interpreter") -> None:
    """Check that the module, run by `runner`, equals the formula on every sequence of a batch."""
    rng = np.random.default_rng(7)
    graph = trace_checked(row.module, row.dim)
    weights = randomize(graph, rng, row.std)
    positions = np.arange(row.length) if row.positions is None else row.positions
    extra = {name: rng.standard_normal((BATCH, row.length, *shape)) for name, shape in row.extra.items()}
    x = rng.standard_normal((BATCH, row.length, row.dim)).astype(np.float32).astype(np.float64)
    got = run(graph, {"x": x, "position_ids": np.tile(positions, (BATCH, 1)), **extra}, runner)["output"]
    want = [row.formula(x[b], weights, **{name: array[b] for name, array in extra.items()}) for b in range(BATCH)]
    close(got, np.stack(want), row.exact and runner == "interpreter")


def trace_checked(module: Any, dim: int = DIM) -> Graph:
    """Return the graph of `module` for x [batch, seq, dim], verified and equal to its text form read back."""
    graph = trace(module, {"x": X.with_shape(*X.shape[:2], dim)})
    verify(graph, recipes=True)
    assert parse(str(graph)) == graph
    return graph


def outputs(module: Any, rng: np.random.Generator, length: int = 6) -> tuple[Array, dict[str, Array], Weights]:
    """Return x [2, length, 16], the outputs of `module` for it by the interpreter, and its weights."""
    graph = trace_checked(module)
    weights, x = randomize(graph, rng, 1.0), rng.standard_normal((BATCH, length, DIM))
    return x, run(graph, {"x": x, "position_ids": np.tile(np.arange(length), (BATCH, 1))}), weights


def close(got: Array, want: Array, exact: bool = True, factor: float = 1) -> None:
    """Check equality up to the roundings of float64, or float32 if not `exact`, through sums of some dozen terms."""
    tolerance = 64 * np.finfo(np.float64).eps if exact else 256 * np.finfo(np.float32).eps
    assert got.shape == want.shape
    np.testing.assert_allclose(got, want, rtol=0, atol=factor * tolerance * max(1.0, np.abs(want).max()))


def randomize(graph: Graph, rng: np.random.Generator, std: float = 0.5) -> Weights:
    """Give every learned parameter random values, and return them in float64."""
    weights = {}
    for name, param in graph.params.items():
        if not param.recipe.is_constant:
            weights[name] = (std * rng.standard_normal(param.shape)).astype(np.float32)
            param.recipe = Source(name)
    graph.reader = MemoryReader(weights)
    return {name: array.astype(np.float64) for name, array in weights.items()}


def run(graph: Graph, feeds: dict[str, Array], runner: str = "interpreter") -> dict[str, Array]:
    """Return the outputs of `graph` by name, from the interpreter, a generated module or ONNX Runtime."""
    feeds = {name: array for name, array in feeds.items() if name in graph.inputs}
    if runner == "interpreter":
        return interpret(graph, feeds)
    if runner == "torch":
        values = call(build_module(graph).eval(), tensors(feeds))
        return dict(zip(graph.outputs, (tensor.numpy() for tensor in values), strict=True))
    target = TARGETS[runner]
    lowered = graph.clone()
    legalize(lowered, lambda node: list_refusals(node, target))
    length = 1 + max((int(a.max()) for a in feeds.values() if a.dtype.kind == "i"), default=0)
    session = ort.InferenceSession(
        serialize_model(build_model(lowered, target, length)), providers=["CPUExecutionProvider"]
    )
    narrow = {n: a.astype(np.float32) if a.dtype.kind == "f" else a.astype(np.int64) for n, a in feeds.items()}
    used = {i.name for i in session.get_inputs()}
    values = session.run(None, {n: a for n, a in narrow.items() if n in used})
    return dict(zip((o.name for o in session.get_outputs()), values, strict=True))
