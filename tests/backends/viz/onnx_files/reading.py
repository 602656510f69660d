"""ONNX models saved and read as networks."""

from __future__ import annotations

from pathlib import Path

import onnx

from weft.backends.viz.model.network import Network
from weft.backends.viz.onnx_files.onnx_network import read_onnx_network

from .. import onnx_models
from ..onnx_models import Builder


def read_model(model: onnx.ModelProto, folder: Path) -> Network:
    onnx.save(model, folder / "m.onnx")
    return read_onnx_network(folder / "m.onnx")


def build_decoder(style: str, layers: int) -> onnx.ModelProto:
    """The decoder with names in that style; "dynamo": names of no use, but metadata."""
    name = onnx_models.plain if style == "dynamo" else getattr(onnx_models, style)
    return Builder(name, metadata=style == "dynamo").model(layers)
