"""Rewrites of graphs: the pass and pipeline machinery, patterns, and every pass with its declared effect.

Never here: a target's op names, file formats, torch and onnx; imports from backends or frontends.
"""

if __name__ == "passes":
    raise ImportError("import weft.passes, not passes: the bare name makes a second copy of every class")

from weft.ir.lazy import lazy_names

__getattr__, __all__ = lazy_names(__name__, __file__)
