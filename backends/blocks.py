"""Weights that stay in quantized blocks: those that a pass quantized, and those of a checkpoint on request."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from weft.ir.graph import Graph, Param, Value
from weft.ir.recipes.blocks import BlockRecipe, Kept, block_layout
from weft.ir.types.block_layouts import BlockLayout

NOT_ASKED = ""


def is_quantized(weight: Param) -> bool:
    """Return whether a pass, not the checkpoint, made the blocks of `weight`."""
    return weight.recipe.has(BlockRecipe)


def is_exact(weight: Param) -> bool:
    """Return whether products by the blocks of `weight` are summed in f32, without rounding activations."""
    return not is_quantized(weight) or weight.recipe.has(Kept)


def quantized_layout(weight: Value | None) -> BlockLayout | None:
    """Return the layout of the blocks that a pass made of `weight`; None if it has none, or more is done to them."""
    if not isinstance(weight, Param) or not is_quantized(weight):
        return None
    layout = block_layout(weight.recipe, weight.graph.reader)
    return layout if isinstance(layout, BlockLayout) else None


def packed_bytes(weight: Param, layout: BlockLayout) -> int:
    """Return what the codes, scales and zero points of `weight` take, its rows filled up to whole groups."""
    *lead, width = weight.type.concrete({})
    return math.ceil(math.prod(lead) * layout.row_bits(width) / 8)


def kept_layout(weight: Value | None) -> BlockLayout | str:
    """Return the block layout that `weight` is to stay in; or why it has none, `NOT_ASKED` if it need not have one."""
    if not isinstance(weight, Param):
        return NOT_ASKED
    if not is_quantized(weight) and not weight.recipe.has(Kept):
        return NOT_ASKED
    return block_layout(weight.recipe, weight.graph.reader)


def candidates(graph: Graph) -> Iterator[Param]:
    """Yield the parameters that somebody reads, each once."""
    yield from (param for param in graph.params.values() if param.uses)


def counted(layouts: Iterable[BlockLayout]) -> dict[str, int]:
    """Count weights by their block layout."""
    counts: dict[str, int] = {}
    for layout in layouts:
        counts[str(layout)] = counts.get(str(layout), 0) + 1
    return counts
