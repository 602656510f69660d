"""Attention written out, query by query: relative vectors, sparse patterns, linear attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from weft.frontends.dsl import Attention, LinearAttention, RelativeAttention, RoPE

from ..masks import PATTERNS
from .harness import RUNNERS, Array, Row, Weights, check

HEADS, DIM = 3, 24
HEAD = DIM // HEADS


def heads(x: Array, w: Weights) -> Any:
    """q, k, v [length, head, d] of every head, one head after the other."""
    q, k, v = (x @ w[f"{name}.weight"].T for name in "qkv")
    for h in range(HEADS):
        own = slice(h * HEAD, (h + 1) * HEAD)
        yield q[:, own], k[:, own], v[:, own]


def joined(found: list[Array], w: Weights) -> Array:
    return np.concatenate(found, 1) @ w["o.weight"].T


def weighted(scores: dict[int, float], values: Callable[[int], Array]) -> Array:
    """Σ_j softmax(scores)_j values(j)."""
    top = max(scores.values())
    total = sum(np.exp(s - top) for s in scores.values())
    return np.asarray(sum(np.exp(s - top) / total * values(j) for j, s in scores.items()))


# -- Shaw 2018


def shaw(clip: int, causal: bool) -> Callable[[Array, Weights], Array]:
    """e_ij = q_i·(k_j + w^K_{clip(j − i)})/√d, z_i = Σ_j α_ij (v_j + w^V_{clip(j − i)}) (equations 3 to 5)."""

    def formula(x: Array, w: Weights) -> Array:
        def relative(table: str, i: int, j: int) -> Array:
            return w[table][min(max(j - i, -clip), clip) + clip]

        found = []
        for q, k, v in heads(x, w):
            rows = []
            for i in range(len(x)):
                seen = range(i + 1) if causal else range(len(x))
                scores = {j: q[i] @ (k[j] + relative("keys", i, j)) / np.sqrt(HEAD) for j in seen}
                rows.append(weighted(scores, lambda j, i=i, v=v: v[j] + relative("values", i, j)))
            found.append(np.array(rows))
        return joined(found, w)

    return formula


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("clip", [1, 4, 20])
def test_shaw_relative_attention(clip: int, causal: bool, runner: str) -> None:
    module = RelativeAttention(HEADS, clip, causal=causal)
    check(Row(module, shaw(clip, causal), DIM, 13), runner)


# -- patterns (Child 2019; Beltagy 2020; Brown 2020)


def masked(sees: Callable[[int, int], bool], causal: bool) -> Callable[[Array, Weights], Array]:
    def formula(x: Array, w: Weights) -> Array:
        found = []
        for q, k, v in heads(x, w):
            rows = []
            for i in range(len(x)):
                seen = [j for j in range(len(x)) if sees(i, j) and (j <= i or not causal)]
                rows.append(weighted({j: q[i] @ k[j] / np.sqrt(HEAD) for j in seen}, lambda j, v=v: v[j]))
            found.append(np.array(rows))
        return joined(found, w)

    return formula


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", PATTERNS)
def test_pattern(name: str, causal: bool, runner: str) -> None:
    settings, sees = PATTERNS[name]
    check(Row(Attention(HEADS, causal=causal, **settings), masked(sees, causal), DIM, 17), runner)


# -- linear attention (Katharopoulos 2020; with RoPE, Su 2021)


def turned(x: Array, position: int, interleaved: bool) -> Array:
    """The vector x turned in the plane of each pair k by position · 10000^(−2k/d)."""
    y = x.copy()
    for k in range(HEAD // 2):
        a, b = (2 * k, 2 * k + 1) if interleaved else (k, k + HEAD // 2)
        angle = position * float(np.float32(10000.0 ** (-2 * k / HEAD)))
        y[a] = x[a] * np.cos(angle) - x[b] * np.sin(angle)
        y[b] = x[a] * np.sin(angle) + x[b] * np.cos(angle)
    return y


def linear(causal: bool, rope: RoPE | None) -> Callable[[Array, Weights], Array]:
    """Σ_m (R φ(q_n))·(R φ(k_m)) v_m / Σ_m φ(q_n)·φ(k_m): the denominator is not turned (Su 2021, equation 19)."""

    def formula(x: Array, w: Weights) -> Array:
        found = []
        for q, k, v in heads(x, w):
            q, k = (np.where(t > 0, t, np.exp(t) - 1) + 1 for t in (q, k))
            rows = []
            for n in range(len(x)):
                above, below = np.zeros(HEAD), 0.0
                for m in range(n + 1 if causal else len(x)):
                    below += q[n] @ k[m]
                    if rope is None:
                        above += q[n] @ k[m] * v[m]
                    else:
                        above += turned(q[n], n, rope.interleaved) @ turned(k[m], m, rope.interleaved) * v[m]
                rows.append(above / below)
            found.append(np.array(rows))
        return joined(found, w)

    return formula


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("rope", [None, RoPE(), RoPE(interleaved=True)], ids=["plain", "rope", "interleaved"])
def test_linear_attention(rope: RoPE | None, causal: bool, runner: str) -> None:
    check(Row(LinearAttention(HEADS, rope, causal=causal), linear(causal, rope), DIM, 13), runner)
