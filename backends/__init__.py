"""Backends of a graph: ONNX models, PyTorch source, pictures, and the runtime that generates with them.

Never here: model families, checkpoint formats, the command line, rewrites that hold for every target;
imports from frontends.
"""

if __name__ == "backends":
    raise ImportError("import weft.backends, not backends: the bare name makes a second copy of every class")

DEFAULT_TARGET = "ort-cpu"  # here, because the command line shows it before importing the rest of this package
