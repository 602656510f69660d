"""Folders whose weights are quantized as published, read as the numbers that the codes stand for.

A method is a function from the tensors and the config of a folder to one `Quantized` for each weight, which dequantizes
rows and, where weft has a block layout for its codes, also returns them as stored. Never here: rounding of activations,
which such models may ask for while they run; writing such folders (`weft.frontends.export.hf`).
"""

from __future__ import annotations

from .methods import dequantized, unread_scheme

__all__ = ["dequantized", "unread_scheme"]
