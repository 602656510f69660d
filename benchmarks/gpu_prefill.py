"""Reading a prompt: Hugging Face's ways and weft's, beside the sum of the bare products and attentions in it.

The floor is what cuBLAS takes for each product of a layer by itself and the fastest attention that torch has, times the
layers, and the head for one token; norms, activations, rotations and residuals come on top of it.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import torch
from gpu_clock import Clock, cycled, microseconds
from gpu_models import LLAMA_8B, TINY, Shape, hugging_face, prompt
from gpu_ours import prefill as ours
from gpu_pool import Work
from machine import spread
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION, "math": SDPBackend.MATH}
LENGTHS = (2048, 8192, 4096)


def product_seconds(clock: Clock, rows: int, out: int, inner: int, dtype: torch.dtype) -> list[float]:
    """Seconds of one product [rows, inner] · [out, inner]ᵀ of normal numbers, operands from memory."""

    def make(seed: int) -> tuple[Tensor, Tensor]:
        x, w = (torch.randn(n, inner, device=clock.device, dtype=dtype) for n in (rows, out))
        return x, w

    sets = clock.rotation(make, 2 * inner * (rows + out))
    return clock.graph(cycled([partial(F.linear, x, w) for x, w in sets], 8))


def attention_seconds(clock: Clock, shape: Shape, rows: int, dtype: torch.dtype) -> dict[str, list[float] | str]:
    """Seconds of causal attention of one layer by each of torch's backends, or why one does not take it."""
    heads = (shape.heads, shape.kv_heads, shape.kv_heads)
    q, k, v = (torch.randn(1, n, rows, shape.head_dim, device=clock.device, dtype=dtype) for n in heads)
    found: dict[str, list[float] | str] = {}
    for name, backend in BACKENDS.items():
        if clock.cuda != (name != "math"):  # on a GPU it is far slower and fills the memory
            continue
        work = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=True)
        try:
            with sdpa_kernel(backend):
                found[name] = clock.graph([work] * 4)
        except RuntimeError as error:  # not built in, or not for these heads
            found[name] = f"{error}"[:200]
    return found


def floor(device: str, shape: Shape, rows: int) -> dict[str, Any]:
    """Milliseconds of the products and attentions of a prompt of `rows` tokens, and each by itself in microseconds."""
    clock, dtype = Clock(device), torch.bfloat16
    found: dict[str, Any] = {}
    total = 0.0
    for name, (out, inner) in shape.products().items():
        found[f"{name}_us"] = microseconds(times := product_seconds(clock, rows, out, inner, dtype))
        found[f"{name}_tflop_per_s"] = round(2 * rows * out * inner / median(times) / 1e12, 1)
        total += shape.layers * median(times)
    attention = attention_seconds(clock, shape, rows, dtype)
    operations = 2 * rows * rows * shape.heads * shape.head_dim  # half of 4 · rows²: causal
    least = float("inf")
    for name, result in attention.items():
        if isinstance(result, str):
            found[f"attention_{name}"] = result
        else:
            found[f"attention_{name}_us"] = microseconds(result)
            found[f"attention_{name}_tflop_per_s"] = round(operations / median(result) / 1e12, 1)
            least = min(least, median(result))
    total += shape.layers * least
    total += median(product_seconds(clock, 1, shape.vocab, shape.dim, dtype))
    return {**found, "floor_ms": round(1e3 * total, 3)}


@torch.no_grad()
def prepared(device: str, name: str, shape: Shape, rows: int) -> Callable[[], dict[str, Any]]:
    """Build a contender, let it read a prompt of `rows` tokens, compiled if its name says so; return what times it."""
    read = _hugging_face(shape, device) if name.startswith("hf") else ours(shape, device, rows, name == "weft")
    if name.endswith("compiled"):
        read = torch.compile(read, dynamic=False)
    ids = prompt(shape, 1, rows, device)
    read(ids)

    @torch.no_grad()
    def measured() -> dict[str, Any]:
        times = Clock(device).calls(partial(read, ids))
        return {"ms": spread([1e3 * t for t in times], 3), "tokens_per_s": round(rows / median(times), 1)}

    return measured


def _hugging_face(shape: Shape, device: str) -> Callable[[Tensor], Tensor]:
    """A prompt into an empty cache, and the logits of the last token."""
    from transformers import DynamicCache

    model = hugging_face(shape, device, torch.bfloat16)

    def read(ids: Tensor) -> Tensor:
        cache = DynamicCache(config=model.config)
        logits: Tensor = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        return logits

    return read


def works(args: Namespace) -> Iterator[Work]:
    """Every length: its floor, then all contenders."""
    large = args.device == "cuda"
    shape = LLAMA_8B if large else TINY
    for rows in LENGTHS if large else (16,):
        yield Work(f"floor_{rows}", lambda rows=rows: partial(floor, args.device, shape, rows), alone=6, memory=6)
        for name, layer in {
            "weft": 0.5,
            "weft_module": 0.5,
            "hf_eager": 0.3,
            "weft_compiled": 3,
            "hf_compiled": 3,
        }.items():
            run = partial(prepared, args.device, name, shape, rows)
            alone = 2 + 10 * rows / 8192
            yield Work(f"{name}_{rows}", run, 12 + shape.layers * layer, alone, 6 + 1.3 * shape.gib())
