"""Mixtures of experts against formulas that go token by token."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from weft.frontends.dsl import MLP, Block, Decoder, GatedMLP, MoE
from weft.ir import interpret, ops, verify

from ..formulas import Array, close, outputs, run, sigmoid, silu, softmax, softplus


def expert(p: dict[str, Array], e: int, x: Array) -> Array:
    """E_e(x), SwiGLU."""
    return (silu(x @ p["experts.gate"][e].T) * (x @ p["experts.up"][e].T)) @ p["experts.down"][e].T


def mixed(p: dict[str, Array], combine: Array, x: Array) -> Array:
    y = np.zeros_like(x)
    for b, t, e in np.argwhere(combine):
        y[b, t] += combine[b, t, e] * expert(p, e, x[b, t])
    return y


def best(scores: Array, k: int) -> list[int]:
    return sorted(range(len(scores)), key=lambda e: -scores[e])[:k]


@pytest.mark.parametrize("renormalize", [True, False])
def test_top_k_softmax(renormalize: bool, rng: np.random.Generator) -> None:
    x, y, p = run(MoE(4, 8, 2, renormalize=renormalize, scale=1.5), rng)
    weights = softmax(x @ p["router.weight"].T)
    combine = np.zeros_like(weights)
    for b, t in np.ndindex(x.shape[:2]):
        chosen = best(weights[b, t], 2)
        combine[b, t, chosen] = 1.5 * weights[b, t, chosen] / (weights[b, t, chosen].sum() if renormalize else 1)
    close(y, mixed(p, combine, x))


def test_deepseek_routing_with_shared_expert(rng: np.random.Generator) -> None:
    """Sigmoid scores, choice by corrected scores among the best groups, weights from the plain scores."""
    model = MoE(
        *(8, 6, 3),
        scoring="sigmoid",
        correction=True,
        groups=4,
        top_groups=2,
        scale=2.5,
        shared=GatedMLP(10),
    )
    x, y, p = run(model, rng)
    scores = sigmoid(x @ p["router.weight"].T)
    combine = np.zeros_like(scores)
    for b, t in np.ndindex(x.shape[:2]):
        ranked = scores[b, t] + p["router.correction"]
        groups = best([ranked[2 * g : 2 * g + 2].sum() for g in range(4)], 2)  # both of the two are the top two
        open_to = [e for e in range(8) if e // 2 in groups]
        chosen = sorted(open_to, key=lambda e: -ranked[e])[:3]
        combine[b, t, chosen] = 2.5 * scores[b, t, chosen] / scores[b, t, chosen].sum()
    shared = (silu(x @ p["shared.gate.weight"].T) * (x @ p["shared.up.weight"].T)) @ p["shared.down.weight"].T
    close(y, mixed(p, combine, x) + shared)


def test_gated_shared_expert(rng: np.random.Generator) -> None:
    x, y, p = run(MoE(3, 4, 3, shared=MLP(8, "relu"), shared_gate=True), rng)
    shared = np.maximum(x @ p["shared.up.weight"].T, 0) @ p["shared.down.weight"].T
    assert p["shared_gate.weight"].shape == (1, 16)
    close(y, mixed(p, softmax(x @ p["router.weight"].T), x) + sigmoid(x @ p["shared_gate.weight"].T) * shared)


def test_experts_with_biases_limit_and_shift(rng: np.random.Generator) -> None:
    """gpt-oss: (min(g, l) · σ(1.702 min(g, l))) ⊙ (clip(u, ±l) + 1)."""
    x, y, p = run(MoE(3, 4, 1, "swish(1.702)", bias=True, router_bias=True, limit=0.8, shift=1.0), rng)
    logits = x @ p["router.weight"].T + p["router.bias"]
    for b, t in np.ndindex(x.shape[:2]):
        e = int(logits[b, t].argmax())
        gate, up = (x[b, t] @ p[f"experts.{n}"][e].T + p[f"experts.{n}_bias"][e] for n in ("gate", "up"))
        gate = np.minimum(gate, 0.8)
        hidden = gate * sigmoid(1.702 * gate) * (np.clip(up, -0.8, 0.8) + 1)
        close(y[b, t], hidden @ p["experts.down"][e].T + p["experts.down_bias"][e])


def test_plain_experts(rng: np.random.Generator) -> None:
    x, y, p = run(MoE(3, 4, 1, "relu", gated=False, renormalize=False), rng)
    weights = softmax(x @ p["router.weight"].T)
    for b, t in np.ndindex(x.shape[:2]):
        e = int(weights[b, t].argmax())
        hidden = np.maximum(x[b, t] @ p["experts.up"][e].T, 0)
        close(y[b, t], weights[b, t, e] * hidden @ p["experts.down"][e].T)
    assert not [n for n in p if "gate" in n]


def test_noisy_top_k_is_seeded_from_outside(rng: np.random.Generator) -> None:
    noise = np.random.default_rng(7).standard_normal((2, 6, 4))
    x, y, p = run(MoE(4, 8, 2, noisy=True), rng, **{"router_noise.0": noise})
    logits = x @ p["router.weight"].T + noise * softplus(x @ p["noise.weight"].T)
    combine = np.zeros_like(logits)
    for b, t in np.ndindex(x.shape[:2]):
        chosen = best(logits[b, t], 2)
        combine[b, t, chosen] = softmax(logits[b, t, chosen])
    close(y, mixed(p, combine, x))


def test_every_noisy_router_has_an_input_of_its_own() -> None:
    graph = Decoder(10, 16, 2, Block(None, MoE(4, 8, 2, noisy=True))).graph()
    assert list(graph.inputs) == ["input_ids", "router_noise.0", "router_noise.1"]


@pytest.mark.parametrize(("capacity", "limit"), [(2, 2), (0.5, math.ceil(0.5 * 6 / 2)), (1.25, 4)])
def test_capacity_drops_the_later_tokens_of_a_row(capacity: float, limit: int, rng: np.random.Generator) -> None:
    x, y, p = run(MoE(2, 8, 1, renormalize=False, capacity=capacity), rng)
    weights = softmax(x @ p["router.weight"].T)
    combine = np.zeros_like(weights)
    for b in range(2):
        taken = [0, 0]
        for t in range(6):
            e = int(weights[b, t].argmax())
            taken[e] += 1
            combine[b, t, e] = weights[b, t, e] * (taken[e] <= limit)
    close(y, mixed(p, combine, x))


@pytest.mark.parametrize(("capacity", "taken"), [(None, math.ceil(2 * 6 / 4)), (1, 1), (0.7, math.ceil(0.7 * 6 / 4))])
def test_expert_choice(capacity: float | None, taken: int, rng: np.random.Generator) -> None:
    x, y, p = run(MoE(4, 8, 2, choice="expert", capacity=capacity), rng)
    weights = softmax(x @ p["router.weight"].T)
    combine = np.zeros_like(weights)
    for b in range(2):
        for e in range(4):
            tokens = best(weights[b, :, e], taken)
            combine[b, tokens, e] = weights[b, tokens, e]
    close(y, mixed(p, combine, x))


def test_rows_of_a_batch_may_compete(rng: np.random.Generator) -> None:
    x, y, p = run(MoE(4, 8, 2, choice="expert", batched=True), rng)
    weights = softmax(x.reshape(12, 16) @ p["router.weight"].T)
    combine = np.zeros_like(weights)
    for e in range(4):
        tokens = best(weights[:, e], math.ceil(2 * 12 / 4))
        combine[tokens, e] = weights[tokens, e]
    close(y, mixed(p, combine.reshape(2, 6, 4), x))
    x, y, p = run(MoE(2, 8, 1, renormalize=False, capacity=0.75, batched=True), rng)
    weights, taken = softmax(x.reshape(12, 16) @ p["router.weight"].T), [0, 0]
    combine = np.zeros_like(weights)
    for t, row in enumerate(weights):
        e = int(row.argmax())
        taken[e] += 1
        combine[t, e] = row[e] * (taken[e] <= math.ceil(0.75 * 12 / 2))
    close(y, mixed(p, combine.reshape(2, 6, 2), x))


def test_hierarchical(rng: np.random.Generator) -> None:
    x, y, p = run(MoE(6, 8, 2, choice="hierarchical", groups=2, top_groups=1), rng)
    by_group, logits = x @ p["group_router.weight"].T, x @ p["router.weight"].T
    combine = np.zeros_like(logits)
    for b, t in np.ndindex(x.shape[:2]):
        g = int(by_group[b, t].argmax())
        chosen = [3 * g + e for e in best(logits[b, t, 3 * g : 3 * g + 3], 2)]
        combine[b, t, chosen] = softmax(logits[b, t, chosen])
    close(y, mixed(p, combine, x))


def test_load_balance_loss_is_an_output_summed_over_layers(rng: np.random.Generator) -> None:
    _, found, _ = outputs(MoE(4, 8, 1, aux_loss=0.01), rng)
    assert list(found) == ["output", "aux_loss"]
    graph = Decoder(10, 16, 3, Block(None, MoE(4, 8, 2, aux_loss=0.01, capacity=1))).graph()
    verify(graph)
    assert list(graph.outputs) == ["logits", "aux_loss"]
    params = {n: rng.standard_normal(v.shape) for n, v in graph.params.items()}
    expected, x = 0.0, params["embed.weight"][ids := rng.integers(0, 10, (2, 6))]
    for i in range(3):
        layer = {n.removeprefix(f"layers.{i}.ffn."): v for n, v in params.items() if f"layers.{i}." in n}
        normed = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * params[f"layers.{i}.ffn_norm.weight"]
        weights = softmax(normed @ layer["router.weight"].T)
        chosen = np.zeros_like(weights)
        kept = np.zeros_like(weights)
        for b in range(2):
            taken = np.zeros(4, int)
            for t in range(6):
                two = best(weights[b, t], 2)
                chosen[b, t, two] = weights[b, t, two] / weights[b, t, two].sum()
                taken[two] += 1
                kept[b, t] = np.where(taken <= 1, chosen[b, t], 0)
        expected += 0.01 * 4 * ((chosen > 0).mean((0, 1)) * weights.mean((0, 1))).sum()
        x = x + mixed(layer, kept, normed)
    close(interpret(graph, {"input_ids": ids}, params=params)["aux_loss"], np.asarray(expected))


def test_cost_counts_the_active_experts() -> None:
    def flops(model: Any) -> int:
        from weft.ir.graph.analysis import total_cost
        from weft.ir.types import sizes

        graph = Decoder(10, 16, 1, Block(None, model)).graph()
        return sizes.evaluate(total_cost(n for n in graph.nodes if n.op is ops.moe).flops, {"batch": 1, "seq": 1})

    assert flops(MoE(64, 8, 2)) == 2 * 6 * 8 * 16
    assert flops(MoE(64, 8, 2, choice="hierarchical", groups=8, top_groups=3)) == 6 * 6 * 8 * 16
