"""Trees for the terminal."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import weft
from weft.backends.viz.formats.style import Sheet
from weft.backends.viz.formats.tree import render_plain_tree
from weft.backends.viz.layout.coordinates import PlacedShape
from weft.frontends.app.api.draw.fact_sheet import build_fact_sheet

from ..pages import model_of
from .placed import BARE, ODD, ODD_LINE, PRESETS, place_default, place_odd_name


def test_tree_of_mixtral() -> None:
    model = model_of("mixtral-8x7b")
    assert (
        render_plain_tree(place_default("mixtral-8x7b"), build_fact_sheet(model))
        == """\
mixtral-8x7b                   Mixtral 8x7B v0.1 (Jiang 2024) · decoder                                   46.7 G
├─ input_ids                   i64[batch, seq]
├─ position_ids                i64[batch, seq]
├─ embed                       Embedding · 32,000 × 4,096                                                  131 M
├─ layers 0-31 · experts × 32                                                                             46.4 G
│  ├─ attn_norm                RMSNorm                                                                     4.1 k
│  ├─ attn                     Grouped-query attention · 32 heads, 8 KV heads · RoPE · with position_ids  41.9 M
│  ├─ attn_residual            +
│  ├─ ffn_norm                 RMSNorm                                                                     4.1 k
│  ├─ ffn                      Mixture of experts · 8 experts, 2 active                                   1.41 G
│  └─ ffn_residual             +
├─ final_norm                  RMSNorm                                                                     4.1 k
├─ lm_head                     Linear · 4,096 to 32,000                                                    131 M
└─ logits                      f32[batch, seq, 32000]
"""
    )


def test_block_inside_a_layer_is_titled_block(tmp_path: Path) -> None:
    """Not by what it has of attention, or of a feed-forward."""
    block = weft.Block(weft.Attention(2), weft.GatedMLP(24))
    weft.draw(weft.Decoder(20, 16, 1, weft.MixtureOfDepths(block)), tmp_path / "tree.txt")
    text = (tmp_path / "tree.txt").read_text()
    assert "Block · RMSNorm, Multi-head attention, SwiGLU feed-forward" in text


@pytest.mark.parametrize("preset", PRESETS)
def test_tree_has_a_line_for_every_part(preset: str) -> None:
    placed = place_default(preset)
    lines = render_plain_tree(placed, BARE).splitlines()
    assert len(lines) == len(list(placed.all()))
    depths = [(len(line) - len(line.lstrip("│├└─ "))) // 3 for line in lines]
    assert depths == [depth for _, depth in list_depths(placed, 0)]
    counts = [int(n) for n in re.findall(r"× (\d+)(?= {2}|$)", "\n".join(line.partition(" · ")[0] for line in lines))]
    assert all(n > 1 for n in counts)


def list_depths(placed: PlacedShape, depth: int) -> list[tuple[PlacedShape, int]]:
    return [(placed, depth), *(pair for inner in placed.inner for pair in list_depths(inner, depth + 1))]


def test_names_are_on_one_line() -> None:
    assert ODD_LINE in render_plain_tree(place_odd_name(ODD), Sheet('say "it"', "about\nlines", ()))
