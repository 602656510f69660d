"""The two sides of an encoder-decoder: a graph of the encoder, and one of the decoder that reads what it makes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import networkx as nx

from weft.ir import ops
from weft.ir.errors import WeftError
from weft.ir.graph import Graph, Node, Param, Value
from weft.passes.analysis.states import SOUND, SOURCE

ENCODER, DECODER = "encoder", "decoder"
LOSS = "aux_loss"
HIDDEN, SHOWN = "encoder_hidden_states", "encoder_attention_mask"  # what a decoder is given of its encoder


@dataclass(frozen=True)
class Side:
    """One side of a model, called `name`, or all of it, called ""; `names` are those that parameters of its `graph`
    have in that of the model."""

    name: str
    graph: Graph
    names: dict[str, str]


def sides(graph: Graph) -> list[Side]:
    """The decoder and the encoder of `graph`, or itself.

    All that the decoder reads of the encoder is one value [batch, source, width]: the last that every way from the
    source leads through. The inputs of the encoder are called as those of any other; its parts, and those of the
    decoder, are named from their side on.

    Raises:
        WeftError: if there is no such value.
    """
    if graph.meta.get("kind") != "encoder-decoder":
        return [Side("", graph, {name: name for name in graph.params})]
    graph = graph.clone()
    loss = _encoder_loss(graph)
    ids, shown = (graph.inputs.get(name) for name in ("encoder_input_ids", SHOWN))
    memory = None if ids is None else _memory(graph, ids)
    if any(name in graph.inputs for name in SOUND):
        raise WeftError(f"target transformers writes encoders of texts: that of {graph.name} reads sound")
    if memory is None:
        raise WeftError(
            f"target transformers needs one value through which a decoder reads its source: {graph.name} has none"
        )
    assert ids is not None
    source = {"input_ids": ids} | ({} if shown is None else {"attention_mask": shown})
    given = {name: value for name, value in graph.inputs.items() if name not in SOURCE} | {HIDDEN: memory}
    given |= {} if shown is None else {SHOWN: shown}
    return [
        _side(graph, DECODER, given, dict(graph.outputs.items())),
        _side(graph, ENCODER, source, {"last_hidden_state": memory} | loss),
    ]


def _encoder_loss(graph: Graph) -> dict[str, Value]:
    """The output that routers of the encoder add to the loss; `graph`, changed in place, then leaves it out."""
    loss = graph.outputs.get(LOSS)
    if loss is None:
        return {}
    late = {v for name, v in graph.inputs.items() if name not in SOURCE}
    for node in graph.nodes:
        if not late.isdisjoint(node.inputs):
            late.update(node.outputs)
    if loss not in late:
        del graph.outputs[LOSS]
        return {LOSS: loss}
    joins = [n for n in graph.nodes if n.op is ops.add and n.output in late and n.output.shape == ()]
    for node in joins:
        early = [v for v in node.inputs if v is not None and v not in late]
        (other,) = [v for v in node.inputs if v in late] if early else [None]
        if other is not None:
            node.output.replace_uses(other)
            graph.erase(node)
            return {LOSS: early[0]}
    return {}


def _memory(graph: Graph, ids: Value) -> Value | None:
    """The last value that all ways from `ids` to where other inputs come in lead through; None if it is `ids`."""
    ways: nx.DiGraph = nx.DiGraph()
    early, late = {ids}, {v for name, v in graph.inputs.items() if name not in SOURCE}
    for node in graph.nodes:
        read = early.intersection(node.inputs)
        if late.isdisjoint(node.inputs):
            early.update(node.outputs if read else ())
        else:
            late.update(node.outputs)
        joined = late.issuperset(node.outputs)
        ways.add_edges_from((v, made) for v in read for made in (("",) if joined else node.outputs))
    if "" not in ways:
        return None
    found = nx.immediate_dominators(ways, ids)[""]
    return None if found is ids else found


def _side(graph: Graph, side: str, given: Mapping[str, Value], outputs: Mapping[str, Value]) -> Side:
    """The part of `graph` that makes `outputs` of what it is `given`."""
    nodes = _needed(graph, given, outputs)
    params = dict.fromkeys(v for node in nodes for v in node.inputs if isinstance(v, Param))
    names = _short([p.name for p in params], {node.scope for node in nodes}, side)
    part = Graph(graph.name, graph.reader)
    part.tokenize, part.meta, part.origins = graph.tokenize, graph.meta | {"kind": side}, dict(graph.origins)
    mapped: dict[Value, Value] = {value: part.add_input(name, value.type) for name, value in given.items()}
    for param in (p for p in graph.params.values() if p in params):
        mapped[param] = part.add_param(names[param.name], param.type, param.recipe)
    for node in nodes:
        operands = [None if v is None else mapped[v] for v in node.inputs]
        types, made = [v.type for v in node.outputs], [v.name.removeprefix(f"{side}.") for v in node.outputs]
        copy = part.add_node(node.op, operands, node.attrs, types, made, names[node.scope])
        mapped.update(zip(node.outputs, copy.outputs, strict=True))
    for name, value in outputs.items():
        part.add_output(name, mapped[value])
    return Side(side, part, {names[p.name]: p.name for p in params})


def _needed(graph: Graph, given: Mapping[str, Value], outputs: Mapping[str, Value]) -> list[Node]:
    """The nodes between what is `given` and `outputs`, in order."""
    known, asked, found = {*given.values()}, {*outputs.values()}, []
    for node in reversed(graph.nodes):
        if not asked.isdisjoint(node.outputs) and known.isdisjoint(node.outputs):
            found.append(node)
            asked.update(v for v in node.inputs if v is not None)
    return found[::-1]


def _short(params: list[str], scopes: set[str], side: str) -> dict[str, str]:
    """Names for parameters and scopes of a side, which need not say its own; all as they are where two would be one."""
    short = {name: "" if name == side else name.removeprefix(f"{side}.") for name in (*params, *scopes)}
    homes = {name.partition(".")[0] for name in short if name != side and not name.startswith(f"{side}.")}
    own = {short[name].partition(".")[0] for name in short if name.startswith(f"{side}.")}
    return {name: name for name in short} if homes & own else short
