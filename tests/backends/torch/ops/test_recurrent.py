"""Recurrences in PyTorch: convolutions, state-space layers, linear attention."""

from __future__ import annotations

import pytest
import torch

from weft.backends.torch.program.registry import LOWERINGS
from weft.ir import ops
from weft.ir.types.sizes import sym

from .op_cases import build_graph, check, examples, write_forward

B, S = sym("batch"), sym("seq")


@pytest.mark.parametrize(("name", "number", "held", "dtype"), examples("recurrent"))
def test_cases_agree_with_the_reference(name: str, number: int, held: bool, dtype: torch.dtype) -> None:
    check(name, number, held, dtype)


def test_recurrences_without_a_cache_return_no_state() -> None:
    graph = build_graph(
        lambda x, y, z: ops.gated_linear_attention(x, y, z, heads=2, groups=2), (B, S, 8), (B, S, 8), (B, S, 4)
    )
    assert write_forward(graph) == "return linear_recurrence(x, y, z, past=None, heads=2, groups=2)[0]"


def test_causal_conv_applies_its_activation() -> None:
    graph = build_graph(lambda x, w: ops.causal_conv(x, w, activation="silu"), (B, S, 4), w=(4, 3))
    assert write_forward(graph) == "return F.silu(causal_conv(x, self.w.weight))"


def test_a_past_state_is_an_operand_and_the_new_state_an_output() -> None:
    graph = build_graph(lambda x, y, w: ops.causal_conv.emit(x, w, None, y), (B, S, 4), (B, 2, 4), w=(4, 3))
    call, returned = write_forward(graph).split("\n")
    assert call.endswith(", present = causal_conv_from(y, x, self.w.weight)")
    assert returned == f"return ({call.partition(',')[0]}, present)"


@pytest.mark.parametrize(
    ("causal", "source"),
    [
        (False, "linear_attention(x, y, x, y, z, 2)"),
        (True, "causal_linear_attention(x, y, x, y, z, None, heads=2)[0]"),
    ],
)
def test_linear_attention_maps_queries_and_keys_to_features(causal: bool, source: str) -> None:
    graph = build_graph(
        lambda x, y, z: ops.linear_attention(x, y, z, heads=2, causal=causal), (B, S, 8), (B, S, 8), (B, S, 4)
    )
    assert write_forward(graph).split("\n") == ["x = elu_plus_one(x)", "y = elu_plus_one(y)", f"return {source}"]


@pytest.mark.parametrize("name", ["selective_scan", "ssd"])
def test_state_space_layers_have_a_lowering_with_kernels_and_one_without(name: str) -> None:
    assert [lowering.kernels for lowering in LOWERINGS[name]] == [True, False]
