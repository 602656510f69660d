"""Inspections as text and as HTML tables."""

from __future__ import annotations

from dataclasses import replace

import pytest
from click.testing import CliRunner

import weft
from weft import Attention, Block, Decoder, GatedMLP
from weft.frontends.app.api.inspect.inspection import format_ranges
from weft.frontends.app.cli import cli

DIM, HEADS, FFN, VOCAB = 32, 4, 48, 50


@pytest.mark.parametrize(
    ("scopes", "text"),
    [
        (("layers.0",), "layers.0"),
        (("layers.0", "layers.1", "layers.2", "layers.5"), "layers.0-2,5"),
        (("layers.1", "layers.3"), "layers.1,3"),
        (("embed",), "embed"),
    ],
)
def test_scopes_are_shortened_to_ranges(scopes: tuple[str, ...], text: str) -> None:
    assert format_ranges(scopes) == text


def test_inspection_prints_like_the_command() -> None:
    found = weft.inspect("gpt2")
    shown, printed = str(found).splitlines(), CliRunner().invoke(cli, ["inspect", "gpt2"]).stdout.splitlines()
    assert repr(found) == str(found)
    assert [" ".join(line.split()) for line in shown] == [" ".join(line.split()) for line in printed if "─" not in line]


def test_control_characters_in_tensor_names_are_escaped() -> None:
    assert "\x1b" not in str(replace(weft.inspect("gpt2"), unread=("a\x1b[31mb",)))


def test_notebook_gets_escaped_html_tables() -> None:
    page = weft.inspect(Decoder(VOCAB, DIM, 2, Block(Attention(HEADS), GatedMLP(FFN))))._repr_html_()
    assert page.count("<table>") == 2 and "<td style='text-align: right'>× 2</td>" in page
    assert "<script" not in weft.frontends.app.api.inspect.inspection.format_html(
        replace(weft.inspect("gpt2"), unread=("<script>",))
    )
