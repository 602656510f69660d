"""Random inputs of kernels: arguments that a launcher and its reference both take.

One function per kernel has its name. kernel_cases.py calls it with sizes of real models, tests/gpu with odd ones.
Weights have variance 1 / fan-in, so that results are about as large as the inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from weft.backends.torch.kernels.shared.float8 import FLOAT8, as_bytes, to_float8
from weft.backends.torch.kernels.shared.quantized_gemv import Codes, words_per_row


@dataclass(frozen=True)
class Inputs:
    """Arguments of a launcher and its reference; `launch_only` are keywords that only the launcher takes."""

    args: tuple[Any, ...]
    keywords: Mapping[str, Any] = field(default_factory=dict)
    launch_only: Mapping[str, Any] = field(default_factory=dict)

    def call(self, function: Callable[..., Any]) -> Any:
        """Call a reference or peer."""
        return function(*self.args, **self.keywords)

    def launch(self, launcher: Callable[..., Any], **more: Any) -> Any:
        """Call the launcher."""
        return launcher(*self.args, **{**self.keywords, **self.launch_only, **more})

    def map(self, change: Callable[[Tensor], Tensor]) -> Inputs:
        """Return inputs with `change` applied to every tensor."""

        def convert(value: Any) -> Any:
            if is_dataclass(value) and not isinstance(value, type):
                return replace(value, **{f.name: convert(getattr(value, f.name)) for f in fields(value)})
            return change(value) if isinstance(value, Tensor) else value

        named = ({name: convert(value) for name, value in group.items()} for group in (self.keywords, self.launch_only))
        return Inputs(tuple(map(convert, self.args)), *named)

    def tensors(self) -> list[Tensor]:
        """Return every tensor in order."""
        listed: list[Tensor] = []

        def append(t: Tensor) -> Tensor:
            listed.append(t)
            return t

        self.map(append)
        return listed

    def to_float64(self) -> Inputs:
        """Return inputs for a reference: all floating-point tensors in f64, except codes."""
        return self.map(lambda t: t.double() if t.is_floating_point() and t.dtype != FLOAT8 else t.clone())


class Draw:
    """Draw random tensors on a device, reproducibly for a seed."""

    def __init__(self, device: str, seed: int, dtype: torch.dtype = torch.bfloat16) -> None:
        self.device, self.dtype = device, dtype
        self.generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        values = torch.randn(shape, generator=self.generator, device=self.device)
        return values.mul_(scale).to(dtype or self.dtype)

    def uniform(self, *shape: int, low: float, high: float, dtype: torch.dtype | None = None) -> Tensor:
        values = torch.rand(shape, generator=self.generator, device=self.device)
        return values.mul_(high - low).add_(low).to(dtype or self.dtype)

    def weight(self, *shape: int) -> Tensor:
        """Draw a weight […, out, in] of variance 1 / in."""
        return self.normal(*shape, scale=shape[-1] ** -0.5)

    def positions(self, batch: int, value: int) -> Tensor:
        return torch.full((batch, 1), value, dtype=torch.long, device=self.device)

    def tickets(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int32, device=self.device)


def draw_norm(draw: Draw, width: int, kind: str) -> Any:
    """Draw a norm over rows of `width`, of kind none, rms or layer."""
    from weft.backends.torch.kernels.shared.norm import Norm

    gain = None if kind == "none" else draw.normal(width, scale=0.1).add_(1)
    return Norm(kind, gain, draw.normal(width, scale=0.1) if kind == "layer" else None, 1e-5)


def norm_linear(draw: Draw, rows: int, out: int, inner: int, kind: str = "rms", bias: bool = False) -> Inputs:
    """A norm and a linear layer: x [rows, inner], weight [out, inner], bias [out]."""
    more = (draw.normal(out),) if bias else ()
    return Inputs((draw.normal(rows, inner), draw.weight(out, inner), *more), {"norm": draw_norm(draw, inner, kind)})


def norm_glu(draw: Draw, rows: int, hidden: int, inner: int, kind: str = "rms", bias: bool = False) -> Inputs:
    """A norm and a gated unit: x [rows, inner], weight [2 · hidden, inner], bias [2 · hidden]."""
    return norm_linear(draw, rows, 2 * hidden, inner, kind, bias)


def linear_residual(draw: Draw, rows: int, out: int, inner: int, kind: str = "none") -> Inputs:
    """A linear layer added to a residual [rows, out]: x [rows, inner], weight [out, inner]."""
    args = draw.normal(rows, inner), draw.weight(out, inner), draw.normal(rows, out)
    return Inputs(args, {"norm": draw_norm(draw, out, kind)}, {"tickets": draw.tickets(out)})


def norm_qkv(
    draw: Draw,
    batch: int,
    heads: int,
    kv_heads: int,
    d: int,
    inner: int,
    capacity: int,
    *,
    kind: str = "rms",
    rotary: int | None = None,
    head_norms: bool = False,
    bias: bool = False,
    floats: bool = False,
    **switches: Any,
) -> Inputs:
    """Projections of one token, written to slot capacity - 2 of caches [batch, kv_heads, capacity, d]."""
    out = (heads + 2 * kv_heads) * d
    k_cache, v_cache, scales = draw_caches(draw, batch, kv_heads, capacity, d, floats)
    args = draw.normal(batch, inner), draw.weight(out, inner), k_cache, v_cache, draw.positions(batch, capacity - 2)
    keywords: dict[str, Any] = {"norm": draw_norm(draw, inner, kind), **switches, **scales}
    if head_norms:
        keywords |= {"q_norm": draw_norm(draw, d, "rms"), "k_norm": draw_norm(draw, d, "rms")}
    if pairs := (d if rotary is None else rotary) // 2:
        angles = draw.uniform(batch, pairs, low=-3.0, high=3.0, dtype=torch.float32)
        keywords |= {"cos": angles.cos(), "sin": angles.sin()}
    more = (draw.normal(out),) if bias else ()
    return Inputs((*args, *more), keywords, {"tickets": draw.tickets(heads + kv_heads)})


def norm_rope_cache(
    draw: Draw, batch: int, seq: int, heads: int, kv_heads: int, d: int, head_norms: bool = False, **more: Any
) -> Inputs:
    """Projections of prompts of `seq` tokens, [batch · seq, (heads + 2 · kv_heads) · d], and caches of that size."""
    base = norm_qkv(draw, batch, heads, kv_heads, d, 8, seq, head_norms=head_norms, rotary=0, **more)
    keywords, rows = {name: value for name, value in base.keywords.items() if name != "norm"}, batch * seq
    angles = draw.uniform(rows, d // 2, low=-3.0, high=3.0, dtype=torch.float32)
    positions = torch.arange(seq, device=draw.device).repeat(batch)
    projected = draw.normal(rows, (heads + 2 * kv_heads) * d)
    return Inputs((projected, *base.args[2:4], positions), keywords | {"cos": angles.cos(), "sin": angles.sin()})


def gated_activation(draw: Draw, rows: int, hidden: int, **more: Any) -> Inputs:
    """Gate and up projections [rows, 2 · hidden]."""
    return Inputs((draw.normal(rows, 2 * hidden),), more)


def draw_caches(
    draw: Draw, batch: int, kv_heads: int, capacity: int, d: int, floats: bool
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Draw keys and values [batch, kv_heads, capacity, d]; `floats`: bytes of FP8, with a scale per head."""
    k, v = (draw.normal(batch, kv_heads, capacity, d) for _ in range(2))
    if not floats:
        return k, v, {}
    k_scale, v_scale = (draw.uniform(kv_heads, low=0.5, high=2.0, dtype=torch.float32) for _ in range(2))
    return as_bytes(k, k_scale), as_bytes(v, v_scale), {"k_scale": k_scale, "v_scale": v_scale}


def decode_attention(
    draw: Draw,
    batch: int,
    heads: int,
    kv_heads: int,
    d: int,
    length: int,
    capacity: int = 0,
    splits: int | None = None,
    floats: bool = False,
    **mask: Any,
) -> Inputs:
    """One token after `length` - 1 others: q [batch, heads, d], caches [batch, kv_heads, capacity or length, d]."""
    k, v, scales = draw_caches(draw, batch, kv_heads, capacity or length, d, floats)
    launch_only = {"tickets": draw.tickets(batch * heads), "splits": splits}
    return Inputs((draw.normal(batch, heads, d), k, v, draw.positions(batch, length - 1)), mask | scales, launch_only)


def several_tokens(
    draw: Draw, batch: int, seq: int, heads: int, kv_heads: int, d: int, length: int, floats: bool = False
) -> Inputs:
    """The last `seq` of `length` tokens at once, as in speculative decoding: q [batch, seq, heads, d]."""
    base = decode_attention(draw, batch, heads, kv_heads, d, length, floats=floats)
    positions = torch.arange(length - seq, length, device=draw.device).repeat(batch, 1)
    q, launch_only = draw.normal(batch, seq, heads, d), {"tickets": draw.tickets(batch * heads), "splits": None}
    return Inputs((q, *base.args[1:3], positions), {**base.keywords, "start": length - seq}, launch_only)


def window_attention(
    draw: Draw, batch: int, heads: int, kv_heads: int, d: int, seq: int, window: int, **mask: Any
) -> Inputs:
    """A prompt of `seq` tokens: q [batch, heads, seq, d], k and v [batch, kv_heads, seq, d]."""
    q, k, v = (draw.normal(batch, n, seq, d) for n in (heads, kv_heads, kv_heads))
    return Inputs((q, k, v, window), mask)


def latent_decode(
    draw: Draw, batch: int, heads: int, rank: int, rope: int, length: int, splits: int | None = None, **mask: Any
) -> Inputs:
    """Absorbed latent attention: q [batch, heads, rank + rope], cache [batch, 1, length, rank + rope]."""
    q, cache = draw.normal(batch, heads, rank + rope), draw.normal(batch, 1, length, rank + rope)
    launch_only = {"tickets": draw.tickets(batch * heads), "splits": splits}
    mask["scale"] = (128 + rope) ** -0.5
    return Inputs((q, cache, draw.positions(batch, length - 1), rank), mask, launch_only)


def latent_qk(draw: Draw, batch: int, heads: int, rank: int, plain: int, rope: int, capacity: int) -> Inputs:
    """Inputs of `latent_decode`: q [batch, heads · (plain + rope)], latent [batch, rank + rope], weight of keys."""
    angle = draw.normal(batch, rope // 2, dtype=torch.float32)
    args = draw.normal(batch, heads * (plain + rope)), draw.normal(batch, rank + rope), draw.weight(heads * plain, rank)
    cache = draw.normal(batch, 1, capacity, rank + rope)
    more = {"norm": draw_norm(draw, rank, "rms"), "interleaved": True}
    return Inputs((*args, cache, draw.positions(batch, capacity - 1), angle.cos(), angle.sin()), more)


def linear_by_head(draw: Draw, rows: int, heads: int, out: int, inner: int) -> Inputs:
    """A linear layer per head: x [rows, heads · inner], weight [heads · out, inner]."""
    return Inputs((draw.normal(rows, heads * inner), draw.weight(heads * out, inner)), {"heads": heads})


def moe_decode(draw: Draw, tokens: int, experts: int, k: int, hidden: int, dim: int, gated: bool = True) -> Inputs:
    """k experts per token: x [tokens, dim], indices and weights [tokens, k], stacks [experts, hidden or dim, ·]."""
    order = torch.rand(tokens, experts, generator=draw.generator, device=draw.device).argsort(-1)
    share = draw.normal(tokens, k, dtype=torch.float32).softmax(-1)
    stacks = [draw.weight(experts, hidden, dim), draw.weight(experts, dim, hidden)]
    gate = draw.weight(experts, hidden, dim) if gated else None
    args = draw.normal(tokens, dim), order[:, :k].contiguous(), share, *stacks, gate
    return Inputs(args, {"activation": "silu" if gated else "relu"})


def route(draw: Draw, tokens: int, experts: int, k: int, scoring: str = "softmax", biased: bool = False) -> Inputs:
    """Scores of a router [tokens, experts]."""
    bias = draw.normal(experts, scale=0.1) if biased else None
    return Inputs((draw.normal(tokens, experts), bias), {"k": k, "scoring": scoring})


def embed_tokens(draw: Draw, batch: int, vocab: int, dim: int, pairs: int) -> Inputs:
    """Token ids [batch, 1], embedding [vocab, dim], positions and RoPE frequencies."""
    ids = torch.randint(vocab, (batch, 1), generator=draw.generator, device=draw.device)
    frequencies = 10_000.0 ** -(torch.arange(pairs, dtype=torch.float64, device=draw.device) / pairs)
    return Inputs((ids, draw.weight(vocab, dim), draw.positions(batch, 1023), (frequencies, 1.0)), {})


def choose_tokens(draw: Draw, batch: int, vocab: int, **sampling: float) -> Inputs:
    """Logits [batch, vocab] of standard deviation 3; each row samples by one fixed random number."""
    numbers = torch.linspace(0.1, 0.9, batch, dtype=torch.float64, device=draw.device)[:, None].expand(batch, 64)
    spent = torch.zeros(batch, 1, dtype=torch.int64, device=draw.device)
    return Inputs((draw.normal(batch, vocab, scale=3.0), numbers.contiguous(), spent), sampling)


def norm_route(draw: Draw, tokens: int, experts: int, k: int, dim: int, scoring: str = "softmax") -> Inputs:
    """A norm and a router: x [tokens, dim], weight [experts, dim]; no rounding changes the choice of such logits."""
    direction, sign = draw.normal(dim), draw.normal(tokens, 1).sign()
    levels = torch.rand(experts, generator=draw.generator, device=draw.device).argsort() / 4
    weight = (levels[:, None] * direction.float() / dim).to(direction.dtype)
    return Inputs((direction * sign, weight), {"k": k, "norm": draw_norm(draw, dim, "rms"), "scoring": scoring})


def mamba_scan(draw: Draw, batch: int, seq: int, channels: int, states: int, past: bool = False) -> Inputs:
    """Mamba over a prompt: x, delta [batch, seq, channels], a [channels, states], b, c [batch, seq, states]."""
    x, (b, c) = draw.normal(batch, seq, channels), (draw.normal(batch, seq, states) for _ in range(2))
    delta = draw.uniform(batch, seq, channels, low=0.001, high=0.1)
    a = draw.uniform(channels, states, low=-float(states), high=-1.0, dtype=torch.float32)
    state = (draw.normal(batch, states, channels, dtype=torch.float32),) if past else ()
    return Inputs((x, delta, a, b, c, draw.normal(channels), *state))


def selective_step(draw: Draw, batch: int, channels: int, states: int, rank: int, normed: bool = False) -> Inputs:
    """One token of Mamba after its projections; the gate is a part of wider rows."""
    x, delta = draw.normal(batch, channels), draw.normal(batch, rank)
    b, c = (draw.normal(batch, states) for _ in "bc")
    gate = draw.normal(batch, 2 * channels)[:, channels:]
    a = draw.uniform(channels, states, low=-float(states), high=-1.0, dtype=torch.float32)
    past = draw.normal(batch, states, channels, dtype=torch.float32)
    norms = {"norm": draw_norm(draw, rank, "rms"), **{f"{n}_norm": draw_norm(draw, states, "rms") for n in "bc"}}
    more = {"weight": draw.weight(channels, rank), "bias": draw.uniform(channels, low=-6.0, high=-2.0), "gate": gate}
    more |= norms if normed else {}
    return Inputs((x, delta, a, b, c, draw.normal(channels), past), {**more, "softplus": True})


def mamba2_scan(
    draw: Draw, batch: int, seq: int, heads: int, width: int, states: int, groups: int = 1, past: bool = False
) -> Inputs:
    """Mamba-2: x [batch, seq, heads·width], delta [batch, seq, heads], b and c [batch, seq, groups·states]."""
    x, (b, c) = draw.normal(batch, seq, heads * width), (draw.normal(batch, seq, groups * states) for _ in range(2))
    delta = draw.uniform(batch, seq, heads, low=0.001, high=0.1)
    a = draw.uniform(heads, low=-16.0, high=-1.0, dtype=torch.float32)
    state = (draw.normal(batch, heads, states, width, dtype=torch.float32),) if past else ()
    return Inputs((x, delta, a, b, c, draw.normal(heads), *state), {"heads": heads, "groups": groups})


def ssd_step(
    draw: Draw, batch: int, heads: int, width: int, states: int, groups: int = 1, norm_groups: int = 0
) -> Inputs:
    """One token of Mamba-2 after its projection, normalized in `norm_groups`; the gate is a part of wider rows."""
    x, delta = draw.normal(batch, heads * width), draw.normal(batch, heads)
    b, c = (draw.normal(batch, groups * states) for _ in "bc")
    gate = draw.normal(batch, 2 * heads * width)[:, heads * width :]
    a = draw.uniform(heads, low=-16.0, high=-1.0, dtype=torch.float32)
    past = draw.normal(batch, heads, states, width, dtype=torch.float32)
    more = {"heads": heads, "groups": groups, "bias": draw.uniform(heads, low=-6.0, high=-2.0), "softplus": True}
    if norm_groups:
        more |= {"norm": draw_norm(draw, heads * width, "rms"), "norm_groups": norm_groups}
    launch_only = {"tickets": draw.tickets(batch * max(norm_groups, 1))}
    return Inputs((x, delta, a, b, c, draw.normal(heads), past), {**more, "gate": gate}, launch_only)


def matrix_step(draw: Draw, batch: int, heads: int, groups: int, keys: int, width: int, form: str = "") -> Inputs:
    """One token, a state matrix per head with decay per head or "key"; "delta": delta rule, norm and gate."""
    q, k = (draw.normal(batch, groups * keys, scale=keys**-0.5) for _ in "qk")
    v, past = draw.normal(batch, heads * width), draw.normal(batch, heads, keys, width, dtype=torch.float32)
    decay = draw.uniform(batch, heads * (keys if "key" in form else 1), low=-2.0, high=0.0)
    more: dict[str, Any] = {"heads": heads, "groups": groups, "decay": decay}
    if "delta" in form:
        more |= {"beta": draw.uniform(batch, heads, low=0.0, high=1.0), "gate": draw.normal(batch, heads * width)}
        more |= {"a_log": draw.normal(heads), "unit": replace(draw_norm(draw, 1, "rms"), gain=None)}
        more |= {"k_scale": keys**-0.5, "norm": draw_norm(draw, width, "rms"), "norm_groups": heads}
    return Inputs((q, k, v, past), more, {"tickets": draw.tickets(batch * heads)} if "delta" in form else {})


def draw_codes(
    draw: Draw, out: int, inner: int, form: str = "int", bits: int = 4, group: int = 128, offsets: bool = False
) -> Codes:
    """Draw weights [out, inner]: integers of 4 or 8 bits, fp8, mxfp4 or nvfp4. Scales are for evenly spread codes."""
    shape = (out, words_per_row(inner, 8 if form == "fp8" else bits))
    more: dict[str, Any] = {"generator": draw.generator, "device": draw.device}
    if form == "fp8":
        scales = draw.uniform(inner // group, out, low=0.8 / 64, high=1.2 / 64, dtype=torch.float32)
        return Codes(to_float8(draw.normal(out, 4 * shape[1], scale=64 * inner**-0.5)), scales, None, 8, inner)
    if form == "int":
        codes = torch.randint(-(1 << 31), 1 << 31, shape, **more)
        step = inner**-0.5 * 12**0.5 / (1 << bits)
        scales = draw.uniform(inner // group, out, low=0.8 * step, high=1.2 * step)
        zeros = draw.normal(inner // group, out, scale=step) if offsets else None
        return Codes(codes.int(), scales, zeros, bits, inner)
    size = inner**-0.5 / 3  # codes are about 3
    packed = torch.randint(0, 256, (out, 4 * shape[1]), dtype=torch.uint8, **more)
    if form == "mxfp4":
        power = 127 + round(math.log2(size))
        scales = torch.randint(power - 1, power + 2, (inner // 32, out), dtype=torch.uint8, **more)
        return Codes(packed, scales, None, 4, inner)
    scales = draw.uniform(inner // 16, out, low=0.25, high=400, dtype=torch.float32).to(FLOAT8)
    factors = draw.uniform(1, out, low=0.8 * size / 200, high=1.2 * size / 200, dtype=torch.float32)
    return Codes(packed, scales, factors, 4, inner)


def coded_linear(draw: Draw, rows: int, out: int, inner: int, **layout: Any) -> Inputs:
    """x [rows, inner] and weights in codes, for `norm_linear`."""
    return Inputs((draw.normal(rows, inner), draw_codes(draw, out, inner, **layout)))


def dequantize_weights(draw: Draw, out: int, inner: int, **layout: Any) -> Inputs:
    """Weights in codes, to dequantize to bf16."""
    return Inputs((draw_codes(draw, out, inner, **layout), draw.dtype))


def quantize_float8(draw: Draw, rows: int, inner: int, group: int) -> Inputs:
    """x [rows, inner], to convert to FP8."""
    return Inputs((draw.normal(rows, inner), group))


def conv_step(draw: Draw, batch: int, channels: int, width: int = 4) -> Inputs:
    """One token of a causal convolution: x [batch, channels], weight [channels, width], past [batch, width - 1, ·]."""
    x, weight, bias = draw.normal(batch, channels), draw.weight(channels, width), draw.normal(channels)
    return Inputs((x, weight, bias, draw.normal(batch, width - 1, channels)))
