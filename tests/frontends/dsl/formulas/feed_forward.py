"""Feed-forwards, residual arrangements and mixtures of experts in float64, token by token."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from weft.frontends.dsl import MLP, GatedMLP, MoE

from .elementary import ACTIVATIONS, Array, Formula, Weights, in_scope, linear, sigmoid, softmax, softplus

Combine = Callable[..., Array]  # of x [length, dim] and the weights: weights of the experts [length, experts]


def feed_forward(module: MLP | GatedMLP, scope: str = "") -> Formula:
    """act(x W₁ + b₁) W₂ + b₂, or gated (act(x W + b) ⊙ (x V + c)) W₂ + b₂ (Shazeer 2020)."""
    act, bias = ACTIVATIONS[module.activation], module.bias

    def formula(x: Array, w: Weights) -> Array:
        up = linear(x, w, f"{scope}up", bias)
        hidden = act(linear(x, w, f"{scope}gate", bias)) * up if isinstance(module, GatedMLP) else act(up)
        return linear(hidden, w, f"{scope}down", bias)

    return formula


Sublayer = Callable[[Array], Array]
Arrangement = Callable[[Array, Callable[[str, Array], Array], Sublayer, Sublayer], Array]
# of x, the norm of a name, attention f and feed-forward g (Xiong 2020; Zhang & Sennrich 2019)
ARRANGED: dict[str, Arrangement] = {
    "pre": lambda x, n, f, g: (y := x + f(n("attn_norm", x))) + g(n("ffn_norm", y)),
    "pre_ffn": lambda x, n, f, g: (y := x + f(x)) + g(n("ffn_norm", y)),
    "post": lambda x, n, f, g: n("ffn_norm", (y := n("attn_norm", x + f(x))) + g(y)),
    "sandwich": lambda x, n, f, g: (
        (y := x + n("attn_post_norm", f(n("attn_norm", x)))) + n("ffn_post_norm", g(n("ffn_norm", y)))
    ),
    "post_sublayer": lambda x, n, f, g: (y := x + n("attn_post_norm", f(x))) + n("ffn_post_norm", g(y)),
    "parallel": lambda x, n, f, g: x + f(n("norm", x)) + g(n("norm", x)),
    "parallel_norms": lambda x, n, f, g: x + f(n("attn_norm", x)) + g(n("ffn_norm", x)),
}


# -- mixtures of experts


def expert(module: MoE, x: Array, w: Weights, e: int) -> Array:
    """Return E_e of the vector x; gates are at most `limit`, and up is within ±limit, plus `shift` (gpt-oss)."""

    def project(x: Array, name: str) -> Array:
        return w[f"experts.{name}"][e] @ x + (w[f"experts.{name}_bias"][e] if module.bias else 0.0)

    act, up, limit = ACTIVATIONS[module.activation], project(x, "up"), module.limit or np.inf
    if not module.gated:
        return project(act(up), "down")
    return project(act(np.minimum(project(x, "gate"), limit)) * (np.clip(up, -limit, limit) + module.shift), "down")


def mixture(module: MoE, router: Combine) -> Formula:
    """y = Σ_e g_e(x) E_e(x), plus the expert that all tokens pass, times σ(x w) if it has a gate (Qwen2-MoE)."""

    def formula(x: Array, w: Weights, **extra: Array) -> Array:
        inner = linear(x, w, "latent_in") if module.latent else x
        y, shares = np.zeros_like(inner), router(x, w, **extra)
        for t, e in np.argwhere(shares):
            y[t] += shares[t, e] * expert(module, inner[t], w, e)
        y = linear(y, w, "latent_out") if module.latent else y
        if isinstance(module.shared, MLP | GatedMLP):
            shared = feed_forward(module.shared)(x, in_scope(w, "shared."))
            y = y + shared * (sigmoid(x @ w["shared_gate.weight"][0])[:, None] if module.shared_gate else 1.0)
        return y

    return formula


def best(scores: Array, k: int) -> list[int]:
    """Return the indices of the k largest scores."""
    return sorted(range(len(scores)), key=lambda i: -scores[i])[:k]


def top_k(
    k: int,
    renormalize: bool = True,
    scores: Callable[[Array], Array] = softmax,
    scale: float = 1.0,
    limit: float = math.inf,
    bias: bool = False,
    noisy: bool = False,
) -> Combine:
    """Each token to its k best experts, each of which takes the first `limit` tokens of a sequence (Fedus 2021).

    Noisy logits are x W_g + noise · softplus(x W_noise) (Shazeer 2017, equations 3 to 5).
    """

    def router(x: Array, w: Weights, **extra: Array) -> Array:
        noise = extra["router_noise.0"] * softplus(linear(x, w, "noise")) if noisy else 0.0
        p = scores(linear(x, w, "router", bias) + noise)
        shares, taken = np.zeros_like(p), np.zeros(p.shape[1])
        for t in range(len(x)):
            chosen = best(p[t], k)
            taken[chosen] += 1
            shares[t, chosen] = scale * p[t, chosen] / (p[t, chosen].sum() if renormalize else 1.0)
            shares[t, taken > limit] = 0.0
        return shares

    return router


def expert_choice(tokens: int) -> Combine:
    """Each expert to the `tokens` tokens that score best with it (Zhou 2022)."""

    def router(x: Array, w: Weights) -> Array:
        scores = softmax(linear(x, w, "router"))
        shares = np.zeros_like(scores)
        for e in range(scores.shape[1]):
            chosen = best(scores[:, e], tokens)
            shares[chosen, e] = scores[chosen, e]
        return shares

    return router


def hierarchical(groups: int, top_groups: int, k: int) -> Combine:
    """A gate over groups times a gate over the experts of each (Shazeer 2017, appendix B)."""

    def router(x: Array, w: Weights) -> Array:
        outer, inner = linear(x, w, "group_router"), linear(x, w, "router")
        shares, size = np.zeros_like(inner), inner.shape[1] // groups
        for t in range(len(x)):
            chosen = best(outer[t], top_groups)
            for g, share in zip(chosen, softmax(outer[t, chosen]), strict=True):
                members = [g * size + m for m in best(inner[t, g * size : (g + 1) * size], k)]
                shares[t, members] = share * softmax(inner[t, members])
        return shares

    return router


def group_limited(groups: int, top_groups: int, k: int, scale: float) -> Combine:
    """Sigmoid scores; selected with a correction, in the groups with the largest sums of two scores (DeepSeek-V3)."""

    def router(x: Array, w: Weights) -> Array:
        scores = sigmoid(linear(x, w, "router"))
        ranked, shares, size = scores + w["router.correction"], np.zeros_like(scores), scores.shape[1] // groups
        for t in range(len(x)):
            by_group = [np.sort(ranked[t, g * size : (g + 1) * size])[-2:].sum() for g in range(groups)]
            allowed = [g * size + m for g in best(np.array(by_group), top_groups) for m in range(size)]
            chosen = [allowed[i] for i in best(ranked[t, allowed], k)]
            shares[t, chosen] = scale * scores[t, chosen] / scores[t, chosen].sum()
        return shares

    return router


def load_balance_loss(p: Array, k: int, weight: float) -> Array:
    """λ · experts · Σ_j f_j p_j of probabilities p [tokens, experts] (Fedus 2021).

    f is the fraction of tokens sent to expert j, p_j the mean probability of expert j.
    """
    sent = np.zeros_like(p)
    for t in range(len(p)):
        sent[t, best(p[t], k)] = 1
    return np.asarray(weight * p.shape[1] * (sent.mean(0) @ p.mean(0)))
