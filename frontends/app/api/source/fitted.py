"""Transfer of codes that were fitted to a text (GPTQ) from a compiled folder to the matrices of the source's graph.

Fitting them again would take as long as compiling did, and need the text. Targets pack, split and transpose matrices,
so the recipes of stored tensors are inverted.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace

import numpy as np

from weft.backends.weights import StoredTensor
from weft.ir.graph import Graph
from weft.ir.recipes import Recipe, Source
from weft.ir.recipes.blocks import Dequantize, Kept, Part, Quantize, Stored
from weft.ir.recipes.blocks.parts import WITH_CODES, decode_parts
from weft.ir.recipes.readers import Array, MemoryReader, SpilledTensors
from weft.ir.types.block_layouts import pack_codes
from weft.passes.fitting.matrices import Matrix, find_matrices

from ....export.inversion import undo_recipe


class _MatrixCodes(Quantize):
    """A placeholder for the codes of the parameter `matrix`; the name distinguishes parameters of one source tensor."""

    matrix: str = ""


class FittedMatrices:
    """The quantized matrices of `graph` except lookup tables; their recipes are placeholders until `set_codes`."""

    def __init__(self, graph: Graph) -> None:
        self._graph, self._recipes = graph, dict[_MatrixCodes, Recipe]()
        self._reader = graph.reader = SpilledTensors.wrap(graph.reader)
        kinds = find_matrices(graph)
        for param in graph.params.values():
            matrix = kinds.get(param)
            if not (isinstance(matrix, Matrix) and matrix.kind == "table"):
                param.recipe = _forget_codes(param.recipe, param.name)

    def set_codes(self, tensors: Mapping[str, StoredTensor], arrays: Mapping[str, Array]) -> dict[str, StoredTensor]:
        """Replace the placeholders in the graph by the codes of a folder, or by floats if it stores dequantized values.

        `tensors` are those that the target derives from the graph, `arrays` their stored contents. Return `tensors`
        with recipes that read the codes, except tensors stored as dequantized floats, which have no codes to compare.
        Raise WeftError if a recipe cannot be inverted.
        """
        parts: dict[_MatrixCodes, dict[str, Array]] = defaultdict(dict)
        for name, tensor in tensors.items():
            keys: dict[str, tuple[_MatrixCodes, str]] = {}
            recipe = _replace_by_parts(tensor.recipe, "", keys)
            if not keys:
                continue
            sources = {key: Source(key).evaluate(self._reader) for key in {*recipe.sources()} - keys.keys()}
            for key, (matrix, part) in keys.items():
                shape = (Part(matrix, part) if part else matrix).shape(self._reader)
                sources[key] = np.broadcast_to(np.uint8(0), shape)
            for key, values, mask in undo_recipe(recipe, arrays[name], MemoryReader(sources)):
                if key in keys:
                    matrix, part = keys[key]
                    previous = parts[matrix].get(part)
                    parts[matrix][part] = values if previous is None else np.where(mask, values, previous)
        self._recipes = {matrix: self._store_matrix(matrix, stored) for matrix, stored in parts.items()}
        for param in self._graph.params.values():
            param.recipe = _replace_codes(param.recipe, self._recipes)
        by_codes = {matrix: recipe for matrix, recipe in self._recipes.items() if isinstance(recipe, Dequantize)}
        filled = {
            name: replace(tensor, recipe=_replace_codes(tensor.recipe, by_codes)) for name, tensor in tensors.items()
        }
        return {name: tensor for name, tensor in filled.items() if not tensor.recipe.has(_MatrixCodes)}

    def _store_matrix(self, matrix: _MatrixCodes, parts: Mapping[str, Array]) -> Recipe:
        """Repack the `parts` of a matrix (codes and scales, or elements as f32) into the reader; return its recipe."""
        layout, (*lead, width), key = matrix.layout(self._reader), matrix.shape(self._reader), matrix.matrix
        if parts.keys().isdisjoint(WITH_CODES):
            source = Source(self._reader.unique_key(key))
            self._reader.put(source.key, parts[""].astype(np.float32))
            return source
        rows = {part: array.reshape(-1, array.shape[-1]) for part, array in parts.items()}
        codes, scales, _, zeros, _ = decode_parts(layout, rows, width)
        packed = {"codes": pack_codes(codes, layout.bits), "scales": scales}
        packed |= {} if zeros is None else {"zeros": pack_codes(zeros, layout.bits)}
        sources = {part: Source(self._reader.unique_key(f"{key}.{part}")) for part in packed}
        for part, array in packed.items():
            self._reader.put(sources[part].key, array.reshape(*lead, -1))
        recipe = Dequantize(sources["codes"], sources["scales"], sources.get("zeros"), width=width)
        return replace(recipe, bits=layout.bits, group=layout.group, scale=layout.scale.name)

    def measure_distances(self) -> Iterator[tuple[str, float]]:
        """Yield the name of each matrix and its distance from the original: ‖W − Ŵ‖ / ‖W‖ (Frobenius)."""
        for matrix, recipe in self._recipes.items():
            squared_error = size = start = 0
            for rows in matrix.item.blocks(self._reader):
                values = recipe.read(self._reader, start, start + len(rows))
                squared_error += np.square(values - rows, dtype=np.float64).sum()
                size += np.square(rows, dtype=np.float64).sum()
                start += len(rows)
            yield matrix.matrix, math.sqrt(squared_error / size) if size else math.sqrt(squared_error)


def _forget_codes(recipe: Recipe, name: str) -> Recipe:
    if isinstance(recipe, Quantize):
        return _MatrixCodes(**vars(recipe), matrix=name)
    return recipe.map_parts(lambda part: _forget_codes(part, name))


def _replace_by_parts(recipe: Recipe, part: str, keys: dict[str, tuple[_MatrixCodes, str]]) -> Recipe:
    """Return `recipe` with a new source tensor for each placeholder; map its key to (placeholder, part) in `keys`."""
    if isinstance(recipe, Kept | Stored):
        return _replace_by_parts(recipe.item, getattr(recipe, "part", part), keys)
    if isinstance(recipe, _MatrixCodes):
        key = f"codes {len(keys)} of {recipe.matrix}"
        keys[key] = recipe, part
        return Source(key)
    return recipe.map_parts(lambda inner: _replace_by_parts(inner, part, keys))


def _replace_codes(recipe: Recipe, recipes: Mapping[_MatrixCodes, Recipe]) -> Recipe:
    if isinstance(recipe, _MatrixCodes):
        return recipes.get(recipe, recipe)
    return recipe.map_parts(lambda part: _replace_codes(part, recipes))
