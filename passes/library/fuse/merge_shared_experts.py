"""Merge parallel feed-forwards into one wide feed-forward."""

from __future__ import annotations

from weft.ir import Graph, Value, ops
from weft.ir.ops.activation import activate
from weft.ir.recipes import Add, Concat

from ... import Pass, Trace
from ...analysis.feed_forward import FeedForward, Projection, match_feed_forward
from ...edits.edit import (
    add_common_prefix,
    backward_slice,
    derive_param,
    erase_unused,
    find_summands,
    find_sums,
    has_add_norm_reader,
    remove_summand,
    replace_uses,
)


class MergeSharedExperts(Pass):
    """Merge a sum of feed-forwards of the same value into one as wide as all of them.

    D₁ a(U₁ x) + D₂ a(U₂ x) = [D₁ D₂] a([U₁; U₂] x), since the activation a is elementwise. Gates are stacked like the
    up projections U, and biases of the down projections D are added. Shared experts and parallel feed-forwards are such
    sums.

    Condition: the feed-forwards read the same value, have the same activation, and all or none are gated. Each is a
    summand without a factor: a gate on the output (Qwen2-MoE's σ(w x)) prevents the merge; fold-scale removes constant
    factors.

    Source: DeepSeekMoE (Dai 2024, 2401.06066), whose N shared experts are one of N times the width.

    Example merge-shared-experts::

        graph example {
          input %x: f32[batch, seq, 4]
          param %up.weight: f32[6, 4] = normal([6, 4], std=0.5, stream="up")
          param %down.weight: f32[4, 6] = normal([4, 6], std=0.5, stream="down")
          param %second.up.weight: f32[3, 4] = normal([3, 4], std=0.5, stream="second.up")
          param %second.down.weight: f32[4, 3] = normal([4, 3], std=0.5, stream="second.down")
          %up: f32[batch, seq, 6] = linear(%x, %up.weight)
          %gelu: f32[batch, seq, 6] = gelu(%up)
          %down: f32[batch, seq, 4] = linear(%gelu, %down.weight)
          %second.up: f32[batch, seq, 3] = linear(%x, %second.up.weight)
          %second.gelu: f32[batch, seq, 3] = gelu(%second.up)
          %second.down: f32[batch, seq, 4] = linear(%second.gelu, %second.down.weight)
          %sum: f32[batch, seq, 4] = add(%down, %second.down)
          output y = %sum
        }
    """

    name = "merge-shared-experts"
    effect = "exact"
    purpose = "Fuse and take apart"

    def run(self, graph: Graph, trace: Trace) -> None:
        order = {node: i for i, node in enumerate(graph.nodes)}
        for total in find_sums(graph):
            sites: dict[Value, list[tuple[str, FeedForward | str]]] = {}  # by input; a str is why one cannot merge
            for term in find_summands(total):
                summand = _match_summand(term)
                if summand is not None:
                    sites.setdefault(summand[0], []).append((term.name, summand[1]))
            for site in (terms for terms in sites.values() if len(terms) > 1):
                kinds: dict[object, list[FeedForward]] = {}
                for at, feed in site:
                    if isinstance(feed, str):
                        trace.refuse(self.name, at, feed)
                    else:
                        kinds.setdefault(feed.kind, []).append(feed)
                for mergeable in kinds.values():
                    mergeable.sort(key=lambda f: order[f.down])
                    at = mergeable[-1].down.output.name
                    if any(has_add_norm_reader(f.down.output) for f in mergeable[:-1]):
                        trace.refuse(self.name, at, "it is an operand of add_norm: run unfuse-residual-norm first")
                    elif len(mergeable) > 1:
                        trace.record_rewrite(self.name, at)
                        _merge_feed_forwards(mergeable)
                    elif len(kinds) > 1:
                        trace.refuse(self.name, at, "its activation or gate differs from the other's")


def _match_summand(term: Value) -> tuple[Value, FeedForward | str] | None:
    """Return (input, feed-forward) if `term` is the output of a feed-forward, or (input, reason (str)) if that cannot
    be merged, for example because it is multiplied by a factor. Return None for other terms."""
    node = term.producer
    if node is None:
        return None
    if node.op in (ops.mul, ops.affine):
        for v in node.inputs:
            scaled_feed = match_feed_forward(v.producer) if v is not None and v.producer is not None else None
            if isinstance(scaled_feed, FeedForward):
                return scaled_feed.x, f"{node.op.name} multiplies it"
    feed = match_feed_forward(node)
    if not isinstance(feed, FeedForward):
        return None
    if feed.up.is_normed:
        return feed.x, f"its norm is fused into it: run {MergeSharedExperts.name} before fuse-norm-linear"
    return feed.x, "its result has other readers" if len(term.uses) > 1 or term.is_output else feed


def _merge_feed_forwards(parts: list[FeedForward]) -> None:
    """Replace the last of `parts` by one feed-forward that merges all of them, and remove the others from the sum."""
    last, graph = parts[-1], parts[0].x.graph
    with graph.inserting(before=last.down):
        up = _merge_linears([f.up for f in parts], 0, "up", last.x)
        if last.gate is None:
            hidden = activate(up, last.activation)
        else:
            gate = _merge_linears([f.gate for f in parts if f.gate is not None], 0, "gate", last.x)
            hidden = ops.glu(gate, up, activation=last.activation, limit=last.limit, shift=last.shift)
        y = _merge_linears([f.out for f in parts], 1, "down", hidden)
    replace_uses(last.down.output, y)
    for f in parts[:-1]:
        remove_summand(f.down.output)
    erase_unused(graph, backward_slice([f.down.output for f in parts], [last.x]))


def _merge_linears(parts: list[Projection], axis: int, name: str, x: Value) -> Value:
    """Emit one linear of x for the projections `parts`; return its output.
    With axis 0 their outputs are concatenated; with axis 1 their inputs are, so that the outputs are summed."""
    rows = sum(s.stop - s.start for s in parts) if axis == 0 else parts[0].stop
    weights, biases = [s.params[0] for s in parts], [b for s in parts if (b := s.params[1]) is not None]
    recipe, full, bias = Concat(tuple(s.weight for s in parts), axis), add_common_prefix(weights, name), None
    weight = derive_param(weights[0], recipe, (rows, x.width), f"{full}.weight")
    if biases:
        merged = Concat(tuple(s.full_bias for s in parts)) if axis == 0 else Add(tuple(s.bias for s in parts if s.bias))
        bias = derive_param(biases[0], merged, (rows,), f"{full}.bias")
    return ops.linear(x, weight, bias, name=name)
