"""Feed-forwards with and without gates, and mixtures of experts with every routing scheme."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from weft.frontends.dsl import MLP, Block, Decoder, GatedMLP, MoE, Router, trace
from weft.ir import TensorType, ops, verify
from weft.ir.graph.analysis import sum_node_costs
from weft.ir.types import dtypes, sizes

from .formulas.elementary import ACTIVATIONS, in_scope, linear, rms_norm, sigmoid, softmax
from .formulas.feed_forward import (
    Combine,
    expert_choice,
    feed_forward,
    group_limited,
    hierarchical,
    load_balance_loss,
    mixture,
    top_k,
)
from .harness import RUNNERS, Row, check, close, outputs, randomize, run, trace_checked

GATES = ("sigmoid", "identity", "relu", "gelu", "gelu_quick", "silu", "swish(0.5)", "tanh")  # sigmoid: GLU …


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("kind", "activation"), [*((MLP, name) for name in ACTIVATIONS), *((GatedMLP, name) for name in GATES)]
)
def test_feed_forward(kind: type[MLP | GatedMLP], activation: str, bias: bool, runner: str) -> None:
    module = kind(24, activation, bias)
    check(Row(module, feed_forward(module)), runner)


@pytest.mark.parametrize(("wide", "multiple", "hidden"), [(4 * 4096, 256, 11008), (4 * 512, 1, 1365), (96, 32, 64)])
def test_matched_gated_mlp_has_the_parameter_count_of_an_mlp(wide: int, multiple: int, hidden: int) -> None:
    """Three matrices of 2/3 the width are as large as two, up to the multiple (Shazeer 2020; 11008 is Llama 2's)."""
    matched, dim = GatedMLP.matched(wide, multiple), 8
    assert matched == GatedMLP(hidden)

    def parameters(module: GatedMLP | MLP) -> int:
        graph = trace(module, {"x": TensorType(dtypes.f32, (1, dim))})
        return sum(math.prod(p.shape) for p in graph.params.values())

    assert abs(parameters(matched) - parameters(MLP(wide))) <= 3 * dim * multiple


# -- mixtures of experts


def row(module: MoE, router: Combine, **settings: Any) -> Row:
    return Row(module, mixture(module, router), **settings)


ROWS = {
    "top-k": row(MoE(8, 10, 2, router=Router(scale=1.5)), top_k(2, scale=1.5)),
    "top-k, plain weights": row(MoE(8, 10, 3, router=Router(renormalize=False, scale=1.5)), top_k(3, False, scale=1.5)),
    "all experts": row(MoE(8, 10, 8), top_k(8)),
    "sigmoid": row(MoE(8, 10, 2, router=Router(scoring="sigmoid")), top_k(2, scores=sigmoid)),
    "biased, ungated": row(MoE(8, 10, 2, "relu", gated=False, bias=True), top_k(2)),
    "biased, GEGLU": row(MoE(8, 10, 2, "gelu", bias=True), top_k(2)),
    "limit and shift": row(
        MoE(3, 4, 1, "swish(1.702)", bias=True, limit=0.8, shift=1.0, router=Router(bias=True)), top_k(1, bias=True)
    ),
    "noisy top-k": row(MoE(8, 10, 2, router=Router(noisy=True)), top_k(2, noisy=True), extra={"router_noise.0": (8,)}),
    "switch": row(MoE(8, 10, 1, "relu", gated=False, router=Router(renormalize=False)), top_k(1, False)),
    "switch, overflow": row(
        MoE(8, 10, 1, router=Router(renormalize=False, capacity=1.0)),
        top_k(1, False, limit=math.ceil(21 / 8)),
        length=21,
        std=1.0,
    ),
    "switch, half": row(
        MoE(2, 8, 1, router=Router(renormalize=False, capacity=0.5)), top_k(1, False, limit=math.ceil(0.5 * 11 / 2))
    ),
    "switch, two tokens": row(MoE(2, 8, 1, router=Router(renormalize=False, capacity=2)), top_k(1, False, limit=2)),
    "expert choice": row(MoE(8, 10, 2, router=Router(choice="expert")), expert_choice(math.ceil(2 * 11 / 8))),
    "expert choice, capacity": row(
        MoE(8, 10, 2, router=Router(choice="expert", capacity=1.25)), expert_choice(math.ceil(1.25 * 23 / 8)), length=23
    ),
    "expert choice, one token": row(MoE(8, 10, 2, router=Router(choice="expert", capacity=1)), expert_choice(1)),
    "hierarchical": row(
        MoE(6, 8, 2, router=Router(choice="hierarchical", groups=2, top_groups=1)), hierarchical(2, 1, 2)
    ),
    "hierarchical, two groups": row(
        MoE(8, 10, 1, router=Router(choice="hierarchical", groups=4, top_groups=2)), hierarchical(4, 2, 1)
    ),
    "group-limited, shared": row(
        MoE(
            8,
            6,
            3,
            shared=GatedMLP(10),
            router=Router(scoring="sigmoid", correction=True, groups=4, top_groups=2, scale=2.5),
        ),
        group_limited(4, 2, 3, 2.5),
    ),
    "gated shared": row(
        MoE(8, 10, 2, shared=GatedMLP(12), shared_gate=True, router=Router(renormalize=False)), top_k(2, False)
    ),
    "ungated shared": row(MoE(3, 4, 3, shared=MLP(8, "relu"), shared_gate=True), top_k(3)),
    "latent": row(MoE(3, 4, 3, "relu", gated=False, shared=MLP(8, "relu"), latent=5), top_k(3)),
    "one expert is a feed-forward": Row(
        MoE(1, 10, 1, "gelu_tanh", gated=False),
        lambda x, w: ACTIVATIONS["gelu_tanh"](x @ w["experts.up"][0].T) @ w["experts.down"][0].T,
    ),
}


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("name", ROWS)
def test_mixture_of_experts(name: str, runner: str) -> None:
    check(ROWS[name], runner)


def test_latent_experts_have_the_latent_width() -> None:
    assert trace_checked(ROWS["latent"].module).params["experts.up"].shape == (3, 4, 5)


def test_tokens_beyond_the_capacity_contribute_nothing() -> None:
    row, rng = ROWS["switch, overflow"], np.random.default_rng(7)
    graph = trace_checked(row.module)
    weights, x = randomize(graph, rng, row.std), rng.standard_normal((2, row.length, 16))
    y = run(graph, {"x": x})["output"]
    for b, s in enumerate(x):
        dropped = top_k(1, False, limit=3)(s, weights).sum(-1) == 0
        assert 0 < dropped.sum() < row.length
        assert (y[b, dropped] == 0).all()


def test_batched_routing_makes_rows_compete(rng: np.random.Generator) -> None:
    for module, router in (
        (MoE(4, 8, 2, router=Router(choice="expert", batched=True)), expert_choice(math.ceil(2 * 12 / 4))),
        (
            MoE(2, 8, 1, router=Router(renormalize=False, capacity=0.75, batched=True)),
            top_k(1, False, limit=math.ceil(0.75 * 12 / 2)),
        ),
    ):
        x, found, w = outputs(module, rng)
        close(found["output"], mixture(module, router)(x.reshape(12, 16), w).reshape(x.shape))


def test_every_noisy_router_has_its_own_noise_input() -> None:
    graph = Decoder(10, 16, 2, Block(None, MoE(4, 8, 2, router=Router(noisy=True)))).graph()
    assert list(graph.inputs) == ["input_ids", "router_noise.0", "router_noise.1"]


@pytest.mark.parametrize("runner", RUNNERS)
def test_load_balance_loss(runner: str) -> None:
    rng, moe = np.random.default_rng(3), MoE(8, 10, 2, router=Router(aux_loss=0.01))
    graph = trace_checked(moe)
    weights = randomize(graph, rng)
    x = rng.standard_normal((2, 11, 16)).astype(np.float32).astype(np.float64)
    found = run(graph, {"x": x}, runner)
    assert list(found) == ["output", "aux_loss"]
    p = softmax(linear(x.reshape(22, 16), weights, "router"))
    close(found["aux_loss"], load_balance_loss(p, 2, 0.01), runner == "interpreter")
    close(found["output"], np.stack([mixture(moe, top_k(2))(s, weights) for s in x]), runner == "interpreter")


def test_load_balance_loss_is_summed_over_layers(rng: np.random.Generator) -> None:
    moe = MoE(4, 8, 2, router=Router(aux_loss=0.01, capacity=1))
    graph = Decoder(10, 16, 3, Block(None, moe)).graph()
    verify(graph)
    assert list(graph.outputs) == ["logits", "aux_loss"]
    weights, ids, expected = randomize(graph, rng), rng.integers(0, 10, (2, 6)), np.zeros(())
    x = weights["embed.weight"][ids]
    for i in range(3):
        layer = in_scope(weights, f"layers.{i}.ffn.")
        normed = rms_norm(x, weights[f"layers.{i}.ffn_norm.weight"])
        expected = expected + load_balance_loss(softmax(linear(normed, layer, "router")).reshape(12, 4), 2, 0.01)
        x = x + np.stack([mixture(moe, top_k(2, limit=1))(s, layer) for s in normed])
    close(run(graph, {"input_ids": ids})["aux_loss"], expected)


def test_cost_counts_the_active_experts() -> None:
    def flops(model: Any) -> int:
        graph = Decoder(10, 16, 1, Block(None, model)).graph()
        return sizes.evaluate(sum_node_costs(n for n in graph.nodes if n.op is ops.moe).flops, {"batch": 1, "seq": 1})

    assert flops(MoE(64, 8, 2)) == 2 * 6 * 8 * 16
    assert flops(MoE(64, 8, 2, router=Router(choice="hierarchical", groups=8, top_groups=3))) == 6 * 6 * 8 * 16


def test_router_arguments_of_earlier_versions_become_a_router_with_a_note(caplog: pytest.LogCaptureFixture) -> None:
    old: dict[str, Any] = {"scoring": "sigmoid", "groups": 4, "top_groups": 2, "router_bias": True, "capacity": 1.5}
    assert MoE(8, 4, 2, bias=True, **old) == MoE(
        8, 4, 2, bias=True, router=Router(scoring="sigmoid", groups=4, top_groups=2, bias=True, capacity=1.5)
    )
    assert "is deprecated: use MoE(router=Router(scoring='sigmoid'" in caplog.text
