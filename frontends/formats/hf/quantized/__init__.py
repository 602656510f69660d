"""Readers of folders with quantized weights, which are read as the values that their codes represent.

A method is a function from the tensors and the quantization config of a folder to one `QuantizedTensor` per weight. A
`QuantizedTensor` dequantizes rows and, if weft has a block layout for its codes, also returns the codes as stored.

Never here: rounding of activations, which such models may request at run time; writing such folders
(`weft.frontends.export.hf`).
"""

from __future__ import annotations

from .methods import dequantize_reader, find_unread_scheme

__all__ = ["dequantize_reader", "find_unread_scheme"]
