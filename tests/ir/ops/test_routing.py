"""Routers and experts against Transformers; what it lacks against the papers' formulas, one number after the other."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from weft.ir import Graph, TensorType, Value, interpret, ops
from weft.ir.ops import routing
from weft.ir.types import dtypes

B, S, WIDTH, HIDDEN, EXPERTS, K = 2, 9, 6, 10, 8, 3
RNG = np.random.default_rng(8)
X = RNG.standard_normal((B, S, WIDTH))
LOGITS = RNG.standard_normal((B, S, EXPERTS)) * 2


def filled(module: torch.nn.Module) -> dict[str, np.ndarray]:
    """Fill every parameter with normal numbers; return them in float64."""
    torch.manual_seed(1)
    module.double().eval()
    for p in module.parameters():
        torch.nn.init.normal_(p, std=0.5)
    return {name: p.detach().numpy() for name, p in module.named_parameters()}


def gated(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(up, gate) of a packed [experts, 2·hidden, dim] projection, gate first."""
    return packed[:, packed.shape[1] // 2 :], packed[:, : packed.shape[1] // 2]


def run(module: torch.nn.Module, x: np.ndarray = X) -> Any:
    with torch.no_grad():
        return module(torch.from_numpy(x))


def test_mixtral() -> None:
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    config = MixtralConfig(
        hidden_size=WIDTH, intermediate_size=HIDDEN, num_local_experts=EXPERTS, num_experts_per_tok=K
    )
    block = MixtralSparseMoeBlock(config)
    p = filled(block)
    combine = ops.route.reference(X @ p["gate.weight"].T, k=K)
    assert ((combine != 0).sum(-1) == K).all()
    up, gate = gated(p["experts.gate_up_proj"])
    found = ops.moe.reference(X, combine, up, p["experts.down_proj"], gate, active=K)
    np.testing.assert_allclose(found, run(block), atol=1e-5)  # its softmax is in float32


@pytest.mark.parametrize("renormalize", [True, False])
def test_qwen3_moe(renormalize: bool) -> None:
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config = Qwen3MoeConfig(
        hidden_size=WIDTH,
        moe_intermediate_size=HIDDEN,
        num_experts=EXPERTS,
        num_experts_per_tok=K,
        norm_topk_prob=renormalize,
    )
    block = Qwen3MoeSparseMoeBlock(config)
    p = filled(block)
    combine = ops.route.reference(X @ p["gate.weight"].T, k=K, renormalize=renormalize)
    up, gate = gated(p["experts.gate_up_proj"])
    found = ops.moe.reference(X, combine, up, p["experts.down_proj"], gate)
    np.testing.assert_allclose(found, run(block), atol=1e-5)


def test_deepseek_v3() -> None:
    """Sigmoid scores, bias-corrected choice limited to the best groups, scaled weights, a shared expert."""
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

    config = DeepseekV3Config(
        hidden_size=WIDTH,
        moe_intermediate_size=HIDDEN,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=K,
        n_group=4,
        topk_group=2,
        n_shared_experts=2,
        routed_scaling_factor=2.5,
    )
    block = DeepseekV3MoE(config)
    p = filled(block)
    bias = RNG.standard_normal(EXPERTS)
    block.gate.e_score_correction_bias.copy_(torch.from_numpy(bias))
    logits = X @ p["gate.weight"].T
    combine = ops.route.reference(logits, bias, k=K, scoring="sigmoid", groups=4, top_groups=2, scale=2.5)
    up, gate = gated(p["experts.gate_up_proj"])
    shared = ops.glu.reference(X @ p["shared_experts.gate_proj.weight"].T, X @ p["shared_experts.up_proj.weight"].T)
    found = (
        ops.moe.reference(X, combine, up, p["experts.down_proj"], gate)
        + shared @ p["shared_experts.down_proj.weight"].T
    )
    np.testing.assert_allclose(found, run(block), atol=1e-5)
    plain = ops.route.reference(logits, k=K, scoring="sigmoid", scale=2.5)
    assert ((plain != 0) != (combine != 0)).any()  # bias and groups do matter here


def test_deepseek_v2() -> None:
    """Groups compete by their best expert; softmax weights, not renormalized."""
    from transformers import DeepseekV2Config
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter

    config = DeepseekV2Config(
        hidden_size=WIDTH,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=K,
        n_group=4,
        topk_group=2,
        num_attention_heads=2,
        topk_method="group_limited_greedy",
        routed_scaling_factor=16.0,
        norm_topk_prob=False,
    )
    router = DeepseekV2TopkRouter(config)
    p = filled(router)
    _, weights, chosen = run(router.float(), X.astype(np.float32))
    wanted = torch.zeros(B * S, EXPERTS).scatter(1, chosen, weights).reshape(B, S, EXPERTS)
    found = ops.route.reference(
        X @ p["weight"].T, k=K, groups=4, top_groups=2, group_score="max", renormalize=False, scale=16.0
    )
    np.testing.assert_allclose(found, wanted, atol=2e-5)


@pytest.mark.parametrize("capacity", [1, 2, 64])
def test_switch(capacity: int) -> None:
    """k = 1, weight = its probability, what an expert cannot take is dropped."""
    from transformers import SwitchTransformersConfig
    from transformers.models.switch_transformers.modeling_switch_transformers import SwitchTransformersSparseMLP

    config = SwitchTransformersConfig(
        d_model=WIDTH, d_ff=HIDDEN, num_experts=4, expert_capacity=capacity, dropout_rate=0.0
    )
    block = SwitchTransformersSparseMLP(config)
    p = filled(block)
    combine = ops.route.reference(X @ p["router.classifier.weight"].T, k=1, renormalize=False)
    limited = ops.limit_capacity.reference(combine, capacity=capacity)
    assert (limited != 0).sum(1).max() <= capacity
    up, down = (np.stack([p[f"experts.expert_{e}.{name}.weight"] for e in range(4)]) for name in ("wi", "wo"))
    found = ops.moe.reference(X, limited, up, down, activation="relu", active=1)
    np.testing.assert_allclose(found, run(block), atol=1e-5 * np.abs(found).max())  # its router is in float32
    assert (found[(limited == 0).all(-1)] == 0).all()


def test_gpt_oss() -> None:
    """Router and experts with biases; clamped SwiGLU with σ(1.702x) and up + 1."""
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

    config = GptOssConfig(hidden_size=WIDTH, intermediate_size=HIDDEN, num_local_experts=EXPERTS, num_experts_per_tok=K)
    block = GptOssMLP(config)
    p = filled(block)
    block.experts.limit = 0.7
    combine = ops.route.reference(X @ p["router.weight"].T + p["router.bias"], k=K)
    packed, bias = p["experts.gate_up_proj"], p["experts.gate_up_proj_bias"]
    found = ops.moe.reference(
        X,
        combine,
        packed[:, :, 1::2].swapaxes(1, 2),
        p["experts.down_proj"].swapaxes(1, 2),
        packed[:, :, ::2].swapaxes(1, 2),
        bias[:, 1::2],
        p["experts.down_proj_bias"],
        bias[:, ::2],
        activation="swish(1.702)",
        limit=0.7,
        shift=1.0,
    )
    np.testing.assert_allclose(found, run(block)[0], rtol=1e-10, atol=1e-12)


def test_load_balance_is_mixtral() -> None:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    logits = LOGITS.reshape(-1, EXPERTS)
    wanted = load_balancing_loss_func((torch.from_numpy(logits),), EXPERTS, K)
    found = ops.load_balance_loss.reference(LOGITS, ops.route.reference(LOGITS, k=K))
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    even = ops.load_balance_loss.reference(np.zeros((EXPERTS, EXPERTS)), np.eye(EXPERTS))
    np.testing.assert_allclose(even, 1.0)  # the minimum: experts · Σ 1/E · 1/E


def test_load_balance_is_switch() -> None:
    from transformers.models.switch_transformers.modeling_switch_transformers import load_balancing_loss_func

    probs = F.softmax(torch.from_numpy(LOGITS[:1]), -1)
    wanted = load_balancing_loss_func(probs, probs.argmax(-1, keepdim=True)[None])
    found = ops.load_balance_loss.reference(LOGITS[:1], ops.route.reference(LOGITS[:1], k=1))
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.25, 2.0])
def test_capacity_factor(factor: float) -> None:
    """C = ⌈α · tokens / experts⌉, first come first served; the whole batch competes once flattened."""
    combine = ops.route.reference(LOGITS, k=2).reshape(B * S, EXPERTS)
    limit = math.ceil(factor * B * S / EXPERTS)
    wanted, taken = np.zeros_like(combine), [0] * EXPERTS
    for token, e in itertools.product(range(B * S), range(EXPERTS)):
        if combine[token, e] and taken[e] < limit:
            wanted[token, e] = combine[token, e]
            taken[e] += 1
    found = ops.limit_capacity.reference(combine, factor=factor)
    np.testing.assert_array_equal(found, wanted)
    if factor == 0.5:
        assert (found != combine).any()


@pytest.mark.parametrize("tokens", range(1, 40))
def test_capacity_is_a_whole_number_despite_rounding(tokens: int) -> None:
    """Reference and body agree for every length, also where α·tokens/experts is whole."""
    for factor in (0.1, 0.7, 1.1, 1.2, 1.25):
        combine = np.ones((tokens, 5))
        graph = Graph()
        x = graph.add_input("x", TensorType(dtypes.f32, combine.shape))
        node = ops.limit_capacity(x, factor=factor).producer
        assert node is not None
        graph.add_output("y", ops.limit_capacity.expand(node)[0])
        limit = -(-round(factor * 20) * tokens // 100)
        for found in (ops.limit_capacity.reference(combine, factor=factor), interpret(graph, {"x": combine})["y"]):
            assert found.sum(0).tolist() == [min(limit, tokens)] * 5


def test_expert_choice() -> None:
    """S = softmax(x W_g); expert e takes the C tokens with the largest S[:, e] (Zhou 2022, eq. 1 and 2)."""
    logits = LOGITS.reshape(B * S, EXPERTS)
    scores = F.softmax(torch.from_numpy(logits), -1)
    capacity = math.ceil(B * S * 2 / EXPERTS)
    values, tokens = torch.topk(scores.T, capacity)
    wanted = torch.zeros_like(scores.T).scatter(1, tokens, values).T
    np.testing.assert_allclose(ops.expert_choice.reference(logits, factor=2.0), wanted, rtol=1e-12)
    np.testing.assert_allclose(ops.expert_choice.reference(logits, capacity=capacity), wanted, rtol=1e-12)


def emit(make: Any, **arrays: np.ndarray) -> np.ndarray:
    graph = Graph()
    values: dict[str, Value] = {n: graph.add_input(n, TensorType(dtypes.f32, a.shape)) for n, a in arrays.items()}
    graph.add_output("y", make(**values))
    return interpret(graph, arrays)["y"]


def test_noisy_top_k() -> None:
    """H_i = (xW_g)_i + ε·softplus((xW_noise)_i); softmax over the kept k (Shazeer 2017, eq. 3 to 5)."""
    spread, noise = RNG.standard_normal((2, B, S, EXPERTS))
    found = emit(lambda **v: ops.route(routing.emit_noisy_logits(**v), k=K), logits=LOGITS, spread=spread, noise=noise)
    h = LOGITS + noise * np.log1p(np.exp(spread))
    for b, s in itertools.product(range(B), range(S)):
        kept = sorted(range(EXPERTS), key=lambda e: -h[b, s, e])[:K]
        total = sum(math.exp(h[b, s, e]) for e in kept)
        wanted = [math.exp(h[b, s, e]) / total if e in kept else 0.0 for e in range(EXPERTS)]
        np.testing.assert_allclose(found[b, s], wanted, rtol=1e-12)


def test_hierarchical() -> None:
    """Group first, then expert within the group; gates multiply."""
    groups, members = 4, EXPERTS // 4
    outer = RNG.standard_normal((B, S, groups))
    found = emit(
        lambda **v: routing.emit_hierarchical_routing(**v, top_groups=2, k=1), group_logits=outer, logits=LOGITS
    )
    for b, s in itertools.product(range(B), range(S)):
        kept = sorted(range(groups), key=lambda g: -outer[b, s, g])[:2]
        total = sum(math.exp(outer[b, s, g]) for g in kept)
        for g in range(groups):
            inside = LOGITS[b, s, g * members : (g + 1) * members]
            for e in range(members):
                chosen = g in kept and e == int(inside.argmax())
                weight = math.exp(outer[b, s, g]) / total if chosen else 0
                assert math.isclose(found[b, s, g * members + e], weight, rel_tol=1e-12)
