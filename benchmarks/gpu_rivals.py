"""What kernels are measured beside, with the arguments of the kernels: torch's operators and transformers' modules."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """torch.compile of a reference, each shape by itself, with the tuning that makes it a GEMV at one row."""
    settings: dict[str, Any] = {"coordinate_descent_tuning": True} if torch.cuda.is_available() else {}
    found: Callable[..., Any] = torch.compile(function, dynamic=False, options=settings)
    return found


def linear(x: Tensor, weight: Tensor, *_: Any, **__: Any) -> Tensor:
    """The product alone, without what is fused with it."""
    return F.linear(x, weight)


def sdpa(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, **_: Any) -> Tensor:
    """One token over a whole cache by torch's own choice."""
    return F.scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True)[:, :, 0]


def sdpa_flash(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, **_: Any) -> Tensor:
    """The same by FlashAttention, whose query heads of a KV head become tokens: it then splits the keys."""
    batch, heads, d = q.shape
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q.view(batch, k.shape[1], -1, d), k, v).reshape(batch, heads, d)


@cache
def _flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def flex(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, **_: Any) -> Tensor:
    """The same by flex_attention, which has a kernel of its own for one token."""
    found: Tensor = _flex()(q[:, :, None], k, v, enable_gqa=True)[:, :, 0]
    return found


RIVALS: dict[str, Callable[..., Any]] = {
    "linear": linear,
    "sdpa": sdpa,
    "sdpa_flash": sdpa_flash,
    "flex": flex,
}


def rival(name: str, reference: Callable[..., Any]) -> Callable[..., Any]:
    """A peer by name; "compiled" is the reference through torch.compile."""
    return partial(compiled(reference)) if name == "compiled" else RIVALS[name]
