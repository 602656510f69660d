"""An operation of an ONNX file."""

from __future__ import annotations

from dataclasses import dataclass

import onnx


@dataclass
class Op:
    """An operation of the file. `names` are the calls of functions that it is in and its own name, `scopes` the modules
    that the exporter says it is in, where it does; `inputs` are "" where one is left out.
    """

    kind: str
    domain: str
    names: tuple[str, ...]
    scopes: tuple[str, ...] | None
    inputs: list[str]
    outputs: list[str]
    attrs: dict[str, onnx.AttributeProto]
    captured: tuple[str, ...] = ()
