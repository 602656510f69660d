"""Pictures described in words, for screen readers."""

from __future__ import annotations

from weft.backends.viz.formats.sheet import Sheet, describe_picture
from weft.backends.viz.layout.scene import build_scene
from weft.backends.viz.model.network import Network

from ..pages import drawn


def test_description_lists_facts_then_parts_without_sums() -> None:
    sheet = Sheet("gpt2", "a decoder", (("Parameters", "124,439,808"), ("Context", "1,024")))
    described = describe_picture(drawn("gpt2"), sheet)
    assert described.startswith("a decoder. Parameters: 124,439,808. Context: 1,024. Parts: input_ids; ")
    assert "layers 0-11 × 12 of LayerNorm, Multi-head attention, LayerNorm, " in described and "+" not in described


def test_description_without_a_sheet_or_parts() -> None:
    assert describe_picture(build_scene(Network("empty", (), {}, {})), None) == "Parts: ."
