"""Lower attention with relative keys and values, which no attention function of transformers supports."""

from __future__ import annotations

from weft.ir import ops
from weft.ir.errors import WeftError
from weft.ir.graph import Node

from ...ops.calls import FunctionCall
from ...program.statements import Operand
from .attention_functions import emit_cache_update
from .lower_embeddings import emit_distances
from .model_emitter import HFEmitter, hf_lowering
from .shared_masks import get_mask


@hf_lowering(ops.relative_attention)
def _lower_relative_attention(e: HFEmitter, node: Node) -> Operand:
    if node in e.cross_attentions:
        raise WeftError(f"target transformers has no relative cross-attention (%{node.output.name}): use torch")
    heads = e.attr(node, "heads")
    q, k, v = (e.split_heads(node.required_operand(n), heads, n) for n in ("q", "k", "v"))
    mask, distance = get_mask(e, node), emit_distances(e)
    text = f"visible({{0}}, {{1}}{', causal=False' * (not node.attrs['causal'])})"
    seen = e.hoist(("visible", mask), text, mask, distance, name="seen")
    if node in e.cached:
        k, v = emit_cache_update(e, k, v)
    tables = node.required_operand("key_table"), node.operand("value_table")
    call = FunctionCall("relative_attention").add(q, k, v, *tables, distance, seen)
    return e.emit(f"{call}.transpose(1, 2).flatten(2)", *call.operands, name="x")
