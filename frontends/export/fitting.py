"""Identification of a graph's family: candidates are tried until the graph of one is the same."""

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
from weft.passes.analysis.projections import find_projections
from weft.passes.edits.edit import replace_weights
from weft.passes.fitting.matrices import Matrix, find_matrices
from weft.passes.forms import canonicalize

from ..formats.weft.model_folder import find_exact_dtype
from ..model import Model
from ..models.families import LoadedModel
from .inversion import Shape, ShapedRecipe, invert_recipes
from .matching import GraphMatch, check_exportable, match_graphs


@dataclass(frozen=True)
class Candidate:
    """The model that a `family` builds from a `config`. `shapes`: the shapes of its tensors, if known. `extra_tensors`:
    further tensors of its checkpoint."""

    family: str
    config: Mapping[str, Any]
    loaded: LoadedModel
    shapes: Mapping[str, Shape] = field(default_factory=dict)
    extra_tensors: Mapping[str, ShapedRecipe] = field(default_factory=dict)

    def layout(self, key: str, count: int) -> Shape | None:
        """Return the shape of the tensor `key` of `count` elements, which the family reads reshaped: [heads, head size]
        if "norm" is in `key`, else None."""
        head = self.loaded.settings.head_size
        return (count // head, head) if "norm" in key else None


@dataclass(frozen=True)
class FamilyFit:
    """A family's model that computes the same as a graph: its config, and its checkpoint's tensors, keyed by name.
    `kinds`: tensor name → use of the matrix in products and lookups (`weft.passes.fitting.matrices`)."""

    family: str
    config: Mapping[str, Any]
    tensors: Mapping[str, ShapedRecipe]
    kinds: Mapping[str, str]


def fit_family(model: Model, candidates: Callable[[Graph], Iterator[Candidate]], kind: str) -> FamilyFit:
    """Return the first candidate whose graph equals the canonical graph of `model`.

    `candidates` yields the candidates for a graph; error messages call them `kind`, such as "Hugging Face family". If
    none is equal, the graph is tried once more with unusual attention scales folded into query weights.

    Raises:
        WeftError: if the graph cannot be exported (`check_exportable`), or no candidate's graph is equal; then it names
            the nearest candidate and the first difference.
    """
    check_exportable(model.graph)
    plain = canonicalize(model.graph, ("sentence_embedding",) if _is_pooled_by_modules(model.graph) else ())
    fewest_faults, fault = (math.inf, math.inf), "no known config is similar"
    for graph in (plain, *_fold_scales(plain)):
        try:
            for candidate in candidates(graph):
                reference = canonicalize(candidate.loaded.graph)
                result = match_graphs(graph, reference)
                if not result.differences:
                    tensors = invert_match(reference, result, candidate)
                    kinds = _matrix_kinds(candidate.loaded.graph)
                    return FamilyFit(candidate.family, candidate.config, {**tensors, **candidate.extra_tensors}, kinds)
                faults = float(len(reference) - result.nodes), float(len(result.differences))
                if faults < fewest_faults:
                    fewest_faults, difference = faults, result.differences[0]
                    fault = f"the nearest, {candidate.family}, differs at {difference.at}: it has {difference.theirs}, "
                    fault += f"the graph {difference.ours}"
        except WeftError as e:  # it resembles none of the candidates' graphs
            fault = str(e) if math.inf in fewest_faults else fault
    raise WeftError(f"{model.spec}: no {kind} expresses the graph: {fault}")


def _is_pooled_by_modules(graph: Graph) -> bool:
    """Return whether modules.json, not config.json, describes how `graph` computes its output sentence_embedding."""
    modules = (graph.meta.get("sentence") or {}).get("modules", [{"type": "Pooling"}] * ("pooling" in graph.meta))
    return "sentence_embedding" in graph.outputs and any(module["type"] == "Pooling" for module in modules)


def _matrix_kinds(graph: Graph) -> dict[str, str]:
    read = [(param, matrix) for param, matrix in find_matrices(graph).items() if isinstance(matrix, Matrix)]
    return {key: matrix.kind for param, matrix in read for key in param.recipe.sources()}


def invert_match(reference: Graph, result: GraphMatch, candidate: Candidate) -> dict[str, ShapedRecipe]:
    """Return the tensors of the candidate's checkpoint as recipes over the parameters that were matched to them.

    `reference` is the candidate's graph, `result` its match with the exported graph.

    Raises:
        WeftError: if a layout of the family has no inverse.
    """
    equations = []
    for param in reference.params.values():
        if param.name in result.params:
            shape, value = param.type.concrete({}), result.params[param.name]
            recipe = value.recipe if isinstance(value, Param) else Full(value, shape)
            equations.append((param.recipe, ShapedRecipe(recipe, shape)))
    return invert_recipes(equations, candidate.layout, candidate.shapes)


def fit_dtype(graph: Graph, tensors: Iterable[ShapedRecipe]) -> DType:
    """Return a dtype that represents `tensors`, recipes over parameters of `graph`, exactly: f16 or bf16 if `graph` was
    cast to it; else the checkpoint's dtype, if it has one and the recipes only move elements; else f32."""
    cast_dtypes = {param.type.dtype for param in graph.params.values() if param.recipe.has(Source, *RANDOM)}
    if len(cast_dtypes) == 1 and cast_dtypes < set(STORED) and dtypes.f32 not in cast_dtypes:
        return cast_dtypes.pop()
    kinds = {find_exact_dtype(tensor.recipe, dtypes.f32, graph.reader) for tensor in tensors}
    return kinds.pop() if len(kinds) == 1 else dtypes.f32


def _fold_scales(graph: Graph) -> Iterator[Graph]:
    """Yield `graph` with unusual attention scales folded into query weights; nothing if none can be folded."""
    copy = graph.clone()
    changed = False
    for node in list(copy.nodes):
        scale = node.attrs.get("scale") if node.op is ops.attention else None
        parts = find_projections(node) if scale is not None else "it has the usual scale"
        if scale is None or isinstance(parts, str) or not parts.q.has_plain_path:
            continue
        factor, bias = scale * parts.head_dim**0.5, parts.q.bias
        scaled = None if bias is None else Scale(bias.recipe, factor)
        replace_weights(parts.q.linear, Scale(parts.q.weight.recipe, factor), scaled)
        node.attrs["scale"], changed = None, True
    if changed:
        yield copy
