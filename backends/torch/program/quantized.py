"""Weights that stay in quantized blocks, and their tensors.

`backends.blocks` tells which are to. A module of `snippets/quantized.py` holds the codes, scales and offsets of a
`kept` weight; every other weight is dequantized.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from weft.ir import ops
from weft.ir.graph import Graph, Node, Param, Value
from weft.ir.recipes import Permute
from weft.ir.recipes.blocks import Stored, block_layout
from weft.ir.recipes.blocks.parts import wide
from weft.ir.types import TensorType, dtypes
from weft.ir.types.block_layouts import BlockLayout

from ...blocks import NOT_ASKED, is_quantized, kept_layout
from ..kernels.shared.codes import TILE, words

# Ops that multiply by a weight, those of a decode step among them.
MULTIPLIED = (ops.linear, ops.norm_linear, ops.norm_glu, ops.norm_route, ops.linear_residual, ops.pack)


def kept(weight: Value | None) -> BlockLayout | str:
    """The layout that `weight`, of a linear map, is kept in; or why it is widened, nothing if it is not to be kept."""
    layout = kept_layout(weight)
    if layout == NOT_ASKED or not isinstance(weight, Param):
        return NOT_ASKED
    linears = [node for node in weight.users if node.op in MULTIPLIED]
    if not linears:
        return NOT_ASKED
    home = weight.name.removesuffix(".weight")
    if home == weight.name or not all(_reads(node, weight, home) for node in weight.users):
        return "it is not the weight of linear maps alone, in a module of theirs"
    if len({node.operand("bias") for node in linears if node.op is not ops.pack}) > 1:
        return "linear maps with different biases share it"
    if isinstance(layout, str):
        return layout
    if weight.width % layout.group:
        return f"its rows of {weight.width} numbers end within a group of {layout.group}"
    if layout.group % TILE and not layout.small_floats:
        return f"groups of {layout.group} codes are not multiples of {TILE}, which kernels multiply at a time"
    if embeds(weight) and dense(weight.graph) is None:
        return "no other weight tells the dtype of the model"
    return layout


def dense(graph: Graph) -> Param | None:
    """A weight that is widened whatever is asked for: its dtype is that of the model."""
    vectors = [p for p in graph.params.values() if p.type.rank == 1 and p.type.dtype.is_float and p.uses]
    vectors = [p for p in vectors if not p.recipe.constant]
    return min(vectors, key=lambda p: p.name.count("."), default=None)


def block_params(weight: Param, layout: BlockLayout) -> dict[str, Param]:
    """The tensors of a `kept` weight, by what its module calls them."""
    out, width = weight.type.concrete({})
    stem, groups = weight.name.removesuffix(".weight"), width // layout.group
    steps, dtype = ("levels", dtypes.u8) if layout.small_floats else ("steps", layout.numbers)
    parts = {
        "codes": (Stored(weight.recipe, "words"), dtypes.i32, (out, words(width, wide(layout)))),
        "scales": (Permute(Stored(weight.recipe, steps), (1, 0)), dtype, (groups, out)),
    }
    if layout.tensor_scale:
        parts["tensor_scales"] = (Permute(Stored(weight.recipe, "tensor_scale"), (1, 0)), dtypes.f32, (1, out))
    if layout.has_minimum or layout.has_zeros:
        parts["offsets"] = (Permute(Stored(weight.recipe, "offsets"), (1, 0)), dtypes.f32, (groups, out))
    return {
        name: Param(weight.graph, f"{stem}.{name}", TensorType(dtype, shape), recipe)
        for name, (recipe, dtype, shape) in parts.items()
    }


def numbers(param: Param) -> int:
    """Count the weights that a module's tensor stands for: codes count, scales and offsets do not."""
    recipe = param.recipe
    if isinstance(recipe, Stored):
        return math.prod(recipe.item.shape(param.graph.reader))
    return math.prod(param.type.concrete({})) if param.type.dtype.is_float and not recipe.has(Stored) else 0


def summary(weights: Iterable[Param]) -> dict[str, int]:
    """Count the kept weights among a module's tensors `weights`, by block layout."""
    counts: dict[str, int] = {}
    for param in weights:
        if isinstance(param.recipe, Stored):
            name = str(block_layout(param.recipe.item, param.graph.reader))
            counts[name] = counts.get(name, 0) + 1
    return counts


def widened(graph: Graph) -> list[str]:
    """List weights that cannot stay in blocks as asked, with the reason."""
    weights = {v: None for n in graph.nodes if n.op is ops.linear and (v := n.operand("weight")) is not None}
    reasons = ((w.name, kept(w)) for w in weights)
    return [f"{name} is widened: {reason}" for name, reason in reasons if isinstance(reason, str) and reason]


def widens_all(graph: Graph) -> str:
    """Return why none of the blocks that --keep-blocks asks for stay; "" if some do."""
    if any(isinstance(kept(param), BlockLayout) and not is_quantized(param) for param in graph.params.values()):
        return ""
    return f"no weights keep their blocks: {next(iter(widened(graph)), 'no linear map has blocks of a checkpoint')}"


def _reads(node: Node, weight: Param, home: str) -> bool:
    """Return whether `node` can use a module at `home`, to multiply by `weight` or look up its rows."""
    within = not node.scope or home.startswith(f"{node.scope}.")
    if node.op in (ops.pack, ops.embedding):  # whose operands with a weight are all alike
        return within and weight in node.inputs
    return within and node.op in (*MULTIPLIED, ops.embed_tokens) and node.operand("weight") is weight


def embeds(weight: Param) -> bool:
    """Return whether `weight` is also an embedding table."""
    return any(node.op in (ops.embedding, ops.embed_tokens) for node in weight.users)
