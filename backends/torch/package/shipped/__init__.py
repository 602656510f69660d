"""Scripts of a compiled folder, next to its generated model: they load the weights, and generate text or embed it.

The files are copied unchanged. Never here: imports of weft; they import PyTorch and each other.
"""
