"""Weights as a target stores them: each tensor with the recipe of its contents, bytes by kind, bits of a weight."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from weft.ir.graph import Graph, Param
from weft.ir.recipes import Recipe
from weft.ir.types.dtypes import DType
from weft.passes.fitting.matrices import Matrix, matrices

# Kinds of weights by what `matrices` calls them. A tied table is an output head.
KINDS = {"linear": "linear maps", "experts": "experts", "head": "output head", "table": "embedding"}
OTHER = "norms and others"
LAYERED = (KINDS["linear"], KINDS["experts"])  # kinds that layers consist of
_LAYER = re.compile(r"(?:[^.]+\.)*?[^.]+\.\d+(?=\.)")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a compiled folder: `recipe` evaluated and cast to `dtype`."""

    recipe: Recipe
    dtype: DType
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.dtype.bytes_for(math.prod(self.shape))


def weight_facts(graph: Graph, tensors: Mapping[str, StoredTensor]) -> dict[str, Any]:
    """The manifest's entry about the weights of `graph`, which are stored as `tensors`, by name.

    `kinds` has the numbers and the bytes of each kind of weight, codes with their scales and zero points; `layers` the
    bits that a number of the matrices of a layer takes on average.
    """
    found = matrices(graph)
    numbers: dict[str, int] = {}
    layers: dict[str, list[int]] = {}
    for param in graph.params.values():
        if not param.uses:
            continue
        kind, elements = _kind(found.get(param)), math.prod(param.type.concrete({}))
        numbers[kind] = numbers.get(kind, 0) + elements
        if kind in LAYERED and (layer := layer_of(param.name)):
            layers.setdefault(layer, [0, 0])[0] += elements
    taken = dict.fromkeys(numbers, 0)
    owners = _Owners(graph)
    for name, tensor in tensors.items():
        owner = owners.of(name)
        kind = OTHER if owner is None else _kind(found.get(owner))
        taken[kind] = taken.get(kind, 0) + tensor.nbytes
        if owner is not None and kind in LAYERED and (layer := layer_of(owner.name)):
            layers[layer][1] += tensor.nbytes
    order = [*KINDS.values(), OTHER]
    return {
        "kinds": {
            kind: {"numbers": numbers.get(kind, 0), "bytes": taken[kind]} for kind in sorted(taken, key=order.index)
        },
        "layers": {layer: round(8 * size / count, 3) for layer, (count, size) in layers.items()},
    }


def bits_per_weight(kinds: Mapping[str, Mapping[str, int]]) -> float | None:
    """Bits that a number of the linear maps and experts takes on average, scales and zero points included; None if
    there are none."""
    parts = [kinds[kind] for kind in LAYERED if kind in kinds]
    count = sum(part["numbers"] for part in parts)
    return 8 * sum(part["bytes"] for part in parts) / count if count else None


def layer_of(name: str) -> str | None:
    """The layer that a parameter called `name` is in: ``layers.0`` of ``layers.0.attn.q.weight``."""
    match = _LAYER.match(name)
    return match[0] if match else None


class _Owners:
    """The parameters of a graph by the names of the tensors that they are stored as, which begin with theirs."""

    def __init__(self, graph: Graph) -> None:
        self._params: dict[str, Param] = {}
        for param in graph.params.values():
            if param.uses:
                self._params.setdefault(param.name.removesuffix(".weight"), param)
        self._params |= {param.name: param for param in graph.params.values() if param.uses}

    def of(self, name: str) -> Param | None:
        """The parameter whose name is the longest beginning of `name`."""
        return next((self._params[stem] for stem in _stems(name) if stem in self._params), None)


def _stems(name: str) -> Iterator[str]:
    while name:
        yield name
        name = name.rpartition(".")[0]


def _kind(matrix: Matrix | str | None) -> str:
    return KINDS[matrix.kind] if isinstance(matrix, Matrix) else OTHER
