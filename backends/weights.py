"""Statistics of the weights that a target stores: bytes by kind of weight, and average bits per weight."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weft.ir.graph import Graph, Param
from weft.ir.recipes import Recipe
from weft.ir.types.dtypes import DType
from weft.passes.fitting.matrices import Matrix, find_matrices

# Kinds of weights by their names in `find_matrices`. A tied table is an output head.
KINDS = {"linear": "linear maps", "experts": "experts", "head": "output head", "table": "embedding"}
OTHER = "norms and others"
LAYERED = (KINDS["linear"], KINDS["experts"])  # kinds that belong to layers
_LAYER = re.compile(r"(?:[^.]+\.)*?[^.]+\.\d+(?=\.)")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a compiled folder: the result of `recipe`, cast to `dtype`."""

    recipe: Recipe
    dtype: DType
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.dtype.bytes_for(math.prod(self.shape))


def summarize_weights(graph: Graph, tensors: Mapping[str, StoredTensor]) -> dict[str, Any]:
    """Return the manifest's entry about the weights of `graph`. `tensors` are the stored tensors, keyed by name.

    - "kinds": dict from kind of weight to {"numbers": count of parameters, "bytes": with scales and zero points}
    - "layers": dict from layer to the average bits per parameter of its linear layers and experts
    """
    by_param, used = find_matrices(graph), [param for param in graph.params.values() if param.uses]
    counts: dict[str, int] = {}
    layers: dict[str, list[int]] = {}
    for param in used:
        kind, elements = _name_kind(by_param.get(param)), math.prod(param.type.concrete({}))
        counts[kind] = counts.get(kind, 0) + elements
        if kind in LAYERED and (layer := find_layer(param.name)):
            layers.setdefault(layer, [0, 0])[0] += elements
    stored_bytes = dict.fromkeys(counts, 0)
    # Of parameters with one stem, the first; a full name beats a stem.
    owners = {p.name.removesuffix(".weight"): p for p in reversed(used)} | {p.name: p for p in used}
    for name, tensor in tensors.items():
        owner = _find_owner(owners, name)
        kind = OTHER if owner is None else _name_kind(by_param.get(owner))
        stored_bytes[kind] = stored_bytes.get(kind, 0) + tensor.nbytes
        if owner is not None and kind in LAYERED and (layer := find_layer(owner.name)):
            layers[layer][1] += tensor.nbytes
    order = [*KINDS.values(), OTHER]
    return {
        "kinds": {
            kind: {"numbers": counts.get(kind, 0), "bytes": stored_bytes[kind]}
            for kind in sorted(stored_bytes, key=order.index)
        },
        "layers": {layer: round(8 * size / count, 3) for layer, (count, size) in layers.items()},
    }


def average_bits(kinds: Mapping[str, Mapping[str, int]]) -> float | None:
    """Return the average bits per parameter of linear layers and experts together, with scales and zero points; None if
    the model has neither. `kinds` is the entry "kinds" of `summarize_weights`."""
    parts = [kinds[kind] for kind in LAYERED if kind in kinds]
    count = sum(part["numbers"] for part in parts)
    return 8 * sum(part["bytes"] for part in parts) / count if count else None


def find_layer(name: str) -> str | None:
    """Return the layer in a parameter's name ("layers.0" for "layers.0.attn.q.weight"); None if it has none."""
    match = _LAYER.match(name)
    return match[0] if match else None


def _find_owner(params: Mapping[str, Param], name: str) -> Param | None:
    """Return the parameter that the stored tensor `name` belongs to. Its key in `params` is `name`, or else the longest
    key that is a start of `name` before a dot. Return None if there is none."""
    while name and name not in params:
        name = name.rpartition(".")[0]
    return params.get(name)


def _name_kind(matrix: Matrix | str | None) -> str:
    return KINDS[matrix.kind] if isinstance(matrix, Matrix) else OTHER
