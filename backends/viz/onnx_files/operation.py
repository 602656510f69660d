"""An operation of an ONNX file."""

from __future__ import annotations

from dataclasses import dataclass

import onnx


@dataclass
class Op:
    """An operation of the file.

    `names` are the function calls that contain it, and its own name; `scopes` the modules that contain it according to
    the exporter, or None; an omitted one of `inputs` is "".
    """

    kind: str
    domain: str
    names: tuple[str, ...]
    scopes: tuple[str, ...] | None
    inputs: list[str]
    outputs: list[str]
    attrs: dict[str, onnx.AttributeProto]
    captured: tuple[str, ...] = ()
