"""Links between closed parts."""

from __future__ import annotations

import pytest

from weft.backends.viz.layout.links import find_links

from ..formats.placed import PRESETS, place_default, place_everything
from ..pages import drawn, network_of

LLAMA = """
input_ids > embed; embed > layers.0.attn_norm; position_ids > layers.0.attn; layers.0.attn_norm > layers.0.attn;
embed > layers.0.attn_residual; layers.0.attn > layers.0.attn_residual; layers.0.attn_residual > layers.0.ffn_norm;
layers.0.ffn_norm > layers.0.ffn; layers.0.attn_residual > layers.0.ffn_residual; layers.0.ffn > layers.0.ffn_residual;
layers.0.ffn_residual > final_norm; final_norm > lm_head; lm_head > out.logits"""


def test_links_of_llama() -> None:
    told = {(a.strip(), b.strip()) for a, b in (pair.split(">") for pair in LLAMA.split(";"))}
    assert set(find_links(place_default("llama3.1-8b"))) == told


@pytest.mark.parametrize("preset", ["smollm2-135m", "t5-base", "mamba-130m"])
def test_links_equal_the_edges_of_the_graph(preset: str) -> None:
    net = network_of(preset)
    placed = place_everything(drawn(preset))
    home = {v.name: p.shape.key for p in placed.all() if not p.open for v in p.shape.part.vertices}
    maker = {made: v.name for v in net.vertices for made in v.makes} | {name: name for name in net.inputs}
    wanted = {(home[maker[r]], home[v.name]) for v in net.vertices for r in v.reads}
    wanted |= {(home[maker[value]], f"out.{name}") for name, (value, _) in net.outputs.items()}
    assert set(find_links(placed)) == {(a, b) for a, b in wanted if a != b}


@pytest.mark.parametrize("preset", PRESETS)
def test_links_join_closed_parts_once(preset: str) -> None:
    placed = place_default(preset)
    closed = {p.shape.key for p in placed.all() if not p.open}
    found = find_links(placed)
    assert len(found) == len(set(found)) and {key for pair in found for key in pair} == closed
