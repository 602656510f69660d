"""Cut an encoder-decoder into two graphs: an encoder, which runs once, and a decoder, which runs for every token.

The source is the sequence that the encoder reads; nodes that depend on its inputs alone belong to the encoder. A cut at
"keys" passes keys and values of cross-attentions to the decoder, a cut at "states" the encoder's last hidden state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import networkx as nx

from weft.ir import Graph, Node, Param, Value, WeftError, ops
from weft.ir.op import Growth
from weft.ir.recipes.readers import Array
from weft.ir.types import TensorType

from ... import Pass, Trace
from ...analysis.states import SOURCE, find_specs
from ...core.equivalence import EXACT, EquivalenceCheck
from ...edits.edit import rename_all
from ..cleanup.dce import Dce


@dataclass(frozen=True)
class GraphConnection:
    """An output of the graph named `maker` that is an input of the graph `reader`; `name` is its name in the model."""

    maker: str
    reader: str
    name: str
    type: TensorType


@dataclass(frozen=True)
class Package:
    """Graphs by name, in the order in which they run.

    A graph's input is the output of an earlier graph with the same name in the model, else an input of the model.
    For each graph, `renamed` maps names of inputs and outputs to names in the model; unlisted names stay.
    """

    graphs: Mapping[str, Graph]
    renamed: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def find_connections(self) -> list[GraphConnection]:
        """Return the connections between the graphs, in the order of the reading graphs and of their inputs.

        Raises:
            WeftError: if a connected output and input differ in type, naming both graphs.
        """
        outputs, connections = dict[str, tuple[str, TensorType]](), list[GraphConnection]()
        for reader, graph in self.graphs.items():
            for name, value in graph.inputs.items():
                model_name = self._in_model(reader, name)
                if model_name not in outputs:
                    continue
                maker, type = outputs[model_name]
                if value.type != type:
                    raise WeftError(f"{reader} reads {model_name} as {value.type}, but {maker} returns {type}")
                connections.append(GraphConnection(maker, reader, model_name, type))
            outputs |= {self._in_model(reader, name): (reader, v.type) for name, v in graph.outputs.items()}
        return connections

    def run(
        self, run: Callable[[Graph, Mapping[str, Array]], Mapping[str, Array]], inputs: Mapping[str, Array]
    ) -> dict[str, Array]:
        """Call run(graph, its inputs) for every graph; return `inputs` and all outputs, by their names in the model."""
        values = dict(inputs)
        for reader, graph in self.graphs.items():
            outputs = run(graph, {name: values[self._in_model(reader, name)] for name in graph.inputs})
            values |= {self._in_model(reader, name): array for name, array in outputs.items()}
        return values

    def _in_model(self, graph: str, name: str) -> str:
        return self.renamed.get(graph, {}).get(name, name)


ENCODER, DECODER = "encoder", "decoder"
IDS, MASK = "encoder_input_ids", "encoder_attention_mask"
HIDDEN, STATES, LOSS = "encoder_hidden_states", "last_hidden_state", "aux_loss"
At = Literal["keys", "states", "packed"]


class _Side(Pass):
    """The base of encoder-side and decoder-side: it cuts the graph and keeps the part `kind` (encoder or decoder)."""

    effect = "changing"
    purpose = "Targets"
    on_fused = True
    idempotent = False
    kind: ClassVar[str]
    at: At = "keys"

    def run(self, graph: Graph, trace: Trace) -> None:
        Dce().run(graph, Trace())
        # First: a loss to which both encoder and decoder add would be a crossing value as well.
        encoder_outputs = _find_encoder_outputs(graph, self.at)
        is_encoder, crossing = self.kind == ENCODER, _find_crossing_values(graph, self.at)
        for name in [n for n in graph.outputs if is_encoder or graph.outputs[n] in encoder_outputs.values()]:
            del graph.outputs[name]
        if is_encoder:
            for name, value in {**crossing, **encoder_outputs}.items():
                graph.add_output(STATES if name == HIDDEN else name, value)
        else:
            for name, value in crossing.items():
                value.replace_uses(graph.add_input(name, value.type))
        if self.at == "packed":
            (_pack_outputs if is_encoder else _split_input)(graph, crossing)
        Dce().run(graph, Trace())
        graph.meta["kind"] = self.kind
        for name, value in list(graph.inputs.items()):
            if name not in SOURCE if is_encoder else name in SOURCE and not value.uses:
                del graph.inputs[name]
        if self.at != "keys":
            _remove_prefix(graph, self.kind)
        for name in crossing:
            trace.record_rewrite(self.name, name)

    def check(self, before: Graph, after: Graph, equivalence: EquivalenceCheck) -> None:
        """Check that encoder and decoder, run one after another, compute the outputs of the graph."""
        sides = {cut.kind: cut.apply_to(before) for cut in (EncoderSide(self.at), DecoderSide(self.at))}
        model = join_encoder_decoder(**(sides | {self.kind: after}), at=self.at)
        model.find_connections()  # types fit
        expected = equivalence.run(before, inputs := equivalence.make_inputs(before))
        outputs = model.run(equivalence.run, inputs)
        if (encoder_loss := outputs.get(_IN_WHOLE[LOSS])) is not None:
            outputs[LOSS] = outputs[LOSS] + encoder_loss if LOSS in outputs else encoder_loss
        equivalence.check_close(expected, {name: outputs[name] for name in expected}, EXACT)


class EncoderSide(_Side):
    """Keep the encoder of an encoder-decoder: the nodes that depend on the source inputs only.

    With at=keys, the outputs are the values of these nodes that the decoder reads (the inputs of decoder-side), and the
    graph outputs among them. Keys and values of the i-th cross-attention are named cross.{i}.key and cross.{i}.value;
    other values keep their names. With at=packed, the output last_hidden_state is their concatenation: [batch,
    source, sum of widths]. With at=states, the output is last_hidden_state, the last value on all paths from the
    source to the decoder. Inputs are then named as in any other encoder, and names of parameters and scopes lose the
    prefix "encoder."; the encoder's part of aux_loss is a second output. In both cases, encoder and decoder, run in
    this order, compute the outputs of the original graph.

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


class DecoderSide(_Side):
    """Keep the decoder of an encoder-decoder: the nodes that depend on inputs other than the source.

    The inputs of the decoder are those of the target sequence, the outputs of encoder-side, and the source inputs that
    its nodes read, such as the padding mask. With at=keys (the default) the encoder passes on keys and values of
    cross-attentions; with at=states its last_hidden_state, which is the input encoder_hidden_states here; with
    at=packed this input is the concatenation of the keys and values.

    Condition: the encoder has run before it.

    Source: Vaswani 2017, arXiv:1706.03762, section 3.1.

    Example decoder-side, on the graph of encoder-side.
    """

    name = "decoder-side"
    kind = DECODER
    see = ("encoder-side",)


def join_encoder_decoder(encoder: Graph, decoder: Graph, at: At) -> Package:
    """Return the package that connects outputs of `encoder` to inputs of `decoder`; both were cut with `at`."""
    return Package({ENCODER: encoder, DECODER: decoder}, {ENCODER: _IN_WHOLE} if at != "keys" else {})


# Names of the inputs and outputs of an encoder at `states`, and their names in the whole model.
_IN_WHOLE = {"input_ids": IDS, "attention_mask": MASK, STATES: HIDDEN, LOSS: f"{LOSS} of the encoder"}


def _pack_outputs(graph: Graph, names: Iterable[str]) -> None:
    """Replace the outputs `names` of an encoder by last_hidden_state, their concatenation along the last axis."""
    values = [graph.outputs.pop(name) for name in names]
    types = {(value.type.dtype, *value.shape[:-1]) for value in values}
    if len(types) > 1:
        raise WeftError(f"graph {graph.name} cannot be split: its decoder reads values of several sizes")
    graph.add_output(STATES, ops.concat(*values, axis=-1))


def _split_input(graph: Graph, names: Iterable[str]) -> None:
    """Replace the inputs `names` of a decoder by encoder_hidden_states, their concatenation along the last axis."""
    values = [graph.inputs.pop(name) for name in names]
    widths = tuple(value.width for value in values)
    packed = graph.add_input(HIDDEN, values[0].type.with_axis(values[0].type.rank - 1, sum(widths)))
    with graph.inserting(before=next(iter(graph.nodes))):
        parts = ops.split.emit(packed, sizes=widths, axis=-1)
    for value, part in zip(values, parts, strict=True):
        value.replace_uses(part)


def _split_values(graph: Graph) -> tuple[set[Value], set[Value]]:
    """Return (values that depend on source inputs only, values that depend on another input), inputs included."""
    source_values = {v for name, v in graph.inputs.items() if name in SOURCE}
    later_values = set(graph.inputs.values()) - source_values
    for node in graph.nodes:
        crossing = {v for v in node.inputs if v is not None and not isinstance(v, Param)}
        if crossing & later_values:
            later_values.update(node.outputs)
        elif crossing & source_values:
            source_values.update(node.outputs)
    return source_values, later_values


def _find_crossing_values(graph: Graph, at: At) -> dict[str, Value]:
    """Return the values that the decoder reads from the encoder, keyed by their names as inputs of the decoder.
    Raise a WeftError if there are none, or if `at` is "states" and no single value determines all of them."""
    if at == "states":
        if (memory := _find_memory(graph)) is None:
            raise WeftError(f"graph {graph.name} cannot be split: its decoder must read one value made from {IDS}")
        return {HIDDEN: memory}
    names: dict[Value, str] = {}
    attentions: dict[Node, int] = {}
    source_values, _ = _split_values(graph)
    for node in graph.nodes:
        if source_values.issuperset(node.outputs):
            continue
        cross = {node.op.operand_index(s.past_operand): s.part for s in find_specs(node) if s.growth is Growth.SOURCE}
        for index, value in enumerate(node.inputs):
            if value not in source_values or value.producer is None or value in names:
                continue
            names[value] = value.name
            if index in cross:
                names[value] = f"cross.{attentions.setdefault(node, len(attentions))}.{cross[index]}"
    if not names:
        reason = f"no value depends only on encoder inputs ({', '.join(SOURCE)})"
        raise WeftError(f"graph {graph.name} cannot be split: {reason}")
    return {name: value for value, name in names.items()}


def _find_memory(graph: Graph) -> Value | None:
    """Return the last value on all paths from the source tokens to the decoder's nodes; None if there is none."""
    if (ids := graph.inputs.get(IDS)) is None:
        return None
    paths: nx.DiGraph = nx.DiGraph()
    source_values, later_values = {ids}, {v for name, v in graph.inputs.items() if name not in SOURCE}
    for node in graph.nodes:
        crossing = source_values.intersection(node.inputs)
        if later_values.isdisjoint(node.inputs):
            source_values.update(node.outputs if crossing else ())
        else:
            later_values.update(node.outputs)
        joined = later_values.issuperset(node.outputs)
        paths.add_edges_from((v, output) for v in crossing for output in (("",) if joined else node.outputs))
    memory = nx.immediate_dominators(paths, ids)[""] if "" in paths else ids
    return None if memory is ids else memory


def _find_encoder_outputs(graph: Graph, at: At) -> dict[str, Value]:
    """Return the outputs of `graph` that the encoder computes, keyed by name; only aux_loss if `at` is "states".
    If encoder and decoder both add to this loss, return the encoder's summand and remove it from the sum in `graph`."""
    source_values, later_values = _split_values(graph)
    if at != "states":
        return {name: v for name, v in graph.outputs.items() if v in source_values}
    loss = graph.outputs.get(LOSS)
    if loss is None or loss in source_values:
        return {} if loss is None else {LOSS: loss}
    for node in [n for n in graph.nodes if n.op is ops.add and n.output in later_values and n.output.shape == ()]:
        parts = [v for v in node.inputs if v is not None and v not in later_values]
        (remainder,) = [v for v in node.inputs if v in later_values] if parts else [None]
        if remainder is not None:
            node.output.replace_uses(remainder)
            graph.erase(node)
            return {LOSS: parts[0]}
    return {}


def _remove_prefix(graph: Graph, kind: str) -> None:
    """Remove the prefix `kind` from all names, and name the inputs of an encoder as in any other model. Parameters and
    scopes keep the prefix if a shortened name could clash with another name."""
    if kind == DECODER and MASK in graph.inputs:  # moved after the states that it masks
        graph.inputs[MASK] = graph.inputs.pop(MASK)
    scoped = [*graph.params, *(node.scope for node in graph.nodes)]
    short = {name: "" if name == kind else name.removeprefix(f"{kind}.") for name in scoped}
    other_names = {name.partition(".")[0] for name in short if name != kind and not name.startswith(f"{kind}.")}
    side_names = {short[name].partition(".")[0] for name in short if name.startswith(f"{kind}.")}
    names = {v.name: v.name.removeprefix(f"{kind}.") for node in graph.nodes for v in node.outputs}
    inputs = {name: next((k for k, v in _IN_WHOLE.items() if v == name), name) for name in graph.inputs}
    if kind == DECODER:
        inputs = {name: name for name in inputs}
    names |= {v.name: inputs[name] for name, v in graph.inputs.items()}
    if other_names & side_names:
        short = {name: name for name in short}
    names |= {name: short[name] for name in graph.params}
    rename_all(graph, names, short, inputs, {name: name for name in graph.outputs})
