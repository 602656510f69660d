"""Packages of graphs: outputs of one are inputs of another, by their names in the model."""

from __future__ import annotations

import numpy as np
import pytest

from weft.ir import WeftError, interpret, parse
from weft.passes.package import Package

DOUBLE = "graph a { input %x: f32[n] %y: f32[n] = affine(%x, by=2.0) output y = %y }"
ADD = "graph b { input %h: f32[n] input %x: f32[n] %z: f32[n] = add(%h, %x) output z = %z }"


def package(second: str = ADD) -> Package:
    return Package({"double": parse(DOUBLE), "add": parse(second)}, {"add": {"h": "y"}})


def test_connection_is_an_output_read_under_its_name_in_the_model() -> None:
    (one,) = package().find_connections()
    assert (one.maker, one.reader, one.name, str(one.type)) == ("double", "add", "y", "f32[n]")
    assert Package({"double": parse(DOUBLE), "add": parse(ADD)}).find_connections() == []


def test_graphs_run_in_order_on_the_outputs_of_earlier_ones() -> None:
    x = np.array([1.0, 3.0])
    values = package().run(interpret, {"x": x})
    assert list(values) == ["x", "y", "z"]
    np.testing.assert_array_equal(values["z"], 3 * x)


def test_connection_of_two_types_names_both_graphs() -> None:
    with pytest.raises(WeftError, match=r"add reads y as f16\[n\], but double returns f32\[n\]"):
        package("graph b { input %h: f16[n] output z = %h }").find_connections()
