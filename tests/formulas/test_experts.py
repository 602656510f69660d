"""Mixtures of experts written out, token by token (Shazeer 2017, Fedus 2021, Zhou 2022, DeepSeek-V3)."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from weft.frontends.dsl import GatedMLP, MoE, trace
from weft.ir import TensorType
from weft.ir.types import dtypes, sizes

from .harness import RUNNERS, Array, Row, Weights, check, close, randomize, run
from .test_blocks import ACTIVATIONS, gated, plain

EXPERTS, HIDDEN, DIM = 8, 10, 16
Router = Callable[..., Array]  # x [length, dim] and the weights → weights of the experts [length, experts]


def softmax(z: Array) -> Array:
    e = np.array([math.exp(v - max(z)) for v in z])
    return e / sum(e)


def sigmoid(z: Array) -> Array:
    return np.array([1 / (1 + math.exp(-v)) for v in z])


def best(scores: Array, k: int) -> list[int]:
    """The indices of the k largest."""
    return sorted(range(len(scores)), key=lambda i: -scores[i])[:k]


def expert(x: Array, w: Weights, e: int, activation: str = "silu") -> Array:
    """The e-th feed-forward of the vector x."""
    act = np.vectorize(ACTIVATIONS[activation])
    biases = {n: w[f"experts.{n}_bias"][e] if f"experts.{n}_bias" in w else 0 for n in ("gate", "up", "down")}
    up = w["experts.up"][e] @ x + biases["up"]
    hidden = act(w["experts.gate"][e] @ x + biases["gate"]) * up if "experts.gate" in w else act(up)
    return np.asarray(w["experts.down"][e] @ hidden + biases["down"])


def mixture(router: Router, activation: str = "silu") -> Callable[..., Array]:
    """y = Σ_e g_e(x) E_e(x)."""

    def formula(x: Array, w: Weights, **extra: Array) -> Array:
        y, shares = np.zeros_like(x), router(x, w, **extra)
        for t, e in np.argwhere(shares):
            y[t] += shares[t, e] * expert(x[t], w, e, activation)
        return y

    return formula


def logits(x: Array, w: Weights) -> Array:
    return np.array([w["router.weight"] @ row for row in x])


def top_k(k: int, renormalize: bool, scores: Callable[[Array], Array] = softmax) -> Router:
    def router(x: Array, w: Weights) -> Array:
        shares = np.zeros((len(x), EXPERTS))
        for t, z in enumerate(logits(x, w)):
            p = scores(z)
            chosen = best(p, k)
            for e in chosen:
                shares[t, e] = p[e] / sum(p[c] for c in chosen) if renormalize else p[e]
        return shares

    return router


def noisy(k: int) -> Router:
    """H = x W_g + noise · softplus(x W_noise), softmax over the k largest of H (Shazeer 2017, equations 3 to 5)."""

    def router(x: Array, w: Weights, **extra: Array) -> Array:
        shares = np.zeros((len(x), EXPERTS))
        for t, row in enumerate(x):
            spread = [math.log1p(math.exp(v)) for v in w["noise.weight"] @ row]
            h = w["router.weight"] @ row + extra["router_noise.0"][t] * spread
            chosen = best(h, k)
            shares[t, chosen] = softmax(h[chosen])
        return shares

    return router


def switch(capacity: float) -> Router:
    """Each token to one expert, which takes the first ⌈capacity · tokens/experts⌉ of them (Fedus 2021)."""

    def router(x: Array, w: Weights) -> Array:
        shares, taken = np.zeros((len(x), EXPERTS)), [0] * EXPERTS
        for t, z in enumerate(logits(x, w)):
            p = softmax(z)
            e = best(p, 1)[0]
            if taken[e] < math.ceil(capacity * len(x) / EXPERTS):
                shares[t, e] = p[e]
            taken[e] += 1
        return shares

    return router


def expert_choice(average: float) -> Router:
    """Each expert takes the tokens that score best with it, `average` experts a token (Zhou 2022)."""

    def router(x: Array, w: Weights) -> Array:
        scores = np.array([softmax(z) for z in logits(x, w)])
        shares = np.zeros_like(scores)
        for e in range(EXPERTS):
            chosen = best(scores[:, e], math.ceil(average * len(x) / EXPERTS))
            shares[chosen, e] = scores[chosen, e]
        return shares

    return router


def hierarchical(groups: int, top_groups: int, k: int) -> Router:
    """A gate over groups times a gate over the experts of each (Shazeer 2017, appendix B)."""
    size = EXPERTS // groups

    def router(x: Array, w: Weights) -> Array:
        shares = np.zeros((len(x), EXPERTS))
        for t, row in enumerate(x):
            outer, inner = w["group_router.weight"] @ row, (w["router.weight"] @ row).reshape(groups, size)
            chosen = best(outer, top_groups)
            for g, share in zip(chosen, softmax(outer[chosen]), strict=True):
                members = best(inner[g], k)
                shares[t, [g * size + m for m in members]] = share * softmax(inner[g][members])
        return shares

    return router


def deepseek(groups: int, top_groups: int, k: int, scale: float) -> Router:
    """Sigmoid scores; chosen by what a correction adds, in the groups whose two best sum to most (DeepSeek-V3)."""
    size = EXPERTS // groups

    def router(x: Array, w: Weights) -> Array:
        shares = np.zeros((len(x), EXPERTS))
        for t, z in enumerate(logits(x, w)):
            scores = sigmoid(z)
            ranked = scores + w["router.correction"]
            by_group = [sum(sorted(ranked[g * size : (g + 1) * size])[-2:]) for g in range(groups)]
            open_ = [g * size + m for g in best(np.array(by_group), top_groups) for m in range(size)]
            chosen = [open_[i] for i in best(ranked[open_], k)]
            shares[t, chosen] = scale * scores[chosen] / sum(scores[chosen])
        return shares

    return router


def shared(x: Array, w: Weights) -> Array:
    """A gated feed-forward that all tokens pass, times a gate of its own (Qwen2-MoE)."""
    always = gated("silu", "shared.")(x, w)
    return np.array([sigmoid(w["shared_gate.weight"] @ row) for row in x]) * always


def with_shared(x: Array, w: Weights) -> Array:
    return mixture(top_k(2, False))(x, w) + shared(x, w)


ROWS = {
    "top-k": Row(MoE(EXPERTS, HIDDEN, 2), mixture(top_k(2, True))),
    "top-k, plain weights": Row(MoE(EXPERTS, HIDDEN, 3, renormalize=False), mixture(top_k(3, False))),
    "all experts": Row(MoE(EXPERTS, HIDDEN, EXPERTS), mixture(top_k(EXPERTS, True))),
    "sigmoid": Row(MoE(EXPERTS, HIDDEN, 2, scoring="sigmoid"), mixture(top_k(2, True, sigmoid))),
    "biased, ungated": Row(
        MoE(EXPERTS, HIDDEN, 2, "relu", gated=False, bias=True),
        mixture(top_k(2, True), "relu"),
    ),
    "biased, GEGLU": Row(MoE(EXPERTS, HIDDEN, 2, "gelu", bias=True), mixture(top_k(2, True), "gelu")),
    "noisy top-k": Row(MoE(EXPERTS, HIDDEN, 2, noisy=True), mixture(noisy(2)), extra={"router_noise.0": (EXPERTS,)}),
    "switch": Row(MoE(EXPERTS, HIDDEN, 1, "relu", gated=False, renormalize=False), mixture(top_k(1, False), "relu")),
    "switch, overflow": Row(
        MoE(EXPERTS, HIDDEN, 1, renormalize=False, capacity=1.0), mixture(switch(1.0)), length=21, std=1.0
    ),
    "expert choice": Row(MoE(EXPERTS, HIDDEN, 2, choice="expert"), mixture(expert_choice(2))),
    "expert choice, capacity": Row(
        MoE(EXPERTS, HIDDEN, 2, choice="expert", capacity=1.25), mixture(expert_choice(1.25)), length=23
    ),
    "hierarchical": Row(
        MoE(EXPERTS, HIDDEN, 2, choice="hierarchical", groups=2, top_groups=1), mixture(hierarchical(2, 1, 2))
    ),
    "hierarchical, two groups": Row(
        MoE(EXPERTS, HIDDEN, 1, choice="hierarchical", groups=4, top_groups=2), mixture(hierarchical(4, 2, 1))
    ),
    "group-limited": Row(
        MoE(EXPERTS, HIDDEN, 3, scoring="sigmoid", correction=True, groups=4, top_groups=2, scale=2.5),
        mixture(deepseek(4, 2, 3, 2.5)),
    ),
    "shared expert": Row(
        MoE(EXPERTS, HIDDEN, 2, renormalize=False, shared=GatedMLP(12), shared_gate=True), with_shared
    ),
}


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("name", ROWS)
def test_mixture(name: str, runner: str) -> None:
    check(ROWS[name], runner)


def test_the_overflow_row_overflows() -> None:
    """Some expert is asked more often than it answers, and what it drops adds nothing."""
    rng, row = np.random.default_rng(7), ROWS["switch, overflow"]
    graph = trace(row.module, {"x": TensorType(dtypes.f32, (sizes.sym("batch"), sizes.sym("seq"), DIM))})
    weights = randomize(graph, rng, row.std)
    x = rng.standard_normal((2, row.length, DIM))
    dropped = [(switch(1.0)(s, weights).sum(-1) == 0) for s in x]
    assert all(0 < d.sum() < row.length for d in dropped)
    y = run(graph, {"x": x}, "interpreter")["output"]
    assert all((y[b, d] == 0).all() for b, d in enumerate(dropped))


@pytest.mark.parametrize("runner", RUNNERS)
def test_load_balance_loss(runner: str) -> None:
    """λ · experts · Σ_j f_j p_j: f the fraction of tokens sent to j, p the mean probability of j (Fedus 2021)."""
    rng, k, weight = np.random.default_rng(3), 2, 0.01
    graph = trace(MoE(EXPERTS, HIDDEN, k, aux_loss=weight), {"x": TensorType(dtypes.f32, (2, 11, DIM))})
    weights = randomize(graph, rng)
    x = rng.standard_normal((2, 11, DIM)).astype(np.float32).astype(np.float64)
    sent, probability = np.zeros(EXPERTS), np.zeros(EXPERTS)
    tokens = x.reshape(-1, DIM)
    for z in logits(tokens, weights):
        p = softmax(z)
        sent[best(p, k)] += 1 / len(tokens)
        probability += p / len(tokens)
    want = weight * EXPERTS * (sent @ probability)
    found = run(graph, {"x": x}, runner)
    close(found["aux_loss"], np.asarray(want), runner == "interpreter")
    y = np.stack([mixture(top_k(k, True))(s, weights) for s in x])
    close(found["output"], y, runner == "interpreter")


@pytest.mark.parametrize("runner", RUNNERS)
def test_a_dense_expert_is_a_feed_forward(runner: str) -> None:
    """One expert that all tokens ask is the feed-forward of its weights."""
    one = MoE(1, HIDDEN, 1, "gelu_tanh", gated=False)

    def formula(x: Array, w: Weights) -> Array:
        return plain("gelu_tanh")(x, {"up.weight": w["experts.up"][0], "down.weight": w["experts.down"][0]})

    check(Row(one, formula), runner)
