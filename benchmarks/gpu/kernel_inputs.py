"""Inputs of every kernel for given sizes: normal numbers on a device, and what else its launcher takes.

One function per kernel, named like it: `kernel_cases.py` calls it with sizes of real models, tests/gpu with odd ones.
Weights have variance 1 / fan-in, so that results are of the size of their inputs.
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
    """Arguments of a launcher and its reference; `own` are keywords that only the launcher takes."""

    args: tuple[Any, ...]
    keywords: Mapping[str, Any] = field(default_factory=dict)
    own: Mapping[str, Any] = field(default_factory=dict)

    def call(self, function: Callable[..., Any]) -> Any:
        """A reference or peer of these inputs."""
        return function(*self.args, **self.keywords)

    def launch(self, launcher: Callable[..., Any], **more: Any) -> Any:
        """The launcher of these inputs."""
        return launcher(*self.args, **{**self.keywords, **self.own, **more})

    def map(self, change: Callable[[Tensor], Tensor]) -> Inputs:
        """The same with every tensor changed: copied, or in another dtype."""

        def changed(value: Any) -> Any:
            if is_dataclass(value) and not isinstance(value, type):
                return replace(value, **{f.name: changed(getattr(value, f.name)) for f in fields(value)})
            return change(value) if isinstance(value, Tensor) else value

        named = ({name: changed(value) for name, value in group.items()} for group in (self.keywords, self.own))
        return Inputs(tuple(map(changed, self.args)), *named)

    def tensors(self) -> list[Tensor]:
        """Every tensor of it, in order."""
        found: list[Tensor] = []

        def note(t: Tensor) -> Tensor:
            found.append(t)
            return t

        self.map(note)
        return found

    def wide(self) -> Inputs:
        """The same with all numbers in f64, for a reference."""
        return self.map(lambda t: t.double() if t.is_floating_point() and t.dtype != FLOAT8 else t.clone())


class Draw:
    """Random tensors on a device, always the same for a seed."""

    def __init__(self, device: str, seed: int, dtype: torch.dtype = torch.bfloat16) -> None:
        self.device, self.dtype = device, dtype
        self.generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        drawn = torch.randn(shape, generator=self.generator, device=self.device)
        return drawn.mul_(scale).to(dtype or self.dtype)

    def uniform(self, *shape: int, low: float, high: float, dtype: torch.dtype | None = None) -> Tensor:
        drawn = torch.rand(shape, generator=self.generator, device=self.device)
        return drawn.mul_(high - low).add_(low).to(dtype or self.dtype)

    def weight(self, *shape: int) -> Tensor:
        """[…, out, in] with variance 1 / in."""
        return self.normal(*shape, scale=shape[-1] ** -0.5)

    def gain(self, size: int) -> Tensor:
        return self.normal(size, scale=0.1).add_(1)

    def positions(self, batch: int, value: int) -> Tensor:
        return torch.full((batch, 1), value, dtype=torch.long, device=self.device)

    def tickets(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int32, device=self.device)


def norm(draw: Draw, width: int, kind: str) -> Any:
    """A norm of rows of `width`: none, rms or layer."""
    from weft.backends.torch.kernels.shared.norm import Norm

    gain = None if kind == "none" else draw.gain(width)
    return Norm(kind, gain, draw.normal(width, scale=0.1) if kind == "layer" else None, 1e-5)


def norm_linear(draw: Draw, rows: int, out: int, inner: int, kind: str = "rms", bias: bool = False) -> Inputs:
    """One product behind a norm: x [rows, inner], weight [out, inner], bias [out]."""
    more = (draw.normal(out),) if bias else ()
    return Inputs((draw.normal(rows, inner), draw.weight(out, inner), *more), {"norm": norm(draw, inner, kind)})


def norm_glu(draw: Draw, rows: int, hidden: int, inner: int, kind: str = "rms", bias: bool = False) -> Inputs:
    """A gated unit behind a norm: x [rows, inner], weight [2 · hidden, inner], bias [2 · hidden]."""
    return norm_linear(draw, rows, 2 * hidden, inner, kind, bias)


def linear_residual(draw: Draw, rows: int, out: int, inner: int, kind: str = "none") -> Inputs:
    """A product added to a residual [rows, out]: x [rows, inner], weight [out, inner]."""
    args = draw.normal(rows, inner), draw.weight(out, inner), draw.normal(rows, out)
    return Inputs(args, {"norm": norm(draw, out, kind)}, {"tickets": draw.tickets(out)})


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
    """Projections of one token, written to slot capacity - 2 of caches [batch, kv_heads, capacity, d]; `floats`: of 8
    bits."""
    out = (heads + 2 * kv_heads) * d
    k_cache, v_cache, scales = caches(draw, batch, kv_heads, capacity, d, floats)
    switches |= scales
    args = draw.normal(batch, inner), draw.weight(out, inner), k_cache, v_cache, draw.positions(batch, capacity - 2)
    keywords: dict[str, Any] = {"norm": norm(draw, inner, kind), **switches}
    if head_norms:
        keywords |= {"q_norm": norm(draw, d, "rms"), "k_norm": norm(draw, d, "rms")}
    if pairs := (d if rotary is None else rotary) // 2:
        angles = draw.uniform(batch, pairs, low=-3.0, high=3.0, dtype=torch.float32)
        keywords |= {"cos": angles.cos(), "sin": angles.sin()}
    more = (draw.normal(out),) if bias else ()
    return Inputs((*args, *more), keywords, {"tickets": draw.tickets(heads + kv_heads)})


def norm_rope_cache(
    draw: Draw, batch: int, seq: int, heads: int, kv_heads: int, d: int, head_norms: bool = False, **more: Any
) -> Inputs:
    """Projections of prompts of `seq` tokens, [batch · seq, heads and KV heads · d], and caches that hold these."""
    given = norm_qkv(draw, batch, heads, kv_heads, d, 8, seq, head_norms=head_norms, rotary=0, **more)
    keywords, rows = {name: value for name, value in given.keywords.items() if name != "norm"}, batch * seq
    angles = draw.uniform(rows, d // 2, low=-3.0, high=3.0, dtype=torch.float32)
    positions = torch.arange(seq, device=draw.device).repeat(batch)
    projected = draw.normal(rows, (heads + 2 * kv_heads) * d)
    return Inputs((projected, *given.args[2:4], positions), keywords | {"cos": angles.cos(), "sin": angles.sin()})


def gated_activation(draw: Draw, rows: int, hidden: int, **more: Any) -> Inputs:
    """Gates, and the ups behind them, [rows, 2 · hidden]."""
    return Inputs((draw.normal(rows, 2 * hidden),), more)


def caches(
    draw: Draw, batch: int, kv_heads: int, capacity: int, d: int, floats: bool
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Keys and values [batch, kv_heads, capacity, d]; as bytes of `floats` of 8 bits, with the scales of heads."""
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
    """One token after `length` - 1 others: q [batch, heads, d], caches [batch, kv_heads, capacity or length, d]; these
    of `floats` of 8 bits."""
    k, v, scales = caches(draw, batch, kv_heads, capacity or length, d, floats)
    mask |= scales
    own = {"tickets": draw.tickets(batch * heads), "splits": splits}
    return Inputs((draw.normal(batch, heads, d), k, v, draw.positions(batch, length - 1)), mask, own)


def several_tokens(
    draw: Draw, batch: int, seq: int, heads: int, kv_heads: int, d: int, length: int, floats: bool = False
) -> Inputs:
    """The last `seq` of `length` tokens at once, as speculative decoding verifies them: q [batch, seq, heads, d]."""
    given = decode_attention(draw, batch, heads, kv_heads, d, length, floats=floats)
    positions = torch.arange(length - seq, length, device=draw.device).repeat(batch, 1)
    q, own = draw.normal(batch, seq, heads, d), {"tickets": draw.tickets(batch * heads), "splits": None}
    return Inputs((q, *given.args[1:3], positions), given.keywords | {"start": length - seq}, own)


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
    own = {"tickets": draw.tickets(batch * heads), "splits": splits}
    return Inputs((q, cache, draw.positions(batch, length - 1), rank), {"scale": (128 + rope) ** -0.5, **mask}, own)


def latent_qk(draw: Draw, batch: int, heads: int, rank: int, plain: int, rope: int, capacity: int) -> Inputs:
    """What `latent_decode` reads: q [batch, heads · (plain + rope)], latent [batch, rank + rope], weight of keys."""
    angle = draw.normal(batch, rope // 2, dtype=torch.float32)
    args = draw.normal(batch, heads * (plain + rope)), draw.normal(batch, rank + rope), draw.weight(heads * plain, rank)
    cache = draw.normal(batch, 1, capacity, rank + rope)
    more = {"norm": norm(draw, rank, "rms"), "interleaved": True}
    return Inputs((*args, cache, draw.positions(batch, capacity - 1), angle.cos(), angle.sin()), more)


def linear_by_head(draw: Draw, rows: int, heads: int, out: int, inner: int) -> Inputs:
    """A product per head: x [rows, heads · inner], weight [heads · out, inner]."""
    return Inputs((draw.normal(rows, heads * inner), draw.weight(heads * out, inner)), {"heads": heads})


def moe_decode(draw: Draw, tokens: int, experts: int, k: int, hidden: int, dim: int, gated: bool = True) -> Inputs:
    """Tokens at k experts each: x [tokens, dim], chosen and weights [tokens, k], stacks [experts, hidden or dim, ·]."""
    order = torch.rand(tokens, experts, generator=draw.generator, device=draw.device).argsort(-1)
    share = draw.normal(tokens, k, dtype=torch.float32).softmax(-1)
    stacks = [draw.weight(experts, hidden, dim), draw.weight(experts, dim, hidden)]
    gate = draw.weight(experts, hidden, dim) if gated else None
    args = draw.normal(tokens, dim), order[:, :k].contiguous(), share, *stacks, gate
    return Inputs(args, {"activation": "silu" if gated else "relu"})


def route(draw: Draw, tokens: int, experts: int, k: int, scoring: str = "softmax", biased: bool = False) -> Inputs:
    """A router's scores [tokens, experts]."""
    bias = draw.normal(experts, scale=0.1) if biased else None
    return Inputs((draw.normal(tokens, experts), bias), {"k": k, "scoring": scoring})


def embed_tokens(draw: Draw, batch: int, vocab: int, dim: int, pairs: int) -> Inputs:
    """A token for each row, its embedding and the angles of its position: weight [vocab, dim]."""
    ids = torch.randint(vocab, (batch, 1), generator=draw.generator, device=draw.device)
    frequencies = 10_000.0 ** -(torch.arange(pairs, dtype=torch.float64, device=draw.device) / pairs)
    return Inputs((ids, draw.weight(vocab, dim), draw.positions(batch, 1023), (frequencies, 1.0)), {})


def choose_tokens(draw: Draw, batch: int, vocab: int, **way: float) -> Inputs:
    """Logits [batch, vocab] with a standard deviation of 3; every row draws by the same number again and again."""
    numbers = torch.linspace(0.1, 0.9, batch, dtype=torch.float64, device=draw.device)[:, None].expand(batch, 64)
    spent = torch.zeros(batch, 1, dtype=torch.int64, device=draw.device)
    return Inputs((draw.normal(batch, vocab, scale=3.0), numbers.contiguous(), spent), way)


def norm_route(draw: Draw, tokens: int, experts: int, k: int, dim: int, scoring: str = "softmax") -> Inputs:
    """A router of normed tokens: x [tokens, dim], weight [experts, dim]; logits are so far apart that no rounding
    changes the choice."""
    along, turned = draw.normal(dim), draw.normal(tokens, 1).sign()
    levels = torch.rand(experts, generator=draw.generator, device=draw.device).argsort() / 4
    weight = (levels[:, None] * along.float() / dim).to(along.dtype)
    return Inputs((along * turned, weight), {"k": k, "norm": norm(draw, dim, "rms"), "scoring": scoring})


def mamba_scan(draw: Draw, batch: int, seq: int, channels: int, states: int, past: bool = False) -> Inputs:
    """Mamba over a prompt: x, delta [batch, seq, channels], a [channels, states], b, c [batch, seq, states]."""
    x, (b, c) = draw.normal(batch, seq, channels), (draw.normal(batch, seq, states) for _ in range(2))
    delta = draw.uniform(batch, seq, channels, low=0.001, high=0.1)
    a = draw.uniform(channels, states, low=-float(states), high=-1.0, dtype=torch.float32)
    state = (draw.normal(batch, states, channels, dtype=torch.float32),) if past else ()
    return Inputs((x, delta, a, b, c, draw.normal(channels), *state))


def selective_step(draw: Draw, batch: int, channels: int, states: int, rank: int, normed: bool = False) -> Inputs:
    """One token of it behind its projections; the gate is a part of wider rows."""
    x, delta, (b, c) = (
        draw.normal(batch, channels),
        draw.normal(batch, rank),
        (draw.normal(batch, states) for _ in "bc"),
    )
    gate = draw.normal(batch, 2 * channels)[:, channels:]
    a = draw.uniform(channels, states, low=-float(states), high=-1.0, dtype=torch.float32)
    past = draw.normal(batch, states, channels, dtype=torch.float32)
    norms = {"norm": norm(draw, rank, "rms"), **{f"{n}_norm": norm(draw, states, "rms") for n in "bc"}}
    more = {"weight": draw.weight(channels, rank), "bias": draw.uniform(channels, low=-6.0, high=-2.0)}
    more |= {"softplus": True, "gate": gate, **(norms if normed else {})}
    return Inputs((x, delta, a, b, c, draw.normal(channels), past), more)


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
    """One token of it behind its projection, its result normed in `norm_groups` parts; the gate is a part of wider
    rows."""
    x, delta = draw.normal(batch, heads * width), draw.normal(batch, heads)
    b, c = (draw.normal(batch, groups * states) for _ in "bc")
    gate = draw.normal(batch, 2 * heads * width)[:, heads * width :]
    a = draw.uniform(heads, low=-16.0, high=-1.0, dtype=torch.float32)
    past = draw.normal(batch, heads, states, width, dtype=torch.float32)
    more = {"heads": heads, "groups": groups, "bias": draw.uniform(heads, low=-6.0, high=-2.0), "softplus": True}
    if norm_groups:
        more |= {"norm": norm(draw, heads * width, "rms"), "norm_groups": norm_groups}
    own = {"tickets": draw.tickets(batch * max(norm_groups, 1))}
    return Inputs((x, delta, a, b, c, draw.normal(heads), past), {**more, "gate": gate}, own)


def matrix_step(draw: Draw, batch: int, heads: int, groups: int, keys: int, width: int, form: str = "") -> Inputs:
    """A token, a matrix per head that fades by head, or by "key"; "delta": by the delta rule, normed and gated."""
    q, k = (draw.normal(batch, groups * keys, scale=keys**-0.5) for _ in "qk")
    v, past = draw.normal(batch, heads * width), draw.normal(batch, heads, keys, width, dtype=torch.float32)
    decay = draw.uniform(batch, heads * (keys if "key" in form else 1), low=-2.0, high=0.0)
    more: dict[str, Any] = {"heads": heads, "groups": groups, "decay": decay}
    if "delta" in form:
        more |= {"beta": draw.uniform(batch, heads, low=0.0, high=1.0), "gate": draw.normal(batch, heads * width)}
        more |= {"a_log": draw.normal(heads), "unit": replace(norm(draw, 1, "rms"), gain=None), "k_scale": keys**-0.5}
        more |= {"norm": norm(draw, width, "rms"), "norm_groups": heads}
    return Inputs((q, k, v, past), more, {"tickets": draw.tickets(batch * heads)} if "delta" in form else {})


def coded(
    draw: Draw, out: int, inner: int, bits: int = 4, group: int = 128, offsets: bool = False, floats: bool = False
) -> Codes:
    """Weights [out, inner] in codes of 4 or 8 bits, or in floats of 8."""
    shape = (out, words_per_row(inner, bits))
    if floats:
        scales = draw.uniform(inner // group, out, low=0.8 / 64, high=1.2 / 64, dtype=torch.float32)
        return Codes(to_float8(draw.normal(out, 4 * shape[1], scale=64 * inner**-0.5)), scales, None, 8, inner)
    codes = torch.randint(-(1 << 31), 1 << 31, shape, generator=draw.generator, device=draw.device)
    step = inner**-0.5 * 12**0.5 / (1 << bits)  # of codes that spread evenly
    scales = draw.uniform(inner // group, out, low=0.8 * step, high=1.2 * step)
    return Codes(codes.int(), scales, draw.normal(inner // group, out, scale=step) if offsets else None, bits, inner)


def small_floats(draw: Draw, out: int, inner: int, form: str) -> Codes:
    """Weights [out, inner] in floats of 4 bits, in the layout mxfp4 or nvfp4."""
    size = inner**-0.5 / 3  # of scales: codes that spread evenly are about 3
    more: dict[str, Any] = {"generator": draw.generator, "device": draw.device}
    packed = torch.randint(0, 256, (out, 4 * words_per_row(inner, 4)), dtype=torch.uint8, **more)
    if form == "mxfp4":
        power = 127 + round(math.log2(size))
        scales = torch.randint(power - 1, power + 2, (inner // 32, out), dtype=torch.uint8, **more)
        return Codes(packed, scales, None, 4, inner)
    scales = draw.uniform(inner // 16, out, low=0.25, high=400, dtype=torch.float32).to(FLOAT8)
    factors = draw.uniform(1, out, low=0.8 * size / 200, high=1.2 * size / 200, dtype=torch.float32)
    return Codes(packed, scales, factors, 4, inner)


def small_linear(draw: Draw, rows: int, out: int, inner: int, form: str) -> Inputs:
    """x [rows, inner] and weights in floats of 4 bits, for `norm_linear`."""
    return Inputs((draw.normal(rows, inner), small_floats(draw, out, inner, form)))


def widen_small(draw: Draw, out: int, inner: int, form: str) -> Inputs:
    """Weights in floats of 4 bits, to be numbers of bf16."""
    return Inputs((small_floats(draw, out, inner, form), draw.dtype))


def coded_linear(draw: Draw, rows: int, out: int, inner: int, **layout: Any) -> Inputs:
    """x [rows, inner] and weights of few bits, for `norm_linear`."""
    return Inputs((draw.normal(rows, inner), coded(draw, out, inner, **layout)))


def widen(draw: Draw, out: int, inner: int, **layout: Any) -> Inputs:
    """Weights in codes, to be numbers of bf16."""
    return Inputs((coded(draw, out, inner, **layout), draw.dtype))


def quantize_float8(draw: Draw, rows: int, inner: int, group: int) -> Inputs:
    """x [rows, inner], to be floats of 8 bits."""
    return Inputs((draw.normal(rows, inner), group))


def conv_step(draw: Draw, batch: int, channels: int, width: int = 4) -> Inputs:
    """One token of a causal convolution: x [batch, channels], weight [channels, width], past [batch, width - 1, ·]."""
    x, weight, bias = draw.normal(batch, channels), draw.weight(channels, width), draw.normal(channels)
    return Inputs((x, weight, bias, draw.normal(batch, width - 1, channels)))
