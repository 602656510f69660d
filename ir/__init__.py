"""Intermediate representation: sizes, types, recipes, graph, ops, text form, verifier, interpreter.

Never here: anything that changes a graph, knows a target or reads a file format; torch and onnx;
imports from our other folders.
"""

if __name__ == "ir":
    raise ImportError("import weft.ir, not ir: the bare name makes a second copy of every class")

from .lazy import lazy_names

__getattr__, __all__ = lazy_names(__name__, __file__)
