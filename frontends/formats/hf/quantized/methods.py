"""The ways of quantizing a folder, by what its config calls them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from weft.ir.errors import WeftError
from weft.ir.recipes.readers import TensorReader

from . import compressed_tensors as ct
from .bitsandbytes import bitsandbytes
from .floats import fp8, mxfp4
from .gptq import awq, gptq
from .tensor import DequantizedReader, Quantized
from .torchao import torchao

_Method = Callable[[TensorReader, Collection[str], Mapping[str, Any]], dict[str, Quantized]]
METHODS: Mapping[str, _Method] = {
    "mxfp4": mxfp4,
    "fp8": fp8,
    "gptq": gptq,
    "awq": awq,
    "compressed-tensors": ct.compressed_tensors,
    "bitsandbytes": bitsandbytes,
    "torchao": torchao,
}


def dequantized(reader: TensorReader, config: Mapping[str, Any], source: str) -> TensorReader:
    """`reader` under the names and shapes of an unquantized checkpoint, as `config` (called `source`) says to read it.

    Raises:
        WeftError: if its weights are quantized in a way that cannot be read, or lack scales that fit.
    """
    how = config.get("quantization_config")
    if not how:
        return reader
    how = how if isinstance(how, Mapping) else {"quant_method": how}
    method = how.get("quant_method")
    if method is None and (how.get("load_in_8bit") or how.get("load_in_4bit")):
        method = "bitsandbytes"  # the first configs did not say so
    method = str(method)
    if method not in METHODS:
        raise WeftError(
            f"{source}: the weights are quantized ({method}); weft imports unquantized folders, those quantized by "
            f"{', '.join(list(METHODS)[:-1])} or {list(METHODS)[-1]}, and GGUF"
        )
    keys = dict.fromkeys(reader.keys())
    try:
        quantized = METHODS[method](reader, keys, how)
    except WeftError as e:
        raise WeftError(f"{source}: the weights are quantized ({method}), but {e}") from e
    return DequantizedReader(reader, quantized, ct.hidden(keys) if method == "compressed-tensors" else frozenset())
