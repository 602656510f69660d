"""ONNX files as networks: whatever their exporter calls things, the same model is the same picture."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from playwright.sync_api import Page

from weft.backends.viz.layout.coordinates import place_shapes
from weft.backends.viz.layout.scene import ALL, build_scene, list_default_open
from weft.backends.viz.model.network import Network
from weft.backends.viz.model.outline import PicturePart, build_outline
from weft.backends.viz.onnx_files.onnx_network import join_networks, read_onnx_network
from weft.backends.viz.web.page import render_page
from weft.ir.errors import WeftError

from ...sampling import each
from . import onnx_models
from .geometry import faults
from .onnx_models import DIM, HIDDEN, VOCAB, Builder, wrapped

STYLES = ("slashed", "dotted", "wrapped_in_model", "tensorflow", "plain", "nameless")
FLOAT, INT = TensorProto.FLOAT, TensorProto.INT64


def read(model: onnx.ModelProto, folder: Path) -> Network:
    onnx.save(model, folder / "m.onnx")
    return read_onnx_network(folder / "m.onnx")


def built(style: str, layers: int) -> onnx.ModelProto:
    """The decoder with names in that style; "dynamo": names of no use, but metadata."""
    name = onnx_models.plain if style == "dynamo" else getattr(onnx_models, style)
    return Builder(name, metadata=style == "dynamo").model(layers)


@pytest.mark.parametrize("style", [*STYLES, "dynamo"])
def test_layers_are_found(style: str, tmp_path: Path) -> None:
    root = build_scene(read(built(style, 5), tmp_path))
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
    root = build_scene(read(built(style, 3), tmp_path))
    every = {s.key for s in root.all() if s.arrangement is not None}
    for opened in ({root.key}, every, every | {s.key + ALL for s in root.all() if s.part.count > 1}):
        assert list(faults(place_shapes(root, opened))) == []


def test_parameters_are_counted(tmp_path: Path) -> None:
    """By hand: tables, four maps of attention with biases, two of the feed-forward, norms without biases."""
    found = read(built("slashed", 3), tmp_path)
    layer = 4 * (DIM * DIM + DIM) + (DIM * HIDDEN + HIDDEN) + (HIDDEN * DIM + DIM) + DIM
    assert sum(w.learned for v in found.vertices for w in v.weights) == 3 * layer + 2 * VOCAB * DIM + DIM


def test_sizes_are_told(tmp_path: Path) -> None:
    """Shape, Gather, Unsqueeze, Concat: what they make is an attribute of the Reshape."""
    found = read(built("slashed", 1), tmp_path)
    assert not {"Shape", "Constant", "Concat", "Unsqueeze"} & {v.op for v in found.vertices}
    (reshape,) = [v for v in found.vertices if v.op == "Reshape"]
    assert reshape.attrs["shape"] == f"[batch, -1, {DIM}]"
    assert reshape.types == (f"f32[batch, ?, {DIM}]",) or reshape.types == (f"f32[batch, seq, {DIM}]",)


def test_data_outside_need_not_be_there(tmp_path: Path) -> None:
    model = built("slashed", 2)
    onnx.save(model, tmp_path / "a.onnx", save_as_external_data=True, location="a.data", size_threshold=0)
    (tmp_path / "a.data").unlink()
    weights = {w.name: (w.shape, w.bytes) for v in read_onnx_network(tmp_path / "a.onnx").vertices for w in v.weights}
    assert weights["embed.weight"] == (f"[{VOCAB}, {DIM}]", 4 * VOCAB * DIM)


def test_functions_are_opened(tmp_path: Path) -> None:
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
    found = read(wrapped(calls, [("a", FLOAT, [2, 4])], [("c", FLOAT, [2, 4])], [weight], [layer]), tmp_path)
    assert [v.op for v in found.vertices] == ["MatMul", "LeakyRelu", "Add"] * 2
    assert [v.attrs.get("alpha") for v in found.vertices[1::3]] == ["0.5", "0.5"]
    assert len({v.scope for v in found.vertices}) == 2
    made = {x for v in found.vertices for x in v.makes}
    assert found.outputs["c"][0] in made and all(x in made or x == "a" for v in found.vertices for x in v.reads)


def test_a_function_that_calls_itself(tmp_path: Path) -> None:
    again = [helper.make_node("Loopy", ["x"], ["y"], domain="own")]
    loop = helper.make_function("own", "Loopy", ["x"], ["y"], again, [helper.make_opsetid("own", 1)])
    call = [helper.make_node("Loopy", ["a"], ["b"], name="start", domain="own")]
    with pytest.raises(WeftError, match="calls itself"):
        read(wrapped(call, [("a", FLOAT, [2])], [("b", FLOAT, [2])], functions=[loop]), tmp_path)


def test_graphs_in_operations(tmp_path: Path) -> None:
    """An If is one operation, which reads what its branches read from around it."""
    then, other = (
        helper.make_graph(
            [helper.make_node(op, ["a"], [f"{op}.y"])], op, [], [helper.make_tensor_value_info(f"{op}.y", FLOAT, [2])]
        )
        for op in ("Relu", "Neg")
    )
    nodes = [helper.make_node("If", ["c"], ["b"], name="choice", then_branch=then, else_branch=other)]
    found = read(wrapped(nodes, [("a", FLOAT, [2]), ("c", TensorProto.BOOL, [])], [("b", FLOAT, [2])]), tmp_path)
    (v,) = found.vertices
    assert v.reads == ("c", "a") and v.roles == ("cond", "captured")
    assert v.attrs == {"then_branch": "1 operation", "else_branch": "1 operation"}


def attention(i: int) -> list[onnx.NodeProto]:
    """A layer as onnxruntime-genai's builder writes it: operators of ONNX Runtime, caches as inputs and outputs."""
    at, x = f"/model/layers.{i}", f"x{i}"
    past, present = ([f"{stem}.{i}.{kind}" for kind in ("key", "value")] for stem in ("past_key_values", "present"))

    def node(
        op: str, reads: list[str], makes: list[str], name: str, domain: str = "", **attrs: object
    ) -> onnx.NodeProto:
        return helper.make_node(op, reads, makes, name=f"{at}/{name}", domain=domain, **attrs)

    heads = {"num_heads": 4, "kv_num_heads": 2, "do_rotary": 1, "local_window_size": 16}
    asked, ours = [f"q{i}", "", "", *past, "lengths", "total"], "com.microsoft"
    return [
        node("SimplifiedLayerNormalization", [x, "scale"], [f"n{i}"], "input_layernorm/LayerNorm"),
        node(
            "MatMulNBits", [f"n{i}", "packed", "scales"], [f"q{i}"], "attn/qkv_proj/MatMul_Q4", ours, N=24, K=8, bits=4
        ),
        node("GroupQueryAttention", asked, [f"o{i}", *present], "attn/GroupQueryAttention", ours, **heads),
        node("MatMul", [f"o{i}", "w"], [f"p{i}"], "attn/o_proj/MatMul"),
        node("Add", [x, f"p{i}"], [f"x{i + 1}"], "Add"),
    ]


def genai(layers: int) -> onnx.ModelProto:
    nodes = [helper.make_node("Gather", ["table", "input_ids"], ["x0"], name="/model/embed_tokens/Gather")]
    nodes += [node for i in range(layers) for node in attention(i)]
    nodes.append(helper.make_node("MatMul", [f"x{layers}", "head"], ["logits"], name="/lm_head/MatMul"))
    sizes = {"scale": (8,), "scales": (24, 1), "w": (8, 8), "table": (17, 8), "head": (8, 17)}
    weights = [numpy_helper.from_array(np.zeros(shape, np.float32), name) for name, shape in sizes.items()]
    weights.append(numpy_helper.from_array(np.zeros((24, 1, 8), np.uint8), "packed"))
    caches = {
        stem: [f"{stem}.{i}.{kind}" for kind in ("key", "value") for i in range(layers)]
        for stem in ("past_key_values", "present")
    }
    inputs = [
        ("input_ids", INT, ["batch", "seq"]),
        ("lengths", TensorProto.INT32, [1]),
        ("total", TensorProto.INT32, []),
    ]
    inputs += [(name, FLOAT, ["batch", 2, "past", 2]) for name in caches["past_key_values"]]
    outputs = [("logits", FLOAT, ["batch", "seq", 17])]
    outputs += [(name, FLOAT, ["batch", 2, "total", 2]) for name in caches["present"]]
    return wrapped(nodes, inputs, outputs, weights)


def test_operators_of_onnx_runtime(tmp_path: Path) -> None:
    root = build_scene(read(genai(4), tmp_path))
    assert [s.key for s in root.inner][:3] == ["input_ids", "lengths", "total"]
    assert [s.key for s in root.inner][3:] == ["embed_tokens.Gather", "layers.0-3", "lm_head.MatMul", "out.logits"]
    at = {s.key: s for s in root.all()}
    attn = at["layers.0.attn"]
    assert attn.label.title == "Grouped-query attention" and attn.label.kind == "attention"
    assert attn.label.lines[1] == "4 heads, 2 KV heads · window 16 · RoPE"
    assert attn.captions == ["with lengths, total, past key, value", "gives present key, value"]
    assert at["layers.0.attn.qkv_proj.MatMul_Q4"].label.lines == ("qkv_proj", "8 to 24")
    assert at["layers.0.input_layernorm.LayerNorm"].label.title == "RMSNorm"
    assert at["embed_tokens.Gather"].label.title == "Embedding"


def test_packed_weights_count_as_what_they_hold(tmp_path: Path) -> None:
    weights = {w.name: w for v in reversed(read(genai(2), tmp_path).vertices) for w in v.weights}
    assert weights["packed"].learned == 24 * 8 and weights["packed"].bytes == 24 * 8
    assert weights["scales"].learned == 0


def test_halves_are_one_model(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("style", each(2, ["nameless", "slashed"]))
def test_three_thousand_nodes_take_five_seconds(style: str, tmp_path: Path, visit: Callable[[str], Page]) -> None:
    """From the file to a page that shows it."""
    model = built(style, 110)
    assert len(model.graph.node) > 3000
    onnx.save(model, tmp_path / "m.onnx")
    start = time.process_time()
    root = build_scene(read_onnx_network(tmp_path / "m.onnx"))
    text = render_page(root, list_default_open(root))
    assert time.process_time() - start < 5
    assert visit(text).locator("g.part").count() > 5


def test_layers_of_no_names_are_equal_ones(tmp_path: Path) -> None:
    """If one layer of six has another activation, the others form two runs or none, never with the odd layer."""
    model = Builder(onnx_models.nameless).model(6)
    gelu = [n for n in model.graph.node if n.op_type == "Gelu"]
    gelu[3].op_type = "Relu"
    root = build_outline(read(model, tmp_path))
    assert [p.count for p in root.children if p.count > 1] == [3, 2]
    (odd,) = [p for p in root.children if p.count == 1 and any(v.op == "Relu" for v in p.all_vertices())]
    assert isinstance(odd, PicturePart) and {"Gelu"}.isdisjoint(v.op for v in odd.all_vertices())


def test_operations_without_results_are_drawn(tmp_path: Path) -> None:
    nodes = [helper.make_node("Add", ["a", "a"], []), helper.make_node("Add", ["a", "a"], ["b"])]
    build_scene(read(wrapped(nodes, [("a", FLOAT, [2])], [("b", FLOAT, [2])]), tmp_path))


def test_values_that_are_made_twice_are_refused(tmp_path: Path) -> None:
    """They could depend on themselves."""
    nodes = [helper.make_node("Mul", ["a", x], [y]) for x, y in (("a", "b"), ("b", "c"), ("c", "b"))]
    with pytest.raises(WeftError, match="produces 'b', which already exists"):
        read(wrapped(nodes, [("a", FLOAT, [2])], [("c", FLOAT, [2])]), tmp_path)


def test_attention_without_a_number_of_heads_keeps_its_operator(tmp_path: Path) -> None:
    node = helper.make_node("GroupQueryAttention", ["a", "a", "a"], ["b"], domain="com.microsoft", num_heads="None")
    found = read(wrapped([node], [("a", FLOAT, [1, 2, 8])], [("b", FLOAT, [1, 2, 8])]), tmp_path)
    assert [v.weft_op.op for v in found.vertices] == ["GroupQueryAttention"]
