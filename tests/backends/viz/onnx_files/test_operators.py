"""Equivalent weft ops of ONNX operators."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from weft.backends.viz.layout.scene import build_scene
from weft.backends.viz.model.network import Vertex, Weight
from weft.backends.viz.onnx_files.operators import find_equivalent, label_gates
from weft.ir.errors import WeftError

from ..onnx_models import wrapped
from .reading import read_model

FLOAT, INT = TensorProto.FLOAT, TensorProto.INT64


FLOAT, INT = TensorProto.FLOAT, TensorProto.INT64


def make_genai_layer(i: int) -> list[onnx.NodeProto]:
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


def build_genai_model(layers: int) -> onnx.ModelProto:
    nodes = [helper.make_node("Gather", ["table", "input_ids"], ["x0"], name="/model/embed_tokens/Gather")]
    nodes += [node for i in range(layers) for node in make_genai_layer(i)]
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


def test_contrib_operators_have_labels_and_captions(tmp_path: Path) -> None:
    root = build_scene(read_model(build_genai_model(4), tmp_path))
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


def test_packed_weights_count_as_their_elements(tmp_path: Path) -> None:
    weights = {w.name: w for v in reversed(read_model(build_genai_model(2), tmp_path).vertices) for w in v.weights}
    assert weights["packed"].learned == 24 * 8 and weights["packed"].bytes == 24 * 8
    assert weights["scales"].learned == 0


def test_attention_without_a_number_of_heads_keeps_its_operator(tmp_path: Path) -> None:
    node = helper.make_node("GroupQueryAttention", ["a", "a", "a"], ["b"], domain="com.microsoft", num_heads="None")
    found = read_model(wrapped([node], [("a", FLOAT, [1, 2, 8])], [("b", FLOAT, [1, 2, 8])]), tmp_path)
    assert [v.weft_op.op for v in found.vertices] == ["GroupQueryAttention"]


def vertex(op: str, roles: str, weight: str = "", **attrs: str) -> Vertex:
    weights = (Weight("w", weight, "f32", 4, ""),) if weight else ()
    return Vertex("v", op, "", tuple(roles.split()), ("v",), tuple(roles.split()), (), attrs, weights)


@pytest.mark.parametrize(
    ("found", "shape"),
    [
        (vertex("MatMul", "A", "[8, 3]"), "[3, 8]"),
        (vertex("Gemm", "A", "[8, 3]", transB="1"), "[8, 3]"),
        (vertex("MatMulNBits", "A", "[24, 1, 4]", N="24", K="8"), "[24, 8]"),
    ],
)
def test_products_by_a_weight_are_linear_maps(found: Vertex, shape: str) -> None:
    linear = find_equivalent(found, {})
    assert linear is not None and (linear.op, linear.weights[0].shape) == ("linear", shape)


@pytest.mark.parametrize(
    ("found", "op"),
    [
        (vertex("MatMul", "A B"), "matmul"),
        (vertex("MatMul", "B", "[8, 3]"), "matmul"),  # the weight is at the left
        (vertex("Gather", "indices", "[7, 4]"), "embedding"),
        (vertex("Gather", "indices", "[7, 4]", axis="1"), None),
        (vertex("QuickGelu", "X", alpha="1.0"), "swish"),
        (vertex("QuickGelu", "X"), "gelu"),
        (vertex("MoE", "input", k="2"), "moe"),
        (vertex("NonZero", "X"), None),
    ],
)
def test_only_exact_equivalents_are_mapped(found: Vertex, op: str | None) -> None:
    equivalent = find_equivalent(found, {})
    assert (equivalent and equivalent.op) == op


def test_standard_attention_reads_its_heads_off_the_types() -> None:
    types = {"Q": "f32[batch, 8, seq, 64]", "K": "f32[batch, 2, total, 64]"}
    found = find_equivalent(vertex("Attention", "Q K V", softcap="30.0"), types)
    assert found is not None
    assert (found.op, found.attrs) == ("attention", {"heads": "8", "kv_heads": "2", "softcap": "30.0"})
    assert find_equivalent(vertex("Attention", "Q K V"), {"Q": "f32[batch, seq, 512]"}) is None


def test_attribute_that_is_not_a_number_is_refused() -> None:
    with pytest.raises(WeftError, match=r"v \(GroupQueryAttention\): softcap is 'high', not a number"):
        find_equivalent(vertex("GroupQueryAttention", "query", num_heads="4", softcap="high"), {})


def test_gates_written_as_products_are_labelled() -> None:
    def step(name: str, op: str, *reads: str, equivalent: str = "") -> Vertex:
        found = Vertex(name, op, "", reads, (name,))
        return replace(found, equivalent=replace(found, op=equivalent)) if equivalent else found

    up, gate = (step(name, "MatMul", "x", equivalent="linear") for name in ("up", "gate"))
    swish = step("s", "Sigmoid", "gate"), step("swish", "Mul", "gate", "s")
    gated = step("gated", "Mul", "up", "swish")
    *_, activation, product = label_gates([up, gate, *swish, gated])
    assert activation.weft_op.op == "swish"
    assert (product.weft_op.op, product.weft_op.attrs) == ("glu", {"activation": "silu"})
    *_, plain = label_gates([up, gate, step("plain", "Mul", "up", "gate")])
    assert plain.equivalent is None
