"""Titles, lines and kinds of parts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from weft.backends.viz.model.labels import Label, choose_title, describe_sizes, label_part
from weft.backends.viz.model.network import CHANGED, NEW, REMOVED, Mark, Vertex, Weight
from weft.backends.viz.model.outline import PicturePart
from weft.frontends.app.api.draw.pictures import draw
from weft.frontends.app.api.rewrite import rewrite
from weft.frontends.model import Model

from .quantized import DECODER, PIPELINE


@pytest.mark.parametrize("ending", ["html", "svg", "mmd", "txt", "dot"])
def test_labels_state_bits_in_every_format(ending: str, tmp_path: Path) -> None:
    model = rewrite(Model(DECODER.graph(), "model", "model"), PIPELINE)
    draw(model, tmp_path / f"picture.{ending}")
    shown = (tmp_path / f"picture.{ending}").read_text()
    assert "4.62 bits, int4 groups of 32" in shown and "8.5 bits, int8 groups of 32" in shown
    if ending == "html":
        assert "int4, groups of 32 with zero points; " in shown  # for the panel
    draw(Model(DECODER.graph(), "model", "model"), tmp_path / f"plain.{ending}")
    plain = (tmp_path / f"plain.{ending}").read_text()
    assert "groups of 32" not in plain


def test_layers_with_different_bits_do_not_fold(tmp_path: Path) -> None:
    model = Model(DECODER.graph(), "model", "model")
    mixed = rewrite(model, 'quantize{bits=4, method=rtn, keep="layers.1.*"}, quantize{bits=8, method=rtn}')
    draw(mixed, tmp_path / "a.txt")
    lines = (tmp_path / "a.txt").read_text().splitlines()
    (first,) = (line for line in lines if "layers 0" in line or "layer 0" in line)
    assert "× 2" not in first


def vertex(op: str, *reads: str, weight: str = "", out: str = "f32[batch, seq, 8]", **attrs: str) -> Vertex:
    weights = (Weight("w", weight, "f32", 4, ""),) if weight else ()
    return Vertex("layers.0.sub.v", op, "layers.0.sub", reads, ("v",), reads, (out,), attrs, weights)


@pytest.mark.parametrize(
    ("attrs", "name"),
    [
        ({"heads": "8"}, "Multi-head attention"),
        ({"heads": "8", "kv_heads": "8"}, "Multi-head attention"),
        ({"heads": "8", "kv_heads": "2"}, "Grouped-query attention"),
        ({"heads": "8", "kv_heads": "1"}, "Multi-query attention"),
        ({"heads": "8", "kv_heads": "1", "value_dim": "512"}, "Latent attention"),
    ],
)
def test_attention_is_named_by_its_heads(attrs: dict[str, str], name: str) -> None:
    assert choose_title(vertex("attention", "q", "k", "v", **attrs)) == name


@pytest.mark.parametrize(
    ("operation", "title", "sizes"),
    [
        (vertex("linear", "x", weight="[1536, 576]"), "Linear", "576 to 1,536"),
        (vertex("embedding", "ids", weight="[49152, 576]"), "Embedding", "49,152 × 576"),
        (vertex("glu", "gate", "up", activation="'gelu'"), "GEGLU", ""),
        (vertex("glu", "gate", "up"), "SwiGLU", ""),
        (vertex("moe", "x", weight="[8, 4, 4]", active="2"), "Experts", "8 experts, 2 active"),
        (vertex("route", "x", k="2"), "Router's choice", "top 2"),
        (vertex("scan", "x", step="h = a * h + x\ny = c * h"), "Recurrence", "h = a * h + x"),
        (vertex("scan", "x", step="h = x\nh = h\nh = h\ny = h"), "Recurrence", "4 formulas for a token"),
        (
            vertex("attention", "q", "k", "sinks", heads="8", kv_heads="2", window="4096", softcap="50.0"),
            "Grouped-query attention",
            "8 heads, 2 KV heads · window 4,096 · sinks · soft cap 50.0",
        ),
        (vertex("NonMaxSuppression", "x"), "NonMaxSuppression", ""),
    ],
)
def test_operations_have_titles_and_characteristic_sizes(operation: Vertex, title: str, sizes: str) -> None:
    assert (choose_title(operation), describe_sizes(operation)) == (title, sizes)


def test_sums_are_circles_and_inputs_have_their_type() -> None:
    leaf = PicturePart("sum", "layers.0.sum", (vertex("add", "a", "b"),))
    assert label_part(leaf) == Label("sum", (), "stream", "+")
    source = PicturePart("input_ids", "input_ids", (vertex("input", out="i64[batch, seq]"),))
    assert label_part(source) == Label("input_ids", ("i64[batch, seq]",), "input")


def test_groups_are_named_by_their_operations() -> None:
    def group(name: str, *operations: Vertex) -> Label:
        leaves = [PicturePart(f"v{i}", f"{name}.v{i}", (v,)) for i, v in enumerate(operations)]
        return label_part(PicturePart(name, name, children=leaves))

    linear = vertex("linear", "x", weight="[8, 8]")
    assert group("ffn", linear, vertex("glu", "a", "b", out="f32[batch, seq, 1536]"), linear) == Label(
        "SwiGLU feed-forward", ("ffn", "hidden 1,536"), "feed-forward"
    )
    assert group("ffn", linear, vertex("relu", "a")).title == "Feed-forward, ReLU"
    attention = vertex("attention", "q", "k", "v", heads="4", kv_heads="2")
    assert group("attn", vertex("rope", "q"), attention) == Label(
        "Grouped-query attention", ("attn", "4 heads, 2 KV heads · RoPE"), "attention"
    )
    assert group("cross", attention).title == "Cross-attention"
    assert group("mixer", vertex("selective_scan", "x")) == Label("Mamba", ("mixer", "selective scan"), "recurrence")
    assert group("odd", linear, vertex("tanh_", "x")) == Label("odd", ("Linear, tanh_",), "group")


def test_marks_of_a_comparison_replace_the_kind() -> None:
    def leaf(mark: Mark) -> PicturePart:
        return PicturePart("q", "q", (replace(vertex("linear", "x"), mark=mark),))

    changed = label_part(leaf(Mark(CHANGED, ("was RMSNorm",))))
    assert (changed.kind, changed.lines[-1]) == ("sign-changed", "was RMSNorm")
    assert label_part(leaf(Mark(NEW))).lines[-1] == "new"
    kept = label_part(leaf(Mark()))
    assert kept.kind == "sign-kept" and kept.lines == label_part(PicturePart("q", "q", (vertex("linear", "x"),))).lines
    both = PicturePart("attn", "attn", children=[leaf(Mark(REMOVED)), leaf(Mark())])
    assert (label_part(both).kind, label_part(both).lines[-1]) == ("sign-changed", "1 removed")
