"""Snippets of models for transformers, in addition to those of `torch/lib`; a generated file has only those it uses.

Never here: code that needs weft, or depends on one model.
"""
