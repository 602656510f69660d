"""`weft.initialize`: random weights of an architecture by a scheme, before training; `weft.learning_rates` of muP."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

from weft.ir import Graph, Node, ops
from weft.ir.errors import WeftError
from weft.ir.recipes import Normal
from weft.passes.analysis.residual import find_streams, require_streams
from weft.passes.fitting.matrices import Matrix, find_matrices

from ...dsl.build import STD
from ...model import Model, SourceLike
from .source.sources import load_source

Scheme = Literal["plain", "depth", "fan-in", "mup"]
SCHEMES: tuple[Scheme, ...] = ("plain", "depth", "fan-in", "mup")


def initialize(
    source: SourceLike, scheme: Scheme | str = "depth", std: float = 0.02, width: int = 256, seed: int | None = None
) -> Model:
    """Return the model of `source` with matrices initialized from normal distributions by the `scheme`.

    - ``plain``: `std` for all (BERT, Llama)
    - ``depth``: `std`, and `std`/√n for the n matrices that write into the residual stream (GPT-2)
    - ``fan-in``: 1/√inputs (LeCun 1998), `std` for lookup tables
    - ``mup``: at r times the `width`, `std` for tables, `std`/√r for hidden matrices and `std`/r for the head (Yang
      2021, arXiv 2203.03466): hyperparameters tuned at `width` transfer to models with more heads of the same size and
      wider feed-forwards, together with `learning_rates`

    Other parameters keep their initialization: norms, biases, routers, and matrices that the source does not declare as
    N(0, 0.02²).

    Raises:
        WeftError: if the scheme is unknown, a number is not positive, the weights are a checkpoint's, or no matrix is
            N(0, 0.02²). For mup also if the head is tied to the embedding, or there is no residual stream.
    """
    model = load_source(source, seed)
    if scheme not in SCHEMES:
        raise WeftError(f"unknown scheme {scheme!r} of initialization; known are {', '.join(SCHEMES)}")
    if not std > 0:
        raise WeftError(f"std={std} must be positive")
    if not model.random_init:
        raise WeftError(f"initialize needs an architecture without a checkpoint, and {model.description} has one")
    graph = model.graph.clone()
    recipes = [(matrix, matrix.param.recipe) for matrix in _list_matrices(graph)]
    initialized = [(m, recipe) for m, recipe in recipes if isinstance(recipe, Normal) and recipe.std == STD]
    residual_writers = _find_residual_writers(graph)
    if not initialized:
        raise WeftError(f"{model.description}: no matrix is initialized as N(0, 0.02²), so a scheme changes nothing")
    ratio = _compute_width_ratio(graph, width) if scheme == "mup" else 1.0
    for matrix, recipe in initialized:
        if scheme == "plain" or (_is_table(matrix) and scheme != "depth"):
            new = std
        elif scheme == "depth":
            new = std / math.sqrt(len(residual_writers)) if matrix.param.name in residual_writers else std
        elif scheme == "fan-in":
            new = matrix.param.type.concrete({})[-1] ** -0.5
        else:
            new = std / (ratio if matrix.kind == "head" else math.sqrt(ratio))
        matrix.param.recipe = replace(recipe, std=new)
    return replace(model, graph=graph)


def learning_rates(model: Model | Graph, width: int = 256) -> dict[str, float]:
    """Return muP's factor of Adam's learning rate, tuned at `width`, for each parameter, keyed by name.

    The factor at r times that width is 1/r for hidden matrices and the head, and 1 for tables, norms and biases (Yang
    2021, arXiv 2203.03466). ``module.named_parameters()`` of `weft.torch` has the same names.

    Raises:
        WeftError: if `width` is not positive, the head is tied to the embedding, or the graph has no residual stream.
    """
    graph = model if isinstance(model, Graph) else model.graph
    ratio = _compute_width_ratio(graph, width)
    hidden = {matrix.param.name for matrix in _list_matrices(graph) if not _is_table(matrix)}
    return {name: 1 / ratio if name in hidden else 1.0 for name in graph.params}


def _list_matrices(graph: Graph) -> list[Matrix]:
    return [matrix for matrix in find_matrices(graph).values() if isinstance(matrix, Matrix)]


def _is_table(matrix: Matrix) -> bool:
    return any(node.op is ops.embedding for node in matrix.readers)


def _compute_width_ratio(graph: Graph, width: int) -> float:
    """Return the width of the residual stream divided by `width`, for muP."""
    if not width > 0:
        raise WeftError(f"width={width} must be positive")
    if tied := next((m for m in _list_matrices(graph) if m.kind == "head" and _is_table(m)), None):
        raise WeftError(
            f"{graph.name}: {tied.param.name} is both the embedding and the head, which muP initializes differently: "
            "set tie_embeddings=False"
        )
    return require_streams(graph, "muP")[0].width / width


def _find_residual_writers(graph: Graph) -> set[str]:
    """Return the names of the matrices whose products are added to a residual stream, except tables."""
    nodes = [node for stream in find_streams(graph) for node in stream.writers if isinstance(node, Node)]
    names = {ops.linear: "weight", ops.moe: "down"}
    written = (node.operand(names[node.op]) for node in nodes if node.op in names)
    return {value.name for value in written if value is not None}
