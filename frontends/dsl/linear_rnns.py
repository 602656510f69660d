"""Recurrences with a few numbers per channel: the RG-LRU of Griffin, the time and channel mixing of RWKV-4."""

from __future__ import annotations

import math

from weft.ir import ops
from weft.ir.graph import Value
from weft.ir.ops.activation import activate
from weft.ir.recipes import Literal, Map, Recipe, Uniform
from weft.ir.recipes.frequencies import Interpolate

from .build import computed, fill, module, param, uniform
from .checks import need, need_activation, need_few, need_whole
from .hybrids import convolved
from .layers import linear, positions
from .recurrence import State, scan

_MAX_RATE = 8.0  # of −log a per token, times softplus of the parameter
_LOWEST = -1e30  # an exponent below all others


def _rates(shape: tuple[int, ...], name: str, seed: int) -> Recipe:
    """Parameters whose a at an open gate lie between 0.9 and 0.999 (De 2024, section 2.4)."""
    low, high = (-math.log(a) / _MAX_RATE for a in (0.999, 0.9))
    return Map(Uniform(shape, low, high, name, seed), "inverse_softplus")


@module
class RGLRU:
    """The recurrent block of Griffin (De 2024): a convolution and a real-gated linear recurrent unit beside a gate.

    x passes ``in.weight`` [width, dim], a causal convolution ``conv.weight`` over `conv` tokens with ``conv.bias``,
    and h_t = a_t h_{t−1} + √(1 − a_t²) i_t u_t with a = e^(−8 r softplus(rate)), where at position 0 the factor of the
    input is 1. The gates i and r are σ(u W + b), W block-diagonal in `heads` blocks: ``input.weight`` and
    ``recur.weight`` [width, width/heads], ``input.bias``, ``recur.bias`` and ``rate`` [width]. h times `activation` of
    x W with ``gate.weight`` [width, dim] passes ``out.weight`` [dim, width]. in, gate and out have biases if `bias`.
    `width` defaults to dim.
    """

    heads: int
    width: int | None = None
    conv: int = 4
    activation: str = "gelu_tanh"
    bias: bool = True

    def __post_init__(self) -> None:
        need_whole(self, "heads", "width")
        need_few(self, "heads")
        need_whole(self, "conv", least=2)
        need_activation(self, self.activation)
        fits = self.width is None or self.width % self.heads == 0
        need(self, fits, f"heads={self.heads} does not divide width={self.width}")

    def __call__(self, x: Value) -> Value:
        """x [batch, seq, dim] → the same."""
        width = self.width or x.width
        u = convolved(linear(x, width, "in", self.bias), self.conv, True)
        rate = ops.softplus(param("rate", (width,), _rates), name="rates")
        decay = ops.mul(self._gate(u, "recur"), ops.affine(rate, by=-_MAX_RATE), name="decay")
        first = ops.unsqueeze(ops.equal(positions(x), 0), axes=(2,), name="first")
        kept = ops.sqrt(ops.affine(ops.exp(ops.affine(decay, by=2.0)), by=-1.0, plus=1.0), name="left_over")
        driven = ops.mul(self._gate(u, "input"), u)
        driven = ops.where(first, driven, ops.mul(driven, kept), name="driven")

        def step(h: Value, a: Value, driven: Value) -> tuple[Value, Value]:
            h = ops.add(ops.mul(a, h), driven)
            return h, h

        h = scan(step, ops.exp(decay, name="a"), driven, state=(width,))
        gate = activate(linear(x, width, "gate", self.bias), self.activation)
        return linear(ops.mul(h, gate, name="gated"), x.width, "out", self.bias)

    def _gate(self, u: Value, name: str) -> Value:
        block = u.width // self.heads
        weight = param(f"{name}.weight", (u.width, block), uniform(block**-0.5))
        y = ops.head_linear(u, weight, heads=self.heads)
        return ops.sigmoid(ops.add(y, param(f"{name}.bias", (u.width,), fill(0.0))), name=f"{name}_gate")


@module
class RWKVTimeMix:
    """The attention-free mixer of RWKV-4 (Peng 2023): a weighted mean of values that decays with distance.

    k, v and r come from x and the token before it, mixed by ``k.mix``, ``v.mix`` and ``r.mix`` [dim], by ``k.weight``,
    ``v.weight`` and ``r.weight`` [width, dim]. σ(r) times Σ e^(k_s − (t − 1 − s) e^decay) v_s + e^(k_t + first) v_t,
    divided by the sum of its weights, passes ``out.weight`` [dim, width]; ``decay`` and ``first`` are [width]. `width`
    defaults to dim.
    """

    width: int | None = None

    def __post_init__(self) -> None:
        need_whole(self, "width")

    def __call__(self, x: Value) -> Value:
        """x [batch, seq, dim] → the same."""
        width, before = self.width or x.width, _before(x)
        k, v, r = (linear(_mixed(x, before, name), width, name) for name in ("k", "v", "r"))
        fade = ops.neg(ops.exp(param("decay", (width,), uniform(1.0))), name="fade")
        first = param("first", (width,), fill(math.log(0.3)))

        def step(state: tuple[Value, ...], k: Value, v: Value) -> tuple[tuple[Value, ...], Value]:
            above, below, top = state  # sums, divided by e^top so that none overflows
            now = ops.add(k, first)
            most = ops.maximum(top, now)
            old, new = ops.exp(ops.sub(top, most)), ops.exp(ops.sub(now, most))
            y = ops.div(ops.add(ops.mul(old, above), ops.mul(new, v)), ops.add(ops.mul(old, below), new))
            faded = ops.add(top, fade)
            top = ops.maximum(faded, k)
            old, new = ops.exp(ops.sub(faded, top)), ops.exp(ops.sub(k, top))
            return (ops.add(ops.mul(old, above), ops.mul(new, v)), ops.add(ops.mul(old, below), new), top), y

        y = scan(step, k, v, state={"above": (width,), "below": (width,), "top": State((width,), _LOWEST)})
        return linear(ops.mul(ops.sigmoid(r), y, name="received"), x.width, "out")


@module
class RWKVChannelMix:
    """The feed-forward of RWKV-4 (Peng 2023): σ(r) times relu(x W_k)² W_v.

    x and the token before it are mixed by ``k.mix`` and ``r.mix`` [dim]; ``k.weight`` [hidden, dim], ``v.weight``
    [dim, hidden], ``r.weight`` [dim, dim].
    """

    hidden: int

    def __post_init__(self) -> None:
        need_whole(self, "hidden")

    def __call__(self, x: Value) -> Value:
        """x [batch, seq, dim] → the same."""
        before = _before(x)
        k, r = linear(_mixed(x, before, "k"), self.hidden, "k"), linear(_mixed(x, before, "r"), x.width, "r")
        return ops.mul(ops.sigmoid(r), linear(ops.relu2(k), x.width, "v"), name="received")


def _before(x: Value) -> Value:
    """The token before each of x [batch, seq, dim], zeros before the first."""
    taps = Interpolate(Literal((1.0, 0.0), (1, 2)), x.width, 1.0)
    return ops.causal_conv(x, computed("shift.weight", (x.width, 2), taps), name="before")


def _mixed(x: Value, before: Value, name: str) -> Value:
    """before + mix ⊙ (x − before)."""
    mix = param(f"{name}.mix", (x.width,), fill(0.5))
    return ops.add(before, ops.mul(ops.sub(x, before), mix), name=f"{name}_mixed")
