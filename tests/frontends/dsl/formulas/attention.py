"""Attention in float64, head by head: softmax attention and its variants, latent, relative and linear attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from weft.frontends import dsl

from ....masks import sees
from .elementary import Array, Formula, Weights, head_slices, layer_norm, linear, relu, rms_norm, sigmoid, softmax
from .positions import relative_row, rope

Bias = Callable[[int, int, int, Weights], float]  # of a head, the positions of query and key, and the weights


def visible_keys(length: int, **settings: Any) -> Array:
    """Return which keys each query sees, [length, length]."""
    return np.array([[sees(i, j, **settings) for j in range(length)] for i in range(length)])


def attend(scores: Array, v: Array, visible: Array, sink: float | None = None) -> Array:
    """Return softmax(scores) v over the visible keys; a `sink` is one more score, without a value (gpt-oss, 2025)."""
    scores = np.where(visible, scores, -np.inf)
    if sink is not None:
        scores = np.concatenate([scores, np.full((len(scores), 1), sink)], 1)
    return softmax(scores)[:, : len(v)] @ v


def attention(module: dsl.Attention, bias: Bias | None = None, positions: Array | None = None) -> Formula:
    """softmax(scale · q kᵀ + bias) v of every head, concatenated, times W_O (Vaswani 2017; Ainslie 2023).

    With a soft-cap c, scores become c · tanh(scores/c) (Gemma 2). A gate multiplies by σ(x W) before W_O.
    """

    def formula(x: Array, w: Weights) -> Array:
        heads, kv_heads = module.heads, module.kv_heads or module.heads
        d, n = module.head_dim or x.shape[1] // heads, range(len(x))
        causal, mask = module.causal is not False, vars(module.mask or dsl.Mask())
        visible = visible_keys(len(x), causal=causal, window=module.window, **mask)
        q, k, v = (linear(x, w, name, module.qkv_bias) for name in "qkv")
        out = []
        for h, s in enumerate(head_slices(heads, d)):
            g = head_slices(kv_heads, d)[h * kv_heads // heads]
            qh, kh = q[:, s], k[:, g]
            if isinstance(module.qk_norm, dsl.RMSNorm):
                eps = module.qk_norm.eps
                qh, kh = rms_norm(qh, w["q_norm.weight"], eps), rms_norm(kh, w["k_norm.weight"], eps)
            qh, kh = rope(qh, module.rope, positions), rope(kh, module.rope, positions)
            scores = qh @ kh.T * (d**-0.5 if module.scale is None else module.scale)
            if module.softcap is not None:
                scores = module.softcap * np.tanh(scores / module.softcap)
            if bias is not None:
                scores = scores + np.array([[bias(h, i, j, w) for j in n] for i in n])
            out.append(attend(scores, v[:, g], visible, w["sinks"][h] if module.sinks else None))
        y = np.concatenate(out, 1)
        return linear(y * sigmoid(linear(x, w, "gate")) if module.gate else y, w, "o", module.out_bias)

    return formula


def relative_attention(module: dsl.RelativeAttention) -> Formula:
    """e_ij = q_i·(k_j + w^K_r)/√d, z_i = Σ_j α_ij (v_j + w^V_r), r = clip(j − i) (Shaw 2018, equations 3 to 5)."""

    def formula(x: Array, w: Weights) -> Array:
        n, d = len(x), x.shape[1] // module.heads
        r = np.clip(np.arange(n) - np.arange(n)[:, None], -module.clip, module.clip) + module.clip
        visible, out = visible_keys(n, causal=module.causal is not False), []
        q, k, v = (linear(x, w, name) for name in "qkv")
        for s in head_slices(module.heads, d):
            scores = np.einsum("id,ijd->ij", q[:, s], k[:, s] + w["keys"][r]) / np.sqrt(d)
            values = v[:, s] + (w["values"][r] if module.values else np.zeros((n, n, d)))
            out.append(np.einsum("ij,ijd->id", softmax(np.where(visible, scores, -np.inf)), values))
        return linear(np.concatenate(out, 1), w, "o")

    return formula


def linear_attention(module: dsl.LinearAttention) -> Formula:
    """Σ_m (R φ(q_n))·(R φ(k_m)) v_m / Σ_m φ(q_n)·φ(k_m), φ = elu + 1 (Katharopoulos 2020).

    The denominator is not rotated (Su 2021, equation 19).
    """

    def formula(x: Array, w: Weights) -> Array:
        visible, out = visible_keys(len(x), causal=module.causal is not False), []
        q, k, v = (linear(x, w, name) for name in "qkv")
        for s in head_slices(module.heads, x.shape[1] // module.heads):
            fq, fk = (np.where(t > 0, t + 1, np.exp(t)) for t in (q[:, s], k[:, s]))
            above = np.where(visible, rope(fq, module.rope) @ rope(fk, module.rope).T, 0) @ v[:, s]
            out.append(above / np.where(visible, fq @ fk.T, 0).sum(1, keepdims=True))
        return linear(np.concatenate(out, 1), w, "o")

    return formula


def latent_attention(module: dsl.MLA) -> Formula:
    """Keys and values from the latent, head by head, with a rotary key for all heads (DeepSeek-V2, equations 9–19)."""

    def formula(x: Array, w: Weights) -> Array:
        heads, d, d_rope = module.heads, module.head_dim, module.rope_dim
        eps = module.norm.eps if isinstance(module.norm, dsl.RMSNorm) else 0.0
        low_rank = module.q_rank is not None
        source = rms_norm(linear(x, w, "q_down"), w["q_norm.weight"], eps) if low_rank else x
        q, down = linear(source, w, "q_up" if low_rank else "q"), linear(x, w, "kv_down")
        latent = rms_norm(down[:, : module.rank], w["kv_norm.weight"], eps)
        keys, values, shared = linear(latent, w, "k_up"), linear(latent, w, "v_up"), down[:, module.rank :]
        visible = np.tri(len(x), dtype=bool) if module.index is None else index_keys(module.index, source, x, w)
        out = []
        for h in range(heads):
            plain, rotary = np.split(q[:, (d + d_rope) * h : (d + d_rope) * (h + 1)], [d], 1)
            scores = plain @ keys[:, d * h : d * (h + 1)].T + rope(rotary, module.rope) @ rope(shared, module.rope).T
            scores *= (d + d_rope) ** -0.5 if module.scale is None else module.scale
            out.append(attend(scores, values[:, head_slices(heads, module.v_head_dim)[h]], visible))
        return linear(np.concatenate(out, 1), w, "o")

    return formula


def index_keys(index: dsl.LightningIndex, source: Array, x: Array, w: Weights) -> Array:
    """Return which keys each query selects, [length, length] (DeepSeek-V3.2, equations 1 and 2)."""
    k = layer_norm(linear(x, w, "index.k"), w["index.k_norm.weight"], w["index.k_norm.bias"])
    q, weights, scores = linear(source, w, "index.q"), linear(x, w, "index.weights"), np.zeros((len(x), len(x)))
    for h, s in enumerate(head_slices(index.heads, index.head_dim)):
        scores += weights[:, h, None] * relu(rope(q[:, s], index.rope) @ rope(k, index.rope).T)
    scores = np.where(np.tri(len(x), dtype=bool), scores, -np.inf)
    return np.asarray((scores >= np.sort(scores, 1)[:, -index.top_k, None]) & np.isfinite(scores))


def disentangled_attention(module: dsl.DisentangledAttention, table: dsl.RelativeTable) -> Formula:
    """(q_i·k_j + q_i·K_r + k_j·Q_r)/√(d · terms), r the row of i − j, K and Q projected from the table (He 2020)."""

    def formula(x: Array, w: Weights) -> Array:
        n, vectors = range(len(x)), w["relative.weight"]
        if table.norm is not None:
            vectors = layer_norm(vectors, w["relative.norm.weight"], w["relative.norm.bias"], table.norm.eps)
        rows = vectors[[[relative_row(i - j, table) for j in n] for i in n]]  # [length, length, dim]
        names = ("k", "q") if module.shared else ("pos_k", "pos_q")
        terms, out = 1 + module.to_position + module.from_position, []

        def project(rows: Array, name: str) -> Array:
            return linear(rows, w, f"inner.{name}", module.key_bias or name not in ("k", "pos_k"))

        q, k, v = (project(x, name) for name in "qkv")
        for s in head_slices(module.heads, x.shape[1] // module.heads):
            scores = q[:, s] @ k[:, s].T
            if module.to_position:
                scores += np.einsum("id,ijd->ij", q[:, s], project(rows, names[0])[..., s])
            if module.from_position:
                scores += np.einsum("jd,ijd->ij", k[:, s], project(rows, names[1])[..., s])
            out.append(softmax(scores / np.sqrt(q[:, s].shape[1] * terms)) @ v[:, s])
        return project(np.concatenate(out, 1), "o")

    return formula


def differential_attention(module: dsl.DifferentialAttention) -> Formula:
    """(1 − λ₀) norm(a_h − λ a_{h + heads/2}) over pairs of values, λ = e^(λq₁·λk₁) − e^(λq₂·λk₂) + λ₀ (Ye 2024)."""

    def formula(x: Array, w: Weights) -> Array:
        heads, groups, out = module.heads, module.groups, []
        d, visible = x.shape[1] // heads, visible_keys(len(x), causal=module.causal is not False)
        q, k, v = (linear(x, w, name, module.bias) for name in "qkv")
        start = 0.2 if module.lambda_init is None else module.lambda_init  # of the first layer
        factor = np.exp(w["lambda_q1"] @ w["lambda_k1"]) - np.exp(w["lambda_q2"] @ w["lambda_k2"])
        queries, keys = head_slices(heads, d), head_slices(groups, d)
        for h in range(heads // 2):
            pair = keys[h * groups // heads], keys[h * groups // heads + groups // 2]
            values = np.concatenate([v[:, s] for s in pair], 1)
            first, second = (
                attend(rope(q[:, queries[i]], module.rope) @ rope(k[:, s], module.rope).T / np.sqrt(d), values, visible)
                for i, s in zip((h, h + heads // 2), pair, strict=True)
            )
            out.append(rms_norm(first - (factor + start) * second, 1 - start, module.eps))
        return linear(np.concatenate(out, 1), w, "o", module.bias)

    return formula


def scored_keys_attention(module: dsl.ScoredKeysAttention) -> Formula:
    """softmax(q kᵀ/√d + e^(a · softplus(v W))) v (Shi 2025)."""

    def formula(x: Array, w: Weights) -> Array:
        heads, groups, out = module.heads, module.groups, []
        d, visible = x.shape[1] // heads, visible_keys(len(x), causal=True, window=module.window)
        q, k, v = (linear(x, w, name, module.bias) for name in "qkv")
        extra = np.exp(np.log1p(np.exp(linear(v, w, "step", module.bias))) * w["a"])
        for h, s in enumerate(head_slices(heads, d)):
            g = h * groups // heads
            qh, kh = rms_norm(q[:, s], w["q_norm.weight"]), rms_norm(k[:, d * g : d * g + d], w["k_norm.weight"])
            scores = rope(qh, module.rope) @ rope(kh, module.rope).T / np.sqrt(d) + extra[:, g]
            out.append(attend(scores, v[:, d * g : d * g + d], visible))
        return linear(np.concatenate(out, 1), w, "o", module.bias)

    return formula


def mixture_of_attention(module: dsl.MixtureOfAttention) -> Formula:
    """Σ_e p_e attn_e(x) W_e over the k best experts, which share keys and values (Zhang 2022)."""

    def formula(x: Array, w: Weights) -> Array:
        d, visible, (q, k, v) = module.head_dim, np.tri(len(x), dtype=bool), (linear(x, w, name) for name in "qkv")
        logits, out = linear(x, w, "router"), []
        p = softmax(np.where(logits >= np.sort(logits, 1)[:, -module.k, None], logits, -np.inf))
        for h, s in enumerate(head_slices(module.kv_heads * module.experts, d)):
            g = head_slices(module.kv_heads, d)[h // module.experts]
            scores = rope(q[:, s], module.rope) @ rope(k[:, g], module.rope).T / np.sqrt(d)
            out.append(p[:, h % module.experts, None] * attend(scores, v[:, g], visible))
        return linear(np.concatenate(out, 1), w, "o") + w["bias"]

    return formula
