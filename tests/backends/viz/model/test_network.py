"""The network of a graph: operations, weights and their bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.numpy import load_file

from weft.backends.viz.model.network import (
    CHANGED,
    KEPT,
    NEW,
    REMOVED,
    Change,
    Mark,
    Vertex,
    build_network,
    count_signs,
    describe_layout,
    find_common_sign,
)
from weft.backends.viz.model.part_costs import compute_totals
from weft.frontends.app.api.draw.fact_sheet import build_fact_sheet
from weft.frontends.app.api.rewrite import rewrite
from weft.frontends.formats.weft.model_folder import write_model
from weft.frontends.model import Model
from weft.ir import parse
from weft.ir.types.block_layouts import LAYOUTS, build_integer_layout

from .quantized import DECODER, PIPELINE, build_quantized_network


def test_quantized_weights_have_the_bytes_of_their_folder(tmp_path: Path) -> None:
    model = rewrite(Model(DECODER.graph(), "model", "model"), PIPELINE)
    write_model(model, tmp_path / "out")
    stored = sum(array.nbytes for array in load_file(tmp_path / "out" / "model.safetensors").values())
    drawn = build_network(model.graph)
    weights = {w.name: w for v in drawn.vertices for w in v.weights}.values()
    # The norms are ones, which the folder does not store.
    learned = sum(w.bytes for w in weights if "frequencies" not in w.name and "norm" not in w.name)
    # Rows of 3 groups have zero points of 1.5 bytes in words, which a folder fills up.
    assert learned == pytest.approx(stored, rel=0.01)
    found = compute_totals(drawn, 64)
    assert found.weights == sum(w.bytes for w in weights) and "uint4_32" in found.dtypes
    rows = dict(build_fact_sheet(model).rows)
    assert (
        rows["Quantized"].endswith("bits, int4 groups of 32 and int8 groups of 32") and "quantized" in rows["Weights"]
    )


def test_decode_step_reads_packed_bytes() -> None:
    plain = build_network(DECODER.graph())
    for before, after in zip(plain.vertices, build_quantized_network().vertices, strict=True):
        binding = {"batch": 1, "seq": 8, "past": 0, "total": 8, "capacity": 8}
        one, two = (v.step.evaluate(binding, 2) for v in (before, after))
        assert one["flops"] == two["flops"] and one["written"] == two["written"]
        saved = 0
        if after.op == "linear":
            (weight,) = after.weights
            rows, width = map(int, weight.dims)
            assert weight.bits is not None
            saved = rows * width * 2 - round(rows * width * weight.bits / 8)
        assert one["read"] - two["read"] == saved


GRAPH = """
graph g {
  input %x: f32[batch, seq, 4]
  input %ids: i64[batch, seq]
  param %table: f32[7, 4] = source("t")
  param %unread: f16[3] = source("u")
  %e: f32[batch, seq, 4] = embedding(%ids, %table)
  %s: f32[batch, seq, 4] = add(%x, %e)
  %y: f32[batch, seq, 7] = linear(%s, %table)
  output out = %y
}
"""


def test_operations_have_operands_weights_and_types() -> None:
    network = build_network(parse(GRAPH))
    embed, total, head = network.vertices
    assert (embed.op, embed.reads, embed.roles, embed.makes) == ("embedding", ("ids",), ("ids",), ("e",))
    assert (total.reads, total.types, total.weights) == (("x", "e"), ("f32[batch, seq, 4]",), ())
    assert network.inputs == {"x": "f32[batch, seq, 4]", "ids": "i64[batch, seq]"}
    assert network.outputs == {"out": ("y", "f32[batch, seq, 7]")}
    (table,) = head.weights
    assert (table.name, table.dims, table.dtype, table.bytes) == ("table", ("7", "4"), "f32", 4 * 28)


def test_shared_parameter_counts_once_and_unread_ones_are_listed() -> None:
    network = build_network(parse(GRAPH))
    assert [w.learned for v in network.vertices for w in v.weights] == [28, 0]
    assert [(w.name, w.bytes) for w in network.unread] == [("unread", 6)]


def test_layouts_are_described_in_words() -> None:
    assert describe_layout(LAYOUTS["q8_0"]) == "int8, groups of 32"
    assert describe_layout(build_integer_layout(4, 64, True)) == "int4, groups of 64 with zero points"
    assert describe_layout(LAYOUTS["mxfp4"]) == "fp4, groups of 32"


def test_attributes_are_read_without_quotes() -> None:
    vertex = Vertex("v", "glu", "", (), (), attrs={"activation": "'gelu'"})
    assert vertex.text("activation") == "gelu" and vertex.text("absent", "none") == "none"


def test_common_sign_is_changed_if_signs_differ() -> None:
    assert find_common_sign([Mark(NEW), None, Mark(NEW)]) == NEW
    assert find_common_sign([Mark(NEW), Mark(KEPT)]) == CHANGED
    assert find_common_sign([None, None]) == find_common_sign([]) == ""


def test_counts_leave_out_kept_operations() -> None:
    marks = [Mark(CHANGED), Mark(KEPT), Mark(REMOVED), None, Mark(REMOVED)]
    assert count_signs(marks) == "2 removed, 1 changed"
    assert count_signs([Mark(KEPT)]) == ""


def test_marks_are_alike_if_only_names_differ() -> None:
    def mark(layer: int, heads: str) -> Mark:
        read = Change("reads x", f"layers.{layer}.norm", f"layers.{layer}.add", named=True)
        return Mark(CHANGED, ("was 9 heads",), (Change("heads", "9", heads), read), other=f"layers.{layer}.attn")

    assert mark(0, "3").alike == mark(7, "3").alike
    assert mark(0, "3").alike != mark(0, "1").alike
    assert Mark(NEW).alike != Mark(REMOVED).alike
