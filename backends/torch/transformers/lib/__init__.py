"""Snippets of models for transformers, in addition to those of plain PyTorch; a source contains those that it uses.

Never here: code that needs weft, or depends on one model.
"""
