"""Codes of a compiled folder as the recipes of its source: what its weights would be read from, had it been one.

Codes that are fitted to a text (GPTQ) take as long to make again as compiling took, and need the text. Instead a graph
is rewritten with tensors in their places whose contents are unknown, as far as what the target stores; the rows of
what it stores say which rows of these tensors they are, and the folder's own codes fill them in.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from weft.backends.weights import StoredTensor
from weft.ir.errors import WeftError
from weft.ir.graph import Graph
from weft.ir.recipes import Permute, Recipe, Reshape, Source
from weft.ir.recipes.blocks import Dequantize, Quantize, Stored, block_layout
from weft.ir.recipes.blocks.layouts import block_leaves
from weft.ir.recipes.blocks.parts import joined_parts
from weft.ir.recipes.readers import Array, SpilledTensors, TensorReader
from weft.ir.types.block_layouts import Blocks, pack_codes
from weft.passes.fitting.matrices import Matrix, matrices


@dataclass(frozen=True)
class _Rows(Recipe):
    """The numbers of the rows of a matrix [..., out, in], as a matrix of one column."""

    dims: tuple[int, ...]
    first: int

    def shape(self, reader: TensorReader) -> tuple[int, ...]:
        return (*self.dims[:-1], 1)

    def read(self, reader: TensorReader, start: int, stop: int) -> Array:
        inner = math.prod(self.dims[1:-1])
        numbers = np.arange(start * inner, stop * inner, dtype=np.float64) + self.first
        return numbers.reshape(stop - start, *self.dims[1:-1], 1)


class Fitted:
    """Codes of `graph`, whose matrices a pass has rounded to the nearest, that are to be another's: its recipes are
    changed to tensors without contents. Tables that are only looked up are never fitted."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self.original: dict[Recipe, Recipe] = {}  # of what a code stands for, by the recipe that has the codes
        self._shapes: dict[Recipe, tuple[int, ...]] = {}
        self.reader = graph.reader = SpilledTensors.over(graph.reader)
        found = matrices(graph)
        for param in graph.params.values():
            matrix = found.get(param)
            if not (isinstance(matrix, Matrix) and matrix.kind == "table"):
                param.recipe = self._unknown(param.recipe, param.name)

    def _unknown(self, recipe: Recipe, name: str) -> Recipe:
        if not isinstance(recipe, Quantize):
            return recipe.map_parts(lambda part: self._unknown(part, name))
        layout, shape = recipe.layout(self.reader), recipe.shape(self.reader)
        key = self.reader.fresh(f"{name}.codes")
        lead, groups = shape[:-1], -(-shape[-1] // layout.group)
        sizes = {"codes": groups * layout.group * layout.bits // 8, "zeros": -(-groups * layout.bits // 8)}
        self.reader.put(key, np.zeros((*lead, sizes["codes"]), np.uint8))
        self.reader.put(f"{key}.scales", np.zeros((*lead, groups), np.float32))
        zeros = None
        if layout.has_zeros:
            self.reader.put(f"{key}.zeros", np.zeros((*lead, sizes["zeros"]), np.uint8))
            zeros = Source(f"{key}.zeros")
        made = Dequantize(
            Source(key),
            Source(f"{key}.scales"),
            zeros,
            width=shape[-1],
            bits=layout.bits,
            group=layout.group,
            scale=layout.scale.name,
        )
        self.original[made], self._shapes[made] = recipe.item, shape
        return made

    def fill(self, tensors: Mapping[str, StoredTensor], arrays: Mapping[str, Array]) -> bool:
        """Fill in the codes that `arrays` hold for `tensors`; returns False where some are not stored as codes."""
        filled = {leaf: _Filled(leaf, shape) for leaf, shape in self._shapes.items()}
        for item, parts in _by_matrix(tensors, arrays, self.reader).items():
            layout, leaves = block_layout(item, self.reader), block_leaves(item, self.reader)
            if isinstance(layout, str) or isinstance(leaves, str) or not any(leaf in filled for leaf in leaves):
                continue
            if not {"packed", "words", "codes"} & parts.keys():
                return False  # codes in the layout of standard operators
            blocks = joined_parts(layout, parts, item.shape(self.reader)[-1])
            rows, firsts = _rows_of(item, leaves, self.reader)
            for leaf, first in firsts.items():
                if leaf in filled:
                    filled[leaf].take(blocks, rows - first)
        if not all(part.whole for part in filled.values()):
            return False
        for part in filled.values():
            part.put(self.reader)
        return True

    def distances(self) -> Iterator[tuple[str, float]]:
        """Yield, by the name of the codes, how far each matrix is from what was rounded: ‖W − Ŵ‖ / ‖W‖ (Frobenius)."""
        for leaf, item in self.original.items():
            away = size = 0.0
            for start, rows in _numbered(item, self.reader):
                found = leaf.read(self.reader, start, start + len(rows))
                away += float(np.square(found - rows, dtype=np.float64).sum())
                size += float(np.square(rows, dtype=np.float64).sum())
            yield next(leaf.sources()).removesuffix(".codes"), math.sqrt(away / size) if size else math.sqrt(away)


class _Filled:
    """The codes of one matrix of `shape` that are known so far."""

    def __init__(self, leaf: Recipe, shape: tuple[int, ...]) -> None:
        assert isinstance(leaf, Dequantize)
        self._leaf, self._lead = leaf, shape[:-1]
        rows, groups = math.prod(self._lead), -(-shape[-1] // leaf.group)
        self._known = np.zeros(rows, bool)
        zeros = None if leaf.zeros is None else np.zeros((rows, groups), np.uint8)
        shape = (rows, groups, leaf.group)
        self._blocks = Blocks(np.zeros(shape, np.uint8), np.zeros(shape[:2], np.float32), None, zeros)

    @property
    def whole(self) -> bool:
        return bool(self._known.all())

    def take(self, blocks: Blocks, rows: Array) -> None:
        """Take the rows of `blocks` whose numbers `rows` are of this matrix."""
        mine = (rows >= 0) & (rows < len(self._known))
        at = rows[mine]
        self._known[at] = True
        for own, new in zip(self._blocks, blocks, strict=True):
            if own is not None and new is not None:
                own[at] = new[mine]

    def put(self, reader: SpilledTensors) -> None:
        leaf, codes, scales, zeros = self._leaf, self._blocks.codes, self._blocks.scales, self._blocks.zeros
        packed: dict[Recipe | None, Array] = {
            leaf.codes: pack_codes(codes, leaf.bits).reshape(len(codes), -1),
            leaf.scales: scales,
        }
        if zeros is not None:
            packed[leaf.zeros] = pack_codes(zeros, leaf.bits)
        for source, array in packed.items():
            assert isinstance(source, Source)
            reader.put(source.key, array.reshape(*self._lead, -1))


def _by_matrix(
    tensors: Mapping[str, StoredTensor], arrays: Mapping[str, Array], reader: TensorReader
) -> dict[Recipe, dict[str, Array]]:
    """The parts [rows, numbers] that are stored of each matrix in blocks, by name."""
    found: dict[Recipe, dict[str, Array]] = {}
    for name, tensor in tensors.items():
        recipe, array = tensor.recipe, arrays[name]
        if isinstance(recipe, Permute) and recipe.axes == (1, 0):
            recipe, array = recipe.item, array.T
        elif isinstance(recipe, Reshape):
            recipe = recipe.item
        if isinstance(recipe, Stored):
            *_, numbers = recipe.shape(reader)
            found.setdefault(recipe.item, {})[recipe.part] = np.ascontiguousarray(array).reshape(-1, numbers)
    return found


def _rows_of(item: Recipe, leaves: tuple[Recipe, ...], reader: TensorReader) -> tuple[Array, dict[Recipe, int]]:
    """The number of the row that each row of `item` is, and from where on those of each of its leaves are counted."""
    firsts, count = dict[Recipe, int](), 0
    for leaf in dict.fromkeys(leaves):
        firsts[leaf] = count
        count += math.prod(leaf.shape(reader)[:-1])
    if count >= 1 << 24:
        raise WeftError(f"{', '.join(item.sources())}: a matrix of {count:,} rows is too long to be told row by row")

    def numbered(recipe: Recipe) -> Recipe:
        if recipe in firsts:
            return _Rows(recipe.shape(reader), firsts[recipe])
        if isinstance(recipe, Reshape):
            return replace(recipe, item=numbered(recipe.item))
        return recipe.map_parts(numbered)

    return numbered(item).evaluate(reader).reshape(-1).astype(np.int64), firsts


def _numbered(recipe: Recipe, reader: TensorReader) -> Iterator[tuple[int, Array]]:
    """Blocks of rows, each with the number of its first."""
    start = 0
    for rows in recipe.blocks(reader):
        yield start, rows
        start += len(rows)
