"""Lower attention with relative keys and values, which no attention function of transformers supports."""

from __future__ import annotations

from weft.ir import ops
from weft.ir.errors import WeftError
from weft.ir.graph import Node

from ...ops.calls import FunctionCall
from ...program.statements import Operand
from .attention_functions import update_cache
from .lower_embeddings import distances
from .model_emitter import ShellEmitter, lowers
from .shared_masks import mask_of


@lowers(ops.relative_attention)
def _relative_attention(e: ShellEmitter, node: Node) -> Operand:
    if node in e.cross_attentions:
        raise WeftError(f"target transformers has no relative attention to a source: %{node.output.name}")
    heads = e.attr(node, "heads")
    q, k, v = (e.split_heads(node.required_operand(n), heads, n) for n in ("q", "k", "v"))
    mask, distance = mask_of(e, node), distances(e)
    seen = e.hoist(
        ("visible", mask),
        f"visible({{0}}, {{1}}{', causal=False' * (not node.attrs['causal'])})",
        mask,
        distance,
        name="seen",
    )
    if node in e.cached:
        k, v = update_cache(e, k, v)
    call = FunctionCall("relative_attention").add(
        q, k, v, node.required_operand("key_table"), node.operand("value_table"), distance, seen
    )
    return e.emit(f"{call}.transpose(1, 2).flatten(2)", *call.operands, name="x")
