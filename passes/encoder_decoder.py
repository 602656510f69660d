"""Cutting an encoder-decoder in two: what the source alone decides runs once, the rest for every token."""

from __future__ import annotations

from collections.abc import Collection

from weft.ir import Graph, Node, Param, Value, WeftError
from weft.ir.op import Growth

from .analysis.states import SOURCE, specs
from .core.trace import Trace
from .library.cleanup.dce import Dce


def split_encoder(graph: Graph, source: Collection[str] = SOURCE) -> tuple[Graph, Graph]:
    """The encoder and the decoder of `graph`, whose inputs `source` are those of the encoder.

    The encoder makes every value that depends on those inputs alone and that something else reads; the decoder takes
    them as inputs, and keeps those inputs of `source` that it reads itself. Keys and values of the i-th attention to
    the source are called cross.{i}.key and cross.{i}.value, other values as they were. One after the other they compute
    what `graph` computes. Passes before the cut see the whole model.

    Raises:
        WeftError: if no value crosses from one to the other.
    """
    graph = graph.clone()
    Dce().run(graph, Trace())
    early = _early(graph, source)
    crossing = _crossing(graph, early)
    if not crossing:
        raise WeftError(f"graph {graph.name} has no value that depends on {' and '.join(source)} alone")
    encoder, decoder = graph.clone(), graph.clone()
    made, taken = ({v.name: v for n in g.nodes for v in n.outputs} for g in (encoder, decoder))
    own = {name: v for name, v in graph.outputs.items() if v in early}
    encoder.outputs.clear()
    for name, value in {**crossing, **own}.items():
        encoder.add_output(name, made[value.name])
    for name in own:
        del decoder.outputs[name]
    for name, value in crossing.items():
        taken[value.name].replace_uses(decoder.add_input(name, value.type))
    for part, kind in ((encoder, "encoder"), (decoder, "decoder")):
        Dce().run(part, Trace())
        part.meta["kind"] = kind
    for name in graph.inputs:
        if name not in source:
            del encoder.inputs[name]
        elif not decoder.inputs[name].uses:
            del decoder.inputs[name]
    return encoder, decoder


def _early(graph: Graph, source: Collection[str]) -> set[Value]:
    """The values that depend on the inputs `source`, and on no other input."""
    early = {v for name, v in graph.inputs.items() if name in source}
    late = set(graph.inputs.values()) - early
    for node in graph.nodes:
        read = {v for v in node.inputs if v is not None and not isinstance(v, Param)}
        if read & late:
            late.update(node.outputs)
        elif read & early:
            early.update(node.outputs)
    return early


def _crossing(graph: Graph, early: set[Value]) -> dict[str, Value]:
    """By name, the computed values in `early` that a node with other inputs reads."""
    found: dict[Value, str] = {}
    attentions: dict[Node, int] = {}
    for node in graph.nodes:
        if early.issuperset(node.outputs):
            continue
        cross = {node.op.operand_index(s.taken): s.part for s in specs(node) if s.growth is Growth.SOURCE}
        for place, value in enumerate(node.inputs):
            if value not in early or value.producer is None or value in found:
                continue
            found[value] = value.name
            if place in cross:
                found[value] = f"cross.{attentions.setdefault(node, len(attentions))}.{cross[place]}"
    return {name: value for value, name in found.items()}
