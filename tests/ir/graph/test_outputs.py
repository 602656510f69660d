"""The names of outputs by value."""

from __future__ import annotations

import pytest

from weft.ir.graph.outputs import Outputs


def test_names_of_follows_every_change() -> None:
    outputs: Outputs[str] = Outputs()
    assert outputs.names_of("v") == ()
    outputs.update({"y": "v", "z": "w"})
    outputs["a"] = "v"
    assert outputs.names_of("v") == ("y", "a")
    outputs["y"] = "w"  # keeps its position
    assert list(outputs.items()) == [("y", "w"), ("z", "w"), ("a", "v")]
    assert (outputs.names_of("v"), outputs.names_of("w")) == (("a",), ("z", "y"))
    del outputs["a"]
    assert outputs.pop("z") == "w"
    assert (outputs.names_of("v"), outputs.names_of("w")) == ((), ("y",))
    outputs.clear()
    assert outputs.names_of("w") == () and not outputs


def test_an_unknown_name_cannot_be_deleted() -> None:
    outputs: Outputs[str] = Outputs()
    with pytest.raises(KeyError, match="y"):
        del outputs["y"]
