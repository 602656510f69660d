"""The gated delta rule against its transition matrices, against transformers, and in pieces."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from weft.ir import ops

B, S = 2, 11
RNG = np.random.default_rng(17)


def operands(groups: int, heads: int, d: int, dv: int, gates: int) -> list[Any]:
    """q, k, v, β and, if there are any, gates."""
    q, v = RNG.standard_normal((B, S, groups * d)), RNG.standard_normal((B, S, heads * dv))
    k = RNG.standard_normal((B, S, groups, d))
    k = (k / np.linalg.norm(k, axis=-1, keepdims=True)).reshape(B, S, groups * d)
    decay = [-RNG.random((B, S, gates)) * 3] if gates else []
    return [q, k, v, RNG.random((B, S, heads)), *decay]


@pytest.mark.parametrize("gates", [0, 4, 12])
def test_delta_rule_equals_its_transition_matrices(gates: int) -> None:
    """S_t = (I − β k kᵀ) diag(e^g) S_{t−1} + β k vᵀ, one matrix after the other."""
    heads, groups, d, dv = 4, 2, 3, 5
    given = operands(groups, heads, d, dv, gates)
    q, k, v, beta, *rest = given
    found = ops.gated_delta_rule.reference(*given, heads=heads, groups=groups).reshape(B, S, heads, dv)
    for b, h in np.ndindex(B, heads):
        own = slice(d * (h // 2), d * (h // 2) + d)
        state = np.zeros((d, dv))
        for t in range(S):
            g = np.zeros(d)
            if gates == 4:
                g = np.full(d, rest[0][b, t, h])
            elif gates:
                g = rest[0][b, t, d * h : d * h + d]
            forget = np.eye(d) - beta[b, t, h] * np.outer(k[b, t, own], k[b, t, own])
            written = beta[b, t, h] * np.outer(k[b, t, own], v[b, t, dv * h : dv * h + dv])
            state = forget @ np.diag(np.exp(g)) @ state + written
            np.testing.assert_allclose(found[b, t, h], q[b, t, own] @ state, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("pieces", [(11,), (1,) * 11, (4, 7), (5, 1, 1, 4)])
@pytest.mark.parametrize("gates", [0, 12])
def test_delta_rule_in_pieces_equals_one_pass(pieces: tuple[int, ...], gates: int) -> None:
    given, sizes = operands(2, 4, 3, 5, gates), {"heads": 4, "groups": 2}
    whole, last = ops.gated_delta_rule.reference(*given, *[None][gates and 1 :], np.zeros((B, 4, 3, 5)), **sizes)
    state, found = np.zeros((B, 4, 3, 5)), []
    for cut in np.split(np.arange(S), np.cumsum(pieces)[:-1]):
        part = [x[:, cut] for x in given]
        y, state = ops.gated_delta_rule.reference(*part, *[None][gates and 1 :], state, **sizes)
        found.append(y)
    np.testing.assert_allclose(np.concatenate(found, 1), whole, rtol=1e-12)
    np.testing.assert_allclose(state, last, rtol=1e-12)


def test_delta_rule_equals_transformers() -> None:
    """Both forms of Qwen3-Next and those of Kimi Linear, which divide queries by √d."""
    from transformers.models.kimi_linear import modeling_kimi_linear as kimi
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen

    heads, d, dv = 4, 3, 5
    for gates, forms in (
        (4, (qwen.torch_recurrent_gated_delta_rule, qwen.torch_chunk_gated_delta_rule)),
        (12, (kimi.recurrent_kimi_delta_attention, kimi.chunk_kimi_delta_attention)),
    ):
        q, k, v, beta, g = operands(heads, heads, d, dv, gates)
        past = RNG.standard_normal((B, heads, d, dv))
        want, present = ops.gated_delta_rule.reference(q / d**0.5, k, v, beta, g, past, heads=heads, groups=heads)
        split = [torch.from_numpy(x.astype(np.float32)).unflatten(-1, (heads, -1)) for x in (q, k, v)]
        rate, decay = (torch.from_numpy(x.astype(np.float32)) for x in (beta, g))
        decay = decay if gates == heads else decay.unflatten(-1, (heads, -1))
        for form in forms:
            y, state = form(
                *split, g=decay, beta=rate, initial_state=torch.from_numpy(past.astype(np.float32)),
                output_final_state=True,
            )  # fmt: skip
            np.testing.assert_allclose(y.flatten(2).numpy(), want, atol=2e-6)
            np.testing.assert_allclose(state.numpy(), present, atol=2e-6)
