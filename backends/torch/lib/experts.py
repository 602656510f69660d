"""Mixture of experts. The function of an expert is written once, with a parameter `linear` for the product::

    def expert(linear, x, gate, up, down):
        return linear(F.silu(linear(x, gate)) * linear(x, up), down)

    y = moe(x, combine, 2, expert, self.gate, self.up, self.down)

The weights of all experts are stacked, [experts, out, in].
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .indexing import wide


def moe(x: Tensor, combine: Tensor, k: int, expert: Callable[..., Tensor], *stacks: Tensor) -> Tensor:
    """Return Σ_e combine_e · expert_e(x): x [..., dim], combine [..., experts] with at most k nonzero entries per row,
    stacks of weights [experts, out, in] and biases [experts, out]. `expert(linear, x, *stacks)` is one MLP."""
    rows, asked = x.reshape(-1, x.shape[-1]), combine.reshape(-1, combine.shape[-1])
    k = min(k, combine.shape[-1])  # with expert parallelism, a process may hold fewer than k experts
    if x.is_cuda and x.dtype == torch.bfloat16 and all(s.shape[-1] % 8 == 0 for s in stacks):
        y = moe_grouped(rows, asked, k, expert, *stacks)
    elif x.is_cuda and rows.shape[0] * k <= combine.shape[-1]:
        y = moe_gathered(rows, asked, k, expert, *stacks)
    else:
        y = moe_by_expert(rows, asked, expert, *stacks)
    return y.reshape(x.shape)


def moe_by_expert(x: Tensor, combine: Tensor, expert: Callable[..., Tensor], *stacks: Tensor) -> Tensor:
    """Return Σ_e combine_e · expert_e(x), computed expert by expert: x [tokens, dim], combine [tokens, experts]."""
    y = torch.zeros_like(wide(x))
    for weight, *tensors in zip(combine.unbind(1), *(s.unbind(0) for s in stacks), strict=True):
        token = weight.nonzero().squeeze(1)
        if torch.compiler.is_compiling() or len(token) > 0:
            y = y.index_add(0, token, weight[token, None] * wide(expert(F.linear, x[token], *tensors)))
    return y.to(x.dtype)


def moe_grouped(x: Tensor, combine: Tensor, k: int, expert: Callable[..., Tensor], *stacks: Tensor) -> Tensor:
    """Return Σ_e combine_e · expert_e(x) by grouped GEMMs over tokens sorted by expert, without a GPU–CPU sync."""
    weight, chosen = combine.topk(k)  # [tokens, k]
    owner, order = chosen.flatten().sort()
    ends = torch.searchsorted(owner, torch.arange(combine.shape[1], device=x.device), right=True, out_int32=True)

    def linear(rows: Tensor, stack: Tensor, bias: Tensor | None = None) -> Tensor:
        y = F.grouped_mm(rows, stack.mT, offs=ends)
        return y if bias is None else y + bias[owner]

    y = expert(linear, x[order // k], *stacks)[order.argsort()]  # back in the order of tokens
    return torch.einsum("tk,tkd->td", weight, y.unflatten(0, (-1, k)))


def moe_gathered(x: Tensor, combine: Tensor, k: int, expert: Callable[..., Tensor], *stacks: Tensor) -> Tensor:
    """Return Σ_e combine_e · expert_e(x) for few tokens, each with a copy of the weights of its chosen experts."""
    weight, chosen = combine.topk(k)  # [tokens, k]

    def linear(rows: Tensor, stack: Tensor, bias: Tensor | None = None) -> Tensor:
        y = torch.einsum("tki,tkoi->tko", rows, stack)
        return y if bias is None else y + bias

    y = expert(linear, x[:, None].expand(-1, k, -1), *(s[chosen] for s in stacks))
    return torch.einsum("tk,tkd->td", weight, y)
