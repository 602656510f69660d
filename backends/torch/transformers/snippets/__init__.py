"""Functions that models for transformers are made of besides those of plain PyTorch; a source holds those it uses.

Never here: what needs weft; what depends on one model.
"""
