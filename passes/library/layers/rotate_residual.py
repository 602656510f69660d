"""Rotating the residual stream."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from weft.ir import Graph, Node, Param, Recipe, ops
from weft.ir.recipes import Permute, Scale
from weft.ir.recipes.matrices import MatMul, RandomOrthogonal

from ...analysis.residual import Stream, require, residual_streams, unwritable, write_mapped
from ...core.base import Pass
from ...core.trace import Trace
from ...edits.absorb import is_layer, multiplied, read_through, weights_read_with
from ...edits.edit import changed, derive, drop_params
from ..fold.fold_norm_scale import Site, site


@dataclass(frozen=True)
class RotateResidual(Pass):
    """Rotate the residual stream by a random orthogonal matrix Q, which no norm notices.

    RMSNorm(x Q) = RMSNorm(x) Q, because Q keeps lengths. Whatever writes into the stream writes rotated rows (E Q for a
    table, Qᵀ W and Qᵀ b for a linear), whatever reads the norms turns them back (W Q). Q mixes all places of a row, so
    that outliers in few of them are spread over all: a preparation for quantization. It is a recipe, drawn from `seed`.
    Norms with weights need fold-norm-scale before, LayerNorms then layernorm-to-rmsnorm. Where an output head is the
    embedding table, the weight g of the norm before it cannot be folded without a copy of the table; it becomes a small
    linear map there, x ⊙ g = x Qᵀ diag(g) Q in the rotated basis, and the table stays one.

    Condition: every norm that reads the stream is an RMSNorm without a weight, or before a tied head, and linears or
    experts alone read the norms; every writer is linear.

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
        found = residual_streams(graph, self.name)
        for stream in found:
            if any(p.recipe.has(RandomOrthogonal) for p in _written_with(stream)):
                trace.refuse(self.name, next(iter(stream.values)).name, "the residual stream is rotated already")
                return
        require(found, self.name, _obstacle)
        for stream in found:
            matrix = RandomOrthogonal(stream.width, self.seed)
            turn = multiplied(matrix)
            # Each once: a second time would rotate it twice.
            readers = dict.fromkeys(_readers(stream))
            for norm in [norm for norm in stream.norms if _before_tied(norm)]:
                _turn_weight(norm, matrix)
            write_mapped([stream], turn)
            for reader in readers:
                read_through(reader, turn)
            trace.fired(self.name, next(iter(stream.values)).name)


def _written_with(stream: Stream) -> Iterator[Param]:
    for writer in stream.writers:
        yield from (v for v in (writer.inputs if isinstance(writer, Node) else (writer,)) if isinstance(v, Param))


def _readers(stream: Stream) -> Iterator[Node]:
    """The linears and experts that read the stream, by way of a norm or directly."""
    yield from stream.linears
    for norm in stream.norms:
        if norm.op is ops.norm_linear:
            yield norm
        else:
            found = site(norm)
            assert isinstance(found, Site)
            yield from found.readers


def _before_tied(norm: Node) -> bool:
    """Return whether `norm` has a weight, and what reads it reads tables that are looked up elsewhere."""
    found = None if norm.op is not ops.rms_norm or norm.operand("weight") is None else site(norm)
    if not isinstance(found, Site):
        return False
    weights = [weight for reader in found.readers for weight in weights_read_with(reader)]
    return bool(weights) and all(any(n.op is ops.embedding for n in weight.users) for weight in weights)


def _turn_weight(norm: Node, matrix: Recipe) -> None:
    """Take the weight of `norm` out into a linear map behind it, of rows that are rotated."""
    graph, weight = norm.graph, norm.operand("weight")
    assert isinstance(weight, Param)
    width = int(weight.shape[0])
    bare = changed(norm, {"weight": None})
    turned = MatMul(Scale(Permute(matrix, (1, 0)), weight.recipe, axis=1), matrix)
    gain = derive(weight, turned, (width, width), f"{weight.name.removesuffix('.weight')}.gain.weight")
    with graph.inserting(after=bare):
        mapped = ops.linear(bare.output, gain)
    bare.output.replace_uses(mapped, keep=[n for n in bare.output.users if n is mapped.producer])
    drop_params(graph, [weight])


def _obstacle(stream: Stream) -> str | None:
    if why := unwritable(stream):
        return why
    for norm in stream.norms:
        name = norm.output.name
        if is_layer(norm):
            return f"%{name} subtracts the mean; run layernorm-to-rmsnorm before"
        if norm.op is ops.norm_linear:
            continue
        if norm.operand("weight") is not None and not _before_tied(norm):
            return f"%{name} has a weight; run fold-norm-scale{{untie=true}} before"
        found = site(norm)
        if isinstance(found, str):
            return f"%{name} cannot be turned back: {found}"
    return None
