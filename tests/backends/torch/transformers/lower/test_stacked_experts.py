"""Mixtures of experts as a module with stacked weights."""

from __future__ import annotations

import ast
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.backends.torch.transformers.lower.stacked_experts import get_experts_path, make_stack_recipes
from weft.ir.recipes import Slice, Source

from ..tiny import base_of

CONFIG = SimpleNamespace(num_experts=8, moe_intermediate_size=16, hidden_size=32)


def test_gate_and_up_are_stacked_in_one_weight() -> None:
    weights = base_of("experts").lowered.base.weights
    home = "layers.0.ffn.experts"
    assert weights[f"{home}.gate_up_proj"].type.concrete({}) == (8, 32, 32)
    assert weights[f"{home}.down_proj"].type.concrete({}) == (8, 32, 16)


def test_recipes_cut_the_stacked_weights() -> None:
    node = next(n for n in base_of("experts").lowered.graph.nodes if n.op.name == "moe")
    assert get_experts_path(node) == "layers.0.ffn.experts"
    gate_up = Source("e.gate_up_proj")
    assert make_stack_recipes(node, "e") == {
        "gate": Slice(gate_up, 1, 0, 16), "up": Slice(gate_up, 1, 16, 32), "down": Source("e.down_proj"),
    }  # fmt: skip


def test_class_computes_the_weighted_sum_of_its_experts() -> None:
    source = base_of("experts").lowered.emitter.program.functions["Experts"]
    assert ast.parse(source) and source.startswith("@use_experts_implementation\nclass Experts(nn.Module):")
    names = {"torch": torch, "F": F, "nn": nn, "Tensor": Tensor, "Any": object}
    exec(source, names | {"use_experts_implementation": lambda kind: kind}, names)
    experts = names["Experts"](CONFIG)
    for p in experts.parameters():
        nn.init.normal_(p, std=0.3)
    x, index = torch.randn(5, 32), torch.tensor([[0, 3], [7, 1], [2, 0], [3, 4], [5, 6]])
    weights = torch.rand(5, 2)
    want = torch.zeros(5, 32)
    for t in range(5):
        for i, w in zip(index[t], weights[t], strict=True):
            gate, up = (experts.gate_up_proj[i] @ x[t]).split(16)
            want[t] += w * (experts.down_proj[i] @ (F.silu(gate) * up))
    torch.testing.assert_close(experts(x, index, weights), want, rtol=1e-4, atol=1e-5)
