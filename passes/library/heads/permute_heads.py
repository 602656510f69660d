"""Permute attention heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from weft.ir import Graph, Node, Param, Value, WeftError, ops
from weft.ir.recipes import Take

from ...analysis.projections import Branch, find_branch, find_output_linear, slice_rows
from ...core.base import Pass
from ...core.trace import Trace
from ...edits.edit import derive_param, erase_unused, rebuild_node, replace_param
from .head_layout import HeadLayout, apply_layout, find_obstacle


@dataclass(frozen=True)
class PermuteHeads(Pass):
    """Reorder the heads of attention: new query head i is old head `order[i]`.

    The output projection sums over heads: Σ_h W_h y_h is the same in any order. All parameters of a head move with it:
    its rows of W_q and its bias, its columns of W_o, its slope or score bias, its sink, the weight of its norm. Key and
    value heads move with their group of query heads. The pass is useful before a merge of adjacent heads. An attention
    whose heads an earlier run has put in this order stays unchanged.

    Condition: the query heads of a group stay together. The pass refuses attentions with a cache, with a node other
    than norms, scales, clips and rotations between linear and attention, with a reader of the result other than a
    linear, or with a bias per head that is not a parameter, ALiBi or a table of distances.

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
            raise WeftError(f"permute-heads: order={list(self.order)} does not name every head from 0 once")
        if self.order == tuple(sorted(self.order)):
            trace.note("permute-heads: order is the present order of the heads")
            return
        # Layers often share one bias: it is rearranged once.
        biases: dict[Value, Value] = {}
        for node in graph.nodes:
            if node.op is not ops.attention or node.attrs["heads"] == 1:
                continue
            at = node.output.name
            reason = _permute_heads(node, self.order, biases)
            if reason:
                trace.refuse(self.name, at, reason)
            elif reason is None:
                trace.record_rewrite(self.name, at)
        # Only now have all attentions that share a bias moved to the new one.
        erase_unused(graph, [old.producer for old in biases if old.producer is not None])


def _permute_heads(node: Node, order: tuple[int, ...], biases: dict[Value, Value]) -> str | None:
    """Permute the heads of the attention `node` and return None. Return "" if an earlier run has done so, and a reason
    (str) if it is impossible. `biases` maps the score biases that were rearranged to the new ones."""
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
    layouts: dict[str, tuple[Branch, HeadLayout]] = {}
    for role, head_order, count in (("q", order, heads), ("k", group_order, kv_heads), ("v", group_order, kv_heads)):
        branch = find_branch(node, role)
        if isinstance(branch, str):
            return branch
        layout = HeadLayout(head_order, branch.start.width // count)
        if (reason := find_obstacle(branch, layout)) is not None:
            return reason
        layouts[role] = branch, layout
    o, sinks, bias = find_output_linear(node), node.operand("sinks"), node.operand("bias")
    if isinstance(o, str):
        return o
    if not (sinks is None or isinstance(sinks, Param)):
        return f"its sinks %{sinks.name} are computed"
    new_bias_source = None if bias is None else biases[bias] if bias in biases else rearrange_bias(bias, order)
    if isinstance(new_bias_source, str):
        return new_bias_source
    if _has_order(*layouts["q"]):
        return ""
    apply_layout(node, {role: pair for role, pair in layouts.items() if not pair[1].is_identity})
    weight = o.operand("weight")
    assert isinstance(weight, Param)
    columns = HeadLayout(order, int(weight.shape[1]) // heads).derive_param(weight, axis=1)
    rebuild_node(o, {"weight": columns})
    replace_param(weight, columns)
    new_sinks = None if sinks is None else derive_param(sinks, Take(sinks.recipe, order))
    new_bias = bias
    if bias is not None and new_bias_source is not None:
        new_bias = biases[bias] = new_bias_source() if callable(new_bias_source) else new_bias_source
    rebuild_node(node, {"bias": new_bias, "sinks": new_sinks})
    replace_param(sinks, new_sinks)
    return None


def _has_order(branch: Branch, layout: HeadLayout) -> bool:
    """Return whether the weight rows of `branch` are a Take in the order of `layout`, as an earlier run leaves them."""
    start, stop = branch.span
    recipe = slice_rows(branch.weight.recipe, start, stop, branch.linear.graph.reader)
    return isinstance(recipe, Take) and recipe.axis == 0 and recipe.indices == tuple(start + i for i in layout.rows)


def _take_heads(old: Param, order: tuple[int, ...], axis: int) -> Param:
    shape = tuple(old.shape)
    return derive_param(old, Take(old.recipe, order, axis), (*shape[:axis], len(order), *shape[axis + 1 :]))


def rearrange_bias(bias: Value, order: tuple[int, ...]) -> Callable[[], Value] | Value | str:
    """Return the heads `order` (all or a subset) of the score bias `bias` [batch, heads, seq, keys].
    The result is a value if it needs no new nodes, else a function that emits the nodes and returns the value; a reason
    (str) if `bias` cannot be rearranged."""
    if bias.shape[1] == 1:
        return bias
    if isinstance(bias, Param):
        return _take_heads(bias, order, 1)
    source = bias.producer
    head_axes = {ops.alibi: ("slopes", 0), ops.relative_position_bias: ("table", 1)}
    if source is None or source.op not in head_axes:
        return f"its bias %{bias.name} is computed, head by head"
    name, axis = head_axes[source.op]
    old = source.operand(name)
    if not isinstance(old, Param):
        return f"%{name if old is None else old.name}, from which its bias is computed, is not a parameter"

    def emit_bias() -> Value:
        new = _take_heads(old, order, axis)
        with bias.graph.inserting(after=source):
            return source.op(new, *source.inputs[1:], **source.attrs)

    return emit_bias
