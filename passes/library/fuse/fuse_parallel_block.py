"""Fuse the linears of a parallel attention and feed-forward into two wide linears."""

from __future__ import annotations

from weft.ir import Graph, Node, Param, Value, ops
from weft.ir.recipes import Add, Concat

from ... import Pass, Trace
from ...analysis.feed_forward import FeedForward, match_feed_forward
from ...analysis.projections import Projections, find_projections
from ...edits.edit import (
    add_common_prefix,
    are_params,
    derive_param,
    erase_unused,
    find_summands,
    find_sums,
    has_add_norm_reader,
    is_feature_split,
    remove_summand,
    replace_uses,
)
from .pack import pack_linears


class FuseParallelBlock(Pass):
    """Compute a block x + attn(N x) + ffn(N x) with one input linear and one output linear for both branches.

    Queries, keys, values, gate and up read the same normalized value: one linear with [W_q; W_k; W_v; W_gate; W_up]
    computes all of them. The outputs of both branches are summed: W_o a + W_down h = [W_o W_down] [a; h]. Two large
    products replace up to seven small ones.

    Condition: both branches read the same value, and their outputs are only read by the sum. With two norms (GPT-NeoX)
    they read two values: then only the output linears are fused, unless fold-norm-scale and cse merged the norms.

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
    tradeoff = "the inner results of both branches are copied into one tensor"

    def run(self, graph: Graph, trace: Trace) -> None:
        order = {node: i for i, node in enumerate(graph.nodes)}
        matches = [find_projections(node) for node in graph.nodes if node.op is ops.attention]
        attentions = {p.o: p for p in matches if isinstance(p, Projections)}
        for total in find_sums(graph):
            terms = [v.producer for v in find_summands(total) if v.producer and len(v.uses) == 1 and not v.is_output]
            parallel = [attentions[n] for n in terms if n in attentions]
            feeds = [f for n in terms if isinstance(f := match_feed_forward(n), FeedForward)]
            if len(parallel) != 1 or len(feeds) != 1:
                continue  # not a parallel block
            attention, feed = parallel[0], feeds[0]
            at = total.outputs[-1].name
            first, last = sorted((attention.o, feed.down), key=lambda n: order[n])
            reason = _find_obstacle(attention, feed)
            if reason is None and has_add_norm_reader(first.output):
                reason = "nothing else is added"
            trace.record_result(self.name, at, reason)
            if reason is not None:
                continue
            _fuse_outputs(first, last)
            input_linears = [*(b.linear for b in attention.branches), *(p.node for p in feed.parts[:-1])]
            if len({n.inputs[0] for n in input_linears}) > 1:
                trace.refuse(self.name, at, "its branches read different values: only the output linears are fused")
            else:
                _fuse_inputs(sorted(dict.fromkeys(input_linears), key=lambda n: order[n]))


def _find_obstacle(attention: Projections, feed: FeedForward) -> str | None:
    nodes = [attention.o, feed.down, *(b.linear for b in attention.branches), *(p.node for p in feed.parts[:-1])]
    for node in nodes:
        if node.op is not ops.linear:
            return f"%{node.output.name} has its norm fused into it: run fuse-parallel-block before fuse-norm-linear"
        if not are_params(node.inputs[1:]):
            return f"the weight of %{node.output.name} is computed"
    if len({v.type.dtype for n in nodes for v in n.inputs[1:] if v is not None}) > 1:
        return "its weights have different dtypes"
    return None


def _list_weights(nodes: list[Node]) -> list[Param]:
    return [v for n in nodes if isinstance(v := n.inputs[1], Param)]


def _list_biases(nodes: list[Node]) -> list[Param | None]:
    return [b if isinstance(b := n.operand("bias"), Param) else None for n in nodes]


def _fuse_outputs(first: Node, last: Node) -> None:
    """Replace the linears `first` and `last`, two summands of one sum, by one linear of their concatenated inputs."""
    graph, nodes, width = last.graph, [first, last], last.output.width
    weights, present_biases, bias = _list_weights(nodes), [b for b in _list_biases(nodes) if b is not None], None
    name, shape = add_common_prefix(weights, "out"), (width, sum(w.width for w in weights))
    weight = derive_param(weights[0], Concat(tuple(w.recipe for w in weights), 1), shape, f"{name}.weight")
    if present_biases:
        recipe = Add(tuple(b.recipe for b in present_biases)) if len(present_biases) > 1 else present_biases[0].recipe
        bias = derive_param(present_biases[0], recipe, (width,), f"{name}.bias")
    remove_summand(first.output)
    with graph.inserting(before=last):
        inputs = ops.concat(*(n.inputs[0] for n in nodes), axis=len(last.output.shape) - 1, name="both")
        y = ops.linear(inputs, weight, bias, name="out")
    replace_uses(last.output, y)
    erase_unused(graph, [first, last])


def _fuse_inputs(nodes: list[Node]) -> None:
    """Replace `nodes`, linears of one value, by one packed linear and a split; their own splits become part of it."""
    graph, x = nodes[0].graph, nodes[0].required_operand("x")
    pieces: list[Value] = []
    splits: list[Node] = []
    for node in nodes:
        (reader, *more_readers) = node.output.users
        if not more_readers and reader.op is ops.split and is_feature_split(reader):
            pieces += reader.outputs
            splits.append(reader)
        else:
            pieces.append(node.output)
    with graph.inserting(before=nodes[0]):
        results = pack_linears(x, _list_weights(nodes), _list_biases(nodes), "in", [piece.width for piece in pieces])
    for old, new in zip(pieces, results, strict=True):
        replace_uses(old, new)
    erase_unused(graph, [*splits, *nodes])
