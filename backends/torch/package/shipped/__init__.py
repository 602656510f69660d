"""Scripts of a compiled folder, next to its generated model: they load the weights, and generate or embed.

The files are copied as they are. Never here: imports of weft; they import PyTorch and each other.
"""
