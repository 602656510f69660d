"""Recurrent layers of published models: RG-LRU, RWKV-4 to RWKV-7, the cells of xLSTM, gated delta rules."""

from __future__ import annotations

import math

from weft.ir import ops
from weft.ir.graph import Value
from weft.ir.ops.activation import activate
from weft.ir.recipes import Literal, Map, Recipe, Uniform
from weft.ir.recipes.frequencies import Interpolate

from .build import constant_param, fill, keep, kept, module, named, param, uniform
from .checks import need, need_activation, need_divisor, need_int
from .hybrids import causal_conv
from .layers import LayerNorm, Norm, RMSNorm, divide_width, linear, positions
from .recurrence import State, scan
from .state_space import init_random_decays, init_step_bias, negate_exp

_MAX_RATE = 8.0  # −log a per token is at most this times softplus of the parameter
_LOWEST = -1e30  # the initial maximum of exponents; −∞ would give NaN in differences


def _init_rates(shape: tuple[int, ...], name: str, seed: int) -> Recipe:
    """Return initial values of ``rate`` with decays a in [0.9, 0.999] if the gate r is 1 (De 2024, section 2.4)."""
    low, high = (-math.log(a) / _MAX_RATE for a in (0.999, 0.9))
    return Map(Uniform(shape, low, high, name, seed), "inverse_softplus")


@module
class RGLRU:
    """The recurrent block of Griffin (De 2024): a convolution and a real-gated linear recurrent unit, times a gate.

    - u: x projected by ``in.weight`` [width, dim], then a causal convolution over `conv` tokens (``conv.weight``,
      ``conv.bias``). `width` defaults to dim.
    - h_t = a_t h_{t−1} + √(1 − a_t²) i_t u_t, with a = e^(−8 r softplus(rate)); the root is 1 at position 0.
    - The gates i and r are σ(W u + b), with W block-diagonal: ``input.weight`` and ``recur.weight`` [width,
      width/heads] have its `heads` blocks [out, in] below each other; ``input.bias``, ``recur.bias``, ``rate`` [width].
    - The output is h ⊙ activation(W x), W = ``gate.weight`` [width, dim], projected by ``out.weight`` [dim, width].

    in, gate and out have biases if `bias`.
    """

    heads: int
    width: int | None = None
    conv: int = 4
    activation: str = "gelu_tanh"
    bias: bool = True

    def __post_init__(self) -> None:
        need_int(self, "conv", least=2)
        fits = self.width is None or self.width % self.heads == 0
        need(self, fits, f"heads={self.heads} does not divide width={self.width}")

    def __call__(self, x: Value) -> Value:
        width = self.width or x.width
        u = causal_conv(linear(x, width, "in", self.bias), self.conv, True)
        rate = ops.softplus(param("rate", (width,), _init_rates), name="rates")
        decay = ops.mul(self._compute_gate(u, "recur"), ops.affine(rate, by=-_MAX_RATE), name="decay")
        first = ops.unsqueeze(ops.equal(positions(x), 0), axes=(2,), name="first")
        input_scale = ops.sqrt(ops.affine(ops.exp(ops.affine(decay, by=2.0)), by=-1.0, plus=1.0), name="left_over")
        driven = ops.mul(self._compute_gate(u, "input"), u)
        driven = ops.where(first, driven, ops.mul(driven, input_scale), name="driven")

        def step(h: Value, a: Value, driven: Value) -> tuple[Value, Value]:
            h = ops.add(ops.mul(a, h), driven)
            return h, h

        h = scan(step, ops.exp(decay, name="a"), driven, state=(width,))
        gate = activate(linear(x, width, "gate", self.bias), self.activation)
        return linear(ops.mul(h, gate, name="gated"), x.width, "out", self.bias)

    def _compute_gate(self, u: Value, name: str) -> Value:
        block = u.width // self.heads
        weight = param(f"{name}.weight", (u.width, block), uniform(block**-0.5))
        y = ops.head_linear(u, weight, heads=self.heads)
        return ops.sigmoid(ops.add(y, param(f"{name}.bias", (u.width,), fill(0.0))), name=f"{name}_gate")


@module
class RWKVTimeMix:
    """The attention-free mixer of RWKV-4 (Peng 2023): a mean of values with weights that decay with distance.

    k, v and r are linear maps ``k.weight``, ``v.weight`` and ``r.weight`` [width, dim] of p + (x − p) ⊙ ``k.mix`` (or
    ``v.mix``, ``r.mix`` [dim]), with p the previous token. The weighted sum Σ_{s<t} e^(k_s − (t − 1 − s) e^decay) v_s
    + e^(k_t + first) v_t, divided by the sum of its weights and multiplied by σ(r), is projected by ``out.weight``
    [dim, width]; ``decay`` and ``first`` are [width]. `width` defaults to dim.
    """

    width: int | None = None

    def __call__(self, x: Value) -> Value:
        width, before = self.width or x.width, _delay_tokens(x)
        k, v, r = (linear(_mix_tokens(x, before, name), width, name) for name in ("k", "v", "r"))
        fade = ops.neg(ops.exp(param("decay", (width,), uniform(1.0))), name="fade")
        first = param("first", (width,), fill(math.log(0.3)))

        def step(state: tuple[Value, ...], k: Value, v: Value) -> tuple[tuple[Value, ...], Value]:
            above, below, top = state  # numerator and denominator, divided by e^top to prevent overflow
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
    """The feed-forward of RWKV-4 (Peng 2023): σ(r) ⊙ W relu(k)², with W = ``v.weight`` [dim, hidden].

    k and r are linear maps ``k.weight`` [hidden, dim] and ``r.weight`` [dim, dim] of p + (x − p) ⊙ ``k.mix`` (or
    ``r.mix`` [dim]), with p the previous token.
    """

    hidden: int

    def __call__(self, x: Value) -> Value:
        before = _delay_tokens(x)
        k, r = linear(_mix_tokens(x, before, "k"), self.hidden, "k"), linear(_mix_tokens(x, before, "r"), x.width, "r")
        return ops.mul(ops.sigmoid(r), linear(ops.relu2(k), x.width, "v"), name="received")


@module
class MLSTM:
    """The matrix LSTM of xLSTM (Beck 2024) as in xLSTM 7B: linear attention with an exponential input gate.

    q and k are projected by ``q.weight`` and ``k.weight`` [qk_dim, dim], v by ``v.weight`` [v_dim, dim], the input and
    forget gates i and f by ``i.weight`` and ``f.weight`` [heads, dim] with biases, limited to ±`cap` by tanh. The
    states of each head are C_t = σ(f) C_{t−1} + e^i k vᵀ, n_t = σ(f) n_{t−1} + e^i k. The output is
    Cᵀq / (max(|nᵀq|, 1) + eps e^m), with q divided by √(qk_dim/heads), and m_t = max(log σ(f) + m_{t−1}, i). It is
    normalized per head by `norm` (``norm.weight`` [v_dim]), multiplied by σ(W x), W = ``gate.weight`` [v_dim, dim], and
    projected by ``out.weight`` [dim, v_dim]. `qk_dim` defaults to dim/2, `v_dim` to dim.
    """

    heads: int
    qk_dim: int | None = None
    v_dim: int | None = None
    cap: float = 15.0
    eps: float = 1e-6
    norm: LayerNorm = LayerNorm(1e-6, bias=False)

    def __post_init__(self) -> None:
        for name in ("qk_dim", "v_dim"):
            width = getattr(self, name)
            need(self, width is None or width % self.heads == 0, f"heads={self.heads} does not divide {name}={width}")

    def __call__(self, x: Value) -> Value:
        heads, values = self.heads, self.v_dim or x.width
        keys = self.qk_dim or x.width // 2
        grid = (*x.shape[:2], heads)
        q, k, v = linear(x, keys, "q"), linear(x, keys, "k"), linear(x, values, "v")
        i, f = (self._limit(linear(x, heads, name, bias=True), f"{name}_gate") for name in ("i", "f"))
        keep = ops.neg(ops.softplus(ops.neg(f)), name="decay")
        q = ops.affine(q, by=(keys // heads) ** -0.5, name="q_scaled")
        by_head = ops.reshape(k, shape=(*grid, keys // heads))
        k = ops.reshape(ops.mul(by_head, ops.exp(ops.unsqueeze(i, axes=(3,)))), shape=k.shape, name="k_weighed")
        # A further value of 1 makes n part of the state. Limited weights need no stabilizer in f32.
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

    def _limit(self, x: Value, name: str) -> Value:
        return ops.affine(ops.tanh(ops.affine(x, by=1 / self.cap)), by=self.cap, name=name)


@module
class RWKV6TimeMix:
    """The mixer of RWKV-6 (Peng 2024, Eagle and Finch, arXiv 2404.05892): linear attention whose decay depends on the
    token, per key feature; with `static`, the mixer of RWKV-5, whose decay is constant.

    - r, k, v and g are linear maps ``r``, ``k``, ``v`` and ``g`` [dim, dim] of four mixtures of x and p, the token
      before: for r, x + (p − x) ⊙ (``r.mix`` + B tanh(A y)), with y = x + (p − x) ⊙ ``mix``, A = ``r.mix_down``
      [mix_rank, dim] and B = ``r.mix_up`` [dim, mix_rank]; for k, v and g likewise. `static` omits B tanh(A y).
    - The decay is w = exp(−exp(``decay`` + B tanh(A u))), with u a fifth mixture (``w.mix``, …), A = ``decay_down``
      [decay_rank, dim] and B = ``decay_up`` [dim, decay_rank]. `static` omits B tanh(A u).
    - Each head has the state S_t = diag(w_t) S_{t−1} + k_t v_tᵀ and the output (S_{t−1} + diag(``bonus``) k_t v_tᵀ)ᵀ
      r_t, which is normalized (``norm.weight``, ``norm.bias``), multiplied by silu(g), and projected by ``out.weight``.
    """

    heads: int
    mix_rank: int = 32
    decay_rank: int = 64
    static: bool = False
    eps: float = 64e-5

    def __call__(self, x: Value) -> Value:
        divide_width(x, self.heads, "heads")
        change = ops.sub(_delay_tokens(x), x, name="change")
        r, k, v, g = (linear(self._mix_previous(x, change, name), x.width, name) for name in "rkvg")
        rate = param("decay", (x.width,), uniform(1.0))
        if self.static:
            fade = ops.add(ops.affine(k, by=0.0), rate)
        else:
            down = ops.tanh(linear(self._mix_previous(x, change, "w"), self.decay_rank, "decay_down"))
            fade = ops.add(linear(down, x.width, "decay_up"), rate)
        fade = ops.neg(ops.exp(fade), name="fade")
        # r_t reads the state S_{t−1}: so keys, values and decays are delayed by one token.
        earlier = ops.gated_linear_attention(r, *map(_delay_tokens, (k, v, fade)), heads=self.heads, groups=self.heads)
        bonus = param("bonus", (x.width,), uniform(0.5))
        y = ops.add(earlier, _weigh(ops.mul(r, ops.mul(k, bonus)), v, self.heads), name="read")
        y = ops.mul(_norm_heads(y, self.heads, self.eps), ops.swish(g), name="gated")
        return linear(y, x.width, "out")

    def _mix_previous(self, x: Value, change: Value, name: str) -> Value:
        share = param(f"{name}.mix", (x.width,), fill(0.5))
        if self.static:
            return ops.add(x, ops.mul(change, share), name=f"{name}_mixed")
        y = ops.add(x, ops.mul(change, param("mix", (x.width,), fill(0.5))))
        dynamic_mix = linear(ops.tanh(linear(y, self.mix_rank, f"{name}.mix_down")), x.width, f"{name}.mix_up")
        return ops.add(x, ops.mul(change, ops.add(dynamic_mix, share)), name=f"{name}_mixed")


@module
class RWKV7TimeMix:
    """The mixer of RWKV-7 (Peng 2025, Goose, arXiv 2503.14456): a state with a decay per key feature.

    Each token removes the value at one key from the state, and adds a value at another key.

    - Each of r, w, k, v, a and g is a map of its own mixture m of x and the previous token p: for r, m = x + (p − x) ⊙
      ``r.mix``. r, k and v are linear maps ``r``, ``k`` and ``v`` [dim, dim]. The decay is w = exp(−σ(B tanh(A m) +
      bias)/√e), with A = ``decay_down`` [decay_rank, dim] and B = ``decay_up`` [dim, decay_rank]. The rate is
      a = σ(B A m + bias), with ``rate_down`` and ``rate_up``, the gate g = B σ(A m), with ``gate_down``, ``gate_up``.
    - With c = k ⊙ ``removal``, divided by its norm on each head, and k' = k ⊙ (1 + (a − 1) ⊙ ``growth``), the state is
      S_t = S_{t−1} (diag(w) − c (a ⊙ c)ᵀ) + v k'ᵀ.
    - S_t r is normalized on each head; (r · (``bonus`` ⊙ k')) v is added; the sum times g is projected by ``out``.

    `keep_values` is a name under which v is stored. `mix_values` is the name of the v₁ that an earlier layer stored;
    v then becomes v + (v₁ − v) ⊙ σ(B A m + bias), with ``value_down`` and ``value_up``.
    """

    heads: int
    decay_rank: int = 64
    rate_rank: int = 64
    gate_rank: int = 128
    value_rank: int = 32
    keep_values: str | None = None
    mix_values: str | None = None
    eps: float = 64e-5

    def __call__(self, x: Value) -> Value:
        width, heads, change = x.width, self.heads, ops.sub(_delay_tokens(x), x, name="change")
        size = divide_width(x, heads, "heads")
        mixed = {
            name: ops.add(x, ops.mul(change, param(f"{name}.mix", (width,), fill(0.5))), name=f"{name}_mixed")
            for name in "rwkvag"
        }
        r, k, v = (linear(mixed[name], width, name) for name in "rkv")
        if self.keep_values is not None:
            keep(self.keep_values, v)
        if self.mix_values is not None:
            gap = ops.sub(kept(self.mix_values)[0], v)
            v = ops.add(v, ops.mul(gap, self._map_low_rank(mixed["v"], "value", self.value_rank)), name="v_mixed_first")
        down = ops.tanh(linear(mixed["w"], self.decay_rank, "decay_down"))
        d = ops.sigmoid(linear(down, width, "decay_up", bias=True))
        w = ops.exp(ops.affine(d, by=-math.exp(-0.5)), name="w")
        a = self._map_low_rank(mixed["a"], "rate", self.rate_rank)
        g = linear(ops.sigmoid(linear(mixed["g"], self.gate_rank, "gate_down")), width, "gate_up")
        c = self._normalize_keys(ops.mul(k, param("removal", (width,), fill(0.85))))
        grown = ops.mul(ops.affine(a, plus=-1.0), param("growth", (width,), fill(1.0)))
        k = ops.mul(k, ops.affine(grown, plus=1.0), name="k_grown")

        def step(state: Value, *token: Value) -> tuple[Value, Value]:
            r, w, k, v, c, ac = (ops.reshape(t, shape=(t.shape[0], heads, 1, size)) for t in token)
            removed = ops.sum(ops.mul(state, c), axes=(3,), keepdims=True)  # [batch, heads, size, 1]
            written = ops.mul(ops.transpose(v, axes=(0, 1, 3, 2)), k)
            state = ops.add(ops.sub(ops.mul(state, w), ops.mul(removed, ac)), written)
            return state, ops.reshape(ops.sum(ops.mul(state, r), axes=(3,)), shape=(r.shape[0], width))

        y = scan(step, r, w, k, v, c, ops.mul(a, c), state=(heads, size, size))
        y = ops.add(_norm_heads(y, heads, self.eps), _weigh(ops.mul(r, ops.mul(k, param("bonus", (width,)))), v, heads))
        return linear(ops.mul(y, g, name="gated"), width, "out")

    def _map_low_rank(self, x: Value, name: str, rank: int) -> Value:
        return ops.sigmoid(linear(linear(x, rank, f"{name}_down"), x.width, f"{name}_up", bias=True), name=name)

    def _normalize_keys(self, x: Value) -> Value:
        """Return x [batch, seq, heads·d] with each head divided by its Euclidean norm (at least 1e-12)."""
        by_head = ops.reshape(x, shape=(*x.shape[:2], self.heads, x.width // self.heads))
        length = ops.clip(ops.sqrt(ops.sum(ops.square(by_head), axes=(3,), keepdims=True)), low=1e-12)
        return ops.reshape(ops.div(by_head, length), shape=x.shape, name="unit")


@module
class SLSTM:
    """The scalar LSTM of xLSTM (Beck 2024, arXiv 2405.04517), whose gates read the output for the previous token.

    z, i, f and o are W x_t + R h_{t−1} + b, with W = ``z.weight`` … [dim, dim], b = ``z.bias`` …, and R = ``z.recur`` …
    [dim, dim/heads], block-diagonal in `heads` blocks. With `conv`, i and f read x after a causal convolution over
    `conv` tokens and silu. c_t = σ(f) c_{t−1} + e^i tanh(z), n_t = σ(f) n_{t−1} + e^i, h_t = σ(o) c_t / n_t. To prevent
    overflow, c and n are stored divided by e^m, with m_t = max(log σ(f) + m_{t−1}, i). The output is h, normalized on
    each head (``norm.weight``).
    """

    heads: int
    conv: int | None = None
    eps: float = 1e-6

    def __post_init__(self) -> None:
        need_int(self, "conv", least=2)

    def __call__(self, x: Value) -> Value:
        width, block = x.width, divide_width(x, self.heads, "heads")
        smooth = x if self.conv is None else ops.swish(causal_conv(x, self.conv, True))
        gate_inputs = [linear(smooth if name in "if" else x, width, name, bias=True) for name in "zifo"]
        recur = [param(f"{name}.recur", (width, block), uniform(block**-0.5)) for name in "zifo"]

        def step(state: tuple[Value, ...], *token: Value) -> tuple[tuple[Value, ...], Value]:
            c, n, m, h = state
            gates = (ops.add(x, self._apply_blocks(h, weight)) for x, weight in zip(token, recur, strict=True))
            z, i, f, o = gates
            forget = ops.sub(m, ops.softplus(ops.neg(f)))  # m + log σ(f)
            top = ops.maximum(forget, i)
            forget_scale, input_scale = ops.exp(ops.sub(forget, top)), ops.exp(ops.sub(i, top))
            c = ops.add(ops.mul(forget_scale, c), ops.mul(input_scale, ops.tanh(z)))
            n = ops.add(ops.mul(forget_scale, n), input_scale)
            h = ops.mul(ops.sigmoid(o), ops.div(c, n))
            return (c, n, top, h), h

        states = {name: State((width,), _LOWEST if name == "m" else 0.0) for name in "cnmh"}
        return _norm_heads(scan(step, *gate_inputs, state=states), self.heads, self.eps, bias=False)

    def _apply_blocks(self, h: Value, weight: Value) -> Value:
        """Return W h for h [batch, dim] and the block-diagonal W, whose blocks `weight` [dim, dim/heads] stacks."""
        return ops.reshape(ops.head_linear(ops.unsqueeze(h, axes=(1,)), weight, heads=self.heads), shape=h.shape)


def _delay_tokens(x: Value) -> Value:
    """Return x [batch, seq, dim] shifted to the right by one token; the first token is 0."""
    taps = Interpolate(Literal((1.0, 0.0), (1, 2)), x.width, 1.0)
    return ops.causal_conv(x, constant_param("shift.weight", (x.width, 2), taps), name="before")


def _mix_tokens(x: Value, before: Value, name: str) -> Value:
    """Return before + mix ⊙ (x − before), with the parameter ``name.mix`` [dim]; all values are [batch, seq, dim]."""
    mix = param(f"{name}.mix", (x.width,), fill(0.5))
    return ops.add(before, ops.mul(ops.sub(x, before), mix), name=f"{name}_mixed")


def _weigh(scores: Value, v: Value, heads: int) -> Value:
    """Return v [batch, seq, heads·d], each head times the sum of `scores` [batch, seq, heads·d] over this head."""
    split = [ops.reshape(t, shape=(*t.shape[:2], heads, t.width // heads)) for t in (scores, v)]
    return ops.reshape(ops.mul(ops.sum(split[0], axes=(3,), keepdims=True), split[1]), shape=v.shape, name="weighed")


def _norm_heads(x: Value, heads: int, eps: float, bias: bool = True) -> Value:
    """Return x [batch, seq, heads·d] normalized over each head (mean 0, variance 1), times ``norm.weight`` [heads·d],
    and with `bias` plus ``norm.bias`` [heads·d]."""
    split = ops.reshape(x, shape=(*x.shape[:2], heads, x.width // heads))
    joined = ops.reshape(ops.layer_norm(split, eps=eps, name="norm"), shape=x.shape)
    scaled = ops.mul(joined, param("norm.weight", (x.width,), fill(1.0)), name="normed")
    return ops.add(scaled, param("norm.bias", (x.width,), fill(0.0)), name="shifted") if bias else scaled


_TINY = 1e-6  # added to the squared norm of a key


@module
class GatedDeltaNet:
    """The gated delta rule with `heads` value heads in `groups` groups that share q and k (Yang 2024, Gated DeltaNet).

    - q, k, v: projected by ``qkv.weight`` [2·groups·head_dim + heads·v_head_dim, dim], in this order; then a causal
      convolution over `conv` tokens, ``conv.weight``, and SiLU; q and k of each head are divided by their norms, q also
      by √head_dim.
    - β = σ(W x), W = ``beta.weight`` [heads, dim]; doubled with `negative`, for negative eigenvalues (Grazzi 2024).
    - log decay of the state: −e^a_log · softplus(W x + b), W = ``dt.weight`` [heads, dim], b = ``dt.bias``, ``a_log``
      [heads]. With `per_key` every key feature has a decay (Kimi Linear, 2025), and dt has heads·head_dim outputs.
    - The output of the op `gated_delta_rule` is normalized per head by `norm`, multiplied by the activation `gate` of
      W x, W = ``gate.weight`` [heads·v_head_dim, dim], and projected by ``out.weight``.

    With `rank`, decay and gate have factorized projections: ``dt_down.weight`` and ``gate_down.weight`` [rank, dim],
    ``dt.weight`` and ``gate.weight`` [..., rank]. `groups` defaults to `heads`, `v_head_dim` to `head_dim`.
    """

    heads: int
    head_dim: int
    v_head_dim: int | None = None
    groups: int | None = None
    conv: int = 4
    gate: str = "silu"
    norm: Norm = RMSNorm()
    negative: bool = False
    per_key: bool = False
    rank: int | None = None

    def __post_init__(self) -> None:
        need_int(self, "conv", least=2)
        need_activation(self, self.gate)
        if self.groups is not None:
            need_divisor(self, "groups", "heads")

    @property
    def widths(self) -> tuple[int, int]:
        """Return the widths of k (groups · head_dim) and of v (heads · v_head_dim)."""
        return (self.groups or self.heads) * self.head_dim, self.heads * (self.v_head_dim or self.head_dim)

    def __call__(self, x: Value) -> Value:
        keys, values = self.widths
        mixed = causal_conv(linear(x, 2 * keys + values, "qkv"), self.conv, False, "silu")
        q, k, v = ops.split.emit(mixed, sizes=(keys, keys, values), name=("q", "k", "v"))
        # RMSNorm divides by √mean, not by the length: a factor 1/√head_dim gives length 1, and q gets it twice.
        q, k = self._normalize(q, 1 / self.head_dim, "q_unit"), self._normalize(k, self.head_dim**-0.5, "k_unit")
        beta = ops.sigmoid(linear(x, self.heads, "beta"), name="rate")
        beta = ops.affine(beta, by=2.0, name="rate_doubled") if self.negative else beta
        groups = self.groups or self.heads
        y = ops.gated_delta_rule(q, k, v, beta, self._compute_decay(x), heads=self.heads, groups=groups)
        by_head = ops.reshape(y, shape=(*y.shape[:2], self.heads, values // self.heads), name="by_head")
        normed = ops.reshape(named(self.norm, "norm")(by_head), shape=y.shape, name="normed")
        gate = linear(self._project_down(x, "gate_down"), values, "gate")
        return linear(ops.mul(normed, activate(gate, self.gate), name="gated"), x.width, "out")

    def _normalize(self, x: Value, factor: float, name: str) -> Value:
        """Return x [batch, seq, n·head_dim] with each head divided by its root mean square, times `factor`."""
        by_head = ops.reshape(x, shape=(*x.shape[:2], x.width // self.head_dim, self.head_dim))
        normed = ops.rms_norm(by_head, eps=_TINY / self.head_dim)
        return ops.reshape(ops.affine(normed, by=factor), shape=x.shape, name=name)

    def _compute_decay(self, x: Value) -> Value:
        """Return the log decay [batch, seq, heads], or [batch, seq, heads·head_dim] with `per_key`; at most 0."""
        rates = negate_exp(param("a_log", (self.heads,), init_random_decays))
        width = self.heads * (self.head_dim if self.per_key else 1)
        step = linear(self._project_down(x, "dt_down"), width, "dt")
        delta = ops.softplus(ops.add(step, param("dt.bias", (width,), init_step_bias), name="dt_biased"), name="delta")
        if not self.per_key:
            return ops.mul(delta, rates, name="decay")
        by_head = ops.reshape(delta, shape=(*x.shape[:2], self.heads, self.head_dim))
        return ops.reshape(ops.mul(by_head, ops.unsqueeze(rates, axes=(1,))), shape=delta.shape, name="decay")

    def _project_down(self, x: Value, name: str) -> Value:
        return x if self.rank is None else linear(x, self.rank, name)
