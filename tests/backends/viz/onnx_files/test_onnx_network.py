"""ONNX files as networks: the same picture of the same model, whatever names its exporter writes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from playwright.sync_api import Page

import weft
from weft.backends.viz.layout.coordinates import place_shapes
from weft.backends.viz.layout.scene import ALL, build_scene, list_default_open
from weft.backends.viz.model.network import Network, build_network
from weft.backends.viz.onnx_files.onnx_network import join_networks, read_onnx_network
from weft.backends.viz.web.page import render_page
from weft.ir.errors import WeftError

from ....sampling import each
from ..geometry import faults
from ..onnx_models import DIM, HIDDEN, VOCAB, wrapped
from .reading import build_decoder, read_model

STYLES = ("slashed", "dotted", "wrapped_in_model", "tensorflow", "plain", "nameless")


FLOAT, INT = TensorProto.FLOAT, TensorProto.INT64


FLOAT, INT = TensorProto.FLOAT, TensorProto.INT64


@pytest.mark.parametrize("style", [*STYLES, "dynamo"])
def test_layers_are_found_in_every_naming_style(style: str, tmp_path: Path) -> None:
    root = build_scene(read_model(build_decoder(style, 5), tmp_path))
    assert [s.label.title.rstrip("0123456789-").strip() for s in root.inner][1:5] == [
        "Embedding", "layers", "LayerNorm", "Linear"]  # fmt: skip
    (layers,) = [s for s in root.inner if s.part.count > 1]
    assert layers.part.count == 5
    drawn = [s for s in layers.all() if s.part.vertices]
    assert [s.label.title for s in drawn if s.label.title == "Linear"] == ["Linear"] * 6
    assert sum(s.label.symbol == "+" for s in drawn) == 2
    assert sorted(s.label.lines[-1] for s in drawn if s.label.title == "Linear") == sorted(
        [f"{DIM} to {DIM}"] * 4 + [f"{DIM} to {HIDDEN}", f"{HIDDEN} to {DIM}"]
    )


@pytest.mark.parametrize("style", [*STYLES, "dynamo"])
def test_nothing_overlaps(style: str, tmp_path: Path) -> None:
    root = build_scene(read_model(build_decoder(style, 3), tmp_path))
    every = {s.key for s in root.all() if s.arrangement is not None}
    for opened in ({root.key}, every, every | {s.key + ALL for s in root.all() if s.part.count > 1}):
        assert list(faults(place_shapes(root, opened))) == []


def test_parameters_are_counted(tmp_path: Path) -> None:
    """By hand: tables, four maps of attention with biases, two of the feed-forward, norms without biases."""
    found = read_model(build_decoder("slashed", 3), tmp_path)
    layer = 4 * (DIM * DIM + DIM) + (DIM * HIDDEN + HIDDEN) + (HIDDEN * DIM + DIM) + DIM
    assert sum(w.learned for v in found.vertices for w in v.weights) == 3 * layer + 2 * VOCAB * DIM + DIM


def test_external_data_is_not_read(tmp_path: Path) -> None:
    model = build_decoder("slashed", 2)
    onnx.save(model, tmp_path / "a.onnx", save_as_external_data=True, location="a.data", size_threshold=0)
    (tmp_path / "a.data").unlink()
    weights = {w.name: (w.shape, w.bytes) for v in read_onnx_network(tmp_path / "a.onnx").vertices for w in v.weights}
    assert weights["embed.weight"] == (f"[{VOCAB}, {DIM}]", 4 * VOCAB * DIM)


def test_function_calls_are_inlined(tmp_path: Path) -> None:
    """A layer as a function that is called twice, with an attribute handed on."""
    inner = [
        helper.make_node("MatMul", ["x", "w"], ["y"], name="proj"),
        helper.make_node("LeakyRelu", ["y"], ["z"], name="act"),
        helper.make_node("Add", ["x", "z"], ["out"], name="residual"),
    ]
    inner[1].attribute.append(onnx.AttributeProto(name="alpha", ref_attr_name="slope", type=onnx.AttributeProto.FLOAT))
    layer = helper.make_function("own", "Layer", ["x", "w"], ["out"], inner, [helper.make_opsetid("", 20)], ["slope"])
    calls = [
        helper.make_node("Layer", [x, "w"], [y], name=f"/layers.{i}", domain="own", slope=0.5)
        for i, (x, y) in enumerate([("a", "b"), ("b", "c")])
    ]
    weight = numpy_helper.from_array(np.zeros((4, 4), np.float32), "w")
    found = read_model(wrapped(calls, [("a", FLOAT, [2, 4])], [("c", FLOAT, [2, 4])], [weight], [layer]), tmp_path)
    assert [v.op for v in found.vertices] == ["MatMul", "LeakyRelu", "Add"] * 2
    assert [v.attrs.get("alpha") for v in found.vertices[1::3]] == ["0.5", "0.5"]
    assert len({v.scope for v in found.vertices}) == 2
    made = {x for v in found.vertices for x in v.makes}
    assert found.outputs["c"][0] in made and all(x in made or x == "a" for v in found.vertices for x in v.reads)


def test_recursive_function_is_refused(tmp_path: Path) -> None:
    again = [helper.make_node("Loopy", ["x"], ["y"], domain="own")]
    loop = helper.make_function("own", "Loopy", ["x"], ["y"], again, [helper.make_opsetid("own", 1)])
    call = [helper.make_node("Loopy", ["a"], ["b"], name="start", domain="own")]
    with pytest.raises(WeftError, match="calls itself"):
        read_model(wrapped(call, [("a", FLOAT, [2])], [("b", FLOAT, [2])], functions=[loop]), tmp_path)


def test_if_is_one_operation_that_reads_captured_values(tmp_path: Path) -> None:
    """An If is one operation, which reads what its branches read from around it."""
    then, other = (
        helper.make_graph(
            [helper.make_node(op, ["a"], [f"{op}.y"])], op, [], [helper.make_tensor_value_info(f"{op}.y", FLOAT, [2])]
        )
        for op in ("Relu", "Neg")
    )
    nodes = [helper.make_node("If", ["c"], ["b"], name="choice", then_branch=then, else_branch=other)]
    found = read_model(wrapped(nodes, [("a", FLOAT, [2]), ("c", TensorProto.BOOL, [])], [("b", FLOAT, [2])]), tmp_path)
    (v,) = found.vertices
    assert v.reads == ("c", "a") and v.roles == ("cond", "captured")
    assert v.attrs == {"then_branch": "1 operation", "else_branch": "1 operation"}


def test_join_networks_connects_values_of_equal_name(tmp_path: Path) -> None:
    def half(name: str, scope: str, x: str, y: str, kind: str) -> Network:
        node = helper.make_node(kind, [x], [y], name=f"{scope}.{kind}")
        onnx.save(wrapped([node], [(x, FLOAT, [2])], [(y, FLOAT, [2])]), tmp_path / name)
        return read_onnx_network(tmp_path / name)

    whole = join_networks(
        [half("encoder.onnx", "encoder", "a", "cross", "Relu"), half("model.onnx", "encoder", "cross", "b", "Relu")]
    )
    first, second = whole.vertices
    assert first.name != second.name and second.reads == first.makes
    assert [*whole.inputs] == ["a"] and whole.outputs["b"][0] == second.makes[0] and [*whole.outputs] == ["b"]


@pytest.mark.long
@pytest.mark.parametrize("style", each(2, ["nameless", "slashed"]))
def test_three_thousand_nodes_are_drawn_in_five_seconds(
    style: str, tmp_path: Path, visit: Callable[[str], Page]
) -> None:
    """From the file to a page that shows it."""
    model = build_decoder(style, 110)
    assert len(model.graph.node) > 3000
    onnx.save(model, tmp_path / "m.onnx")
    start = time.process_time()
    root = build_scene(read_onnx_network(tmp_path / "m.onnx"))
    text = render_page(root, list_default_open(root))
    assert time.process_time() - start < 5
    assert visit(text).locator("g.part").count() > 5


def test_operations_without_results_are_drawn(tmp_path: Path) -> None:
    nodes = [helper.make_node("Add", ["a", "a"], []), helper.make_node("Add", ["a", "a"], ["b"])]
    network = read_model(wrapped(nodes, [("a", FLOAT, [2])], [("b", FLOAT, [2])]), tmp_path)
    drawn = [vertex.makes for vertex in build_scene(network).part.all_vertices() if vertex.op == "Add"]
    assert drawn == [(), ("b",)]


@pytest.mark.parametrize(("kind", "reads", "name"), [("TopK", ["a", "k"], "Indices"), ("Split", ["a"], "out1")])
def test_results_have_their_names_in_the_standard(kind: str, reads: list[str], name: str, tmp_path: Path) -> None:
    """Results of a variadic output, which share one name, are numbered."""
    nodes = [helper.make_node(kind, reads, ["b", "c"], name="both")]
    network = read_model(wrapped(nodes, [("a", FLOAT, [4]), ("k", INT, [1])], [("b", FLOAT, None)]), tmp_path)
    first, second = network.vertices[0].makes
    assert second == f"{first}.{name}"


def test_value_produced_twice_is_refused(tmp_path: Path) -> None:
    """They could depend on themselves."""
    nodes = [helper.make_node("Mul", ["a", x], [y]) for x, y in (("a", "b"), ("b", "c"), ("c", "b"))]
    with pytest.raises(WeftError, match="produces 'b', which an earlier operation produces too"):
        read_model(wrapped(nodes, [("a", FLOAT, [2])], [("c", FLOAT, [2])]), tmp_path)


@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize(("target", "bits"), [("ort-cpu", 4), ("ort-cpu", 8), ("ort-cuda", 4)])
def test_packed_weights_of_compiled_files_have_their_bits(
    experts: bool, target: str, bits: int, tmp_path: Path
) -> None:
    """Codes are packed there, tables behind a Reshape, and scales behind a Cast; the sizes are those of the model."""
    ffn = weft.MoE(4, 64, 2) if experts else weft.GatedMLP(64)
    block = weft.Block(weft.Attention(4, rope=weft.RoPE()), ffn, weft.RMSNorm())
    model = weft.Decoder(128, 64, 1, block, context=64)
    weft.compile(model, tmp_path / "out", target=target, dtype="f16" if target == "ort-cuda" else None,
                 passes=f"quantize{{bits={bits}, head={bits}, method=rtn, zeros=false}}, default")  # fmt: skip
    drawn = read_onnx_network(tmp_path / "out" / "model.onnx")
    assert not any(v.op in ("Reshape", "Cast") and not v.reads for v in drawn.vertices)
    packed = [w for v in drawn.vertices for w in v.weights if w.bits is not None]
    assert {w.packing for w in packed} == {f"int{bits}, groups of 32"}
    assert {w.bits for w in packed} == {bits + 0.5}
    (embed,) = (v.equivalent for v in drawn.vertices if v.equivalent is not None and v.equivalent.op == "embedding")
    assert embed.weights[0].dims == ("128", "64")
    # Norms of ones are one tensor in the file.
    original = {w.name: w for v in build_network(model.graph()).vertices for w in v.weights if len(w.dims) > 1}
    found = [w.learned for v in drawn.vertices for w in v.weights if len(w.dims) > 1]
    assert sum(found) == sum(w.learned for w in original.values())
