"""Parallel attention and feed-forward as two wide products."""

from __future__ import annotations

from dataclasses import dataclass

from weft.ir import Graph, Node, Param, Value, ops
from weft.ir.recipes import Add, Concat

from ...analysis.feed_forward import FeedForward, feed_forward
from ...analysis.projections import Projections, projections
from ...core.base import Pass
from ...core.trace import Trace
from ...edits.edit import cuts_rows, derive, drop, joint_name, only_params, replace_uses
from ...edits.sums import fixed, summands, take_out, totals
from .pack import packed


@dataclass(frozen=True)
class FuseParallelBlock(Pass):
    """Compute a block x + attn(N x) + ffn(N x) with one linear into both branches and one out of both.

    Queries, keys, values, gate and up read the same normed value: [W_q; W_k; W_v; W_gate; W_up] makes them at once.
    The outputs of both branches are added up: W_o a + W_down h = [W_o W_down] [a; h]. Two large products take the place
    of up to seven small ones, which is why such blocks were made parallel.

    Condition: both read the same value, and nothing but additions lies behind W_o and W_down. Two norms (GPT-NeoX) make
    two values: only the way out is fused then, unless fold-norm-scale and cse have made them one.

    Source: GPT-J (Wang 2021), PaLM (Chowdhery 2022, 2204.02311), section 2.

    Example fuse-parallel-block::

        graph example {
          input %x: f32[batch, seq, 4]
          param %q.weight: f32[4, 4] = normal([4, 4], std=0.5, stream="q")
          param %k.weight: f32[4, 4] = normal([4, 4], std=0.5, stream="k")
          param %v.weight: f32[4, 4] = normal([4, 4], std=0.5, stream="v")
          param %o.weight: f32[4, 4] = normal([4, 4], std=0.5, stream="o")
          param %up.weight: f32[6, 4] = normal([6, 4], std=0.5, stream="up")
          param %down.weight: f32[4, 6] = normal([4, 6], std=0.5, stream="down")
          %q: f32[batch, seq, 4] = linear(%x, %q.weight)
          %k: f32[batch, seq, 4] = linear(%x, %k.weight)
          %v: f32[batch, seq, 4] = linear(%x, %v.weight)
          %attention: f32[batch, seq, 4] = attention(%q, %k, %v, heads=2, kv_heads=2, causal=true)
          %o: f32[batch, seq, 4] = linear(%attention, %o.weight)
          %up: f32[batch, seq, 6] = linear(%x, %up.weight)
          %hidden: f32[batch, seq, 6] = gelu(%up)
          %down: f32[batch, seq, 4] = linear(%hidden, %down.weight)
          %sum: f32[batch, seq, 4] = add(%o, %down)
          output y = %sum
        }
    """

    name = "fuse-parallel-block"
    effect = "exact"
    purpose = "Fuse and take apart"
    tradeoff = "the inner results of both branches are copied side by side"

    def run(self, graph: Graph, trace: Trace) -> None:
        place = {node: i for i, node in enumerate(graph.nodes)}
        known = [projections(node) for node in graph.nodes if node.op is ops.attention]
        attentions = {p.o: p for p in known if isinstance(p, Projections)}
        for total in totals(graph):
            terms = [v.producer for v in summands(total) if v.producer and len(v.uses) == 1 and not v.is_output]
            found = [attentions[n] for n in terms if n in attentions]
            feeds = [f for n in terms if isinstance(f := feed_forward(n), FeedForward)]
            if len(found) != 1 or len(feeds) != 1:
                continue  # not side by side
            attention, feed = found[0], feeds[0]
            at = total.outputs[-1].name
            first, last = sorted((attention.o, feed.down), key=lambda n: place[n])
            why = _misfit(attention, feed) or ("nothing else is added" if fixed(first.output) else None)
            if why is not None:
                trace.refuse(self.name, at, why)
                continue
            trace.fired(self.name, at)
            _way_out(first, last)
            ins = [*(b.linear for b in attention.branches), *(p.node for p in feed.parts[:-1])]
            if len({n.inputs[0] for n in ins}) > 1:
                trace.refuse(self.name, at, "its branches read different values: only the way out is one")
            else:
                _way_in(sorted(dict.fromkeys(ins), key=lambda n: place[n]))


def _misfit(attention: Projections, feed: FeedForward) -> str | None:
    nodes = [attention.o, feed.down, *(b.linear for b in attention.branches), *(p.node for p in feed.parts[:-1])]
    for node in nodes:
        if node.op is not ops.linear:
            return f"%{node.output.name} has its norm fused into it: run before fuse-norm-linear"
        if not only_params(node.inputs[1:]):
            return f"the weight of %{node.output.name} is computed"
    if len({v.type.dtype for n in nodes for v in n.inputs[1:] if v is not None}) > 1:
        return "its weights have different dtypes"
    return None


def _weights(nodes: list[Node]) -> list[Param]:
    return [v for n in nodes if isinstance(v := n.inputs[1], Param)]


def _biases(nodes: list[Node]) -> list[Param | None]:
    return [b if isinstance(b := n.operand("bias"), Param) else None for n in nodes]


def _way_out(first: Node, last: Node) -> None:
    """Let `last` compute the sum of both, out of what both read."""
    graph, nodes, width = last.graph, [first, last], last.output.width
    weights, given, bias = _weights(nodes), [b for b in _biases(nodes) if b is not None], None
    name, shape = joint_name(weights, "out"), (width, sum(w.width for w in weights))
    weight = derive(weights[0], Concat(tuple(w.recipe for w in weights), 1), shape, f"{name}.weight")
    if given:
        recipe = Add(tuple(b.recipe for b in given)) if len(given) > 1 else given[0].recipe
        bias = derive(given[0], recipe, (width,), f"{name}.bias")
    take_out(first.output)
    with graph.inserting(before=last):
        both = ops.concat(*(n.inputs[0] for n in nodes), axis=len(last.output.shape) - 1, name="both")
        y = ops.linear(both, weight, bias, name="out")
    replace_uses(last.output, y)
    drop(graph, [first, last])


def _way_in(nodes: list[Node]) -> None:
    """Make what `nodes`, linears of one value, make with one linear."""
    graph, x = nodes[0].graph, nodes[0].inputs[0]
    assert x is not None
    pieces: list[Value] = []
    splits: list[Node] = []
    for node in nodes:
        (reader, *others) = node.output.users
        if not others and reader.op is ops.split and cuts_rows(reader):
            pieces += reader.outputs
            splits.append(reader)
        else:
            pieces.append(node.output)
    with graph.inserting(before=nodes[0]):
        made = packed(x, _weights(nodes), _biases(nodes), "in", [piece.width for piece in pieces])
    for old, new in zip(pieces, made, strict=True):
        replace_uses(old, new)
    drop(graph, [*splits, *nodes])
