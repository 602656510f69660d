"""Layers as equal consecutive segments of operations."""

from __future__ import annotations

from pathlib import Path

from weft.backends.viz.model.outline import PicturePart, build_outline
from weft.backends.viz.onnx_files.onnx_constants import Constant
from weft.backends.viz.onnx_files.segments import find_layer_segments
from weft.backends.viz.onnx_files.types import OnnxOperation

from .. import onnx_models
from ..onnx_models import Builder
from .operations import operation
from .reading import read_model


def test_unnamed_layers_fold_without_the_odd_one(tmp_path: Path) -> None:
    """If one layer of six has another activation, the others form two runs or none, never with the odd layer."""
    model = Builder(onnx_models.nameless).model(6)
    gelu = [n for n in model.graph.node if n.op_type == "Gelu"]
    gelu[3].op_type = "Relu"
    root = build_outline(read_model(model, tmp_path))
    assert [p.count for p in root.children if p.count > 1] == [3, 2]
    (odd,) = [p for p in root.children if p.count == 1 and any(v.op == "Relu" for v in p.all_vertices())]
    assert isinstance(odd, PicturePart) and {"Gelu"}.isdisjoint(v.op for v in odd.all_vertices())


def layer(i: int, odd: str = "Relu") -> list[OnnxOperation]:
    """Return five operations that read x<i> and produce x<i + 1>."""
    kinds = ("MatMul", odd, "Tanh", "Exp", "Add")
    values = [f"x{i}", *(f"{kind}{i}" for kind in kinds[:-1]), f"x{i + 1}"]
    first = f"x{i} w{i}"
    reads = [first, *values[1:4], f"{values[4]} x{i}"]
    return [operation(kind, read, value) for kind, read, value in zip(kinds, reads, values[1:], strict=True)]


WEIGHTS = {f"w{i}": Constant("f32", (4, 4), None) for i in range(9)}


def test_equal_consecutive_segments_are_layers() -> None:
    ops = [
        operation("Gather", "table ids", "x0"),
        *(op for i in range(3) for op in layer(i)),
        operation("Neg", "x3", "y"),
    ]
    scopes = find_layer_segments(ops, WEIGHTS)
    assert scopes == [(), *(("layers", str(i)) for i in range(3) for _ in range(5)), ()]


def test_segments_differ_by_operator_weight_shape_and_attributes() -> None:
    def count(*layers: list[OnnxOperation], weights: dict[str, Constant] = WEIGHTS) -> int:
        ops = [operation("Gather", "table ids", "x0"), *(op for ops in layers for op in ops)]
        return len({scope for scope in find_layer_segments(ops, weights) if scope})

    assert count(layer(0), layer(1)) == 2
    assert count(layer(0), layer(1, "Sigmoid")) == 0
    assert count(layer(0), layer(1), weights={**WEIGHTS, "w1": Constant("f32", (4, 5), None)}) == 0
    with_axis = layer(1)
    with_axis[2] = operation("Tanh", "Relu1", "Tanh1", axis=1)
    assert count(layer(0), with_axis) == 0
    assert count() == 0


def test_separate_runs_of_layers_have_names_of_their_own() -> None:
    ops = [op for i in range(3) for op in layer(i)] + [op for i in range(3, 6) for op in layer(i, "Sigmoid")]
    assert {scope[0] for scope in find_layer_segments(ops, WEIGHTS) if scope} == {"layers", "layers_2"}
