"""What kernels are measured beside, with the arguments of the kernels: torch's operators and transformers' modules."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

dynamo: Any = torch._dynamo.config
dynamo.recompile_limit = dynamo.accumulated_recompile_limit = 1000  # a peer is compiled anew for every shape


@cache
def compiled(function: Callable[..., Any], tuned: bool) -> Callable[..., Any]:
    """torch.compile of a reference, each shape by itself; `tuned` as makes it a GEMV at one row, which takes long."""
    settings: dict[str, Any] = {"coordinate_descent_tuning": True} if tuned and torch.cuda.is_available() else {}
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

    return torch.compile(flex_attention, dynamic=False, fullgraph=True)


def flex(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, **_: Any) -> Tensor:
    """The same by flex_attention, which has a kernel of its own for one token."""
    found: Tensor = _flex()(q[:, :, None], k, v, enable_gqa=True)[:, :, 0]
    return found


def latent_sdpa(q: Tensor, cache: Tensor, positions: Tensor, rank: int, *, scale: float, **_: Any) -> Tensor:
    """Absorbed latent attention by torch's operator: one KV head, values a slice of its keys."""
    y = F.scaled_dot_product_attention(q[:, None], cache, cache[..., :rank], scale=scale)
    return y[:, 0]


def latent_products(q: Tensor, cache: Tensor, positions: Tensor, rank: int, *, scale: float, **_: Any) -> Tensor:
    """The same as two products and a softmax."""
    keys = cache[:, 0]
    return ((q @ keys.mT).float() * scale).softmax(-1).to(q.dtype) @ keys[..., :rank]


def _experts(x: Tensor, up: Tensor, down: Tensor, gate: Any) -> Any:
    """transformers' experts on weights that are stacked once and kept with `gate`."""
    if not hasattr(gate, "experts"):
        from transformers import MixtralConfig
        from transformers.models.mixtral.modeling_mixtral import MixtralExperts

        config = MixtralConfig(hidden_size=x.shape[1], intermediate_size=up.shape[1], num_local_experts=len(up))
        with torch.device("meta"):
            experts = MixtralExperts(config)
        experts.gate_up_proj = torch.nn.Parameter(torch.cat([gate, up], 1), requires_grad=False)
        experts.down_proj = torch.nn.Parameter(down, requires_grad=False)
        gate.experts, gate.compiled = experts, torch.compile(experts, dynamic=False)
    return gate


def experts(way: str, kind: str = "experts") -> Callable[..., Tensor]:
    """A way of transformers as a peer of `moe_decode`, as it is or compiled."""

    def compute(x: Tensor, chosen: Tensor, share: Tensor, up: Tensor, down: Tensor, gate: Tensor, **_: Any) -> Tensor:
        kept = _experts(x, up, down, gate)
        kept.experts.config._experts_implementation = way
        found: Tensor = getattr(kept, kind)(x, chosen, share.to(x.dtype))
        return found

    return compute


@cache
def _window(seq: int, window: int, device: torch.device) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (query - key < window)

    return create_block_mask(sees, None, None, seq, seq, device=device)


def flex_window(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """A sliding window by flex_attention and a mask of blocks, which is made once."""
    found: Tensor = _flex()(q, k, v, block_mask=_window(q.shape[2], window, q.device), enable_gqa=True)
    return found


@cache
def _dense_window(seq: int, window: int, device: torch.device) -> Tensor:
    distance = torch.arange(seq, device=device)[:, None] - torch.arange(seq, device=device)
    return (distance >= 0) & (distance < window)


def sdpa_window(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """A sliding window by torch's operator and a mask of all pairs, which is made once."""
    mask = _dense_window(q.shape[2], window, q.device)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def sdpa_causal(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """No window at all, by torch's fastest operator: right only where the window holds the text."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def dense(x: Tensor, weight: Any) -> Tensor:
    """The same product with weights of the dtype of x, made once and kept with the codes."""
    if not hasattr(weight.packed, "dense"):
        weight.packed.dense = _widened(weight, weight.scales, weight.offsets).to(x.dtype)
    return F.linear(x, weight.packed.dense)


def int4(x: Tensor, weight: Any) -> Tensor:
    """torch's own product with weights of 4 bits, which torchao and gpt-fast use, on weights packed once its way."""
    kept, scales = weight.packed, weight.scales
    if not hasattr(kept, "tiles"):
        steps = (_widened(weight, torch.ones_like(scales, dtype=torch.float32), None) + 8).to(torch.uint8)
        kept.tiles = torch.ops.aten._convert_weight_to_int4pack(steps[:, ::2] << 4 | steps[:, 1::2], 8)
        zeros = torch.zeros_like(scales) if weight.offsets is None else weight.offsets
        kept.scales = torch.stack([scales, zeros], -1).to(torch.bfloat16).contiguous()
    found: Tensor = torch.ops.aten._weight_int4pack_mm(x, kept.tiles, weight.group, kept.scales)
    return found


def _widened(weight: Any, scales: Tensor, offsets: Tensor | None) -> Tensor:
    from weft.backends.torch.kernels.shared.quantized_gemv import dequantize

    return dequantize(weight.packed, scales, offsets, bits=weight.bits, width=weight.width)


def ssd_chunked(*args: Any, **sizes: Any) -> Any:
    """Mamba-2 by chunks in plain torch, as models that weft generates compute it without kernels."""
    from weft.backends.torch.lib.state_space import ssd

    return ssd(*args, **sizes)


RIVALS: dict[str, Callable[..., Any]] = {
    "linear": linear,
    "flex_window": flex_window,
    "sdpa_window": sdpa_window,
    "sdpa_causal": sdpa_causal,
    "dense": dense,
    "int4": int4,
    "experts_batched": experts("batched_mm"),
    "experts_grouped": experts("grouped_mm"),
    "experts_eager": experts("eager"),
    "experts_compiled": experts("batched_mm", "compiled"),
    "latent_sdpa": latent_sdpa,
    "latent_products": latent_products,
    "ssd_chunked": ssd_chunked,
    "sdpa": sdpa,
    "sdpa_flash": sdpa_flash,
    "flex": flex,
}


def rival(name: str, reference: Callable[..., Any], tuned: bool) -> Callable[..., Any]:
    """A peer by name; "compiled" is the reference through torch.compile."""
    return partial(compiled(reference, tuned)) if name == "compiled" else RIVALS[name]
