"""The two sides of an encoder-decoder: what the source alone decides runs once, the rest for every token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import networkx as nx

from weft.ir import Graph, Node, Param, Value, WeftError, ops
from weft.ir.op import Growth

from ...analysis.states import SOURCE, specs
from ...core.base import Pass
from ...core.equivalence import EXACT, EquivalenceCheck
from ...core.trace import Trace
from ...edits.edit import rename_all
from ...package import Package
from ..cleanup.dce import Dce

ENCODER, DECODER = "encoder", "decoder"
IDS, SHOWN = "encoder_input_ids", "encoder_attention_mask"
HIDDEN, STATES, LOSS = "encoder_hidden_states", "last_hidden_state", "aux_loss"
At = Literal["keys", "states"]


@dataclass(frozen=True)
class _Side(Pass):
    """Cuts a graph at the values that its source decides and that others read; keeps the encoder or the decoder."""

    effect = "changing"
    purpose = "Targets"
    on_fused = True
    idempotent = False
    kind: ClassVar[str]
    at: At = "keys"

    def run(self, graph: Graph, trace: Trace) -> None:
        Dce().run(graph, Trace())
        own = _own_outputs(graph, self.at)  # first: a loss that both sides add to would cross as well
        encodes, read = self.kind == ENCODER, _crossing(graph, self.at)
        for name in [n for n in graph.outputs if encodes or graph.outputs[n] in own.values()]:
            del graph.outputs[name]
        if encodes:
            for name, value in {**read, **own}.items():
                graph.add_output(STATES if name == HIDDEN else name, value)
        else:
            for name, value in read.items():
                value.replace_uses(graph.add_input(name, value.type))
        Dce().run(graph, Trace())
        graph.meta["kind"] = self.kind
        for name, value in list(graph.inputs.items()):
            if name not in SOURCE if encodes else name in SOURCE and not value.uses:
                del graph.inputs[name]
        if self.at == "states":
            _rename(graph, self.kind)
        for name in read:
            trace.fired(self.name, name)

    def check(self, before: Graph, after: Graph, equivalence: EquivalenceCheck) -> None:
        """One after the other, this side and the other compute what the graph computes."""
        sides = {ENCODER: before.clone(), DECODER: before.clone()}
        for side in (EncoderSide(self.at), DecoderSide(self.at)):
            side.run(sides[side.kind], Trace())
        whole = package(**(sides | {self.kind: after}), at=self.at)
        whole.connections()  # types fit
        want, got = equivalence.run(before, inputs := equivalence.inputs(before)), whole.run(equivalence.run, inputs)
        if (part := got.get(_IN_WHOLE[LOSS])) is not None:
            got[LOSS] = got[LOSS] + part if LOSS in got else part
        equivalence.same(want, {name: got[name] for name in want}, EXACT)


@dataclass(frozen=True)
class EncoderSide(_Side):
    """Keep the encoder of a model with a decoder: what depends on the source alone.

    It makes every value that depends on the inputs of the source alone and that something else reads. Keys and values
    of the i-th attention to the source are called cross.{i}.key and cross.{i}.value, other values as they were.
    decoder-side takes these as inputs: one after the other, the two compute what the graph computes. At `states` it
    makes one value, last_hidden_state, the last that all ways from the source lead through, and is a model of its own:
    its inputs are called as those of any other, and names of its parts do not begin with its own. A loss that both
    sides add to is cut in two.

    Condition: the decoder runs after it.

    Source: Vaswani 2017, arXiv:1706.03762, section 3.1.

    Example encoder-side::

        graph example {
          input %encoder_input_ids: i64[batch, source]
          input %q: f32[batch, seq, 4]
          param %embed: f32[11, 4] = normal([11, 4], std=1.0, stream="embed")
          %k: f32[batch, source, 4] = embedding(%encoder_input_ids, %embed)
          %y: f32[batch, seq, 4] = attention(%q, %k, %k, heads=2, kv_heads=2)
          output y = %y
        }
    """

    name = "encoder-side"
    kind = ENCODER
    see = ("decoder-side",)


@dataclass(frozen=True)
class DecoderSide(_Side):
    """Keep the decoder of a model with an encoder: what depends on more than the source.

    It takes as inputs what encoder-side makes, under the same names, and the inputs of the source that it reads itself,
    such as the mask of its padding. At `states` that is encoder_hidden_states, the encoder's last_hidden_state.

    Condition: the encoder has run before it.

    Source: Vaswani 2017, arXiv:1706.03762, section 3.1.

    Example decoder-side::

        graph example {
          input %encoder_input_ids: i64[batch, source]
          input %q: f32[batch, seq, 4]
          param %embed: f32[11, 4] = normal([11, 4], std=1.0, stream="embed")
          %k: f32[batch, source, 4] = embedding(%encoder_input_ids, %embed)
          %y: f32[batch, seq, 4] = attention(%q, %k, %k, heads=2, kv_heads=2)
          output y = %y
        }
    """

    name = "decoder-side"
    kind = DECODER
    see = ("encoder-side",)


def package(encoder: Graph, decoder: Graph, at: At) -> Package:
    """Return the model that the two sides are, cut `at` the same values."""
    return Package({ENCODER: encoder, DECODER: decoder}, {ENCODER: _IN_WHOLE} if at == "states" else {})


# Of an encoder at `states`, how inputs and outputs are called in the whole model.
_IN_WHOLE = {"input_ids": IDS, "attention_mask": SHOWN, STATES: HIDDEN, LOSS: f"{LOSS} of the encoder"}


def _early(graph: Graph) -> set[Value]:
    """The values that depend on the inputs of the source, and on no other input."""
    early = {v for name, v in graph.inputs.items() if name in SOURCE}
    late = set(graph.inputs.values()) - early
    for node in graph.nodes:
        read = {v for v in node.inputs if v is not None and not isinstance(v, Param)}
        if read & late:
            late.update(node.outputs)
        elif read & early:
            early.update(node.outputs)
    return early


def _crossing(graph: Graph, at: At) -> dict[str, Value]:
    """By name, the values that a node with other inputs reads of those that the source decides.

    Raises:
        WeftError: if there are none, or not one that all others are made of where `at` asks for that.
    """
    if at == "states":
        if (memory := _memory(graph)) is None:
            raise WeftError(f"a decoder reads its source through one value, and graph {graph.name} has no such value")
        return {HIDDEN: memory}
    found: dict[Value, str] = {}
    attentions: dict[Node, int] = {}
    early = _early(graph)
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
    if not found:
        raise WeftError(f"graph {graph.name} has no value that depends on {' and '.join(SOURCE)} alone")
    return {name: value for value, name in found.items()}


def _memory(graph: Graph) -> Value | None:
    """The last value that all ways from the tokens of the source to where other inputs come in lead through."""
    if (ids := graph.inputs.get(IDS)) is None:
        return None
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
    found = nx.immediate_dominators(ways, ids)[""] if "" in ways else ids
    return None if found is ids else found


def _own_outputs(graph: Graph, at: At) -> dict[str, Value]:
    """The outputs that the encoder makes by itself; of a loss that both sides add to, its part at `states`, without
    which `graph`, changed in place, then hands out the rest."""
    early = _early(graph)
    if at == "keys":
        return {name: v for name, v in graph.outputs.items() if v in early}
    loss = graph.outputs.get(LOSS)
    if loss is None or loss in early:
        return {} if loss is None else {LOSS: loss}
    late = {v for name, v in graph.inputs.items() if name not in SOURCE}
    for node in graph.nodes:
        if not late.isdisjoint(node.inputs):
            late.update(node.outputs)
    for node in [n for n in graph.nodes if n.op is ops.add and n.output in late and n.output.shape == ()]:
        parts = [v for v in node.inputs if v is not None and v not in late]
        (other,) = [v for v in node.inputs if v in late] if parts else [None]
        if other is not None:
            node.output.replace_uses(other)
            graph.erase(node)
            return {LOSS: parts[0]}
    return {}


def _rename(graph: Graph, side: str) -> None:
    """Call the inputs of an encoder as those of any other model; let names not begin with that of their side, but all
    stay as they are where two would be one."""
    if side == DECODER and SHOWN in graph.inputs:  # after the states that it belongs to
        graph.inputs[SHOWN] = graph.inputs.pop(SHOWN)
    scoped = [*graph.params, *(node.scope for node in graph.nodes)]
    short = {name: "" if name == side else name.removeprefix(f"{side}.") for name in scoped}
    homes = {name.partition(".")[0] for name in short if name != side and not name.startswith(f"{side}.")}
    own = {short[name].partition(".")[0] for name in short if name.startswith(f"{side}.")}
    names = {v.name: v.name.removeprefix(f"{side}.") for node in graph.nodes for v in node.outputs}
    inputs = {name: next((k for k, v in _IN_WHOLE.items() if v == name), name) for name in graph.inputs}
    if side == DECODER:
        inputs = {name: name for name in inputs}
    names |= {v.name: inputs[name] for name, v in graph.inputs.items()}
    if homes & own:
        short = {name: name for name in short}
    names |= {name: short[name] for name in graph.params}
    rename_all(graph, names, short, inputs, {name: name for name in graph.outputs})
