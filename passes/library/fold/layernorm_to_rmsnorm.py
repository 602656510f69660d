"""LayerNorm to RMSNorm, by centring the writers of the residual stream."""

from __future__ import annotations

from weft.ir import Graph, Node, Param, Value, ops

from ... import Pass, Trace
from ...analysis.residual import (
    ResidualStream,
    check_streams,
    explain_unmappable,
    find_tables,
    map_writers,
    require_streams,
)
from ...edits.absorb import absorb_input_map, is_layer_norm, subtract_mean
from ...edits.edit import erase_unused_params, rebuild_node
from .fold_norm_scale import Site, find_site


class LayernormToRmsnorm(Pass):
    """Replace the LayerNorms of a pre-norm model by RMSNorms, with weights that keep the residual stream centred.

    LayerNorm(x) = RMSNorm(x − μ(x)) ⊙ g + β. The mean is linear, so a stream is centred if every summand is:
    C = I − 11ᵀ/n is multiplied into the tables of tokens, positions and types, into the linears and experts that end a
    sublayer, and into their biases. ε is unchanged. β goes into the biases of the linears that read the norm; if it has
    other readers, β is added after it. A table that is also the head's weight is centred if the head's input comes from
    a LayerNorm without weight and bias; otherwise the table is unchanged and its looked-up rows are centred.

    Condition: every norm that reads the stream is a LayerNorm, every writer is linear, and there are no other readers.
    A LayerNorm whose result is the residual (post-norm) is not centred after its weight and bias.

    Source: SliceGPT (Ashkboos 2024, 2401.15024), section 3.2; Jiang 2023, 2305.14858.

    Example layernorm-to-rmsnorm::

        graph example {
          input %ids: i64[batch, seq]
          param %embed.weight: f32[9, 4] = normal([9, 4], std=0.5, stream="embed")
          param %norm.bias: f32[4] = normal([4], std=0.5, stream="beta")
          param %ffn.weight: f32[4, 4] = normal([4, 4], std=0.5, stream="ffn")
          param %head.weight: f32[9, 4] = normal([9, 4], std=0.5, stream="head")
          %embed: f32[batch, seq, 4] = embedding(%ids, %embed.weight)
          %norm: f32[batch, seq, 4] = layer_norm(%embed, _, %norm.bias)
          %ffn: f32[batch, seq, 4] = linear(%norm, %ffn.weight)
          %residual: f32[batch, seq, 4] = add(%embed, %ffn)
          %final: f32[batch, seq, 4] = layer_norm(%residual)
          %head: f32[batch, seq, 9] = linear(%final, %head.weight)
          output logits = %head
        }
    """

    name = "layernorm-to-rmsnorm"
    effect = "exact"
    purpose = "Fold into weights"
    see = ("fold-norm-scale",)
    tradeoff = "the bias of a LayerNorm becomes biases of its readers"

    def run(self, graph: Graph, trace: Trace) -> None:
        streams = [s for s in require_streams(graph, self.name) if any(map(is_layer_norm, s.norms))]
        check_streams(streams, self.name, _find_obstacle)
        heads = _find_centred_heads(streams)
        map_writers(streams, subtract_mean, _centre_rows, heads)
        for head in heads:
            absorb_input_map(head, subtract_mean)
        for norm in (n for stream in streams for n in stream.norms):
            trace.record_rewrite(self.name, norm.output.name)
            _replace_by_rms_norm(norm)
        if not streams:
            trace.note(f"{self.name}: no LayerNorm reads a residual stream")


def _find_obstacle(stream: ResidualStream) -> str | None:
    if reason := explain_unmappable(stream):
        return reason
    readers = [*(n for n in stream.norms if not is_layer_norm(n)), *stream.linears]
    return f"{readers[0].op.name} (%{readers[0].output.name}) reads its mean" if readers else None


def _find_centred_heads(streams: list[ResidualStream]) -> list[Node]:
    """Return the linears that read a norm of `streams` without weight and bias, and whose weight is also a table."""
    norms = [n for stream in streams for n in stream.norms if n.op is not ops.norm_linear]
    unweighted = [n.output for n in norms if n.operand("weight") is None and n.operand("bias") is None]
    shared = set(find_tables(streams))
    return [n for v in unweighted for n, i in v.uses if n.op is ops.linear and i == 0 and n.inputs[1] in shared]


def _centre_rows(x: Value) -> Value:
    return ops.sub(x, ops.mean(x, axes=(-1,), keepdims=True), name="centre_map")


def _replace_by_rms_norm(norm: Node) -> None:
    """Replace the LayerNorm `norm`, whose input is centred, by an RMSNorm; its bias moves to readers or an add."""
    graph, bias = norm.graph, None if norm.op is ops.norm_linear else norm.operand("bias")
    bias_site = find_site(norm) if isinstance(bias, Param) else None
    if isinstance(bias_site, Site) and isinstance(bias, Param):
        for reader in bias_site.readers:
            absorb_input_map(reader, None, bias.recipe)
    if norm.op is ops.layer_norm:
        with graph.inserting(before=norm):
            y = ops.rms_norm(norm.inputs[0], norm.operand("weight"), eps=norm.attrs["eps"])
        graph.replace(norm, y)
    else:
        y = rebuild_node(norm, {"bias": None} if bias is not None else None, kind="rms").output
    if bias is not None and not isinstance(bias_site, Site):
        with graph.inserting(after=y.producer):
            shifted = ops.add(y, bias, name="shifted")
        y.replace_uses(shifted, keep=[n for n in [shifted.producer] if n is not None])
    erase_unused_params(graph, [bias])
