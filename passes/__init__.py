"""What may be done to a graph: the pass and pipeline machinery, patterns, and every rewrite with its declared effect.

Never here: a target's op names, file formats, torch and onnx; imports from backends or frontends.
"""

if __name__ == "passes":
    raise ImportError("import weft.passes, not passes: the bare name makes a second copy of every class")
