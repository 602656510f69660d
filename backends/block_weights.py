"""Queries about weights that stay in quantized blocks: quantized by a pass, or kept from a checkpoint on request."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator

from weft.ir.graph import Graph, Node, Param, Value
from weft.ir.recipes.blocks import BlockRecipe, Kept, find_block_layout
from weft.ir.types.block_layouts import BlockLayout

NOT_ASKED = ""


def is_quantized(weight: Param) -> bool:
    """Return whether a pass quantized `weight`; False for blocks of the checkpoint."""
    return weight.recipe.has(BlockRecipe)


def is_exact(weight: Param) -> bool:
    """Return whether products by the blocks of `weight` must not round activations to 8 bits: False only for blocks
    that a pass quantized without --arithmetic f32."""
    return not is_quantized(weight) or weight.recipe.has(Kept)


def find_quantized_layout(weight: Value | None) -> BlockLayout | None:
    """Return the block layout of `weight` if a pass quantized it and all its blocks share one layout; else None."""
    if not isinstance(weight, Param) or not is_quantized(weight):
        return None
    layout = find_stored_layout(weight)
    return layout if isinstance(layout, BlockLayout) else None


def count_packed_bytes(weight: Param, layout: BlockLayout) -> int:
    """Return the bytes of the codes, scales and zero points of `weight`, with rows padded to full groups."""
    *lead, width = weight.type.concrete({})
    return math.ceil(math.prod(lead) * layout.row_bits(width) / 8)


def find_stored_layout(weight: Value | None) -> BlockLayout | str:
    """Return the block layout in which `weight` is stored, or the reason (str) why it has none: NOT_ASKED ("") unless
    it is a parameter that a pass quantized or whose blocks --keep-blocks requested."""
    if not isinstance(weight, Param) or not (is_quantized(weight) or weight.recipe.has(Kept)):
        return NOT_ASKED
    return find_block_layout(weight.recipe, weight.graph.reader)


def get_quantized(node: Node, operand: str = "weight") -> tuple[Param, BlockLayout]:
    """Return (the parameter `operand` of `node`, its block layout). The parameter must be stored in blocks."""
    weight, layout = node.operand(operand), find_stored_layout(node.operand(operand))
    assert isinstance(weight, Param) and isinstance(layout, BlockLayout)
    return weight, layout


def list_read_params(graph: Graph) -> Iterator[Param]:
    """Return an iterator over the parameters of `graph` that at least one node reads."""
    return (param for param in graph.params.values() if param.uses)


def tally_layouts(layouts: Iterable[BlockLayout]) -> dict[str, int]:
    """Return a dict from the text of each layout in `layouts` to the number of times that it occurs there."""
    return dict(Counter(map(str, layouts)))
