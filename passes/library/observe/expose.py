"""Outputs for values inside a model: attention weights, the residual stream, the prediction of each layer, …"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from weft.ir import Graph, Node, TensorType, Value, WeftError, ops
from weft.ir.op import Trait
from weft.ir.ops.elementwise import mask_fill
from weft.ir.recipes import Full
from weft.ir.schema.visible_keys import VisibleBlocks
from weft.ir.types import dtypes, sizes

from ... import Pass, Trace
from ...analysis.layers import Layers, expand_add_norms
from ...analysis.observed import (
    LayerNodes,
    find_head,
    find_sites,
    list_layers,
    name_values,
    parse_kinds,
    select_layers,
)
from ...analysis.states import find_states
from ...analysis.tokens.tokenwise import find_token_axes, has_token_axes
from ...core.equivalence import EXACT, EquivalenceCheck
from ...edits.edit import backward_slice, erase_unused

CHOSEN = "chosen_tokens"  # the input with the tokens that the logits of layers are for
DEFAULT = ("attention", "residual", "logits", "routes", "states")


class Expose(Pass):
    """Return values inside the model as further outputs, named by kind and place, such as attention.layers.3.attn.

    Kinds are listed by name; "all" means the first five and "everything" every kind, where the model has them.
    `layers` selects layers by their number, an encoder's before its decoder's.

    - attention: weights [batch, heads, seq, keys] of every softmax attention. With sinks, or without a visible key, the
      weights of a query sum to less than 1.
    - residual: the stream [batch, seq, dim] after a layer, and before the first one (residual.layers).
    - logits: the logits [batch, seq, vocab] if the output of a layer were that of the last layer (logit lens). With
      `tokens` chosen, [batch, chosen, vocab] of the tokens in the new input chosen_tokens i64[batch, chosen].
    - routes: the weight of every expert in a token's output, [batch, seq, experts], 0 for experts not chosen.
    - states: the final states of recurrences.
    - heads: results of heads, before the output projection. neurons: hidden units of feed-forwards. sublayers: terms
      added to the residual stream. parts: results of all operations per token, such as parts.layers.3.attn.q.

    Kernels that do not return attention weights stay: the weights are computed separately, from the same operands.

    Condition: the program that runs the model reads more outputs; the outputs it had do not change.

    Source: nostalgebraist 2020, interpreting GPT: the logit lens; TransformerLens, whose hooks return these values.

    Example expose::

        graph example {
          input %input_ids: i64[batch, seq]
          param %embed: f32[11, 4] = normal([11, 4], std=1.0, stream="embed")
          param %wk: f32[2, 4] = normal([2, 4], std=0.5, stream="k")
          param %wv: f32[2, 4] = normal([2, 4], std=0.5, stream="v")
          %x: f32[batch, seq, 4] = embedding(%input_ids, %embed)
          scope layers.0.attn
            %.k: f32[batch, seq, 2] = linear(%x, %wk)
            %.v: f32[batch, seq, 2] = linear(%x, %wv)
            %.y: f32[batch, seq, 4] = attention(%x, %.k, %.v, heads=2, kv_heads=1, causal=true)
          scope layers.0
            %.sum: f32[batch, seq, 4] = add(%x, %.attn.y)
            %.norm: f32[batch, seq, 4] = rms_norm(%.sum)
          scope _
          %logits: f32[batch, seq, 11] = linear(%layers.0.norm, %embed)
          output logits = %logits
        }
    """

    name = "expose"
    effect = "conditional"
    purpose = "Look inside"
    idempotent = False  # recurrences are emitted again
    see = ("ablate",)
    tradeoff = "attention weights are computed twice, and outputs take memory; in return they can be seen"
    what: str = "all"
    layers: Layers = "all"
    tokens: Literal["all", "chosen"] = "all"

    def run(self, graph: Graph, trace: Trace) -> None:
        expand_add_norms(graph)
        kinds = parse_kinds(self.what, (*EXPOSED, "everything"), self.name)
        before, layers = set(graph.nodes), select_layers(graph, self.layers, self.name)
        model = _Model(graph, list_layers(graph), layers, self.tokens)
        groups = {"all": DEFAULT, "everything": tuple(EXPOSED)}
        for kind in dict.fromkeys(kind for name in kinds for kind in groups.get(name, (name,))):
            exposed = EXPOSED[kind](model)
            if not exposed and kind in kinds:
                raise WeftError(f"expose: the selected layers of graph {graph.name} have no {kind}: leave it out")
            for name, value in exposed.items():
                if name not in graph.outputs:
                    graph.add_output(name, value)
                    trace.record_rewrite(self.name, value.name)
        # Bodies of attentions also compute the product with the values.
        erase_unused(graph, [node for node in graph.nodes if node not in before])

    def check(self, before: Graph, after: Graph, equivalence: EquivalenceCheck) -> None:
        """Check that the outputs before are unchanged, that no query has negative attention weights or a sum above 1,
        and that the logits of the last layer equal the model's."""
        inputs = equivalence.make_inputs(after)
        expected = equivalence.run(before, {name: inputs[name] for name in before.inputs})
        actual = equivalence.run(after, inputs)
        equivalence.check_close(expected, {name: actual[name] for name in expected}, EXACT)
        for name, weights in actual.items():
            if name.startswith("attention.") and (weights.min() < 0 or weights.sum(-1).max() > 1 + EXACT):
                raise WeftError(f"expose: {name} has attention weights that are negative or sum to more than 1")


@dataclass(frozen=True)
class _Model:
    """A graph before anything was added, `all_layers` of it, the `layers` to expose, and the argument `tokens`."""

    graph: Graph
    all_layers: Sequence[LayerNodes]
    layers: Sequence[LayerNodes]
    tokens: str


def _expose_attention(model: _Model) -> dict[str, Value]:
    attentions = [n for layer in model.layers for n in layer.nodes if Trait.ATTENTION in n.op.traits]
    return name_values("attention", {node: _emit_attention_weights(node) for node in attentions})


def _emit_attention_weights(node: Node) -> Value:
    """Emit the attention weights [batch, heads, seq, keys] of `node`: its body up to the softmax, without sinks."""
    graph, operands = node.graph, node.inputs
    with graph.inserting(after=node):
        if node.op is ops.block_sparse_attention:  # whose body gathers blocks of keys
            q, k, v, *mask = operands
            assert q is not None
            bias, attrs = _emit_block_bias(q, VisibleBlocks.from_attrs(node.attrs)), node.attrs
            named = {name: attrs[name] for name in ("heads", "kv_heads", "scale")}
            expansion = ops.attention.emit_body((q, k, v, bias, *mask), ops.attention.check_attrs(named))
        else:
            expansion = node.op.expand(node)
        (softmax,) = (n for n in backward_slice(expansion, operands) if n.op is ops.softmax)
    weights = softmax.output
    if node.op is not ops.attention or node.operand("sinks") is None:
        return weights
    (concat,) = (v.producer for v in softmax.inputs if v is not None)  # of scores and sinks
    assert concat is not None
    with graph.inserting(after=softmax):
        return ops.gather(weights, ops.iota(concat.inputs[0], axis=3), axis=3)


def _emit_block_bias(q: Value, blocks: VisibleBlocks) -> Value:
    """Emit ln of `VisibleBlocks.counts` for the tokens of `q`, [1, 1, seq, seq]."""
    at = ops.iota(q, axis=1)
    length = ops.max(at, axes=(0,), keepdims=True) + 1
    block = at // blocks.block
    first, last = block < blocks.first, block >= (length + (blocks.block - 1)) // blocks.block - blocks.last
    ends, rows, columns = first | last, (1,), (0,)
    near = abs(ops.unsqueeze(block, axes=rows) - ops.unsqueeze(block, axes=columns)) <= blocks.sides
    is_short = length <= blocks.dense
    sees_all = ops.unsqueeze(ends | is_short, axes=rows)
    visible = sees_all | near | ops.unsqueeze(ends, axes=columns)
    heavy = ops.unsqueeze(first, axes=columns) & ~sees_all
    bias = ops.cast(heavy, to=q.type.dtype) * math.log(blocks.first_weight)
    return ops.unsqueeze(mask_fill(visible, bias, -math.inf), axes=(0, 1))


def _expose_residual(model: _Model) -> dict[str, Value]:
    seen, exposed = set[str](), dict[str, Value]()
    for layer in model.all_layers:
        first = layer.find_input() if layer.stack not in seen else None
        seen.add(layer.stack)
        if layer in model.layers:
            exposed |= {f"residual.{layer.stack}": first} if first is not None else {}
            exposed[f"residual.{layer.name}"] = layer.output
    return exposed


def _expose_logits(model: _Model) -> dict[str, Value]:
    graph, head = model.graph, find_head(model.graph, model.all_layers)
    if head is None:
        return {}
    stack, nodes = head
    last = [layer.output for layer in model.all_layers if layer.stack == stack][-1]
    rows = None
    if model.tokens == "chosen":
        type = TensorType(dtypes.i64, (last.shape[0], sizes.sym("chosen")))
        rows = graph.inputs.get(CHOSEN) or graph.add_input(CHOSEN, type)
    exposed = dict[str, Value]()
    for layer in (layer for layer in model.layers if layer.stack == stack):
        is_last = layer.output is last and rows is None
        logits = graph.outputs["logits"] if is_last else _emit_head(nodes, last, layer.output, rows)
        exposed[f"logits.{layer.name}"] = logits
    return exposed


def _emit_head(nodes: Sequence[Node], last: Value, value: Value, rows: Value | None) -> Value:
    """Emit the `nodes` from the output `last` of the last layer to the logits, for `value` or its `rows`."""
    graph, tokens = last.graph, last.shape[:2]
    mapped = {last: value if rows is None else ops.gather_rows(value, rows)}
    for node in nodes:
        operands = [None if v is None else mapped.get(v, v) for v in node.inputs]
        attrs = {key: _narrow(attr, tokens, rows) for key, attr in node.attrs.items()}
        with graph.scope(node.scope):
            mapped.update(zip(node.outputs, node.op.emit(*operands, **attrs), strict=True))
    return mapped[graph.outputs["logits"]]


def _narrow(attr: Any, tokens: tuple[Any, ...], rows: Value | None) -> Any:
    """Return a shape (batch, seq, …) with the number of `rows` instead of seq, and other attributes unchanged."""
    is_shape = rows is not None and isinstance(attr, tuple) and attr[:2] == tokens
    return (*rows.shape, *attr[2:]) if is_shape and rows is not None else attr


def _expose_routes(model: _Model) -> dict[str, Value]:
    mixtures = (node for layer in model.layers for node in layer.nodes if node.op is ops.moe)
    return name_values("routes", {node: node.required_operand("combine") for node in mixtures})


def _expose_states(model: _Model) -> dict[str, Value]:
    recurrences = {node: node.output for layer in model.layers for node in layer.nodes if find_states(node)}
    exposed = dict[str, Value]()
    for name, output in name_values("states", recurrences).items():
        node = output.producer
        assert node is not None
        finals = zip(find_states(node), _emit_final_states(node), strict=True)
        exposed |= {f"{name}.{spec.part}": value for spec, value in finals}
    return exposed


def _emit_final_states(node: Node) -> Sequence[Value]:
    """Return the states of `node` after the last token; emit the node again if it does not return them."""
    if len(node.outputs) > 1:
        return node.outputs[1:]
    graph, inputs = node.graph, list(node.inputs)
    with graph.inserting(after=node):
        for spec in find_states(node):
            ones = (1,) * len(spec.type.shape)
            initial = graph.add_param(f"{node.scope}.initial", spec.type.with_shape(*ones), Full(spec.initial, ones))
            index = node.op.operand_index(spec.past_operand, node.attrs)
            inputs += [None] * (index + 1 - len(inputs))
            inputs[index] = ops.expand(initial, shape=spec.type.shape)
        return node.op.emit(*inputs, **node.attrs)[1:]


def _expose_sites(kind: str, model: _Model) -> dict[str, Value]:
    return {site.name: site.value for site in find_sites(kind, model.graph, model.layers)}


def _expose_parts(model: _Model) -> dict[str, Value]:
    tokens = find_token_axes(model.graph)
    values = (value for layer in model.layers for node in layer.nodes for value in node.outputs)
    per_token = (v for v in values if v.type.dtype.is_float and tokens is not None and has_token_axes(v, tokens))
    return {f"parts.{value.name}": value for value in per_token}


EXPOSED: dict[str, Callable[[_Model], dict[str, Value]]] = {
    "attention": _expose_attention,
    "residual": _expose_residual,
    "logits": _expose_logits,
    "routes": _expose_routes,
    "states": _expose_states,
    **{kind: partial(_expose_sites, kind) for kind in ("heads", "neurons", "sublayers")},
    "parts": _expose_parts,
}
