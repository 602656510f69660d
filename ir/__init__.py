"""Intermediate representation: sizes, types, recipes, graph, ops, text form, verifier, interpreter.

Never here: anything that changes a graph, knows a target or reads a file format; torch and onnx;
imports from our other folders.
"""

import importlib
from typing import TYPE_CHECKING, Any

if __name__ == "ir":
    raise ImportError("import weft.ir, not ir: the bare name makes a second copy of every class")

if TYPE_CHECKING:
    from .errors import WeftError
    from .graph import Graph, Node, Param, Value
    from .graph.verifier import verify
    from .interpreter import interpret
    from .op import OPS, Op, lookup
    from .recipes.readers import MemoryReader, TensorReader
    from .recipes.recipe import Recipe
    from .text import parse, print_graph
    from .types import TensorType, dtypes, sizes
    from .types.dtypes import DType

_HOME = {
    "TensorReader": "recipes.readers",
    "DType": "types.dtypes",
    "Graph": "graph",
    "MemoryReader": "recipes.readers",
    "Node": "graph",
    "OPS": "op",
    "Op": "op",
    "Param": "graph",
    "Recipe": "recipes",
    "TensorType": "types",
    "Value": "graph",
    "WeftError": "errors",
    "interpret": "interpreter",
    "lookup": "op",
    "parse": "text",
    "print_graph": "text",
    "verify": "graph.verifier",
}
_MODULES = {"dtypes": "types.dtypes", "sizes": "types.sizes"}

__all__ = [
    "OPS",
    "DType",
    "Graph",
    "MemoryReader",
    "Node",
    "Op",
    "Param",
    "Recipe",
    "TensorReader",
    "TensorType",
    "Value",
    "WeftError",
    "dtypes",
    "interpret",
    "lookup",
    "parse",
    "print_graph",
    "sizes",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f".{_MODULES[name]}", __name__)
    if name not in _HOME:
        raise AttributeError(f"module 'weft.ir' has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
