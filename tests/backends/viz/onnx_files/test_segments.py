"""Layers as equal consecutive segments of operations."""

from __future__ import annotations

from pathlib import Path

from weft.backends.viz.model.outline import PicturePart, build_outline

from .. import onnx_models
from ..onnx_models import Builder
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
