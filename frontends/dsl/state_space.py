"""State-space layers: Mamba and Mamba-2."""

from __future__ import annotations

import math

from weft.ir import ops
from weft.ir.graph import Value
from weft.ir.recipes import Concat, Full, Map, Recipe, Uniform

from .build import fill, module, named, param, scope, uniform
from .checks import need_divisor, need_int
from .hybrids import causal_conv
from .layers import Norm, RMSNorm, linear

STEPS = math.log(1e-3), math.log(0.1)  # range of the initial log Δ (Gu & Dao 2023, 3.6)
DECAYS = 1.0, 16.0  # range of the initial −A of Mamba-2's heads


def init_step_bias(shape: tuple[int, ...], name: str, seed: int) -> Recipe:
    """Return initial values softplus⁻¹(Δ) of a step's bias, with Δ log-uniform in `STEPS`."""
    return Map(Map(Uniform(shape, *STEPS, name, seed), "exp"), "inverse_softplus")


def _init_arange_decays(shape: tuple[int, ...], name: str, seed: int) -> Recipe:
    """Return initial values log(−A) with A = −1, −2, … over a channel's states (S4D-Real, arXiv 2206.11893)."""
    channels, states = shape
    return Map(Concat(tuple(Full(1.0 + n, (channels, 1)) for n in range(states)), 1), "log")


def init_random_decays(shape: tuple[int, ...], name: str, seed: int) -> Recipe:
    """Return initial values log(−A), with −A uniform in `DECAYS`."""
    return Map(Uniform(shape, *DECAYS, name, seed), "log")


@module
class Mamba:
    """A selective state space of `inner` channels with `state` states each (Gu & Dao 2023).

    - u and a gate are projected from x by ``in.weight`` [2·inner, dim]; then u ← SiLU(causal convolution of u over
      `conv` tokens), with ``conv.weight`` [inner, conv] and, with `conv_bias`, ``conv.bias``.
    - Step, B and C are projected from u by ``x.weight`` [dt_rank + 2·state, inner], each normalized if `norms` is given
      (``dt_norm``, ``b_norm``, ``c_norm``; Jamba); Δ = softplus(W step + b), with W = ``dt.weight`` [inner, dt_rank],
      b = ``dt.bias``. `dt_rank` defaults to ⌈dim/16⌉.
    - The op `selective_scan` of u, Δ, A, B, C and d, times SiLU(gate), is projected by ``out.weight`` [dim, inner].
      A = −e^a_log is negative for any ``a_log`` [inner, state]; ``d`` is [inner].

    `bias` adds biases to in and out. Several `heads` divide the channels; each has separate parameters from ``x`` to
    ``d``, called ``head0.x.weight`` and so on (Zamba). Initial values are those of the authors' code.
    """

    inner: int
    state: int = 16
    conv: int = 4
    dt_rank: int | None = None
    conv_bias: bool = True
    bias: bool = False
    norms: Norm | None = None
    heads: int = 1

    def __post_init__(self) -> None:
        need_divisor(self, "heads", "inner")
        need_int(self, "conv", least=2)

    def __call__(self, x: Value) -> Value:
        dim, inner = x.width, self.inner
        rank = -(-dim // 16) if self.dt_rank is None else self.dt_rank
        u_and_gate = linear(x, 2 * inner, "in", self.bias)
        u, gate = ops.split.emit(u_and_gate, sizes=(inner, inner), name=("u", "gate"))
        u = causal_conv(u, self.conv, self.conv_bias, "silu")
        y = self._scan(u, rank) if self.heads == 1 else self._scan_heads(u, rank)
        return linear(ops.mul(y, ops.swish(gate), name="gated"), dim, "out", self.bias)

    def _scan_heads(self, u: Value, rank: int) -> Value:
        sizes = (self.inner // self.heads,) * self.heads
        outputs = []
        for h, part in enumerate(ops.split.emit(u, sizes=sizes, name=tuple(f"u{h}" for h in range(self.heads)))):
            with scope(f"head{h}"):
                outputs.append(self._scan(part, rank))
        return ops.concat(*outputs, axis=2, name="heads_joined")

    def _scan(self, u: Value, rank: int) -> Value:
        """Return `selective_scan` of u [batch, seq, channels]; step (`rank` features), B and C are projected from u."""
        inner, state = u.width, self.state
        parts = ops.split.emit(linear(u, rank + 2 * state, "x"), sizes=(rank, state, state), name=("step", "b", "c"))
        if self.norms is not None:
            parts = tuple(named(self.norms, f"{n}_norm")(v) for n, v in zip(("dt", "b", "c"), parts, strict=True))
        step, b, c = parts
        weight = param("dt.weight", (inner, rank), uniform(rank**-0.5))
        bias = param("dt.bias", (inner,), init_step_bias)
        delta = ops.softplus(ops.linear(step, weight, bias, name="dt"), name="delta")
        a, d = negate_exp(param("a_log", (inner, state), _init_arange_decays)), param("d", (inner,), fill(1.0))
        return ops.selective_scan(u, delta, a, b, c, d)


@module
class Mamba2:
    """A state space of `heads` heads with one decay each (Dao & Gu 2024): `inner` channels, B and C per group.

    - x is projected to gate, u, B, C and step, in this order, by ``in.weight`` [2·inner + 2·groups·state + heads, dim].
      u, B and C pass a causal convolution over `conv` tokens and SiLU: ``conv.weight`` [inner + 2·groups·state, conv],
      with `conv_bias` ``conv.bias``.
    - Δ = softplus(step + ``dt.bias``), at least `least_step`; A = −e^``a_log``; ``dt.bias``, ``a_log``, ``d`` [heads].
    - The op `ssd`, times SiLU(gate), is projected by ``out.weight`` [dim, inner]. `norm` (None: no norm), with
      ``norm.weight`` [inner], follows the gate (`norm_first`: precedes it), on each of `norm_groups` runs of channels.

    `bias` adds biases to in and out; `out_bias` overrides it for out. Initial values are those of the authors' code.
    """

    inner: int
    heads: int
    state: int = 128
    groups: int = 1
    conv: int = 4
    conv_bias: bool = True
    bias: bool = False
    norm: RMSNorm | None = RMSNorm(1e-5)
    norm_groups: int = 1
    norm_first: bool = False
    out_bias: bool | None = None
    least_step: float | None = None

    def __post_init__(self) -> None:
        need_int(self, "conv", least=2)
        need_divisor(self, "heads", "inner")
        need_divisor(self, "groups", "heads")
        need_divisor(self, "norm_groups", "inner")

    def __call__(self, x: Value) -> Value:
        inner, wide = self.inner, self.groups * self.state
        mixed = inner + 2 * wide
        projected = linear(x, inner + mixed + self.heads, "in", self.bias)
        gate, u, step = ops.split.emit(projected, sizes=(inner, mixed, self.heads), name=("gate", "u", "step"))
        u = causal_conv(u, self.conv, self.conv_bias, "silu")
        u, b, c = ops.split.emit(u, sizes=(inner, wide, wide), name=("u", "b", "c"))
        delta = ops.softplus(ops.add(step, param("dt.bias", (self.heads,), init_step_bias), name="dt"), name="delta")
        if self.least_step is not None:
            delta = ops.clip(delta, low=self.least_step, name="delta_limited")
        a, d = negate_exp(param("a_log", (self.heads,), init_random_decays)), param("d", (self.heads,), fill(1.0))
        y = ops.ssd(u, delta, a, b, c, d, heads=self.heads, groups=self.groups)
        y = self._normalize(y) if self.norm_first else y
        y = ops.mul(y, ops.swish(gate), name="gated")
        y = y if self.norm_first else self._normalize(y)
        return linear(y, x.width, "out", self.bias if self.out_bias is None else self.out_bias)

    def _normalize(self, y: Value) -> Value:
        if self.norm is None:
            return y
        if self.norm_groups == 1:
            return self.norm(y)
        runs = ops.reshape(y, shape=(*y.shape[:2], self.norm_groups, self.inner // self.norm_groups))
        normed = ops.reshape(ops.rms_norm(runs, eps=self.norm.eps), shape=y.shape)
        return ops.mul(normed, param("norm.weight", (self.inner,), fill(1.0)), name="norm")


def negate_exp(a_log: Value) -> Value:
    """Return A = −e^a_log, elementwise."""
    return ops.neg(ops.exp(a_log, name="rates"), name="a")
