"""Recurrent mixers in float64, token by token and head by head, without the stabilizers of their implementations."""

from __future__ import annotations

import numpy as np

from weft.frontends import dsl

from .elementary import (
    ACTIVATIONS,
    Array,
    Formula,
    Weights,
    causal_conv,
    head_slices,
    layer_norm,
    linear,
    relu,
    rms_norm,
    sigmoid,
    silu,
    softplus,
)


def short_conv(module: dsl.ShortConv) -> Formula:
    """(after ⊙ conv(before ⊙ u)) W for before, after, u projected from x (LFM2)."""

    def formula(x: Array, w: Weights) -> Array:
        before, after, u = np.split(linear(x, w, "in", module.bias), 3, 1)
        return linear(after * causal_conv(before * u, w, module.bias), w, "out", module.bias)

    return formula


# -- state spaces


def mamba(module: dsl.Mamba) -> Formula:
    """h_t = e^(Δ_t A) h_{t−1} + Δ_t B_t u_t, y_t = C_t h_t + D u_t of each channel (Gu & Dao 2023)."""

    def formula(x: Array, w: Weights) -> Array:
        rank = module.dt_rank or -(-x.shape[1] // 16)
        u, gate = np.split(linear(x, w, "in", module.bias), 2, 1)
        u = silu(causal_conv(u, w, module.conv_bias))
        step, b, c = np.split(linear(u, w, "x"), [rank, rank + module.state], 1)
        if isinstance(module.norms, dsl.RMSNorm):
            eps = module.norms.eps
            step, b, c = (rms_norm(v, w[f"{n}_norm.weight"], eps) for n, v in (("dt", step), ("b", b), ("c", c)))
        delta, a = softplus(linear(step, w, "dt", True)), -np.exp(w["a_log"])
        h, out = np.zeros((module.inner, module.state)), np.zeros_like(u)
        for t in range(len(x)):
            h = np.exp(delta[t, :, None] * a) * h + np.outer(delta[t] * u[t], b[t])
            out[t] = h @ c[t] + w["d"] * u[t]
        return linear(out * silu(gate), w, "out", module.bias)

    return formula


def mamba2(module: dsl.Mamba2) -> Formula:
    """h_t = e^(Δ_t a) h_{t−1} + Δ_t u_t B_tᵀ, y_t = h_t C_t + d u_t of each head, with B and C per group (Dao 2024)."""

    def formula(x: Array, w: Weights) -> Array:
        inner, heads, groups, state = module.inner, module.heads, module.groups, module.state
        sizes = [inner, 2 * inner + 2 * groups * state]
        gate, u, step = np.split(linear(x, w, "in", module.bias), sizes, 1)
        u, b, c = np.split(silu(causal_conv(u, w, module.conv_bias)), [inner, inner + groups * state], 1)
        delta = np.maximum(softplus(step + w["dt.bias"]), module.least_step or 0.0)
        out = np.zeros_like(u)
        for head, s in enumerate(head_slices(heads, inner // heads)):
            g = head_slices(groups, state)[head * groups // heads]
            h = np.zeros((inner // heads, state))
            for t in range(len(x)):
                h = np.exp(-delta[t, head] * np.exp(w["a_log"][head])) * h
                h += delta[t, head] * np.outer(u[t, s], b[t, g])
                out[t, s] = h @ c[t, g] + w["d"][head] * u[t, s]

        def norm(y: Array) -> Array:
            if module.norm is None:
                return y
            runs = y.reshape(len(y), module.norm_groups, -1)
            return rms_norm(runs, eps=module.norm.eps).reshape(y.shape) * w["norm.weight"]

        y = norm(out) * silu(gate) if module.norm_first else norm(out * silu(gate))
        return linear(y, w, "out", module.bias if module.out_bias is None else module.out_bias)

    return formula


# -- linear attention with decays


def lightning_attention(module: dsl.LightningAttention) -> Formula:
    """A sum over all earlier tokens, which fade by λ per token (Qin 2023, equation 3)."""

    def formula(x: Array, w: Weights) -> Array:
        q, k, v = (silu(linear(x, w, name)) for name in "qkv")
        gap, out = np.subtract.outer(np.arange(len(x)), np.arange(len(x))), np.zeros_like(q)
        for h, s in enumerate(head_slices(module.heads, q.shape[1] // module.heads)):
            fade = np.exp(-module.decay * 2.0 ** (-8 * (h + 1) / module.heads))
            out[:, s] = (q[:, s] @ k[:, s].T * np.where(gap >= 0, fade**gap, 0)) @ v[:, s]
        return linear(rms_norm(out, w["norm.weight"]) * sigmoid(linear(x, w, "gate")), w, "out")

    return formula


def gated_delta_net(module: dsl.GatedDeltaNet) -> Formula:
    """S_t = e^(g_t) S_{t−1} + β_t k_t (v_t − S_{t−1}ᵀ k_t)ᵀ (Yang 2024, section 3.4; Kimi Linear, section 4)."""

    def formula(x: Array, w: Weights) -> Array:
        heads, d, dv = module.heads, module.head_dim, module.v_head_dim or module.head_dim
        groups, eps = module.groups or heads, module.norm.eps if isinstance(module.norm, dsl.RMSNorm) else 0.0
        q, k, v = np.split(silu(causal_conv(linear(x, w, "qkv"), w)), [d * groups, 2 * d * groups], 1)
        beta = sigmoid(linear(x, w, "beta")) * (2 if module.negative else 1)
        narrow = {name: linear(x, w, f"{name}_down") if module.rank else x for name in ("dt", "gate")}
        steps, out = softplus(linear(narrow["dt"], w, "dt") + w["dt.bias"]), np.zeros((len(x), heads, dv))
        for h in range(heads):
            state, s = np.zeros((d, dv)), head_slices(groups, d)[h * groups // heads]
            for t in range(len(x)):
                qt, kt = (z[t, s] / np.sqrt((z[t, s] ** 2).sum() + 1e-6) for z in (q, k))
                step = steps[t, d * h : d * h + d] if module.per_key else steps[t, h].repeat(d)
                state = np.exp(-np.exp(w["a_log"][h]) * step)[:, None] * state
                state += beta[t, h] * np.outer(kt, v[t, dv * h : dv * h + dv] - kt @ state)
                out[t, h] = qt @ state / d**0.5
        gate = ACTIVATIONS[module.gate](linear(narrow["gate"], w, "gate"))
        return linear(rms_norm(out, w["norm.weight"], eps).reshape(gate.shape) * gate, w, "out")

    return formula


# -- RWKV


def shift(x: Array) -> Array:
    """Return x delayed by one token."""
    return np.concatenate([np.zeros_like(x[:1]), x[:-1]])


def head_norm(y: Array, heads: int, weight: Array, bias: Array | float = 0.0, eps: float = 64e-5) -> Array:
    """Return LayerNorm of each head of y, times `weight`, plus `bias`."""
    return layer_norm(y.reshape(len(y), heads, -1), eps=eps).reshape(y.shape) * weight + bias


def rwkv4(x: Array, w: Weights) -> Array:
    """The weighted mean over all earlier tokens, with powers written out (Peng 2023, equations 11 to 18)."""
    mixed = {n: w[f"{n}.mix"] * x + (1 - w[f"{n}.mix"]) * shift(x) for n in "kvr"}
    k, v, r = (linear(mixed[name], w, name) for name in "kvr")
    fade, out = np.exp(w["decay"]), np.zeros_like(v)
    for t in range(len(x)):
        weights = [np.exp(-(t - 1 - s) * fade + k[s]) for s in range(t)] + [np.exp(w["first"] + k[t])]
        out[t] = sum(weight * v[s] for s, weight in enumerate(weights)) / sum(weights)
    return linear(sigmoid(r) * out, w, "out")


def rwkv4_channel_mix(x: Array, w: Weights) -> Array:
    """σ(r) ⊙ relu(k)² W_v (Peng 2023, equations 19 to 21)."""
    k, r = (linear(w[f"{n}.mix"] * x + (1 - w[f"{n}.mix"]) * shift(x), w, n) for n in "kr")
    return sigmoid(r) * linear(relu(k) ** 2, w, "v")


def rwkv6(module: dsl.RWKV6TimeMix) -> Formula:
    """S_t = diag(w_t) S_{t−1} + k_t v_tᵀ, read before the update plus a bonus (Peng 2024, sections 4.1 and 4.2)."""

    def formula(x: Array, w: Weights) -> Array:
        change = shift(x) - x

        def mix(name: str) -> Array:
            if module.static:
                return x + change * w[f"{name}.mix"]
            lora = linear(np.tanh(linear(x + change * w["mix"], w, f"{name}.mix_down")), w, f"{name}.mix_up")
            return x + change * (w[f"{name}.mix"] + lora)

        r, k, v, g = (linear(mix(name), w, name) for name in "rkvg")
        d = np.broadcast_to(w["decay"], x.shape)
        if not module.static:
            d = d + linear(np.tanh(linear(mix("w"), w, "decay_down")), w, "decay_up")
        fade, out = np.exp(-np.exp(d)), np.zeros_like(x)
        for s in head_slices(module.heads, x.shape[1] // module.heads):
            state = np.zeros((s.stop - s.start,) * 2)
            for t in range(len(x)):
                now = np.outer(k[t, s], v[t, s])
                out[t, s] = r[t, s] @ (np.diag(w["bonus"][s]) @ now + state)
                state = np.diag(fade[t, s]) @ state + now
        normed = head_norm(out, module.heads, w["norm.weight"], w["norm.bias"], module.eps)
        return linear(silu(g) * normed, w, "out")

    return formula


def rwkv7(x: Array, w: Weights, heads: int, first: Array | None = None) -> tuple[Array, Array]:
    """S_t = S_{t−1} (diag(w_t) − cᵀ(a ⊙ c)) + v_tᵀ k_t (Peng 2025, section 4), and the values of the layer.

    The values of a `first` layer are mixed into those of the layer.
    """
    mixed = {name: x + (shift(x) - x) * w[f"{name}.mix"] for name in "rwkvag"}

    def low_rank(x: Array, name: str, bias: bool = True) -> Array:
        return linear(linear(x, w, f"{name}_down"), w, f"{name}_up", bias)

    r, k, v = (linear(mixed[name], w, name) for name in "rkv")
    values = v if first is None else v + (first - v) * sigmoid(low_rank(mixed["v"], "value"))
    d = linear(np.tanh(linear(mixed["w"], w, "decay_down")), w, "decay_up", True)
    fade, a = np.exp(-np.exp(-0.5) * sigmoid(d)), sigmoid(low_rank(mixed["a"], "rate"))
    g = linear(sigmoid(linear(mixed["g"], w, "gate_down")), w, "gate_up")
    removal, out, bonus = k * w["removal"], np.zeros_like(x), np.zeros_like(x)
    k = k * (1 + (a - 1) * w["growth"])
    for s in head_slices(heads, x.shape[1] // heads):
        state = np.zeros((s.stop - s.start,) * 2)
        for t in range(len(x)):
            c = removal[t, s] / np.linalg.norm(removal[t, s])
            state = state @ (np.diag(fade[t, s]) - np.outer(c, a[t, s] * c)) + np.outer(values[t, s], k[t, s])
            out[t, s] = state @ r[t, s]
        bonus[:, s] = (r * k * w["bonus"])[:, s].sum(1, keepdims=True) * values[:, s]
    return linear(g * (head_norm(out, heads, w["norm.weight"], w["norm.bias"]) + bonus), w, "out"), values


# -- xLSTM


def mlstm(module: dsl.MLSTM) -> Formula:
    """C_t = σ(f) C_{t−1} + e^i k vᵀ, divided by max(|nᵀq|, 1) (Beck 2024, equations 19 to 27).

    The stabilizer m is only visible in a term eps · e^m next to the divisor.
    """

    def formula(x: Array, w: Weights) -> Array:
        heads, cap = module.heads, module.cap
        q, k, v = (linear(x, w, name) for name in "qkv")
        d, dv = q.shape[1] // heads, v.shape[1] // heads
        i, f = (cap * np.tanh(linear(x, w, name, True) / cap) for name in "if")
        out = np.zeros((len(x), heads, dv))
        for h, (s, sv) in enumerate(zip(head_slices(heads, d), head_slices(heads, dv), strict=True)):
            state, norm, largest = np.zeros((d, dv)), np.zeros(d), 0.0
            for t in range(len(x)):
                keep, new, qt = sigmoid(f[t, h]), np.exp(i[t, h]), q[t, s] / d**0.5
                state, norm = keep * state + new * np.outer(k[t, s], v[t, sv]), keep * norm + new * k[t, s]
                largest = max(np.log(keep) + largest, i[t, h])
                out[t, h] = qt @ state / (max(abs(qt @ norm), 1) + module.eps * np.exp(largest))
        normed = layer_norm(out, eps=module.norm.eps).reshape(v.shape) * w["norm.weight"]
        return linear(normed * sigmoid(linear(x, w, "gate")), w, "out")

    return formula


def slstm(module: dsl.SLSTM) -> Formula:
    """c_t = σ(f) c_{t−1} + e^i tanh(z), h_t = σ(o) c_t / n_t (Beck 2024, equations 8 to 15)."""

    def formula(x: Array, w: Weights) -> Array:
        heads, dim = module.heads, x.shape[1]
        smooth = x if module.conv is None else silu(causal_conv(x, w, True))
        recur = {name: w[f"{name}.recur"].reshape(heads, dim // heads, dim // heads) for name in "zifo"}
        inputs = {name: linear(smooth if name in "if" else x, w, name, True) for name in "zifo"}
        out, c, n, h = np.zeros_like(x), np.zeros(dim), np.zeros(dim), np.zeros(dim)
        for t in range(len(x)):
            back = {name: np.einsum("hd,hed->he", h.reshape(heads, -1), r).reshape(dim) for name, r in recur.items()}
            z, i, f, o = (inputs[name][t] + back[name] for name in "zifo")
            c, n = sigmoid(f) * c + np.exp(i) * np.tanh(z), sigmoid(f) * n + np.exp(i)
            h = out[t] = sigmoid(o) * c / n
        return head_norm(out, heads, w["norm.weight"], eps=module.eps)

    return formula
