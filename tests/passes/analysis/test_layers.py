"""The argument `layers` of passes."""

from __future__ import annotations

from typing import Any

import pytest

from weft import Attention, Block, CrossAttention, Decoder, Encoder, EncoderDecoder, GatedMLP, LinearAttention
from weft.ir import WeftError
from weft.passes import parse_pipeline
from weft.passes.analysis.layers import Layers, expand_pattern, parse_layers, select_attentions

FEED = GatedMLP(11)


@pytest.mark.parametrize(
    ("layers", "found"),
    [
        ("all", [0, 1, 2, 3, 4, 5, 6]),
        ("even", [0, 2, 4, 6]),
        ("odd", [1, 3, 5]),
        (3, [3]),
        (-1, [6]),
        ((5, 0, -6, 5), [0, 1, 5]),
        ("4", [4]),
        ("-2", [5]),
        ("0-2, 5", [0, 1, 2, 5]),
        ("2:1", [0, 1, 3, 4, 6]),
        ("1:2", [0, 3, 6]),
        ("local*2+global", [0, 1, 3, 4, 6]),
        ("global + local * 3", [1, 2, 3, 5, 6]),
        ("local", [0, 1, 2, 3, 4, 5, 6]),
        ("999999999:1", [0, 1, 2, 3, 4, 5, 6]),
        ("local*2 + global*999999999", [0, 1]),
    ],
)
def test_layer_selections(layers: Layers, found: list[int]) -> None:
    assert parse_layers(layers, 7) == found


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (7, "there is no layer 7; the graph has layers 0 to 6"),
        ("0-7", "there is no layer 7;"),
        (-8, "there is no layer -8;"),
        ("0-999999999", "there is no layer 7;"),
        ("-999999999-3", "there is no layer -999999999;"),
        ("9" * 5000, "cannot read '9999"),
        ((), r"layers=\(\) selects none of the layers 0 to 6"),
        ("0:1", "layers='0:1' selects none of the layers 0 to 6"),
        ("3-1", "layers='3-1' ends at 1 before it begins at 3"),
        ("some", "cannot read 'some' in layers='some': give all, even, odd,"),
        ("", "cannot read '' in layers='': give all"),
        ("local*2+golbal", 'is unknown: give "5:1", "local\\*5 \\+ global" or a list of local and'),
        ("local**2", "cannot read 'local\\*\\*2' in pattern 'local\\*\\*2'"),
        ("0:0", "pattern '0:0' is unknown"),
    ],
)
def test_invalid_layer_selections_are_refused(layers: Layers, message: str) -> None:
    with pytest.raises(WeftError, match=message):
        parse_layers(layers, 7)


def test_roles() -> None:
    assert expand_pattern("3:1", 6) == ["local", "local", "local", "global", "local", "local"]
    assert expand_pattern(("global", "local"), 3) == ["global", "local", "global"]
    with pytest.raises(WeftError, match="pattern \\('local', 'wide'\\) is unknown"):
        expand_pattern(("local", "wide"), 4)


@pytest.mark.parametrize("layers", ["even", 3, -1, [0, 2], "0-5, 8", "local*5+global", "5:1"])
def test_layer_selection_prints_in_a_pipeline(layers: Any) -> None:
    (one,) = parse_pipeline("sliding-window{size=4}").passes
    said = type(one).make({"size": 4, "layers": layers})
    assert parse_pipeline(str(said)).passes == (said,)


def test_layers_are_self_attentions() -> None:
    attn, cross = Attention(2), CrossAttention(2)
    encoder, decoder = Encoder(20, 8, 2, Block(attn, FEED)), Decoder(20, 8, 2, Block(attn, FEED, cross=cross))
    found = select_attentions(EncoderDecoder(encoder, decoder).graph(), "all", "x")
    assert [n.scope for n in found] == [f"{half}.layers.{i}.attn" for half in ("encoder", "decoder") for i in (0, 1)]
    mixed = Decoder(20, 8, [Block(LinearAttention(2), FEED), Block(attn, FEED)]).graph()
    assert [n.scope for n in select_attentions(mixed, 0, "x")] == ["layers.1.attn"]
    with pytest.raises(WeftError, match="x: there is no layer 1; the graph has layers 0 to 0"):
        select_attentions(mixed, 1, "x")
