"""Linear layers of few rows in torch, limited by reading the weights only: the fallback where Triton cannot run.

`F.linear` of one float32 row is a matrix–vector product on one thread, which reads a third of what two cores can. All
threads read weights that are packed once for oneDNN, as `torch.compile` packs them. Packed copies are kept in addition
to the originals. Where oneDNN cannot pack a dtype, because the CPU lacks instructions for it, `F.linear` is used.
"""

from __future__ import annotations

import functools

import torch
from torch.nn import functional as F
from torch.utils.weak import WeakIdKeyDictionary

from .operands import requires_grad
from .quantized_gemv import Codes

MOST_ROWS = 8  # of x; for more, on a GPU tensor cores are due, and on a CPU blocks of a product
DTYPES = (torch.float32, torch.bfloat16)
_packed: WeakIdKeyDictionary = WeakIdKeyDictionary()  # weight -> (its version, the packed form)


def linear(x: torch.Tensor, weight: torch.Tensor | Codes, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return x Wᵀ + b: x [..., in], weight [out, in], bias [out] → [..., out]."""
    if isinstance(weight, Codes):
        return weight.linear(x, bias)
    if not _streams(x, weight):
        return F.linear(x, weight, bias)
    rows = x.reshape(-1, x.shape[-1])
    y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, _pack(weight), bias, "none", [], "")
    return y.view(*x.shape[:-1], len(weight))


def _streams(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether to multiply x by packed weights: 1 to MOST_ROWS rows, a CPU, no gradients, and oneDNN can pack."""
    few = x.device.type == "cpu" and 0 < x.numel() <= MOST_ROWS * x.shape[-1]
    return few and not requires_grad(x, weight) and weight.dtype == x.dtype and refusal(x.dtype) is None


@functools.cache
def refusal(dtype: torch.dtype) -> str | None:
    """Return the reason why oneDNN cannot pack weights of `dtype` on this CPU; None if it can. PyTorch has no query for
    this: bf16 needs AVX-512 or AVX-NE-CONVERT, and packing raises without. So a small weight is packed once as a
    trial."""
    if dtype not in DTYPES:
        return f"weights in {dtype} are not packed"
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return "this PyTorch has no oneDNN"
    try:
        torch.ops.mkldnn._reorder_linear_weight(torch.zeros(16, 16, dtype=dtype, device="cpu"), 1)
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return None


def _pack(weight: torch.Tensor) -> torch.Tensor:
    """Return `weight` in the layout of oneDNN; packed copies are cached until the weight changes."""
    # Inference tensors have no version counter. Others do, so the weight is packed again after an optimizer step.
    version = 0 if weight.is_inference() else weight._version
    entry = _packed.get(weight)
    if entry is None or entry[0] != version:
        entry = version, torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 1)
        _packed[weight] = entry
    packed: torch.Tensor = entry[1]
    return packed
