"""Recurrent layers of published models: the RG-LRU of Griffin, time and channel mixing of RWKV-4, mLSTM of xLSTM."""

from __future__ import annotations

import math

from weft.ir import ops
from weft.ir.graph import Value
from weft.ir.ops.activation import activate
from weft.ir.recipes import Literal, Map, Recipe, Uniform
from weft.ir.recipes.frequencies import Interpolate

from .build import computed, fill, module, named, param, uniform
from .checks import need, need_activation, need_few, need_modules, need_positive, need_whole
from .hybrids import convolved
from .layers import LayerNorm, linear, positions
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


@module
class MLSTM:
    """The matrix LSTM of xLSTM (Beck 2024) as in xLSTM 7B: linear attention with an exponential input gate.

    q, k [heads·d] come by ``q.weight`` and ``k.weight`` [qk_dim, dim], v by ``v.weight`` [v_dim, dim], the gates of
    input and forgetting by ``i.weight`` and ``f.weight`` [heads, dim] with biases, squashed to ±`cap`. States C and n
    forget by σ(f) and add e^i k vᵀ and e^i k; Cᵀq / (max(|nᵀq|, 1) + eps e^m), q divided by √d and m the largest log
    weight of a token, passes a norm on each head with ``norm.weight`` [v_dim], is multiplied by σ(x W) with
    ``gate.weight`` [v_dim, dim], and passes ``out.weight`` [dim, v_dim]. `qk_dim` defaults to dim/2, `v_dim` to dim.
    """

    heads: int
    qk_dim: int | None = None
    v_dim: int | None = None
    cap: float = 15.0
    eps: float = 1e-6
    norm: LayerNorm = LayerNorm(1e-6, bias=False)

    def __post_init__(self) -> None:
        need_whole(self, "heads", "qk_dim", "v_dim")
        need_few(self, "heads")
        need_positive(self, "cap", "eps")
        need_modules(self, "norm")
        for name in ("qk_dim", "v_dim"):
            width = getattr(self, name)
            need(self, width is None or width % self.heads == 0, f"heads={self.heads} does not divide {name}={width}")

    def __call__(self, x: Value) -> Value:
        """x [batch, seq, dim] → the same."""
        heads, values = self.heads, self.v_dim or x.width
        keys = self.qk_dim or x.width // 2
        grid = (*x.shape[:2], heads)
        q, k, v = linear(x, keys, "q"), linear(x, keys, "k"), linear(x, values, "v")
        i, f = (self._capped(linear(x, heads, name, bias=True), f"{name}_gate") for name in ("i", "f"))
        keep = ops.neg(ops.softplus(ops.neg(f)), name="decay")
        q = ops.affine(q, by=(keys // heads) ** -0.5, name="q_scaled")
        by_head = ops.reshape(k, shape=(*grid, keys // heads))
        k = ops.reshape(ops.mul(by_head, ops.exp(ops.unsqueeze(i, axes=(3,)))), shape=k.shape, name="k_weighed")
        # A value of 1 beside the others makes the state n. Capped weights need no stabilizer in f32.
        ones = ops.unsqueeze(ops.affine(i, by=0.0, plus=1.0), axes=(3,), name="ones")
        wide = ops.concat(ops.reshape(v, shape=(*grid, values // heads)), ones, axis=3)
        wide = ops.reshape(wide, shape=(*x.shape[:2], values + heads), name="v_and_one")
        y = ops.gated_linear_attention(q, k, wide, keep, heads=heads, groups=heads)
        parts = ops.reshape(y, shape=(*grid, values // heads + 1))
        above, below = ops.split.emit(parts, sizes=(values // heads, 1), name=("above", "below"))

        def step(m: Value, keep: Value, i: Value) -> tuple[Value, Value]:
            m = ops.maximum(ops.add(keep, m), i)
            return m, m

        m = ops.unsqueeze(scan(step, keep, i, state=(heads,)), axes=(3,))
        share = ops.add(ops.maximum(ops.abs(below), 1.0), ops.affine(ops.exp(m), by=self.eps), name="share")
        normed = named(self.norm.plain(), "norm")(ops.div(above, share))
        scaled = ops.mul(ops.reshape(normed, shape=v.shape), param("norm.weight", (values,), fill(1.0)), name="normed")
        gate = ops.sigmoid(linear(x, values, "gate"))
        return linear(ops.mul(scaled, gate, name="gated"), x.width, "out")

    def _capped(self, x: Value, name: str) -> Value:
        return ops.affine(ops.tanh(ops.affine(x, by=1 / self.cap)), by=self.cap, name=name)


def _before(x: Value) -> Value:
    """The token before each of x [batch, seq, dim], zeros before the first."""
    taps = Interpolate(Literal((1.0, 0.0), (1, 2)), x.width, 1.0)
    return ops.causal_conv(x, computed("shift.weight", (x.width, 2), taps), name="before")


def _mixed(x: Value, before: Value, name: str) -> Value:
    """before + mix ⊙ (x − before)."""
    mix = param(f"{name}.mix", (x.width,), fill(0.5))
    return ops.add(before, ops.mul(ops.sub(x, before), mix), name=f"{name}_mixed")
