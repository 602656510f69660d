"""Differential attention, attention with scored keys, and mixture of attention heads."""

from __future__ import annotations

from typing import Any

import pytest

from weft.frontends.dsl import Block, Decoder, DifferentialAttention, MixtureOfAttention, RoPE, ScoredKeysAttention

from .formulas.attention import differential_attention, mixture_of_attention, scored_keys_attention
from .harness import RUNNERS, Row, check


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize(
    "options", [{}, {"kv_heads": 2, "rope": RoPE(), "lambda_init": 0.3, "bias": True}, {"causal": False}], ids=str
)
def test_differential_attention(options: dict[str, Any], runner: str) -> None:
    module = DifferentialAttention(4, **options)
    check(Row(module, differential_attention(module)), runner)


@pytest.mark.parametrize(
    ("lambda_init", "expected"), [(None, [0.2, 0.8 - 0.6 * 0.7408182206817179]), (0.3, [0.3, 0.3])], ids=str
)
def test_lambda_follows_the_depth_unless_it_is_given(lambda_init: float | None, expected: list[float]) -> None:
    """λ₀ = 0.8 − 0.6·exp(−0.3·(l − 1)), with l counted from 1."""
    block = Block(DifferentialAttention(4, lambda_init=lambda_init))
    graph = Decoder(8, 16, 2, block).graph()
    nodes = {node.output.name: node for node in graph.nodes}
    assert [nodes[f"layers.{i}.attn.lambda"].attrs["plus"] for i in range(2)] == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("options", [{}, {"kv_heads": 2, "rope": RoPE(), "window": 3, "bias": True}], ids=str)
def test_scored_keys_attention(options: dict[str, Any], runner: str) -> None:
    module = ScoredKeysAttention(4, **options)
    check(Row(module, scored_keys_attention(module)), runner)


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("rope", [None, RoPE()], ids=str)
def test_mixture_of_attention(rope: RoPE | None, runner: str) -> None:
    module = MixtureOfAttention(3, 2, 2, 6, rope)
    check(Row(module, mixture_of_attention(module)), runner)
