"""Fusing rotary positions with the attention that reads them."""

from __future__ import annotations

from dataclasses import dataclass

from weft.ir import Graph, Node, Value, ops
from weft.ir.ops.fused_attention import SHARED

from ...core.base import Pass
from ...core.trace import Trace
from ...edits.edit import drop, replace_uses


@dataclass(frozen=True)
class FuseRopeAttention(Pass):
    """Turn queries and keys inside the attention that reads them: attention(rope(q), rope(k), v) → rotary_attention.

    A kernel for the fused op reads queries and keys once, where separate rotations read and write them once more.
    Backends without one expand its body, which is what stood there before; ONNX Runtime's GroupQueryAttention finds the
    rotations there too. Caches hold turned keys as before. Run it behind passes that change rotations: they look for
    them before an attention.

    Condition: queries and keys are turned alike, by the same positions and frequencies, and nothing else reads what was
    turned; of a cache, those positions are where it writes.

    Source: Su 2021, RoFormer (arXiv 2104.09864); Dao 2022, FlashAttention (arXiv 2205.14135).

    Example fuse-rope-attention::

        graph example {
          input %q: f32[batch, seq, 16]
          input %k: f32[batch, seq, 8]
          input %v: f32[batch, seq, 8]
          input %position_ids: i64[batch, seq]
          param %frequencies: f32[2] = rope_frequencies(4)
          %q_rope: f32[batch, seq, 16] = rope(%q, %position_ids, %frequencies, heads=4)
          %k_rope: f32[batch, seq, 8] = rope(%k, %position_ids, %frequencies, heads=2)
          %y: f32[batch, seq, 16] = attention(%q_rope, %k_rope, %v, heads=4, kv_heads=2, causal=true)
          output y = %y
        }
    """

    name = "fuse-rope-attention"
    effect = "exact"
    purpose = "Fuse and take apart"
    tradeoff = "a rotation that several operands or attentions share is computed for each of them"

    def run(self, graph: Graph, trace: Trace) -> None:
        for node in graph.nodes:
            if node.op is not ops.attention:
                continue
            found = _rotations(node)
            if isinstance(found, str):
                if found:
                    trace.refuse(self.name, node.output.name, found)
                continue
            turned, keys = found
            rest = (node.operand(name) for name in ("bias", "key_mask", "sinks", "past_k", "past_v"))
            attrs = {name: node.attrs[name] for name in SHARED}
            attrs |= {name: turned.attrs[name] for name in ("interleaved", "amplitude")}
            with graph.inserting(before=node):
                outs = ops.rotary_attention.emit(
                    turned.inputs[0], keys.inputs[0], node.operand("v"), *turned.inputs[1:], *rest, **attrs
                )
            for old, new in zip(node.outputs, outs, strict=True):
                replace_uses(old, new)
            drop(graph, [node, turned, keys])
            trace.fired(self.name, outs[0].name)


def _rotations(node: Node) -> tuple[Node, Node] | str:
    """The rotations of q and k of the attention `node`, or why they do not fuse; an empty reason if nothing turns."""
    q, k = (_rotation(node.operand(name)) for name in "qk")
    if q is None and k is None:
        return ""
    if q is None or k is None:
        return f"only its {'queries are' if k is None else 'keys are'} turned"
    if node.operand("v") is None:
        return "its values are part of the turned keys"
    for turned in (q, k):
        if (others := [n for n in turned.output.users if n is not node]) or turned.output.is_output:
            who = f"{others[0].op.name} (%{others[0].output.name})" if others else "the caller"
            return f"%{turned.output.name} is also read by {who}"
    if q.inputs[1:] != k.inputs[1:]:
        return "queries and keys are turned by other positions or frequencies"
    for name in ("interleaved", "amplitude"):
        if q.attrs[name] != k.attrs[name]:
            return f"queries and keys are turned with {name} {q.attrs[name]} and {k.attrs[name]}"
    if (q.attrs["heads"], k.attrs["heads"]) != (node.attrs["heads"], node.attrs["kv_heads"]):
        return "it has other heads than the rotations"
    if node.operand("positions") not in (None, q.operand("positions")):
        return "its cache is written at other positions than those it is turned by"
    return q, k


def _rotation(value: Value | None) -> Node | None:
    node = None if value is None else value.producer
    return node if node is not None and node.op is ops.rope else None
