"""Variants of softmax attention: differences of two attentions, heads routed like experts, keys with learned scores."""

from __future__ import annotations

import math

from weft.ir import ops
from weft.ir.graph import Value

from .build import fill, get_layer_index, module, named, normal, param, provided
from .checks import need
from .layers import Norm, RMSNorm, divide_width, is_causal, linear
from .rotary import RoPE


@module
class DifferentialAttention:
    """The difference of two softmax attentions, which cancels common noise (Ye 2024, Differential Transformer).

    With a_h the output of head h, y_h = (1 − λ₀) · norm(a_h − λ a_{h + heads/2}) for h < heads/2, and
    λ = e^(λq₁·λk₁) − e^(λq₂·λk₂) + λ₀. Key/value heads j and j + kv_heads/2 share values: those of both, concatenated
    [2·head_dim]. norm is an RMSNorm over these features with `eps`, without weight. λ₀ is `lambda_init`; None follows
    the depth as in the paper: ``lambda_of(i)`` in layer i, 0.2 outside of layers. Parameters: ``q``, ``k``, ``v`` and
    ``o.weight`` as in `Attention`, with biases if `bias`, and ``lambda_q1``, ``lambda_k1``, ``lambda_q2`` and
    ``lambda_k2`` [head_dim]. `causal` None follows the model.
    """

    heads: int
    kv_heads: int | None = None
    head_dim: int | None = None
    rope: RoPE | None = None
    lambda_init: float | None = None
    eps: float = 1e-5
    bias: bool = False
    causal: bool | None = None

    def __post_init__(self) -> None:
        need(self, self.groups % 2 == 0, f"kv_heads={self.groups} must be even: heads form pairs")
        need(self, self.heads % self.groups == 0, f"kv_heads={self.groups} does not divide heads={self.heads}")
        start = self.lambda_init
        need(self, start is None or 0 <= start < 1, f"lambda_init={start} must be at least 0 and below 1")

    @staticmethod
    def lambda_of(layer: int) -> float:
        """Return λ₀ for layer `layer`, counted from 0: 0.8 − 0.6 e^(−0.3 · layer)."""
        return 0.8 - 0.6 * math.exp(-0.3 * layer)

    @property
    def groups(self) -> int:
        """Return the number of key/value heads."""
        return self.heads if self.kv_heads is None else self.kv_heads

    def __call__(self, x: Value) -> Value:
        d, kv, half = self.head_dim or divide_width(x, self.heads, "heads"), self.groups, self.groups // 2
        batch, seq, _ = x.shape
        start = self.lambda_of(get_layer_index()) if self.lambda_init is None else self.lambda_init
        q = linear(x, self.heads * d, "q", self.bias)
        k, v = (linear(x, kv * d, name, self.bias) for name in "kv")
        if self.rope is not None:
            q, k = self.rope(q, self.heads, "q_rope"), self.rope(k, kv, "k_rope")
        # Both key/value heads j and j + kv/2 read the concatenation of their two values.
        paired = ops.transpose(ops.reshape(v, shape=(batch, seq, 2, half, d)), axes=(0, 1, 3, 2, 4))
        once = ops.reshape(paired, shape=(batch, seq, half * 2 * d))
        values = ops.concat(once, once, axis=2, name="v_pairs")
        y = ops.attention(
            *(q, k, values, None, provided("key_mask")), heads=self.heads, kv_heads=kv, causal=is_causal(self.causal)
        )
        first, second = ops.split.emit(y, sizes=(self.heads * d, self.heads * d), name=("first", "second"))
        difference = ops.sub(
            first, ops.mul(second, self._compute_lambda(d, start), name="second_weighed"), name="difference"
        )
        by_head = ops.reshape(difference, shape=(batch, seq, self.heads // 2, 2 * d))
        scaled = ops.affine(named(RMSNorm(self.eps, weight=False), "norm")(by_head), by=1 - start)
        return linear(ops.reshape(scaled, shape=(batch, seq, self.heads * d)), x.width, "o", self.bias)

    def _compute_lambda(self, d: int, start: float) -> Value:
        """Return the factor λ [1] of the second attention; `d` is the head dimension, `start` is λ₀."""

        def exponential(i: int) -> Value:
            q, k = (param(f"lambda_{name}{i}", (d,), normal(0.1)) for name in "qk")
            return ops.exp(ops.sum(ops.mul(q, k), axes=(0,), keepdims=True))

        return ops.affine(ops.sub(exponential(1), exponential(2)), plus=start, name="lambda")


@module
class ScoredKeysAttention:
    """Attention with an extra score per key, computed from its value (Shi 2025, Doge, arXiv 2508.02124).

    The score of key j is q·k_j/√head_dim + e^(a · softplus(W v_j)), with one extra term per key/value head: ``a``
    [kv_heads], W = ``step.weight`` [kv_heads, kv_heads·head_dim]. The extra term is cached as one more feature of the
    key. Parameters: ``q``, ``k``, ``v`` and ``o`` as in `Attention`; `norm` normalizes each head of queries and keys
    (``q_norm``, ``k_norm``), `bias` adds biases to all linear maps. The paper also masks all but the top-k keys of a
    query; this is left out, which changes nothing as long as a sequence has at most k keys.
    """

    heads: int
    kv_heads: int | None = None
    head_dim: int | None = None
    rope: RoPE | None = None
    window: int | None = None
    norm: Norm = RMSNorm()
    bias: bool = False

    def __post_init__(self) -> None:
        need(self, self.heads % self.groups == 0, f"kv_heads={self.groups} does not divide heads={self.heads}")

    @property
    def groups(self) -> int:
        """Return the number of key/value heads."""
        return self.heads if self.kv_heads is None else self.kv_heads

    def __call__(self, x: Value) -> Value:
        d, kv = self.head_dim or divide_width(x, self.heads, "heads"), self.groups
        scale = d**-0.5
        v = linear(x, kv * d, "v", self.bias)
        step = ops.softplus(linear(v, kv, "step", self.bias))
        extra = ops.exp(ops.mul(step, param("a", (kv,), fill(0.0))), name="key_scores")
        q, k = (self._project_heads(x, heads, d, name) for name, heads in (("q", self.heads), ("k", kv)))
        # q · k · scale + extra = [q, 1 / scale] · [k, extra] · scale: the extra score is cached as part of the key.
        ones = ops.affine(ops.slice(q, axis=3, start=0, stop=1), by=0.0, plus=1 / scale)
        q, k = ops.concat(q, ones, axis=3), ops.concat(k, ops.unsqueeze(extra, axes=(3,)), axis=3)
        y = ops.attention(
            ops.reshape(q, shape=(*x.shape[:2], self.heads * (d + 1)), name="q_longer"),
            ops.reshape(k, shape=(*x.shape[:2], kv * (d + 1)), name="k_longer"),
            *(v, None, provided("key_mask")),
            **{"heads": self.heads, "kv_heads": kv, "causal": is_causal(), "window": self.window, "scale": scale},
        )
        return linear(y, x.width, "o", self.bias)

    def _project_heads(self, x: Value, heads: int, d: int, name: str) -> Value:
        """Return queries or keys (`name` "q" or "k") [batch, seq, heads, d], projected, normalized and rotated."""
        shape = (*x.shape[:2], heads, d)
        y = named(self.norm, f"{name}_norm")(ops.reshape(linear(x, heads * d, name, self.bias), shape=shape))
        if self.rope is None:
            return y
        joined = ops.reshape(y, shape=(*x.shape[:2], heads * d))
        return ops.reshape(self.rope(joined, heads, f"{name}_rope"), shape=shape)


@module
class MixtureOfAttention:
    """Attention whose query and output projections are experts (Zhang 2022, Mixture of Attention Heads; JetMoE).

    Each of `experts` experts has queries of `kv_heads` heads; all experts share keys and values. The outputs of the `k`
    experts with the largest router logits of a token are summed, weighted by the softmax of these k logits. All experts
    are computed; unselected ones have weight 0. Parameters: ``q.weight`` [kv_heads·experts·head_dim, dim], with the
    rows of key/value head 0 of every expert, then of head 1, …; ``o.weight``, with columns in the same order; ``k``,
    ``v`` [kv_heads·head_dim, dim], ``router.weight`` [experts, dim], and ``bias`` [dim], added to the output.
    """

    experts: int
    k: int
    kv_heads: int
    head_dim: int
    rope: RoPE | None = None

    def __post_init__(self) -> None:
        need(self, self.k <= self.experts, f"k={self.k} exceeds experts={self.experts}")

    def __call__(self, x: Value) -> Value:
        kv, d, (batch, seq, _) = self.kv_heads, self.head_dim, x.shape
        heads = kv * self.experts
        q = linear(x, heads * d, "q")
        k, v = (linear(x, kv * d, name) for name in "kv")
        if self.rope is not None:
            q, k = self.rope(q, heads, "q_rope"), self.rope(k, kv, "k_rope")
        y = ops.attention(*(q, k, v, None, provided("key_mask")), heads=heads, kv_heads=kv, causal=is_causal())
        combine = ops.route(linear(x, self.experts, "router"), k=self.k)
        weights = ops.reshape(combine, shape=(batch, seq, 1, self.experts, 1))
        weighed = ops.mul(ops.reshape(y, shape=(batch, seq, kv, self.experts, d)), weights, name="weighed")
        mixed = linear(ops.reshape(weighed, shape=(batch, seq, heads * d)), x.width, "o")
        return ops.add(mixed, param("bias", (x.width,), fill(0.0)), name="with_bias")
