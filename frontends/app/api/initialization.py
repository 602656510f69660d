"""`weft.initialize`: random weights of an architecture by a scheme, before training; `weft.learning_rates` of muP."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

from weft.ir import Graph, Node, ops
from weft.ir.errors import WeftError
from weft.ir.recipes import Normal
from weft.passes.analysis.residual import residual_streams, streams
from weft.passes.fitting.matrices import Matrix, matrices

from ...dsl.build import STD
from ...model import Model, SourceLike
from .source.sources import load_source

Scheme = Literal["plain", "depth", "fan-in", "mup"]
SCHEMES: tuple[Scheme, ...] = ("plain", "depth", "fan-in", "mup")


def initialize(
    source: SourceLike, scheme: Scheme = "depth", std: float = 0.02, width: int = 256, seed: int | None = None
) -> Model:
    """Return the model of `source` whose matrices begin as normal numbers of the deviation that `scheme` says.

    - ``plain``: `std` for all (BERT, Llama)
    - ``depth``: `std`, and `std`/√n for matrices that write into the residual stream, n being how many do (GPT-2)
    - ``fan-in``: 1/√inputs (LeCun 1998), `std` for tables that are looked up
    - ``mup``: at r times the `width`, `std` for tables, `std`/√r inside and `std`/r for the head (Yang 2021, arXiv
      2203.03466): what was tuned for a model of `width` holds for one of more heads, as large as before, and wider
      feed-forwards, together with `learning_rates`

    What is no matrix of normal numbers keeps its values: norms, biases, routers; so do matrices that a module begins
    with another deviation than N(0, 0.02²).

    Raises:
        WeftError: if the scheme is unknown, a number is not positive, the weights are a checkpoint's or begin otherwise
            already, or for mup if the head is tied to the embedding.
    """
    model = load_source(source, seed)
    if scheme not in SCHEMES:
        raise WeftError(f"unknown scheme {scheme!r} of initialization; known are {', '.join(SCHEMES)}")
    if not std > 0:
        raise WeftError(f"std={std} must be positive")
    if not model.random_init:
        raise WeftError(f"{model.description} has the weights of a checkpoint: only an architecture is initialized")
    graph = model.graph.clone()
    found, writing = _drawn(graph), _writing(graph)
    if not found:
        raise WeftError(f"{model.description}: no matrix begins as N(0, 0.02²), so there is none to begin otherwise")
    wider = _wider(graph, width) if scheme == "mup" else 1.0
    for matrix in found:
        recipe, inputs = matrix.param.recipe, matrix.param.type.concrete({})[-1]
        assert isinstance(recipe, Normal)
        if scheme == "plain" or (_is_table(matrix) and scheme != "depth"):
            new = std
        elif scheme == "depth":
            new = std / math.sqrt(len(writing)) if matrix.param.name in writing else std
        elif scheme == "fan-in":
            new = inputs**-0.5
        else:
            new = std / (wider if matrix.kind == "head" else math.sqrt(wider))
        matrix.param.recipe = replace(recipe, std=new)
    return replace(model, graph=graph)


def learning_rates(model: Model | Graph, width: int = 256) -> dict[str, float]:
    """Return by parameter what the learning rate of Adam is multiplied with under muP, for a model tuned at `width`.

    At r times the width it is 1/r for matrices inside and for the head, and 1 for tables, norms and biases (Yang 2021,
    arXiv 2203.03466). ``module.named_parameters()`` of `weft.torch` has the same names.

    Raises:
        WeftError: if `width` is not positive, the head is tied to the embedding, or nothing adds to a residual stream.
    """
    graph = model if isinstance(model, Graph) else model.graph
    wider = _wider(graph, width)
    inside = {matrix.param.name for matrix in _matrices(graph) if not _is_table(matrix)}
    return {name: 1 / wider if name in inside else 1.0 for name in graph.params}


def _matrices(graph: Graph) -> list[Matrix]:
    return [matrix for matrix in matrices(graph).values() if isinstance(matrix, Matrix)]


def _drawn(graph: Graph) -> list[Matrix]:
    found = [(matrix, matrix.param.recipe) for matrix in _matrices(graph)]
    return [matrix for matrix, recipe in found if isinstance(recipe, Normal) and recipe.std == STD]


def _is_table(matrix: Matrix) -> bool:
    return any(node.op is ops.embedding for node in matrix.readers)


def _wider(graph: Graph, width: int) -> float:
    """The width of the residual stream over `width`, for muP."""
    if not width > 0:
        raise WeftError(f"width={width} must be positive")
    if tied := next((m for m in _matrices(graph) if m.kind == "head" and _is_table(m)), None):
        raise WeftError(
            f"{graph.name}: {tied.param.name} is both looked up and the head's weight, which muP treats differently: "
            "say tie_embeddings=False"
        )
    return residual_streams(graph, "muP")[0].width / width


def _writing(graph: Graph) -> set[str]:
    """The matrices that write into a residual stream, but for tables."""
    nodes = [node for stream in streams(graph) for node in stream.writers if isinstance(node, Node)]
    names = {ops.linear: "weight", ops.moe: "down"}
    found = (node.operand(names[node.op]) for node in nodes if node.op in names)
    return {value.name for value in found if value is not None}
