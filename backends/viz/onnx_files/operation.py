"""An operation of an ONNX file."""

from __future__ import annotations

from dataclasses import dataclass

import onnx


@dataclass
class OnnxOperation:
    """An operation of the file.

    `names`: the function calls that contain it, then its own name. `scopes`: the modules that contain it, if the
    exporter records them. `inputs`: value names, "" for an omitted operand. `captured`: outer values that subgraphs in
    its attributes read.
    """

    kind: str
    domain: str
    names: tuple[str, ...]
    scopes: tuple[str, ...] | None
    inputs: list[str]
    outputs: list[str]
    attrs: dict[str, onnx.AttributeProto]
    captured: tuple[str, ...] = ()
