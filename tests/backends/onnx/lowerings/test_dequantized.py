"""Quantized weights in standard operators: valid ONNX of the same meaning, which ONNX Runtime fuses."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from gguf.constants import GGMLQuantizationType
from onnx.reference import ReferenceEvaluator

import weft
from weft.backends.onnx import export
from weft.backends.target import TARGETS
from weft.ir import Graph, MemoryReader, TensorType, interpret, ops
from weft.ir.recipes import Source
from weft.ir.recipes.blocks import Quantize
from weft.ir.recipes.readers import Array
from weft.ir.types import dtypes, sizes
from weft.passes import legalize, run_passes

from ....sampling import each
from ..quantized_llama import LAYERS, write
from .test_block_matmul import LAYOUTS, SHAPES, product, relative

LEVEL = "session.qdq_matmulnbits_accuracy_level"


def written(graph: Graph, folder: Path) -> Path:
    """Write the model of `graph` for the target onnx into a folder."""
    backend, legal = TARGETS.lookup("onnx"), graph.clone()
    legalize(legal, backend.refusals)
    export.write_models({export.MODEL: export.build_model(legal, backend, 16)}, folder)
    return folder / export.MODEL


def by_onnxruntime(model: Path, feeds: dict[str, Array], level: str) -> tuple[Array, list[str]]:
    """Return the first output, and the operators of the model after ONNX Runtime's optimizations."""
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(model.parent / "optimized.onnx")
    options.add_session_config_entry(LEVEL, level)
    options.log_severity_level = 3  # a model saved after optimization is of this machine only, it warns
    found: Array = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"]).run(None, feeds)[0]
    nodes = onnx.load(model.parent / "optimized.onnx", load_external_data=False).graph.node
    return found, [node.op_type for node in nodes]


def by_the_standard(model: Path, feeds: dict[str, Array]) -> Array:
    """Return the first output by ONNX's reference evaluator, of a model that its checker accepts."""
    proto = onnx.load(model)
    onnx.checker.check_model(str(model), full_check=True)
    assert {node.domain for node in proto.graph.node} <= {""}
    found: Array = ReferenceEvaluator(proto).run(None, feeds)[0]
    return found


@pytest.mark.parametrize(("bits", "zeros", "group"), LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dequantized_products_equal_the_interpreter(
    bits: int, zeros: bool, group: int, shape: tuple[int, int], tmp_path: Path
) -> None:
    graph, x = product(bits, zeros, group, shape, False)
    model, exact = written(graph, tmp_path), interpret(graph, {"x": x})["y"]
    assert relative(by_the_standard(model, {"x": x}), exact) < 2e-5
    found, nodes = by_onnxruntime(model, {"x": x}, "0")
    assert relative(found, exact) < 2e-5
    assert nodes.count("MatMulNBits") == 1 and "DequantizeLinear" not in nodes
    rounded, _ = by_onnxruntime(model, {"x": x}, "4")
    weight = np.abs(graph.params["w"].recipe.evaluate(graph.reader))
    assert np.abs(rounded - exact).max() <= (np.abs(x).max() / 254 * weight.sum(1)).max() * 1.01


def test_products_after_a_norm(tmp_path: Path) -> None:
    graph, x = product(4, True, 32, (33, 96), True)
    exact = interpret(graph, {"x": x})["y"]
    found, nodes = by_onnxruntime(written(graph, tmp_path), {"x": x}, "0")
    assert relative(found, exact) < 2e-5 and "MatMulNBits" in nodes


@pytest.mark.parametrize(("layout", "tied", "width"), each(3, itertools.product(LAYOUTS, (False, True), (64, 72))))
def test_dequantized_embeddings_equal_the_interpreter(
    layout: tuple[int, bool, int], tied: bool, width: int, tmp_path: Path
) -> None:
    bits, zeros, group = layout
    rng = np.random.default_rng(0)
    table = rng.standard_normal((2051, width)).astype(np.float32)
    graph = Graph("lookup", MemoryReader({"t": table}))
    ids = graph.add_input("ids", TensorType(dtypes.i64, (sizes.sym("batch"), sizes.sym("seq"))))
    t = graph.add_param("t", TensorType(dtypes.f32, table.shape), Quantize(Source("t"), bits, group, zeros))
    rows = ops.embedding(ids, t)
    graph.add_output("y", ops.linear(ops.relu(rows), t) if tied else rows)
    model, feeds = written(graph, tmp_path), {"ids": rng.integers(0, 2051, (2, 7))}
    exact = interpret(graph, feeds)["y"]
    assert relative(by_the_standard(model, feeds), exact) < 2e-5
    found, nodes = by_onnxruntime(model, feeds, "0")
    assert relative(found, exact) < 2e-5
    assert nodes.count("MatMulNBits") == tied
    # The table itself is never dequantized: what is left of DequantizeLinear has read the rows asked for.
    assert nodes.count("DequantizeLinear") == 1
    # Codes of 8 bits are in the file once, those of up to 4 once in each layout.
    groups = -(-width // group)
    padded = groups * group // 2
    codes = 2051 * (width if bits == 8 else padded + tied * -(-width // 2))
    others = 2051 * groups * (2 + zeros) * (1 + (tied and bits < 8))
    size = (tmp_path / export.DATA).stat().st_size
    assert codes < size < codes + others + 6 * export.PAGE


def test_f16(tmp_path: Path) -> None:
    graph, x = product(4, True, 32, (33, 96), False)
    graph = run_passes(graph, "cast{dtype=f16}")
    exact = interpret(graph, {"x": x.astype(np.float16)})["y"]
    found, _ = by_onnxruntime(written(graph, tmp_path), {"x": x.astype(np.float16)}, "0")
    assert relative(found.astype(np.float64), exact) < 64 * float(dtypes.f16.eps)


def test_folder_stores_codes_of_all_matrices(tmp_path: Path) -> None:
    source = write(tmp_path / "model.gguf", {"": GGMLQuantizationType.F32})
    weft.compile(source, tmp_path / "out", target="onnx", max_length=32, weights="int4{method=rtn}")
    nodes = [n.op_type for n in onnx.load(tmp_path / "out" / "model.onnx", load_external_data=False).graph.node]
    # The packed projections of q, k and v, that of the output, gate and up, down; the lookup and the head.
    assert nodes.count("DequantizeLinear") == 4 * LAYERS + 2
    facts = json.loads((tmp_path / "out" / "weft.json").read_text())
    assert facts["arithmetic"] == "int8" and facts["blocks"] == {"uint4_32": 4 * LAYERS, "int8_32": 1}
