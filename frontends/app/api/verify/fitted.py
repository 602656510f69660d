"""Codes of a compiled folder that were fitted to a text (GPTQ), given back to the matrices of the source's graph.

Fitting them again would take as long as compiling did, and need the text. Targets pack, split and transpose matrices,
so the recipes of what they store are undone.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from weft.backends.weights import StoredTensor
from weft.ir.graph import Graph
from weft.ir.recipes import Recipe, Source
from weft.ir.recipes.blocks import Dequantize, Kept, Part, Quantize, Stored
from weft.ir.recipes.blocks.parts import WITH_CODES, joined_parts
from weft.ir.recipes.readers import Array, MemoryReader, SpilledTensors
from weft.ir.types.block_layouts import pack_codes
from weft.passes.fitting.matrices import Matrix, matrices

from ....export.inversion import undo


@dataclass(frozen=True)
class _Fitted(Quantize):
    """Unknown codes of the parameter `matrix`; another parameter that reads the same tensor has others."""

    matrix: str = ""


class Fitted:
    """The matrices of `graph` that a pass has rounded, to get the codes of a folder; tables are never fitted."""

    def __init__(self, graph: Graph) -> None:
        self._graph, self._taken = graph, dict[_Fitted, Recipe]()
        self._reader = graph.reader = SpilledTensors.over(graph.reader)
        found = matrices(graph)
        for param in graph.params.values():
            matrix = found.get(param)
            if not (isinstance(matrix, Matrix) and matrix.kind == "table"):
                param.recipe = _unknown(param.recipe, param.name)

    def take(self, tensors: Mapping[str, StoredTensor], arrays: Mapping[str, Array]) -> dict[str, StoredTensor]:
        """Give the graph the codes of a folder, or the numbers where its target stores these instead.

        `tensors` are those that the target makes of the graph, `arrays` their contents. Returns the tensors that can be
        compared, made of the codes: all but those whose numbers are taken.

        Raises:
            WeftError: if a recipe cannot be undone.
        """
        parts: dict[_Fitted, dict[str, Array]] = defaultdict(dict)
        for name, tensor in tensors.items():
            keys: dict[str, tuple[_Fitted, str]] = {}
            recipe = _of_parts(tensor.recipe, "", keys)
            if not keys:
                continue
            known = {key: Source(key).evaluate(self._reader) for key in {*recipe.sources()} - keys.keys()}
            for key, (matrix, part) in keys.items():
                shape = (Part(matrix, part) if part else matrix).shape(self._reader)
                known[key] = np.broadcast_to(np.uint8(0), shape)
            for key, values, where in undo(recipe, arrays[name], MemoryReader(known)):
                if key in keys:
                    matrix, part = keys[key]
                    before = parts[matrix].get(part)
                    parts[matrix][part] = values if before is None else np.where(where, values, before)
        self._taken = {matrix: self._put(matrix, stored) for matrix, stored in parts.items()}
        for param in self._graph.params.values():
            param.recipe = _filled(param.recipe, self._taken)
        coded = {matrix: recipe for matrix, recipe in self._taken.items() if isinstance(recipe, Dequantize)}
        made = {name: replace(tensor, recipe=_filled(tensor.recipe, coded)) for name, tensor in tensors.items()}
        return {name: tensor for name, tensor in made.items() if not tensor.recipe.has(_Fitted)}

    def _put(self, matrix: _Fitted, parts: Mapping[str, Array]) -> Recipe:
        """Spill a matrix that a folder stores as `parts`; return how it is read."""
        layout, (*lead, width), key = matrix.layout(self._reader), matrix.shape(self._reader), matrix.matrix
        if parts.keys().isdisjoint(WITH_CODES):
            source = Source(self._reader.fresh(key))
            self._reader.put(source.key, parts[""].astype(np.float32))
            return source
        rows = {part: array.reshape(-1, array.shape[-1]) for part, array in parts.items()}
        codes, scales, _, zeros, _ = joined_parts(layout, rows, width)
        packed = {"codes": pack_codes(codes, layout.bits), "scales": scales}
        packed |= {} if zeros is None else {"zeros": pack_codes(zeros, layout.bits)}
        sources = {part: Source(self._reader.fresh(f"{key}.{part}")) for part in packed}
        for part, array in packed.items():
            self._reader.put(sources[part].key, array.reshape(*lead, -1))
        recipe = Dequantize(sources["codes"], sources["scales"], sources.get("zeros"), width=width)
        return replace(recipe, bits=layout.bits, group=layout.group, scale=layout.scale.name)

    def distances(self) -> Iterator[tuple[str, float]]:
        """Yield, by name, how far each matrix is from the one that was rounded: ‖W − Ŵ‖ / ‖W‖ (Frobenius)."""
        for matrix, recipe in self._taken.items():
            away = size = start = 0
            for rows in matrix.item.blocks(self._reader):
                found = recipe.read(self._reader, start, start + len(rows))
                away += np.square(found - rows, dtype=np.float64).sum()
                size += np.square(rows, dtype=np.float64).sum()
                start += len(rows)
            yield matrix.matrix, math.sqrt(away / size) if size else math.sqrt(away)


def _unknown(recipe: Recipe, name: str) -> Recipe:
    """Return the `recipe` of the parameter `name` with its codes unknown."""
    if isinstance(recipe, Quantize):
        return _Fitted(**vars(recipe), matrix=name)
    return recipe.map_parts(lambda part: _unknown(part, name))


def _of_parts(recipe: Recipe, part: str, keys: dict[str, tuple[_Fitted, str]]) -> Recipe:
    """Return `recipe` over tensors in the place of matrices or `part` of their blocks, which are added to `keys`."""
    if isinstance(recipe, Kept | Stored):
        return _of_parts(recipe.item, getattr(recipe, "part", part), keys)
    if isinstance(recipe, _Fitted):
        key = f"codes {len(keys)} of {recipe.matrix}"
        keys[key] = recipe, part
        return Source(key)
    return recipe.map_parts(lambda inner: _of_parts(inner, part, keys))


def _filled(recipe: Recipe, taken: Mapping[_Fitted, Recipe]) -> Recipe:
    """Return `recipe` with the matrices that are known."""
    if isinstance(recipe, _Fitted):
        return taken.get(recipe, recipe)
    return recipe.map_parts(lambda part: _filled(part, taken))
