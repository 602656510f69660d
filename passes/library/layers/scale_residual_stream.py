"""Scale the residual stream."""

from __future__ import annotations

from weft.ir import Graph, Value, WeftError, ops

from ... import Pass, Trace
from ...analysis.residual import check_streams, explain_unmappable, map_writers, require_streams
from ...edits.absorb import absorb_input_map, make_scale_map
from ...edits.edit import rebuild_node


class ScaleResidualStream(Pass):
    """Scale the residual stream by `factor` relative to the original model, and compensate in its readers.

    With c = `factor`, c·x/√(mean((c·x)²) + c²·ε) = x/√(mean(x²) + ε). The weights of all writers of the stream (tables,
    last linears and experts of sublayers, their biases, norms after them) are multiplied by c, ε of every norm that
    reads the stream by c², and linears that read it directly by 1/c. Models trained in bf16 whose stream exceeds 65504
    (T5, Gemma) then run in f16; a power of two changes only exponents. Looked-up rows are multiplied instead of a table
    that the head shares, and results instead of the weight of a norm that has none. A second run multiplies by
    `factor` / graph.meta["residual_scale"].

    Condition: every writer of the stream is linear or a norm, and only norms and linears read it.

    Source: homogeneity of norms; clamping T5 in f16 (Hugging Face transformers) is the alternative that is not exact.

    Example scale-residual-stream{factor=0.125}::

        graph example {
          input %ids: i64[batch, seq]
          param %embed.weight: f32[9, 4] = normal([9, 4], std=0.5, stream="embed")
          param %ffn.weight: f32[4, 4] = normal([4, 4], std=0.5, stream="ffn")
          param %head.weight: f32[9, 4] = normal([9, 4], std=0.5, stream="head")
          %embed: f32[batch, seq, 4] = embedding(%ids, %embed.weight)
          %norm: f32[batch, seq, 4] = rms_norm(%embed)
          %ffn: f32[batch, seq, 4] = linear(%norm, %ffn.weight)
          %residual: f32[batch, seq, 4] = add(%embed, %ffn)
          %final: f32[batch, seq, 4] = rms_norm(%residual)
          %head: f32[batch, seq, 9] = linear(%final, %head.weight)
          output logits = %head
        }
    """

    name = "scale-residual-stream"
    effect = "exact"
    purpose = "Same function, other weights"
    tradeoff = "if the table is tied to the head, a multiplication for every token"
    factor: float

    def run(self, graph: Graph, trace: Trace) -> None:
        if not 1e-6 <= self.factor <= 1e6:
            raise WeftError(f"{self.name}: factor={self.factor} must be from 1e-06 to 1e+06")
        by = self.factor / graph.meta.get("residual_scale", 1.0)
        streams = require_streams(graph, self.name)
        check_streams(streams, self.name, lambda stream: explain_unmappable(stream, norms=True))
        if by == 1:
            return

        def scale_rows(x: Value) -> Value:
            return ops.affine(x, by=by, name="scale_map")

        map_writers(streams, make_scale_map(by), scale_rows)
        for linear in (n for stream in streams for n in stream.linears):
            absorb_input_map(linear, make_scale_map(1 / by))
        for norm in (n for stream in streams for n in stream.norms):
            rebuild_node(norm, eps=norm.attrs["eps"] * by * by)
        for stream in streams:
            trace.record_rewrite(self.name, next(iter(stream.values)).name)
        graph.meta["residual_scale"] = self.factor
