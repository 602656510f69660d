"""Layers of all stacks, their outputs, and the names of values inside them."""

from __future__ import annotations

import pytest

from weft.ir import Graph, WeftError, ops, parse
from weft.passes.analysis.observed import (
    find_head,
    find_hidden_units,
    find_sublayer,
    has_heads,
    list_layers,
    name_values,
    parse_kinds,
    select_layers,
)

from ..models import Tiny

SHARED_KEYS = """graph shared {
  input %x: f32[batch, seq, 4]
  param %k: f32[2, 4] = normal([2, 4], std=0.5, stream="k")
  scope layers.0
    %.sum: f32[batch, seq, 4] = add(%x, %x)
    %.k: f32[batch, seq, 2] = linear(%.sum, %k)
  scope layers.1
    %.y: f32[batch, seq, 4] = attention(%layers.0.sum, %layers.0.k, %layers.0.k, heads=2, kv_heads=1, causal=true)
    %.sum: f32[batch, seq, 4] = add(%layers.0.sum, %.y)
  scope _
  %logits: f32[batch, seq, 4] = affine(%layers.1.sum, by=2.0)
  output logits = %logits
}"""


@pytest.fixture
def tiny() -> Graph:
    return Tiny().graph()


def test_the_output_of_a_layer_is_the_stream_not_keys_that_later_layers_share() -> None:
    layers = list_layers(parse(SHARED_KEYS))
    assert [(layer.name, layer.stack, layer.output.name) for layer in layers] == [
        ("layers.0", "layers", "layers.0.sum"),
        ("layers.1", "layers", "layers.1.sum"),
    ]
    assert [str(layer.find_input()) for layer in layers] == [str(layers[0].find_input()), str(layers[0].output)]


def test_the_head_is_behind_the_last_layer() -> None:
    graph = parse(SHARED_KEYS)
    head = find_head(graph, list_layers(graph))
    assert head is not None and (head[0], [n.op for n in head[1]]) == ("layers", [ops.affine])
    graph.outputs["logits"] = list_layers(graph)[0].output
    assert find_head(graph, list_layers(graph)) is None


def test_places_have_the_scope_or_the_name_of_a_value() -> None:
    graph = parse(SHARED_KEYS)
    attentions = {n: n.output for n in graph.nodes if has_heads(n)}
    assert list(name_values("heads", attentions)) == ["heads.layers.1"]
    assert list(name_values("parts", {n: n.output for n in graph.nodes if n.scope == "layers.1"})) == [
        "parts.layers.1.y",
        "parts.layers.1.sum",
    ]
    names = ("layers.3.attn.o", "decoder.layers.0.ffn", "layers.2", "embed")
    assert [find_sublayer(name) for name in names] == ["layers.3.attn", "decoder.layers.0.ffn", None, None]


def test_hidden_units(tiny: Graph) -> None:
    hidden = [v for n in tiny.nodes if (v := find_hidden_units(n)) is not None]
    assert len(hidden) == len(list_layers(tiny))
    assert all(v.users[0].op is ops.linear for v in hidden)


def test_selections(tiny: Graph) -> None:
    assert [layer.name for layer in select_layers(tiny, -1, "p")] == [list_layers(tiny)[-1].name]
    with pytest.raises(WeftError, match="p: there is no layer 9"):
        select_layers(tiny, 9, "p")
    with pytest.raises(WeftError, match=r"p: graph flat has no layers, which are scopes named layers\.0"):
        select_layers(parse("graph flat { input %x: f32[n] output y = %x }"), "all", "p")
    assert parse_kinds("a, b", ("a", "b"), "p") == ["a", "b"]
    assert parse_kinds("a, all", ("a", "b"), "p") == ["a", "all"]
    with pytest.raises(WeftError, match="p: what=c is unknown: it may list a, b, or be all"):
        parse_kinds("c", ("a", "b"), "p")
