"""Steps as formulas, and where people see them."""

from __future__ import annotations

from pathlib import Path

import pytest

import weft
from weft.backends.viz.model.labels import describe_sizes
from weft.backends.viz.model.network import build_network
from weft.frontends.app.api.inspect.counting import inspect
from weft.ir.text.parser import parse_step
from weft.passes.analysis.recurrences.formulas import write_formulas

EXAMPLE = Path(__file__).resolve().parents[4] / "examples" / "linear_rnn.py"
HEAD = """{
  state %h: f32[batch, 4]
  token %x: f32[batch, 4]
  token %g: f32[batch, 4]
"""


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        (
            "%a: f32[batch, 4] = affine(%g, by=-1.0, plus=1.0) %b: f32[batch, 4] = mul(%a, %x) "
            "%c: f32[batch, 4] = mul(%g, %h) %n: f32[batch, 4] = add(%c, %b)",
            ["h' = g · h + (1 − g) · x", "y = h'"],
        ),
        (
            "%a: f32[batch, 4] = sub(%h, %x) %b: f32[batch, 4] = sub(%g, %a) %n: f32[batch, 4] = div(%b, %a)",
            ["a = h − x", "h' = (g − a) / a", "y = h'"],
        ),
        (
            "%exp: f32[batch, 4] = exp(%h) %b: f32[batch, 4] = mul(%exp, %exp) %n: f32[batch, 4] = neg(%b)",
            ["u = exp(h)", "h' = −u · u", "y = h'"],
        ),
        (
            "%p: f32[batch, 2], %q: f32[batch, 2] = split(%x, sizes=[2, 2], axis=1) "
            "%r: f32[batch, 4] = concat(%q, %p, axis=1) %n: f32[batch, 4] = maximum(%r, %h)",
            ["p, q = split(x)", "h' = maximum(concat(q, p), h)", "y = h'"],
        ),
    ],
)
def test_formulas(body: str, wanted: list[str]) -> None:
    assert write_formulas(parse_step(f"{HEAD}{body} next %h = %n output y = %n }}")) == wanted


def test_inspection_and_pictures_show_them() -> None:
    found = inspect(weft.load_source(EXAMPLE))
    shown = "memory' = keep · memory + (1 − keep) · new"
    assert any(f"scan({shown}; y = memory')" in op for block in found.blocks for op in block.ops)
    shown_network = build_network(weft.load_source(EXAMPLE).graph)
    (first, *_) = (v for v in shown_network.vertices if v.op == "scan")
    assert first.attrs["step"].splitlines() == [shown, "y = memory'"] and describe_sizes(first) == shown
    assert first.roles == ("keep", "new")
