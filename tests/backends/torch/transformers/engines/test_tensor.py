"""Units of tensor parallelism: linear maps of attentions and feed-forwards, and reasons against division."""

from __future__ import annotations

from typing import Any

import pytest

from weft import Attention, Block, Decoder, GatedMLP, QKNorm, RMSNorm, RoPE
from weft.backends.torch.transformers.engines.tensor import COLUMNS, HEADS, ROWS, Units, find_tensor_units
from weft.backends.torch.transformers.lower.lower_base_and_head import lower_sides

from .....lowered import forms
from ..tiny import base_of


def units_of(**options: Any) -> Units:
    block = Block(Attention(8, 4, rope=RoPE(), **options), GatedMLP(48), RMSNorm())
    lowered = lower_sides(forms(Decoder(60, 32, 1, block).graph(), "transformers"))[0]
    return find_tensor_units(lowered.graph, lowered.base)


def test_maps_into_heads_are_divided_by_columns_and_the_map_out_by_rows() -> None:
    units = find_tensor_units(base_of("dense").lowered.graph, base_of("dense").lowered.base)
    assert units.undivided == {} and len(units.styles) == 6
    attn, ffn = "layers.0.attn", "layers.0.ffn"
    assert units.styles[attn] == {f"{attn}.{n}": COLUMNS for n in "qkv"} | {f"{attn}.o": ROWS}
    assert units.styles[f"{ffn}.down"] == {f"{ffn}.{n}": COLUMNS for n in ("up", "gate")} | {f"{ffn}.down": ROWS}


def test_norms_of_each_head_and_gates_are_divided_with_the_heads() -> None:
    styles = units_of(qk_norm=RMSNorm()).styles["layers.0.attn"]
    assert [style for path, style in styles.items() if "norm" in path] == [HEADS, HEADS]
    gated = units_of(gate=True).styles["layers.0.attn"]
    assert gated["layers.0.attn.gate"] == COLUMNS and gated["layers.0.attn.o"] == ROWS


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"sinks": True}, "it has sinks of its own for every head"),
        ({"qk_norm": QKNorm(RMSNorm(), over="full")}, "its queries and keys are normed across heads"),
    ],
)
def test_undivided_attentions_have_a_reason(options: dict[str, Any], reason: str) -> None:
    units = units_of(**options)
    assert units.undivided == {"layers.0.attn": reason}
    assert list(units.styles) == ["layers.0.ffn.down"]
