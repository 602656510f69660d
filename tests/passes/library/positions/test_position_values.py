"""Values computed from positions alone: tables, offsets, and the row of position 0."""

from __future__ import annotations

import pytest

from weft.ir import Graph, parse
from weft.passes.library.positions.position_values import find_first_row, find_position_tables, find_position_values

HEAD = """graph g {
  input %input_ids: i64[batch, seq]
  input %position_ids: i64[batch, seq]
  param %embed: f32[9, 4] = normal([9, 4], std=1.0, stream="e")
  param %table: f32[12, 4] = normal([12, 4], std=1.0, stream="p")
  %token: f32[batch, seq, 4] = embedding(%input_ids, %embed)
"""


def graph(place: str) -> Graph:
    return parse(
        f"{HEAD}{place}  %row: f32[batch, seq, 4] = embedding(%place, %table)\n"
        "  %x: f32[batch, seq, 4] = add(%token, %row)\n  output x = %x\n}"
    )


@pytest.mark.parametrize(
    ("place", "first"),
    [
        ("%place: i64[batch, seq] = affine(%position_ids, by=1.0, plus=2.0)\n", 2),
        ("%place: i64[batch, seq] = affine(%position_ids, by=2.0, plus=0.0)\n", None),
        ("%one: i64[seq] = iota(%input_ids, axis=1) %two: i64[1, seq] = unsqueeze(%one, axes=[0]) "
         "%place: i64[batch, seq] = expand(%two, shape=[batch, seq])\n", 0),
    ],
    ids=["offset", "stretched", "counted"],
)  # fmt: skip
def test_table_of_positions_is_found_with_its_first_row(place: str, first: int | None) -> None:
    g = graph(place)
    (row,) = find_position_tables(g)
    assert row.output.name == "row" and find_first_row(row) == first
    names = {v.name for v in find_position_values(g)}
    assert {"place", "row"} <= names and names.isdisjoint({"token", "x", "input_ids"})


def test_table_of_tokens_is_none() -> None:
    g = graph("%place: i64[batch, seq] = affine(%input_ids, by=1.0, plus=2.0)\n")
    assert find_position_tables(g) == []
    assert {v.name for v in find_position_values(g)} == {"position_ids"}
