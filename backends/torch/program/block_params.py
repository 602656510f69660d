"""Weights that stay in the quantized blocks of a checkpoint, and the tensors that store them.

`backends.block_weights` chooses the weights. A module of `lib/quantized.py` holds the codes, scales and offsets of a
weight that stays in blocks; every other weight is dequantized at load.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from weft.ir import ops
from weft.ir.graph import Graph, Node, Param, Value
from weft.ir.recipes import Permute
from weft.ir.recipes.blocks import Stored, find_block_layout
from weft.ir.recipes.blocks.parts import choose_kernel_bits
from weft.ir.types import TensorType, dtypes
from weft.ir.types.block_layouts import BlockLayout

from ...block_weights import NOT_ASKED, find_stored_layout, is_quantized
from ..kernels.shared.quantized_gemv import TILE, words_per_row

# Ops that multiply by a weight, also in a decode step.
PRODUCT_OPS = (ops.linear, ops.norm_linear, ops.norm_glu, ops.norm_route, ops.linear_residual, ops.pack)


def find_layout(weight: Value | None) -> BlockLayout | str:
    """Return the block layout in which `weight` stays. If it is dequantized at load instead, return the reason (str),
    which is "" if neither a pass nor --keep-blocks asks for its blocks, or no linear map reads it."""
    layout = find_stored_layout(weight)
    if layout == NOT_ASKED or not isinstance(weight, Param):
        return NOT_ASKED
    linears = [node for node in weight.users if node.op in PRODUCT_OPS]
    if not linears:
        return NOT_ASKED
    home = weight.name.removesuffix(".weight")
    if home == weight.name or not all(_can_use_module(node, weight, home) for node in weight.users):
        return "other ops than linear maps read it, or ops outside of its module"
    if len({node.operand("bias") for node in linears if node.op is not ops.pack}) > 1:
        return "linear maps with different biases share it"
    if isinstance(layout, str):
        return layout
    if weight.width % layout.group:
        return f"its rows of {weight.width} values end within a group of {layout.group}"
    if layout.group % TILE and not layout.small_floats:
        return f"groups of {layout.group} codes are not multiples of {TILE}, which kernels multiply at a time"
    if is_embedding_table(weight) and find_plain_vector(weight.graph) is None:
        return "no other weight has the dtype of the model"
    return layout


def find_plain_vector(graph: Graph) -> Param | None:
    """Return a trained float parameter of rank 1, from which to read the model's dtype; None if there is none."""
    floats = (p for p in graph.params.values() if p.type.rank == 1 and p.type.dtype.is_float and p.uses)
    vectors = (p for p in floats if not p.recipe.is_constant)
    return min(vectors, key=lambda p: p.name.count("."), default=None)


def make_block_params(weight: Param, layout: BlockLayout) -> dict[str, Param]:
    """Map attributes of the module of `weight` to the tensors that store it in blocks: `codes`, `scales`, and for some
    layouts `tensor_scales` or `offsets`."""
    out, width = weight.type.concrete({})
    stem, groups = weight.name.removesuffix(".weight"), width // layout.group
    steps, dtype = ("levels", dtypes.u8) if layout.small_floats else ("steps", layout.scale_dtype)
    parts = {
        "codes": (Stored(weight.recipe, "words"), dtypes.i32, (out, words_per_row(width, choose_kernel_bits(layout)))),
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


def count_parameters(param: Param) -> int:
    """Return how many model parameters the stored tensor `param` encodes; 0 for scales, offsets and integer tables."""
    recipe = param.recipe
    if isinstance(recipe, Stored):
        return math.prod(recipe.item.shape(param.graph.reader))
    return math.prod(param.type.concrete({})) if param.type.dtype.is_float and not recipe.has(Stored) else 0


def count_block_weights(weights: Iterable[Param]) -> dict[str, int]:
    """Map the name of each block layout to its number of weights among `weights`, the stored tensors of a model."""
    stored = ((param.recipe, param.graph.reader) for param in weights)
    return dict(Counter(str(find_block_layout(r.item, reader)) for r, reader in stored if isinstance(r, Stored)))


def describe_widened_weights(graph: Graph) -> list[str]:
    """Return a note, with the reason, for each linear weight that was to stay in blocks but is dequantized."""
    weights = {v: None for n in graph.nodes if n.op is ops.linear and (v := n.operand("weight")) is not None}
    reasons = ((w.name, find_layout(w)) for w in weights)
    return [f"{name} is dequantized: {reason}" for name, reason in reasons if isinstance(reason, str) and reason]


def explain_no_blocks(graph: Graph) -> str:
    """Return the reason why no weight keeps its blocks of the checkpoint in spite of --keep-blocks; "" if at least one
    does. Weights that a pass has quantized do not count."""
    if any(isinstance(find_layout(param), BlockLayout) and not is_quantized(param) for param in graph.params.values()):
        return ""
    reasons = [*describe_widened_weights(graph), "no linear map has blocks of a checkpoint"]
    return f"no weights keep their blocks: {reasons[0]}"


def _can_use_module(node: Node, weight: Param, home: str) -> bool:
    """Return whether `node` uses `weight` as its matrix or table, and its scope contains the path `home`."""
    within = not node.scope or home.startswith(f"{node.scope}.")
    if node.op in (ops.pack, ops.embedding):  # any operand may be the weight
        return within and weight in node.inputs
    return within and node.op in (*PRODUCT_OPS, ops.embed_tokens) and node.operand("weight") is weight


def is_embedding_table(weight: Param) -> bool:
    """Return whether an embedding reads `weight` as its table."""
    return any(node.op in (ops.embedding, ops.embed_tokens) for node in weight.users)
