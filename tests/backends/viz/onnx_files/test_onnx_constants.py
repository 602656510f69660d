"""Constants of ONNX files: weights, and sizes computed from shapes."""

from __future__ import annotations

from pathlib import Path

from ..onnx_models import DIM
from .reading import build_decoder, read_model


def test_sizes_computed_from_shapes_become_an_attribute(tmp_path: Path) -> None:
    """Shape, Gather, Unsqueeze, Concat: what they make is an attribute of the Reshape."""
    found = read_model(build_decoder("slashed", 1), tmp_path)
    assert not {"Shape", "Constant", "Concat", "Unsqueeze"} & {v.op for v in found.vertices}
    (reshape,) = [v for v in found.vertices if v.op == "Reshape"]
    assert reshape.attrs["shape"] == f"[batch, -1, {DIM}]"
    assert reshape.types == (f"f32[batch, ?, {DIM}]",) or reshape.types == (f"f32[batch, seq, {DIM}]",)
