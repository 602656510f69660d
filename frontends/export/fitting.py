"""Identify the family of a graph: candidates are tried until one's graph is the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from weft.backends.safetensors import STORED
from weft.ir import ops
from weft.ir.errors import WeftError
from weft.ir.graph import Graph, Param
from weft.ir.recipes import RANDOM, Full, Scale, Source
from weft.ir.types import dtypes
from weft.ir.types.dtypes import DType
from weft.passes.analysis.projections import projections
from weft.passes.edits.edit import reweigh
from weft.passes.fitting.matrices import Matrix, matrices
from weft.passes.forms import canonical

from ..formats.weft.model_folder import exact
from ..model import Model
from ..models.families import Loaded
from .inversion import Made, Shape, inverted
from .matching import Match, match, require


@dataclass(frozen=True)
class Candidate:
    """The model that a `family` makes of a `config`; the `shapes` of its tensors where they are known, and tensors that
    belong to it whatever the graph's parameters are."""

    family: str
    config: Mapping[str, Any]
    loaded: Loaded
    shapes: Mapping[str, Shape] = field(default_factory=dict)
    besides: Mapping[str, Made] = field(default_factory=dict)

    def layout(self, key: str, count: int) -> Shape | None:
        """The shape of a tensor that is reshaped when it is read: norms have a row for each head."""
        head = self.loaded.settings.head_size
        return (count // head, head) if "norm" in key else None


@dataclass(frozen=True)
class Fit:
    """A family's model that computes what a graph does: its config, and its checkpoint's tensors by name.

    `kinds` are those of matrices that products multiply by or lookups read (`weft.passes.fitting.matrices`), by name.
    """

    family: str
    config: Mapping[str, Any]
    tensors: Mapping[str, Made]
    kinds: Mapping[str, str]


def fit(model: Model, candidates: Callable[[Graph], Iterator[Candidate]], kind: str) -> Fit:
    """The first of the candidates for the canonical graph of `model` whose graph is the same; `kind` is what they are
    called.

    Raises:
        WeftError: naming the nearest and the first difference.
    """
    require(model.graph)
    plain = canonical(model.graph, ("sentence_embedding",) if _pooled_elsewhere(model.graph) else ())
    best, told = (math.inf, math.inf), "weft knows no config that says what it is"
    for graph in (plain, *_rescaled(plain)):
        try:
            for candidate in candidates(graph):
                theirs = canonical(candidate.loaded.graph)
                found = match(graph, theirs)
                if not found.differences:
                    tensors = tensors_of(theirs, found, candidate)
                    kinds = _kinds(candidate.loaded.graph)
                    return Fit(candidate.family, candidate.config, {**tensors, **candidate.besides}, kinds)
                missed = float(len(theirs) - found.nodes), float(len(found.differences))
                if missed < best:
                    best, parted = missed, found.differences[0]
                    told = f"the nearest is {candidate.family}, which has {parted.theirs} at {parted.at}"
                    told += f" where the graph has {parted.ours}"
        except WeftError as e:  # it is like no graph of theirs
            told = str(e) if math.inf in best else told
    raise WeftError(f"{model.spec}: no {kind} expresses the graph: {told}")


def _pooled_elsewhere(graph: Graph) -> bool:
    """Return whether modules.json, not config.json, describes how `graph` makes its output sentence_embedding."""
    modules = (graph.meta.get("sentence") or {}).get("modules", [{"type": "Pooling"}] * ("pooling" in graph.meta))
    return "sentence_embedding" in graph.outputs and any(module["type"] == "Pooling" for module in modules)


def _kinds(graph: Graph) -> dict[str, str]:
    """The kinds of the matrices of `graph`, by the tensors that they are read from."""
    found = [(param, matrix) for param, matrix in matrices(graph).items() if isinstance(matrix, Matrix)]
    return {key: matrix.kind for param, matrix in found for key in param.recipe.sources()}


def tensors_of(theirs: Graph, found: Match, candidate: Candidate) -> dict[str, Made]:
    """The tensors of the candidate's checkpoint, over the parameters that those of its graph `theirs` were found to be.

    Raises:
        WeftError: if a layout of the family has no inverse.
    """
    wanted = []
    for param in theirs.params.values():
        if param.name in found.params:
            shape, value = param.type.concrete({}), found.params[param.name]
            recipe = value.recipe if isinstance(value, Param) else Full(value, shape)
            wanted.append((param.recipe, Made(recipe, shape)))
    return inverted(wanted, candidate.layout, candidate.shapes)


def exact_dtype(graph: Graph, tensors: Iterable[Made]) -> DType:
    """The dtype that holds `tensors`, made of the parameters of `graph`, without rounding: the one that the graph was
    cast to, or the one that the checkpoint has where its numbers only moved, else f32."""
    own = {param.type.dtype for param in graph.params.values() if param.recipe.has(Source, *RANDOM)}
    if len(own) == 1 and own < set(STORED) and dtypes.f32 not in own:
        return own.pop()
    kinds = {exact(made.recipe, dtypes.f32, graph.reader) for made in tensors}
    return kinds.pop() if len(kinds) == 1 else dtypes.f32


def _rescaled(graph: Graph) -> Iterator[Graph]:
    """`graph` with the scales of attention in the queries' weights, where they can go and are not 1/√d already."""
    copy = graph.clone()
    changed = False
    for node in list(copy.nodes):
        scale = node.attrs.get("scale") if node.op is ops.attention else None
        found = projections(node) if scale is not None else "it has the usual scale"
        if scale is None or isinstance(found, str) or not found.q.plain:
            continue
        factor, bias = scale * found.head_dim**0.5, found.q.bias
        scaled = None if bias is None else Scale(bias.recipe, factor)
        reweigh(found.q.linear, Scale(found.q.weight.recipe, factor), scaled)
        node.attrs["scale"], changed = None, True
    if changed:
        yield copy
