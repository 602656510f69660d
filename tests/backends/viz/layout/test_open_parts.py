"""Choice of the open parts: by depth, by name, and by default."""

from __future__ import annotations

import pytest

from weft.backends.viz.layout.open_parts import select_open
from weft.backends.viz.layout.scene import list_default_open
from weft.ir.errors import WeftError

from ..pages import drawn

ROOT, REPEAT = "", "layers.0-29"


def test_depth_counts_containers() -> None:
    root = drawn("smollm2-135m")
    assert select_open(root, 0) == {ROOT}
    assert select_open(root, 1) == {ROOT, REPEAT}
    assert select_open(root, 2) == {ROOT, REPEAT, "layers.0.attn", "layers.0.ffn"}
    assert select_open(root) == list_default_open(root) == {ROOT, REPEAT}


def test_named_part_opens_with_its_containers() -> None:
    root = drawn("smollm2-135m")
    assert select_open(root, 0, ["layers.0.ffn"]) == {ROOT, REPEAT, "layers.0.ffn"}
    assert select_open(root, 0, ["attn"]) == {ROOT, REPEAT, "layers.0.attn"}
    both = {"encoder.layers.0.attn", "decoder.layers.0.attn", "encoder", "decoder"}
    assert select_open(drawn("t5-base"), 0, ["attn"]) > both  # every part with that end


@pytest.mark.parametrize("name", ["tn", "layers.1.attn", "embed", ""])
def test_name_of_no_part_that_opens_is_refused(name: str) -> None:
    with pytest.raises(WeftError, match=f"unknown part '{name}'"):
        select_open(drawn("smollm2-135m"), 0, [name])
