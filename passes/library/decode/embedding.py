"""The beginning of a decode step: embeddings, and the RoPE angles that all layers share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from weft.ir import Graph, Node, Param, Value, ops

from ... import Pass, Refusal, Rule, Trace, apply_rules
from ...edits.edit import replace_uses
from ...edits.pattern import ANY, Pattern, either, param, value
from .products import select


def _build_scaled_rows() -> Value:
    row = ops.embedding(value("ids"), param("weight"))
    return either(ops.affine(row, by=ANY("scale")), row)


def _build_position_rows() -> Value:
    positions = either(ops.affine(value("positions"), plus=ANY("offset")), value("positions"))
    return ops.embedding(positions, param("table"))


FORMS = {
    "with positions": lambda: ops.add(_build_scaled_rows(), _build_position_rows()),
    "scaled": lambda: ops.affine(ops.embedding(value("ids"), param("weight")), by=ANY("scale")),
    "alone": lambda: ops.embedding(value("ids"), param("weight")),
}


def _fuse_embedding(offset: float = 0, **match: Any) -> Value | Refusal:
    ids, positions, table = match["ids"], match.get("positions"), match.get("table")
    inputs = ids.graph.inputs
    if ids is not inputs.get("input_ids") or positions not in (None, inputs.get("position_ids")):
        return Refusal(f"it looks up %{ids.name} or other positions, not input_ids and position_ids")
    if offset != int(offset) or (table is not None and len(table.shape) != 2):
        return Refusal("its positions are not integers")
    operands = ids, match["weight"], positions, table
    return ops.embed_tokens.emit(*operands, offset=int(offset), **select(match, "scale"))[0]


class FuseEmbedding(Pass):
    """Fuse the embeddings of tokens and positions and their scale into embed_tokens, which also computes RoPE angles.

    The rotary_angles of layers with equal positions, frequencies and amplitude become one node. The first embed_tokens
    also computes the angles of up to `tables` such nodes, which are removed. Run fuse-qkv and fuse-latent before.

    Condition: the embedding reads the inputs input_ids and position_ids; weights and frequencies are parameters.

    Source: the kernels of a decode step.

    Example fuse-embedding::

        graph example {
          input %input_ids: i64[batch, seq]
          input %position_ids: i64[batch, seq]
          param %embed: f32[11, 4] = normal([11, 4], std=1.0, stream="embed")
          param %frequencies: f64[2] = rope_frequencies(4, 10000.0)
          %row: f32[batch, seq, 4] = embedding(%input_ids, %embed)
          %x: f32[batch, seq, 4] = affine(%row, by=2.0)
          %cos: f64[batch, seq, 2], %sin: f64[batch, seq, 2] = rotary_angles(%position_ids, %frequencies)
          output x = %x
          output cos = %cos
          output sin = %sin
        }
    """

    name = "fuse-embedding"
    effect = "exact"
    purpose = "Fuse and take apart"
    see = ("fuse-qkv", "fuse-latent")
    on_fused = True
    tables: int = 2

    def run(self, graph: Graph, trace: Trace) -> None:
        for name, form in FORMS.items():
            if any(node.op is ops.embedding for node in graph.nodes):
                apply_rules(graph, [Rule(f"embedding {name}", Pattern(form), _fuse_embedding)], trace)
        angles = _merge_angles(graph, trace)
        first = next((node for node in graph.nodes if node.op is ops.embed_tokens), None)
        at = graph.inputs.get("position_ids")
        candidates = [n for n in angles if n.inputs[0] is at and isinstance(n.inputs[1], Param)][: self.tables]
        if first is not None and candidates and first.operand("positions") in (None, at):
            _add_angles(first, candidates)
            trace.record_rewrite("angles", candidates[0].output.name)


def _merge_angles(graph: Graph, trace: Trace) -> list[Node]:
    """Merge rotary_angles with equal operands and amplitudes; return the remaining nodes, moved to the scope ""."""
    firsts: dict[object, Node] = {}
    for node in [n for n in graph.nodes if n.op is ops.rotary_angles]:
        first = firsts.setdefault((*node.inputs, node.attrs["amplitude"]), node)
        if first is not node:
            trace.record_rewrite("equal angles", node.output.name)
            _replace_outputs(node, first.outputs)
    for node in firsts.values():
        if node.scope:
            trace.record_rewrite("angles of all layers", node.output.name)
            node.scope = ""
    return list(firsts.values())


def _add_angles(embedding: Node, angles: list[Node]) -> None:
    graph, at = embedding.graph, angles[0].inputs[0]
    operands = [*embedding.inputs, None, None][:4]
    operands[2] = at
    attrs = {**embedding.attrs, "amplitudes": tuple(n.attrs["amplitude"] for n in angles)}
    names = "x", *("cos", "sin") * len(angles)
    with graph.inserting(before=embedding):
        x, *angle_values = ops.embed_tokens.emit(*operands, *(n.inputs[1] for n in angles), **attrs, name=names)
    graph.replace(embedding, x)
    for node, pair in zip(angles, zip(angle_values[::2], angle_values[1::2], strict=True), strict=True):
        _replace_outputs(node, pair)


def _replace_outputs(node: Node, values: Iterable[Value]) -> None:
    for old, new in zip(node.outputs, values, strict=True):
        replace_uses(old, new, rename=False)
    node.graph.erase(node)
