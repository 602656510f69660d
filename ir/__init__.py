"""What a transformer graph is: sizes, types, recipes, graph, ops, text form, verifier, interpreter.

Never here: anything that changes a graph, knows a target or reads a file format; torch and onnx;
imports from our other folders.
"""

import importlib
from typing import TYPE_CHECKING, Any

if __name__ == "ir":
    raise ImportError("import weft.ir, not ir: the bare name makes a second copy of every class")

if TYPE_CHECKING:
    from .archive import Archive, MemoryArchive
    from .dtypes import DType
    from .errors import WeftError
    from .graph import Graph, Node, Param, Value
    from .interpreter import interpret
    from .op import OPS, Op, lookup
    from .parser import parse
    from .printer import print_graph
    from .recipe import Recipe
    from .types import TensorType
    from .verifier import verify

_HOME = {
    "Archive": "archive",
    "DType": "dtypes",
    "Graph": "graph",
    "MemoryArchive": "archive",
    "Node": "graph",
    "OPS": "op",
    "Op": "op",
    "Param": "graph",
    "Recipe": "recipe",
    "TensorType": "types",
    "Value": "graph",
    "WeftError": "errors",
    "interpret": "interpreter",
    "lookup": "op",
    "parse": "parser",
    "print_graph": "printer",
    "verify": "verifier",
}

__all__ = [
    "OPS",
    "Archive",
    "DType",
    "Graph",
    "MemoryArchive",
    "Node",
    "Op",
    "Param",
    "Recipe",
    "TensorType",
    "Value",
    "WeftError",
    "interpret",
    "lookup",
    "parse",
    "print_graph",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'weft.ir' has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
