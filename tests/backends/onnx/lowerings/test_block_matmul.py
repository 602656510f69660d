"""Weights that the pass quantize rounds: every layout and odd shape means the dequantized numbers on every backend."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from gguf.constants import GGMLQuantizationType

import weft
from weft.backends.onnx import export
from weft.backends.target import TARGETS
from weft.ir import Graph, MemoryReader, TensorType, interpret, ops
from weft.ir.recipes import Source
from weft.ir.recipes.blocks import Quantize
from weft.ir.recipes.readers import Array
from weft.ir.types import dtypes, sizes
from weft.passes import Trace, legalize
from weft.passes.library.target.stored_codes import KeepBlocks

from ..quantized_llama import LAYERS, write

LAYOUTS = [*itertools.product((2, 3, 4, 8), (True, False), (32,)), (4, True, 16), (4, True, 64), (8, False, 128)]
SHAPES = [(64, 64), (1, 64), (33, 96), (40, 72), (16, 24)]  # [out, in]: rows end within a group, one row, small groups


def product(bits: int, zeros: bool, group: int, shape: tuple[int, int], normed: bool) -> tuple[Graph, Array]:
    """Return x Wᵀ + b with a quantized W, which has a row of zeros, and an x."""
    rows, width = shape
    rng = np.random.default_rng(bits)
    weight = rng.standard_normal(shape).astype(np.float32)
    weight[rows // 2] = 0
    graph = Graph("product", MemoryReader({"w": weight, "b": rng.standard_normal(rows).astype(np.float32)}))
    x = graph.add_input("x", TensorType(dtypes.f32, (sizes.sym("batch"), sizes.sym("seq"), width)))
    w = graph.add_param("w", TensorType(dtypes.f32, shape), Quantize(Source("w"), bits, group, zeros))
    b = graph.add_param("b", TensorType(dtypes.f32, (rows,)), Source("b"))
    y = ops.norm_linear(x, w, b, kind="rms", eps=1e-5) if normed else ops.linear(x, w, b)
    graph.add_output("y", y)
    return graph, rng.standard_normal((2, 5, width)).astype(np.float32)


def on_onnxruntime(graph: Graph, feeds: dict[str, Array], target: str = "ort-cpu") -> Array:
    backend = TARGETS.lookup(target)
    legal = graph.clone()
    legalize(legal, backend.refusals)
    session = ort.InferenceSession(
        export.serialize_model(export.build_model(legal, backend, 16)), providers=["CPUExecutionProvider"]
    )
    found: Array = session.run(None, feeds)[0]
    return found


def relative(found: Array, exact: Array) -> float:
    return float(np.abs(found - exact).max() / np.abs(exact).max())


@pytest.mark.parametrize(("bits", "zeros", "group"), LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("normed", [False, True])
def test_products_in_f32(bits: int, zeros: bool, group: int, shape: tuple[int, int], normed: bool) -> None:
    graph, x = product(bits, zeros, group, shape, normed)
    exact = interpret(graph, {"x": x})["y"]
    KeepBlocks("quantized").run(graph, Trace())
    assert relative(on_onnxruntime(graph, {"x": x}), exact) < 2e-5


@pytest.mark.parametrize(("bits", "zeros", "group"), LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_of_rounded_activations(bits: int, zeros: bool, group: int, shape: tuple[int, int]) -> None:
    """An activation is off by half a step of its group at most: 1/254 of the group's largest."""
    graph, x = product(bits, zeros, group, shape, False)
    exact = interpret(graph, {"x": x})["y"]
    weight = np.abs(graph.params["w"].recipe.evaluate(graph.reader))
    bound = (np.abs(x).max() / 254 * weight.sum(1)).max() * 1.01
    found = on_onnxruntime(graph, {"x": x})
    assert np.abs(found - exact).max() <= bound
    assert relative(found, exact) < 0.03


@pytest.mark.parametrize(("bits", "zeros", "group"), [layout for layout in LAYOUTS if layout[2] <= 64])
@pytest.mark.parametrize("tied", [False, True])
def test_lookups(bits: int, zeros: bool, group: int, tied: bool) -> None:
    rng = np.random.default_rng(0)
    table = rng.standard_normal((50, 64)).astype(np.float32)
    graph = Graph("lookup", MemoryReader({"t": table}))
    ids = graph.add_input("ids", TensorType(dtypes.i64, (sizes.sym("batch"), sizes.sym("seq"))))
    t = graph.add_param("t", TensorType(dtypes.f32, (50, 64)), Quantize(Source("t"), bits, group, zeros))
    rows = ops.embedding(ids, t)
    graph.add_output("y", ops.linear(rows, t) if tied else rows)
    KeepBlocks("quantized").run(graph, Trace())
    feeds = {"ids": rng.integers(0, 50, (2, 7))}
    exact = interpret(graph, feeds)["y"]
    assert relative(on_onnxruntime(graph, feeds), exact) < 2e-5
    built = export.build_model(graph.clone(), TARGETS.lookup("ort-cpu"), 16)
    codes = [w for w in built.weights if w.dtype == dtypes.u8 and len(w.shape) == 3]
    # A tied table is stored once, unless a product in f32 takes codes of 8 bits apart.
    assert len(codes) == (2 if tied and bits == 8 else 1 if bits != 3 or tied else 0)


def test_f16_scales_are_folded_and_prepacked_like_f32(tmp_path: Path) -> None:
    source = write(tmp_path / "model.gguf", {"": GGMLQuantizationType.F32})
    for name, prepack in (("plain", False), ("packed", True)):
        weft.compile(source, tmp_path / name, weights="int4{method=rtn}", prepack=prepack)
    plain, packed = (
        {t.name: t for t in onnx.load(tmp_path / name / "model.onnx", load_external_data=False).graph.initializer}
        for name in ("plain", "packed")
    )
    assert {t.data_type for name, t in plain.items() if name.endswith(".steps")} == {onnx.TensorProto.FLOAT16}

    options = ort.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.log_severity_level = 3
    for key, value in {
        "session.save_external_prepacked_constant_initializers": "1",
        "session.optimized_model_external_initializers_file_name": "optimized.data",
        "session.optimized_model_external_initializers_min_size_in_bytes": "1024",
    }.items():
        options.add_session_config_entry(key, value)
    ort.InferenceSession(tmp_path / "plain" / "model.onnx", options, providers=["CPUExecutionProvider"])
    graph = onnx.load(tmp_path / "optimized.onnx", load_external_data=False).graph
    folded = {t.name: t.data_type for t in graph.initializer}
    products = [node for node in graph.node if node.op_type in ("MatMulNBits", "GatherBlockQuantized")]
    assert len(products) == 4 * LAYERS + 2 + LAYERS  # gate and up are two
    assert {folded[node.input[2]] for node in products} == {onnx.TensorProto.FLOAT}
    # The runtime reads the packed codes of a file only where it would pack the same itself.
    both = (packed.values(), graph.initializer)
    mine, theirs = ({t.name: _packing(t) for t in tensors if _packing(t)} for tensors in both)
    assert mine and mine == {name: found for name, found in theirs.items() if name in mine}


def _packing(tensor: onnx.TensorProto) -> list[str]:
    """Return the kernel and the hash of each packing of a weight."""
    return [entry.value.split("|")[0] for entry in tensor.external_data if entry.key.startswith("prepacked_")]
