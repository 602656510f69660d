"""Titles, lines and kinds of parts."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.frontends.app.api.draw.pictures import draw
from weft.frontends.app.api.rewrite import rewrite
from weft.frontends.model import Model

from .quantized import DECODER, PIPELINE


@pytest.mark.parametrize("ending", ["html", "svg", "mmd", "txt", "dot"])
def test_labels_state_bits_in_every_format(ending: str, tmp_path: Path) -> None:
    model = rewrite(Model(DECODER.graph(), "model", "model"), PIPELINE)
    draw(model, tmp_path / f"picture.{ending}")
    shown = (tmp_path / f"picture.{ending}").read_text()
    assert "4.62 bits, int4 groups of 32" in shown and "8.5 bits, int8 groups of 32" in shown
    if ending == "html":
        assert "int4, groups of 32 with zero points; " in shown  # for the panel
    draw(Model(DECODER.graph(), "model", "model"), tmp_path / f"plain.{ending}")
    plain = (tmp_path / f"plain.{ending}").read_text()
    assert "groups of 32" not in plain


def test_layers_with_different_bits_do_not_fold(tmp_path: Path) -> None:
    model = Model(DECODER.graph(), "model", "model")
    mixed = rewrite(model, 'quantize{bits=4, method=rtn, keep="layers.1.*"}, quantize{bits=8, method=rtn}')
    draw(mixed, tmp_path / "a.txt")
    lines = (tmp_path / "a.txt").read_text().splitlines()
    (first,) = (line for line in lines if "layers 0" in line or "layer 0" in line)
    assert "× 2" not in first
