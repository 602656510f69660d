"""The two sides of an encoder-decoder: nodes that depend on the source alone run once, the others for every token."""

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
    """The base of passes that cut a graph where other nodes read values of the source only, and keep one side."""

    effect = "changing"
    purpose = "Targets"
    on_fused = True
    idempotent = False
    kind: ClassVar[str]
    at: At = "keys"

    def run(self, graph: Graph, trace: Trace) -> None:
        Dce().run(graph, Trace())
        own_outputs = _own_outputs(graph, self.at)  # first: a loss that both sides add to would cross as well
        is_encoder, read = self.kind == ENCODER, _crossing(graph, self.at)
        for name in [n for n in graph.outputs if is_encoder or graph.outputs[n] in own_outputs.values()]:
            del graph.outputs[name]
        if is_encoder:
            for name, value in {**read, **own_outputs}.items():
                graph.add_output(STATES if name == HIDDEN else name, value)
        else:
            for name, value in read.items():
                value.replace_uses(graph.add_input(name, value.type))
        Dce().run(graph, Trace())
        graph.meta["kind"] = self.kind
        for name, value in list(graph.inputs.items()):
            if name not in SOURCE if is_encoder else name in SOURCE and not value.uses:
                del graph.inputs[name]
        if self.at == "states":
            _rename(graph, self.kind)
        for name in read:
            trace.fired(self.name, name)

    def check(self, before: Graph, after: Graph, equivalence: EquivalenceCheck) -> None:
        """This side and the other one, run one after another, compute the outputs of the graph."""
        sides = {ENCODER: before.clone(), DECODER: before.clone()}
        for side in (EncoderSide(self.at), DecoderSide(self.at)):
            side.run(sides[side.kind], Trace())
        model = join_sides(**(sides | {self.kind: after}), at=self.at)
        model.connections()  # types fit
        want, got = equivalence.run(before, inputs := equivalence.inputs(before)), model.run(equivalence.run, inputs)
        if (part := got.get(_IN_WHOLE[LOSS])) is not None:
            got[LOSS] = got[LOSS] + part if LOSS in got else part
        equivalence.same(want, {name: got[name] for name in want}, EXACT)


@dataclass(frozen=True)
class EncoderSide(_Side):
    """Keep the encoder of an encoder-decoder: the nodes that depend on the source only.

    Its outputs are the values of these nodes that other nodes read. Keys and values of the i-th cross-attention are
    named cross.{i}.key and cross.{i}.value; other values keep their names. decoder-side takes these as inputs: encoder
    and decoder, run in this order, compute the outputs of the original graph. With at=states, its only output is
    last_hidden_state, the last value on all paths from the source, and it is a complete model: its inputs are named as
    in any other encoder, and names of its parts lose the prefix of their side. A loss of both sides is split in two.

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
    """Keep the decoder of an encoder-decoder: the nodes that depend on more than the source.

    Its inputs are the outputs of encoder-side, under the same names, and the source inputs that its nodes read, such as
    the padding mask. With at=states, it takes the encoder's last_hidden_state as encoder_hidden_states.

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


def join_sides(encoder: Graph, decoder: Graph, at: At) -> Package:
    """Return the package of both sides, which were cut with the same `at`; it connects outputs to inputs."""
    return Package({ENCODER: encoder, DECODER: decoder}, {ENCODER: _IN_WHOLE} if at == "states" else {})


# Names of the inputs and outputs of an encoder at `states`, and their names in the whole model.
_IN_WHOLE = {"input_ids": IDS, "attention_mask": SHOWN, STATES: HIDDEN, LOSS: f"{LOSS} of the encoder"}


def _early(graph: Graph) -> set[Value]:
    """Return the values that depend on inputs of the source and on no other input."""
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
    """Return the values, by name, that depend on the source only and that nodes with other inputs read.

    Raises:
        WeftError: if there are none, or if `at` is "states" and no single value determines all of them.
    """
    if at == "states":
        if (memory := _memory(graph)) is None:
            raise WeftError(f"a decoder reads its source through one value, and graph {graph.name} has no such value")
        return {HIDDEN: memory}
    names: dict[Value, str] = {}
    attentions: dict[Node, int] = {}
    early = _early(graph)
    for node in graph.nodes:
        if early.issuperset(node.outputs):
            continue
        cross = {node.op.operand_index(s.taken): s.part for s in specs(node) if s.growth is Growth.SOURCE}
        for place, value in enumerate(node.inputs):
            if value not in early or value.producer is None or value in names:
                continue
            names[value] = value.name
            if place in cross:
                names[value] = f"cross.{attentions.setdefault(node, len(attentions))}.{cross[place]}"
    if not names:
        raise WeftError(f"graph {graph.name} has no value that depends on {' and '.join(SOURCE)} alone")
    return {name: value for value, name in names.items()}


def _memory(graph: Graph) -> Value | None:
    """Return the last value on all paths from source tokens to nodes that also depend on other inputs; None without."""
    if (ids := graph.inputs.get(IDS)) is None:
        return None
    paths: nx.DiGraph = nx.DiGraph()
    early, late = {ids}, {v for name, v in graph.inputs.items() if name not in SOURCE}
    for node in graph.nodes:
        read = early.intersection(node.inputs)
        if late.isdisjoint(node.inputs):
            early.update(node.outputs if read else ())
        else:
            late.update(node.outputs)
        joined = late.issuperset(node.outputs)
        paths.add_edges_from((v, output) for v in read for output in (("",) if joined else node.outputs))
    memory = nx.immediate_dominators(paths, ids)[""] if "" in paths else ids
    return None if memory is ids else memory


def _own_outputs(graph: Graph, at: At) -> dict[str, Value]:
    """Return the outputs of the encoder that are outputs of `graph`.

    At `states`, that is the loss. If both sides add to it, return the encoder's part, and remove that part from `graph`
    in place.
    """
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
        (remainder,) = [v for v in node.inputs if v in late] if parts else [None]
        if remainder is not None:
            node.output.replace_uses(remainder)
            graph.erase(node)
            return {LOSS: parts[0]}
    return {}


def _rename(graph: Graph, side: str) -> None:
    """Name the inputs of an encoder as in any other model, and remove the prefix `side` from other names, in place.

    No prefix of parameters and scopes is removed if two names would become equal.
    """
    if side == DECODER and SHOWN in graph.inputs:  # moved after the states that it masks
        graph.inputs[SHOWN] = graph.inputs.pop(SHOWN)
    scoped = [*graph.params, *(node.scope for node in graph.nodes)]
    short = {name: "" if name == side else name.removeprefix(f"{side}.") for name in scoped}
    other_names = {name.partition(".")[0] for name in short if name != side and not name.startswith(f"{side}.")}
    side_names = {short[name].partition(".")[0] for name in short if name.startswith(f"{side}.")}
    names = {v.name: v.name.removeprefix(f"{side}.") for node in graph.nodes for v in node.outputs}
    inputs = {name: next((k for k, v in _IN_WHOLE.items() if v == name), name) for name in graph.inputs}
    if side == DECODER:
        inputs = {name: name for name in inputs}
    names |= {v.name: inputs[name] for name, v in graph.inputs.items()}
    if other_names & side_names:
        short = {name: name for name in short}
    names |= {name: short[name] for name in graph.params}
    rename_all(graph, names, short, inputs, {name: name for name in graph.outputs})
