"""Routers, experts and capacity limits in PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from weft.backends.torch.codegen.model_source import write_source
from weft.ir import Value, ops
from weft.ir.types.sizes import sym

from ....lowered import lower
from .op_cases import build_graph, check, examples, write_forward

B, S = sym("batch"), sym("seq")


@pytest.mark.parametrize(("name", "number", "held", "dtype"), examples("mixtures"))
def test_cases_agree_with_the_reference(name: str, number: int, held: bool, dtype: torch.dtype) -> None:
    check(name, number, held, dtype)


@pytest.mark.parametrize(
    ("attrs", "source"),
    [
        ({}, "route_softmax(x, 2)"),
        ({"renormalize": False}, "route_switch(x, 2)"),
        ({"scoring": "sigmoid", "renormalize": False, "scale": 2.5}, "route_sigmoid(x, 2) * 2.5"),
        (
            {"renormalize": False, "groups": 2, "top_groups": 1, "group_score": "max"},
            "route_softmax_groups(x, 2, 2, 1)",
        ),
        (
            {"scoring": "sigmoid", "scale": 2.5},  # no function of the library: written out
            "(renormalize(keep_top(scores, scores, 2)) * 2.5).to(x.dtype)",
        ),
    ],
)
def test_routers_call_the_library(attrs: dict[str, Any], source: str) -> None:
    forward = write_forward(build_graph(lambda x: ops.route(x, k=2, **attrs), (B, S, 4)))
    assert forward.rpartition("\n")[2] == f"return {source}"


def test_capacity_is_a_number_or_follows_from_the_tokens() -> None:
    graph = build_graph(lambda x: ops.limit_capacity(x, factor=1.25), (B, S, 4))
    assert write_forward(graph) == "return limit_capacity(x, expert_capacity(x.shape[-2], 4, 1.25))"
    graph = build_graph(lambda x: ops.expert_choice(x, capacity=3, batched=True), (B, S, 4))
    assert write_forward(graph) == "return expert_choice(x.flatten(0, -2), 3).view_as(x)"


def test_experts_are_one_function_of_a_gated_mlp() -> None:
    def make(x: Value, y: Value, **stacks: Value) -> Value:
        return ops.moe(x, y, *stacks.values(), active=2, activation="silu", limit=7.0, shift=1.0)

    graph = build_graph(make, (B, S, 4), (B, S, 3), up=(3, 6, 4), down=(3, 4, 6), gate=(3, 6, 4))
    weights = "self.gate.weight, self.up.weight, self.down.weight"
    assert write_forward(graph) == f"return moe(x, y, 2, expert, {weights})"
    expert = write_source(lower(graph)).text
    gate, up = "F.silu(linear(x, gate).clamp(max=7.0))", "(linear(x, up).clamp(-7.0, 7.0) + 1.0)"
    assert f"return linear({gate} * {up}, down)" in expert
