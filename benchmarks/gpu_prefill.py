"""Reading a prompt: Hugging Face's ways and weft's, beside the sum of the bare products and attentions in it.

The floor is what cuBLAS takes for each product of a layer by itself and the fastest attention that torch has, times the
layers, and the head for one token; norms, activations, rotations and residuals come on top of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from gpu_models import LLAMA_8B, TINY, Shape, hugging_face, prompt
from gpu_ours import prefill as ours
from gpu_run import Clock, Run, cycled, microseconds
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


def attention_seconds(clock: Clock, shape: Shape, rows: int, dtype: torch.dtype) -> dict[str, list[float]]:
    """Seconds of causal attention of one layer by each of torch's backends that takes it."""
    heads = (shape.heads, shape.kv_heads, shape.kv_heads)
    q, k, v = (torch.randn(1, n, rows, shape.head_dim, device=clock.device, dtype=dtype) for n in heads)
    found: dict[str, list[float]] = {}
    for name, backend in BACKENDS.items():
        if clock.cuda != (name != "math"):  # on a GPU it is far slower and fills the memory
            continue
        work = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True, enable_gqa=True)
        try:
            with sdpa_kernel(backend):
                found[name] = clock.graph([work] * 4)
        except RuntimeError as error:  # not built in, or not for these heads
            print(f"attention by {name}: {error}")
    return found


def floor(run: Run, shape: Shape, rows: int) -> dict[str, Any]:
    """Milliseconds of the products and attentions of a prompt of `rows` tokens, and each by itself in microseconds."""
    dtype = torch.bfloat16
    found: dict[str, Any] = {}
    total = 0.0
    for name, (out, inner) in shape.products().items():
        found[f"{name}_us"] = microseconds(times := product_seconds(run.clock, rows, out, inner, dtype))
        found[f"{name}_tflop_per_s"] = round(2 * rows * out * inner / _median(times) / 1e12, 1)
        total += shape.layers * _median(times)
    attention = attention_seconds(run.clock, shape, rows, dtype)
    operations = 2 * rows * rows * shape.heads * shape.head_dim  # half of 4 · rows²: causal
    for name, times in attention.items():
        found[f"attention_{name}_us"] = microseconds(times)
        found[f"attention_{name}_tflop_per_s"] = round(operations / _median(times) / 1e12, 1)
    total += shape.layers * min(_median(times) for times in attention.values())
    total += _median(product_seconds(run.clock, 1, shape.vocab, shape.dim, dtype))
    return {**found, "floor_ms": round(1e3 * total, 3)}


def _reading(run: Run, make: Callable[[], Callable[[Tensor], object]], shape: Shape, rows: int) -> dict[str, Any]:
    """Milliseconds of reading a prompt of `rows` tokens, and the fraction of it that the floor is."""
    ids = prompt(shape, 1, rows, run.device)
    with torch.no_grad():
        times = run.clock.calls(partial(make(), ids), 7, warm=3)
    least = run.results["prefill"]["results"].get(f"floor_{rows}", {}).get("floor_ms")
    middle = _median(times)
    return {
        "ms": spread([1e3 * t for t in times], 3),
        "tokens_per_s": round(rows / middle, 1),
        "floor_of_it": round(least / (1e3 * middle), 3) if least else None,
    }


def _hugging_face(model: Any) -> Callable[[Tensor], Tensor]:
    """A prompt into an empty cache, and the logits of the last token."""
    from transformers import DynamicCache

    def read(ids: Tensor) -> Tensor:
        cache = DynamicCache(config=model.config)
        logits: Tensor = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        return logits

    return read


def _reader(name: str, model: Any, rows: int) -> Callable[[Tensor], Tensor]:
    """A contender by name, compiled for prompts of `rows` tokens if its name says so."""
    read = _hugging_face(model) if name.startswith("hf") else ours(model, rows)
    if not name.endswith("compiled"):
        return read
    torch._dynamo.reset()
    compiled: Callable[[Tensor], Tensor] = torch.compile(read, dynamic=False)
    return compiled


def prefill(run: Run) -> None:
    """Floors first, then every contender at every length."""
    run.begin("prefill")
    shape = run.choice(LLAMA_8B, TINY)
    lengths = run.choice(LENGTHS[:1] if run.quick else LENGTHS, (16,))
    for rows in lengths:
        run.measure("prefill", f"floor_{rows}", partial(floor, run, shape, rows), 8)
    model: Any = None
    for rows in lengths:
        for name, cost in (("hf_eager", 10), ("weft", 30), ("hf_compiled", 100), ("weft_compiled", 100)):
            if run.skips("prefill", f"{name}_{rows}", cost):
                continue
            model = model or hugging_face(shape, run.device, torch.bfloat16)
            work = partial(_reading, run, partial(_reader, name, model, rows), shape, rows)
            run.measure("prefill", f"{name}_{rows}", work, cost)


def _median(times: list[float]) -> float:
    return sorted(times)[len(times) // 2]
