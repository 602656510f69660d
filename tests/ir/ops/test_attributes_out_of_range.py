"""Attributes of 0, or larger than machines have, are refused in a sentence that names the op."""

from __future__ import annotations

import pytest

from weft.ir.errors import WeftError
from weft.ir.text import parse

GRAPH = """graph g {{
  input %x: f32[3, 4, 8]
  input %positions: i64[3, 4]
  param %f: f32[2] = full(1.0, dims=[2])
  %y: {type} = {call}
  output y = %y
}}
"""


@pytest.mark.parametrize(
    ("type", "call"),
    [
        ("f32[3, 4, 8]", "rope(%x, %positions, %f, heads=0)"),
        ("f32[3, 4, 8]", "rope(%x, %positions, %f, heads=-1)"),
        ("f32[3, 4, 8]", "slice(%x, axis=2, start=0, stop=9223372036854775808)"),
        ("f32[3, 4, 8]", f"slice(%x, axis=2, start=0, stop=1{'0' * 400})"),
    ],
)
def test_attributes_out_of_range_are_refused(type: str, call: str) -> None:
    parse(GRAPH.format(type=type, call="rope(%x, %positions, %f, heads=2)"))  # it is sound but for that
    with pytest.raises(WeftError, match=rf":5:.*({call.partition('(')[0]}: |a number of 401 characters)"):
        parse(GRAPH.format(type=type, call=call))
