"""Intermediate representation: sizes, types, recipes, graph, ops, text form, verifier, interpreter.

Never here: code that rewrites graphs, knows a target or reads a file format; imports of torch, onnx, passes, backends
or frontends.
"""

if __name__ == "ir":
    raise ImportError("import weft.ir, not ir: the bare name makes a second copy of every class")

from .lazy import lazy_names

__getattr__, __all__ = lazy_names(__name__, __file__)
