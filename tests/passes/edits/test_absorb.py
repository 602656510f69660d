"""Linear maps of vectors go into the weights that write or read them, against numpy."""

from __future__ import annotations

import numpy as np
import pytest

from weft.ir import Graph, MemoryReader, Node, interpret, parse
from weft.ir.recipes import Source
from weft.ir.recipes.readers import Array
from weft.passes.edits.absorb import (
    AxisMap,
    absorb_input_map,
    absorb_output_map,
    explain_refusal,
    find_readers,
    is_row_move,
    make_matrix_map,
    make_scale_map,
    subtract_mean,
)

RNG = np.random.default_rng(0)
ARRAYS = {"m": RNG.standard_normal((4, 4)), "s": RNG.standard_normal(4), "w": RNG.standard_normal((6, 4))}
ARRAYS |= {"v": RNG.standard_normal((4, 6)), "b": RNG.standard_normal(4), "x": RNG.standard_normal((3, 6))}
TEXT = """graph g {
  input %x: f32[3, 6]
  param %v: f32[4, 6] = source("v")
  param %b: f32[4] = source("b")
  param %w: f32[6, 4] = source("w")
  %h: f32[3, 4] = linear(%x, %v, %b)
  %y: f32[3, 6] = linear(%h, %w)
  output y = %y
}"""
MAPS: dict[str, tuple[AxisMap, Array]] = {
    "scalar": (make_scale_map(0.3), 0.3 * np.eye(4)),
    "vector": (make_scale_map(Source("s")), np.diag(ARRAYS["s"])),
    "mean": (subtract_mean, np.eye(4) - 1 / 4),
    "matrix": (make_matrix_map(Source("m")), ARRAYS["m"]),
}


def graph() -> tuple[Graph, Node, Node]:
    g = parse(TEXT)
    g.reader = MemoryReader({name: array for name, array in ARRAYS.items() if name != "x"})
    writer, reader = g.nodes
    return g, writer, reader


@pytest.mark.parametrize("name", MAPS)
def test_writer_writes_the_mapped_vector(name: str) -> None:
    axis_map, matrix = MAPS[name]
    g, writer, _ = graph()
    absorb_output_map(writer, axis_map)
    wanted = (ARRAYS["x"] @ ARRAYS["v"].T + ARRAYS["b"]) @ matrix @ ARRAYS["w"].T
    np.testing.assert_allclose(interpret(g, {"x": ARRAYS["x"]})["y"], wanted, atol=1e-12)
    assert list(g.params) == ["v", "b", "w"]


@pytest.mark.parametrize("name", MAPS)
def test_reader_applies_the_transposed_map_and_a_shift(name: str) -> None:
    axis_map, matrix = MAPS[name]
    g, _, reader = graph()
    absorb_input_map(reader, axis_map, Source("s"))
    h = ARRAYS["x"] @ ARRAYS["v"].T + ARRAYS["b"]
    np.testing.assert_allclose(
        interpret(g, {"x": ARRAYS["x"]})["y"], h @ matrix.T @ ARRAYS["w"].T + ARRAYS["s"] @ ARRAYS["w"].T, atol=1e-12
    )


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_matrix_map_takes_any_axis(axis: int) -> None:
    stack = RNG.standard_normal((4, 4, 4))
    mapped = make_matrix_map(Source("m"))(Source("stack"), axis, 3)
    found = mapped.evaluate(MemoryReader({"stack": stack, "m": ARRAYS["m"]}))
    np.testing.assert_allclose(found, np.moveaxis(np.moveaxis(stack, axis, 2) @ ARRAYS["m"], 2, axis), atol=1e-12)


def test_readers_are_found_after_row_moves_and_not_after_outputs() -> None:
    g = parse(
        "graph g { input %x: f32[n, 3, 4] param %w: f32[4, 4] = full(0.5, dims=[4, 4]) "
        "%a: f32[n, 1, 4] = slice(%x, axis=1, start=2, stop=3) %y: f32[n, 1, 4] = linear(%a, %w) "
        "%z: f32[n, 3, 4] = softmax(%x) output y = %y output z = %z }"
    )
    cut, linear, softmax = g.nodes
    assert is_row_move(cut) and not is_row_move(softmax)
    assert find_readers(g.inputs["x"]) == [(softmax, 0), (linear, 0)]
    assert find_readers(linear.output) == "%y is an output of the graph"
    assert explain_refusal(linear, 0) is None
    assert explain_refusal(softmax, 0) == "it is read by softmax (%z)"


@pytest.mark.parametrize(
    ("node", "moves"),
    [
        ("f32[3, 1, 4] = slice(%x, axis=1, start=0, stop=1)", True),
        ("f32[3, 2, 1] = slice(%x, axis=-1, start=0, stop=1)", False),
        ("f32[6, 4] = reshape(%x, shape=[6, 4])", True),
        ("f32[3, 8] = reshape(%x, shape=[3, 8])", False),
        ("f32[2, 3, 4] = transpose(%x, axes=[1, 0, 2])", True),
        ("f32[3, 4, 2] = transpose(%x, axes=[0, 2, 1])", False),
        ("f32[3, 1, 2, 4] = unsqueeze(%x, axes=[1])", True),
        ("f32[3, 2, 4, 1] = unsqueeze(%x, axes=[3])", False),
        ("f32[2, 2, 4] = gather(%x, %i, axis=0)", True),
        ("f32[3, 2, 2] = gather(%x, %i, axis=2)", False),
        ("f32[6, 2, 4] = concat(%x, %x, axis=0)", True),
        ("f16[3, 2, 4] = cast(%x, to=f16)", True),
        ("i64[3, 2, 4] = cast(%x, to=i64)", False),
        ("f32[3, 2, 4] = exp(%x)", False),
    ],
)
def test_row_moves_keep_the_last_axis(node: str, moves: bool) -> None:
    g = parse(f"graph g {{ input %x: f32[3, 2, 4] input %i: i64[2] %y: {node} output y = %y }}")
    (one,) = g.nodes
    assert is_row_move(one) == moves
