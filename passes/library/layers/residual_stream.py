"""Rotate or scale the residual stream."""

from __future__ import annotations

from collections.abc import Iterator

from weft.ir import Graph, Node, Param, Recipe, WeftError, ops
from weft.ir.recipes import Permute, Scale
from weft.ir.recipes.matrices import MatMul, RandomOrthogonal

from ... import Pass, Trace
from ...analysis.residual import ResidualStream, check_streams, explain_unmappable, map_writers, require_streams
from ...edits.absorb import absorb_input_map, find_input_weights, is_layer_norm, make_matrix_map, make_scale_map
from ...edits.edit import derive_param, erase_unused_params, rebuild_node, require_param
from ..fold.fold_norm_scale import Site, find_site


class RotateResidual(Pass):
    """Rotate the residual stream by a random orthogonal matrix Q, and undo it in the linears that read the norms.

    RMSNorm(x Q) = RMSNorm(x) Q, because Q preserves lengths. Writers of the stream write rotated rows (E Q for a table,
    Qᵀ W and Qᵀ b for a linear), and readers of the norms undo the rotation (W Q). Q mixes all features of a row, so
    that outliers in a few of them are spread over all: a preparation for quantization. Q is a recipe, drawn from
    `seed`. Run fold-norm-scale before if norms have weights, and then layernorm-to-rmsnorm if there are LayerNorms. If
    the output head is tied to the embedding table, the weight g of the norm before the head cannot be folded without a
    copy of the table. It becomes a linear with the weight Qᵀ diag(g) Q (width × width), and the table stays shared.

    Condition: every norm that reads the stream is an RMSNorm without a weight (before a tied head, with or without),
    and only linears or experts read the norms; every writer is linear.

    Source: SliceGPT (Ashkboos 2024, 2401.15024); QuaRot (Ashkboos 2024, 2404.00456).

    Example rotate-residual::

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

    name = "rotate-residual"
    effect = "exact"
    purpose = "Same function, other weights"
    see = ("quantize",)
    tradeoff = "before a tied head, a product by a square matrix of the stream's width"
    seed: int = 0

    def run(self, graph: Graph, trace: Trace) -> None:
        streams = require_streams(graph, self.name)
        for stream in streams:
            if any(p.recipe.has(RandomOrthogonal) for p in _list_writer_params(stream)):
                trace.refuse(self.name, next(iter(stream.values)).name, "the residual stream is rotated already")
                return
        check_streams(streams, self.name, _find_obstacle)
        for stream in streams:
            matrix = RandomOrthogonal(stream.width, self.seed)
            rotation = make_matrix_map(matrix)
            # Each reader once: a second visit would rotate it twice.
            readers = dict.fromkeys(_list_readers(stream))
            for norm in [norm for norm in stream.norms if _is_before_tied_head(norm)]:
                _extract_weight(norm, matrix)
            map_writers([stream], rotation)
            for reader in readers:
                absorb_input_map(reader, rotation)
            trace.record_rewrite(self.name, next(iter(stream.values)).name)


def _list_writer_params(stream: ResidualStream) -> Iterator[Param]:
    for writer in stream.writers:
        yield from (v for v in (writer.inputs if isinstance(writer, Node) else (writer,)) if isinstance(v, Param))


def _list_readers(stream: ResidualStream) -> Iterator[Node]:
    yield from stream.linears
    for norm in stream.norms:
        if norm.op is ops.norm_linear:
            yield norm
        else:
            norm_site = find_site(norm)
            assert isinstance(norm_site, Site)
            yield from norm_site.readers


def _is_before_tied_head(norm: Node) -> bool:
    """Return whether `norm` is an RMSNorm with a weight, and all weights of its readers are also embedding tables."""
    norm_site = None if norm.op is not ops.rms_norm or norm.operand("weight") is None else find_site(norm)
    if not isinstance(norm_site, Site):
        return False
    weights = [weight for reader in norm_site.readers for weight in find_input_weights(reader)]
    return bool(weights) and all(any(n.op is ops.embedding for n in weight.users) for weight in weights)


def _extract_weight(norm: Node, matrix: Recipe) -> None:
    """Move the weight g of `norm` into a new linear after it, with the weight Qᵀ diag(g) Q; `matrix` is Q."""
    graph, weight = norm.graph, require_param(norm, "weight")
    width = int(weight.shape[0])
    unweighted = rebuild_node(norm, {"weight": None})
    rotated = MatMul(Scale(Permute(matrix, (1, 0)), weight.recipe, axis=1), matrix)
    gain = derive_param(weight, rotated, (width, width), f"{weight.name.removesuffix('.weight')}.gain.weight")
    with graph.inserting(after=unweighted):
        mapped = ops.linear(unweighted.output, gain)
    unweighted.output.replace_uses(mapped, keep=[n for n in unweighted.output.users if n is mapped.producer])
    erase_unused_params(graph, [weight])


def _find_obstacle(stream: ResidualStream) -> str | None:
    if reason := explain_unmappable(stream):
        return reason
    for norm in stream.norms:
        name = norm.output.name
        if is_layer_norm(norm):
            return f"%{name} subtracts the mean; run layernorm-to-rmsnorm before"
        if norm.op is ops.norm_linear:
            continue
        if norm.operand("weight") is not None and not _is_before_tied_head(norm):
            return f"%{name} has a weight; run fold-norm-scale{{untie=true}} before"
        norm_site = find_site(norm)
        if isinstance(norm_site, str):
            return f"the rotation of %{name} cannot be undone: {norm_site}"
    return None


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

    Example scale-residual-stream{factor=0.125}, on the graph of rotate-residual.
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
        map_writers(streams, make_scale_map(by), lambda x: ops.affine(x, by=by, name="scale_map"))
        for linear in (n for stream in streams for n in stream.linears):
            absorb_input_map(linear, make_scale_map(1 / by))
        for norm in (n for stream in streams for n in stream.norms):
            rebuild_node(norm, eps=norm.attrs["eps"] * by * by)
        for stream in streams:
            trace.record_rewrite(self.name, next(iter(stream.values)).name)
        graph.meta["residual_scale"] = self.factor
