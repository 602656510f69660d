"""Concatenation of the weights of several linear layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.shared.quantized_gemv import Codes


def pack(*linears: nn.Linear) -> Tensor:
    """Return the weights of `linears`, concatenated along the output axis; the modules' weights become views of it."""
    weight = torch.cat([linear.weight.detach() for linear in linears])
    for linear, part in zip(linears, weight.split([len(linear.weight) for linear in linears]), strict=True):
        linear.weight.data = part
    return weight


def pack_bias(*linears: nn.Linear) -> Tensor:
    """Return a concatenated copy of the biases of `linears`."""
    return torch.cat([linear.bias.detach() for linear in linears])


def pack_blocks(*linears: Any) -> Codes:
    """Return the weights of `linears`, of class `Quantized`, concatenated along the output axis. The codes of the
    modules become views of its codes; scales and offsets are copied."""
    first = linears[0]
    codes = torch.cat([linear.codes for linear in linears])
    for linear, codes_part in zip(linears, codes.split([len(linear.codes) for linear in linears]), strict=True):
        linear.codes = codes_part
    scales = first.numbers(torch.cat([linear.scales for linear in linears], 1))
    offsets = [part for linear in linears if (part := linear.blocks().offsets) is not None]
    codes = first.bit_cast(codes)
    return Codes(codes, scales, torch.cat(offsets, 1) if offsets else None, first.bits, first.width, first.product)
