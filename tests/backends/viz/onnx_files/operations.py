"""Operations of ONNX files, for tests of single steps."""

from __future__ import annotations

from typing import Any

from onnx import helper

from weft.backends.viz.onnx_files.onnx_constants import OnnxOperation


def operation(kind: str, inputs: str, outputs: str, name: str = "", **attrs: Any) -> OnnxOperation:
    """Return an operation; `inputs` and `outputs` are value names, separated by spaces."""
    made = {key: helper.make_attribute(key, value) for key, value in attrs.items()}
    return OnnxOperation(kind, "", (name or kind,), None, inputs.split(), outputs.split(), made)
