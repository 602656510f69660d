"""Permute attention heads."""

from __future__ import annotations

from typing import Any

from weft.ir import Graph, Node, Param, Value, WeftError, ops
from weft.ir.recipes import Take

from ... import Pass, Trace
from ...analysis.projections import Branch, find_output_linear, slice_rows
from ...edits.edit import derive_param, erase_unused, rebuild_node, replace_param, require_param
from .head_layout import HeadLayout, apply_layout, find_layouts, rearrange_columns

BiasCache = dict[tuple[Value, tuple[int, ...]], Value]  # (score bias, heads to take) -> new bias
# By op of a score bias, its first operand and the axis of it along which heads are.
_HEAD_AXES = {ops.alibi: ("slopes", 0), ops.relative_position_bias: ("table", 1)}


class PermuteHeads(Pass):
    """Reorder the heads of attention: new query head i is old head `order[i]`.

    The output projection sums over heads: Σ_h W_h y_h is the same in any order. All parameters of a head move with it:
    its rows of W_q and its bias, its columns of W_o, its slope or score bias, its sink, the weight of its norm. Key and
    value heads move with their group of query heads. The pass is useful before a merge of adjacent heads. An attention
    whose heads an earlier run has put in this order stays unchanged.

    Condition: the query heads of a group stay together. The pass refuses attentions with a cache, with keys that are
    also the values, with a node other than norms, scales, clips and rotations between linear and attention, with a
    reader of the result other than one linear, with computed sinks, or with a bias per head that is not a parameter,
    ALiBi or a table of distances.

    Source: Vaswani 2017, Attention Is All You Need; addition commutes.

    Example permute-heads{order=[3, 2, 0, 1]}::

        graph example {
          input %x: f32[batch, seq, 5]
          param %q.weight: f32[8, 5] = normal([8, 5], std=1.0, stream="q")
          param %k.weight: f32[4, 5] = normal([4, 5], std=1.0, stream="k")
          param %v.weight: f32[6, 5] = normal([6, 5], std=1.0, stream="v")
          param %o.weight: f32[5, 12] = normal([5, 12], std=1.0, stream="o")
          %q: f32[batch, seq, 8] = linear(%x, %q.weight)
          %k: f32[batch, seq, 4] = linear(%x, %k.weight)
          %v: f32[batch, seq, 6] = linear(%x, %v.weight)
          %y: f32[batch, seq, 12] = attention(%q, %k, %v, heads=4, kv_heads=2, causal=true)
          %o: f32[batch, seq, 5] = linear(%y, %o.weight)
          output o = %o
        }
    """

    name = "permute-heads"
    effect = "exact"
    purpose = "Same function, other weights"
    order: tuple[int, ...]

    def run(self, graph: Graph, trace: Trace) -> None:
        if sorted(self.order) != list(range(len(self.order))):
            raise WeftError(
                f"permute-heads: order={list(self.order)} must have each head, counted from 0, exactly once"
            )
        if self.order == tuple(sorted(self.order)):
            trace.note("permute-heads: order is the present order of the heads")
            return
        # Layers often share one bias: it is rearranged once.
        biases: BiasCache = {}
        for node in graph.nodes:
            if node.op is ops.attention and node.attrs["heads"] != 1:
                trace.record_result(self.name, node.output.name, _permute_heads(node, self.order, biases))
        # Only now have all attentions that share a bias moved to the new one.
        erase_unused(graph, [old.producer for old, _ in biases if old.producer is not None])


def _permute_heads(node: Node, order: tuple[int, ...], biases: BiasCache) -> str | None:
    """Permute the heads of attention `node`; return None, "" if an earlier run has done so, or a reason (str)."""
    heads, kv_heads = node.attrs["heads"], node.attrs["kv_heads"]
    if heads != len(order):
        return f"it has {heads} heads, the order {len(order)}"
    group = heads // kv_heads
    group_order = tuple(order[i] // group for i in range(0, heads, group))
    if any(h // group != group_order[i // group] for i, h in enumerate(order)):
        return f"heads of its groups of {group} would be separated"
    if node.operand("past_k") is not None:
        return "it has a cache of its KV heads; run permute-heads before kv-cache"
    if node.operand("v") is None:
        return "its keys are its values too"
    layouts = find_layouts(node, "qkv", lambda role, _, width: HeadLayout(order if role == "q" else group_order, width))
    if isinstance(layouts, str):
        return layouts
    o = find_output_linear(node)
    if isinstance(o, str):
        return o
    if (reason := find_score_obstacle(node)) is not None:
        return reason
    if _has_order(*layouts["q"]):
        return ""
    apply_layout(node, {role: pair for role, pair in layouts.items() if not pair[1].is_identity})
    rearrange_columns(o, HeadLayout(order, node.output.width // heads))
    rebuild_scores(node, order, biases)
    return None


def _has_order(branch: Branch, layout: HeadLayout) -> bool:
    """Return whether the weight rows of `branch` are a Take in the order of `layout`, as an earlier run leaves them."""
    start, stop = branch.span
    recipe = slice_rows(branch.weight.recipe, start, stop, branch.linear.graph.reader)
    return isinstance(recipe, Take) and recipe.axis == 0 and recipe.indices == tuple(start + i for i in layout.rows)


def _take_heads(old: Param, order: tuple[int, ...], axis: int) -> Param:
    shape = tuple(old.shape)
    return derive_param(old, Take(old.recipe, order, axis), (*shape[:axis], len(order), *shape[axis + 1 :]))


def find_score_obstacle(node: Node) -> str | None:
    """Return a reason (str) why `rebuild_scores` cannot take heads of the attention `node`; None if it can."""
    sinks, bias = node.operand("sinks"), node.operand("bias")
    if not (sinks is None or isinstance(sinks, Param)):
        return f"its sinks %{sinks.name} are computed"
    if bias is None or isinstance(bias, Param) or bias.shape[1] == 1:
        return None
    if bias.producer is None or bias.producer.op not in _HEAD_AXES:
        return f"its bias %{bias.name} is computed, head by head"
    source = bias.producer.required_operand(_HEAD_AXES[bias.producer.op][0])
    return None if isinstance(source, Param) else f"%{source.name}, from which its bias is computed, is not a parameter"


def rebuild_scores(node: Node, order: tuple[int, ...], biases: BiasCache, **attrs: Any) -> Node:
    """Rebuild the attention `node` with the heads `order` (all or a subset) of sinks and bias, and `attrs`; return it.

    `find_score_obstacle` must return None. `biases` caches the new biases, because layers often share one.
    """
    sinks, bias = node.operand("sinks"), node.operand("bias")
    if bias is not None and (bias, order) not in biases:
        biases[bias, order] = _take_bias_heads(bias, order)
    new_sinks = _take_heads(sinks, order, 0) if isinstance(sinks, Param) else None
    operands = {"bias": None if bias is None else biases[bias, order], "sinks": new_sinks}
    node = rebuild_node(node, operands, **attrs)
    replace_param(sinks, new_sinks)
    return node


def _take_bias_heads(bias: Value, order: tuple[int, ...]) -> Value:
    """Return the heads `order` of the score bias `bias` [batch, heads or 1, seq, keys]."""
    if bias.shape[1] == 1:
        return bias
    if isinstance(bias, Param):
        return _take_heads(bias, order, 1)
    source = bias.producer
    assert source is not None
    name, axis = _HEAD_AXES[source.op]
    with bias.graph.inserting(after=source):
        return source.op(_take_heads(require_param(source, name), order, axis), *source.inputs[1:], **source.attrs)
