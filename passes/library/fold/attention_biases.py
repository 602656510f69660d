"""Biases around attention that softmax makes redundant: the key bias is dropped, the value bias moves to the output."""

from __future__ import annotations

from collections.abc import Iterator

from weft.ir import Graph, Node, Param, Value, ops
from weft.ir.recipes import Concat, Full, Literal, Take

from ... import Pass, Trace
from ...analysis.projections import Branch, find_branch, find_output_linear, is_zero, slice_rows
from ...edits.absorb import absorb_input_map
from ...edits.edit import derive_param, rebuild_node, replace_param


class DropKBias(Pass):
    """Drop the bias of the keys.

    q·(k + b) = q·k + q·b, and q·b is the same for all keys that a query sees: softmax is invariant to it. A packed
    linear keeps its other biases.

    Condition: between the bias and softmax there are only a product with q, a scale and additions to the scores. The
    pass refuses attentions with RoPE (b is rotated with the position of its key), a norm or clip of the keys, a soft
    cap or sinks (not shifted with the scores), keys that are also the values, or a cache of the keys.

    Source: Vaswani 2017, Attention Is All You Need; softmax(s + c) = softmax(s).

    Example drop-k-bias::

        graph example {
          input %x: f32[batch, seq, 6]
          param %q.weight: f32[8, 6] = normal([8, 6], std=1.0, stream="q")
          param %k.weight: f32[4, 6] = normal([4, 6], std=1.0, stream="k")
          param %k.bias: f32[4] = normal([4], std=1.0, stream="b")
          %q: f32[batch, seq, 8] = linear(%x, %q.weight)
          %k: f32[batch, seq, 4] = linear(%x, %k.weight, %k.bias)
          %v: f32[batch, seq, 4] = slice(%x, axis=2, start=0, stop=4)
          %y: f32[batch, seq, 8] = attention(%q, %k, %v, heads=4, kv_heads=2, causal=true)
          output y = %y
        }
    """

    name = "drop-k-bias"
    effect = "exact"
    purpose = "Fold into weights"
    see = ("v-bias-to-o-bias",)

    def run(self, graph: Graph, trace: Trace) -> None:
        for node, k, bias in _find_biases(graph, "k", self.name, trace):
            if (reason := _find_key_bias_effect(node, k)) is not None:
                trace.refuse(self.name, node.output.name, reason)
            else:
                trace.record_rewrite(self.name, bias.name)
                _drop_bias(k)


def _find_biases(graph: Graph, role: str, rule: str, trace: Trace) -> Iterator[tuple[Node, Branch, Param]]:
    """Yield (attention, path to operand `role`, nonzero bias); pass `rule` refuses attentions without such a path."""
    for node in graph.nodes:
        if node.op is ops.attention and node.operand(role) is not None:
            branch = find_branch(node, role)
            if isinstance(branch, str):
                trace.refuse(rule, node.output.name, branch)
            elif (bias := branch.bias) is not None:
                part = slice_rows(bias.recipe, *branch.span, graph.reader)
                if not is_zero(part):
                    yield node, branch, bias


def _find_key_bias_effect(node: Node, k: Branch) -> str | None:
    """Return a reason (str) why the bias of keys changes the result of the attention `node`; None if it does not."""
    if node.operand("past_k") is not None:
        return "its cache holds keys with their bias; run drop-k-bias before kv-cache"
    if node.operand("v") is None:
        return "its keys are also its values"
    if node.attrs["softcap"] is not None:
        return "its soft cap is not invariant to a shift of the scores"
    if node.operand("sinks") is not None:
        return "its sinks are not shifted with the scores"
    for step in k.between:
        if step.op is ops.rope:
            return "RoPE rotates the bias with the position of its key"
        if step.op is not ops.reshape:
            return f"{step.op.name} (%{step.output.name}) is between the bias and the scores"
    return None


class VBiasToOBias(Pass):
    """Move the bias of the values into the bias of the output projection.

    The attention weights α of a query sum to 1: Σ α (v + b) = Σ α v + b. So W_o (y + b) + b_o is W_o y + b', with
    b' = W_o b + b_o, b repeated for the query heads of a group. A packed linear keeps its other biases.

    Condition: every query sees a key, since the output without visible keys is 0, not b. In self-attention a query sees
    its own token under any window or pattern; in full attention it sees all valid tokens, so no sequence may be empty.
    The pass refuses attentions with sinks (weights sum to less than 1), with a mask plus causality, a window or a
    pattern (padding may see no key), a window or pattern if queries and keys differ in number, a bias that may be −∞, a
    node other than reshapes between v's linear and the attention, a reader of the result other than one linear, or a
    cache of the values.

    Source: Vaswani 2017, Attention Is All You Need; linearity.

    Example v-bias-to-o-bias::

        graph example {
          input %q: f32[batch, seq, 8]
          input %k: f32[batch, seq, 4]
          param %v.weight: f32[6, 4] = normal([6, 4], std=1.0, stream="v")
          param %v.bias: f32[6] = normal([6], std=1.0, stream="b")
          param %o.weight: f32[5, 12] = normal([5, 12], std=1.0, stream="o")
          %v: f32[batch, seq, 6] = linear(%k, %v.weight, %v.bias)
          %y: f32[batch, seq, 12] = attention(%q, %k, %v, heads=4, kv_heads=2, causal=true)
          %o: f32[batch, seq, 5] = linear(%y, %o.weight)
          output o = %o
        }
    """

    name = "v-bias-to-o-bias"
    effect = "exact"
    purpose = "Fold into weights"
    see = ("drop-k-bias",)
    tradeoff = (
        "an output projection without a bias gets one of the model's width; the bias of the values may be shorter"
    )

    def run(self, graph: Graph, trace: Trace) -> None:
        for node, v, bias in _find_biases(graph, "v", self.name, trace):
            o = find_output_linear(node)
            if isinstance(o, str):
                trace.refuse(self.name, node.output.name, o)
            elif (reason := _find_value_bias_obstacle(node, v)) is not None:
                trace.refuse(self.name, node.output.name, reason)
            else:
                trace.record_rewrite(self.name, bias.name)
                _move_bias(node, v, bias, o)
                _drop_bias(v)


def _find_value_bias_obstacle(node: Node, v: Branch) -> str | None:
    """Return a reason (str) why the bias of `v` cannot move past the attention `node`; None if it can."""
    if node.operand("past_v") is not None:
        return "its cache holds values with their bias; run v-bias-to-o-bias before kv-cache"
    if (step := next((n for n in v.between if n.op is not ops.reshape), None)) is not None:
        return f"{step.op.name} (%{step.output.name}) is between the bias and the values"
    if node.operand("sinks") is not None:
        return "its sinks take a part of the attention: the weights of the values sum to less than 1"
    bias, a = node.operand("bias"), node.attrs
    if bias is not None and not _is_finite(bias):
        return f"its bias %{bias.name} may mask all keys of a query"
    q, k = node.required_operand("q"), node.required_operand("k")
    local = a["window"] is not None or a["pattern"] != "dense"
    if node.operand("key_mask") is not None and (a["causal"] or local):
        return "queries of padding may see no key: all keys within their window or pattern may be masked"
    if local and q.shape[1] != k.shape[1]:
        return "queries and keys differ in number, so that a window or pattern may contain no key"
    return None


def _is_finite(bias: Value) -> bool:
    """Return whether `bias` is surely finite: a bias by distance, or a parameter without Literal and Full recipes."""
    if isinstance(bias, Param):
        # These two recipes can contain −∞, as masks do.
        return not bias.recipe.has(Literal, Full)
    return bias.producer is not None and bias.producer.op in (ops.alibi, ops.relative_position_bias)


def _move_bias(node: Node, v: Branch, bias: Param, o: Node) -> None:
    heads, kv_heads = node.attrs["heads"], node.attrs["kv_heads"]
    start, stop = v.span
    head_bias = slice_rows(bias.recipe, start, stop, o.graph.reader)
    if heads != kv_heads:
        width, group = (stop - start) // kv_heads, heads // kv_heads
        head_bias = Take(head_bias, tuple(h // group * width + i for h in range(heads) for i in range(width)))
    absorb_input_map(o, None, head_bias)


def _drop_bias(branch: Branch) -> None:
    """Set the rows of `branch` in the bias of its linear to zero; drop the bias if all rows are then zero."""
    linear, bias, (start, stop) = branch.linear, branch.bias, branch.span
    assert bias is not None
    reader, count = linear.graph.reader, int(bias.shape[0])
    pieces = [slice_rows(bias.recipe, a, b, reader) for a, b in ((0, start), (stop, count)) if a < b]
    new = None
    if not all(map(is_zero, pieces)):
        # `start > 0` is the number of pieces (0 or 1) in front of the zeros.
        parts = [*pieces[: start > 0], Full(0.0, (stop - start,)), *pieces[start > 0 :]]
        new = derive_param(bias, Concat(tuple(parts)))
    rebuild_node(linear, {"bias": new})
    replace_param(bias, new)
