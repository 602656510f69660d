"""Masks that layers share: functions of transformers, and generated functions for other patterns."""

from __future__ import annotations

import ast
from types import SimpleNamespace

import pytest

from weft import Attention, Block, Decoder, GatedMLP, RMSNorm
from weft.backends.torch.transformers.lower.lower_base_and_head import LoweredModel, lower_sides

from .....lowered import forms
from ..tiny import base_of


def lower_windows(*windows: int | None, keep_first: int = 0) -> LoweredModel:
    blocks = [Block(Attention(4, window=w), GatedMLP(48), RMSNorm()) for w in windows]
    graph = Decoder(60, 32, blocks).graph()
    for node in graph.nodes:
        if node.op.name == "attention" and keep_first:
            node.attrs["keep_first"] = keep_first
    return lower_sides(forms(graph, "transformers"))[0]


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("dense", "create_causal_mask(self.config, {0}, {1}, {2}, {3})"),
        ("encoder", "create_bidirectional_mask(self.config, {0}, {1})"),
    ],
)
def test_single_mask_is_computed_by_transformers(name: str, call: str) -> None:
    lowered = base_of(name).lowered
    assert [s.text for s in lowered.base.statements].count(call) == 1 and lowered.masks == ""
    (mask,) = lowered.emitter.masks.values()
    assert len(mask.nodes) == sum(n.op.name == "attention" for n in lowered.graph.nodes)


def test_kinds_of_masks_are_computed_together() -> None:
    lowered = base_of("windows").lowered
    assert [(mask.kind, len(mask.nodes)) for mask in lowered.emitter.masks.values()] == [
        ("sliding_attention", 2),
        ("full_attention", 1),
    ]
    assert ast.parse(lowered.masks)
    assert '"sliding_attention": create_sliding_window_causal_mask(*given),' in lowered.masks
    assert '"full_attention": create_causal_mask(*given),' in lowered.masks
    texts = [s.text for s in lowered.base.statements]
    assert '{0}["sliding_attention"]' in texts and '{0}["full_attention"]' in texts


def test_second_window_is_a_condition_of_positions() -> None:
    lowered = lower_windows(3, 5)
    kinds = {mask.kind: mask.condition for mask in lowered.emitter.masks.values()}
    assert set(kinds) == {"sliding_attention", "window_keys"} and kinds["sliding_attention"] == ""
    assert "q, k = q - first[batch], k - first[batch]" in lowered.masks  # left-padded rows
    assert "and_mask_function=window_keys" in lowered.masks
    config = SimpleNamespace(**lowered.fields.values)
    shown = [[eval(kinds["window_keys"], {"q": q, "k": k, "config": config}) for k in range(8)] for q in range(8)]
    assert all(shown[q][k] == (q - k < 5) for q in range(8) for k in range(q + 1))


def test_recurrences_share_a_padding_mask() -> None:
    lowered = base_of("mamba").lowered
    assert [mask.kind for mask in lowered.emitter.masks.values()] == ["linear_attention"]
    assert '"linear_attention": create_recurrent_attention_mask(*given[:4]),' in lowered.masks
