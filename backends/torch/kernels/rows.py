"""Products of few rows with torch, as fast as weights stream: what kernels compute where Triton cannot run.

`F.linear` of one float32 row is a matrix–vector product of one thread, a third of what two cores can read; weights
packed once for oneDNN, as `torch.compile` packs them, are read by all threads. They are held beside the originals.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F
from torch.utils.weak import WeakIdKeyDictionary

MOST_ROWS = 8
DTYPES = (torch.float32, torch.bfloat16)
PACKED = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
_packed: WeakIdKeyDictionary = WeakIdKeyDictionary()  # weight -> (its version, the packed form)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x Wᵀ + b: x [..., in], weight [out, in], bias [out] → [..., out]."""
    if not _streams(x, weight):
        return F.linear(x, weight, bias)
    rows = x.reshape(-1, x.shape[-1])
    y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, _pack(weight), bias, "none", [], "")
    return y.view(*x.shape[:-1], len(weight))


def _streams(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether packed weights are used: on a CPU, for few rows, where nobody wants gradients."""
    few = x.device.type == "cpu" and 0 < x.numel() <= MOST_ROWS * x.shape[-1]
    wanted = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    return PACKED and few and not wanted and x.dtype in DTYPES and weight.dtype == x.dtype


def _pack(weight: torch.Tensor) -> torch.Tensor:
    """`weight` in the layout of oneDNN, made once for as long as it stays as it is."""
    version = 0 if weight.is_inference() else weight._version
    known = _packed.get(weight)
    if known is None or known[0] != version:
        known = version, torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 1)
        _packed[weight] = known
    packed: torch.Tensor = known[1]
    return packed
