"""What a compiled folder holds beside its generated model: it loads the weights, and generates or embeds.

The files are copied as they are. Never here: imports of weft; they import PyTorch and each other.
"""
