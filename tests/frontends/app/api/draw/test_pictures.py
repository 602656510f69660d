"""weft viz and weft gallery on the command line: formats, what is open, and what is refused."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

import weft
from weft import WeftError

from ....command import done

STARTS = {
    "html": "<!doctype html>",
    "svg": "<svg ",
    "mmd": '---\ntitle: "arch"\n---\nflowchart TD\n',
    "dot": 'digraph "arch" {\n',
    "txt": "arch  ",
}


@pytest.mark.parametrize("ending", STARTS)
def test_suffix_selects_the_picture_format(ending: str, arch: str) -> None:
    said = done("viz", arch, "-o", f"a.{ending}")
    assert said.stderr == f"weft: a.{ending} written\n" and said.stdout == ""
    assert Path(f"a.{ending}").read_text().startswith(STARTS[ending])


def test_draw_in_python(arch: str) -> None:
    weft.draw("gpt2", "a.mmd", depth=0)
    assert "layers 0-11 × 12" in Path("a.mmd").read_text()
    weft.draw(weft.load_source(arch), Path("b.svg"), parts=["attn"], dark=True)
    assert "layers.0.attn.q" in Path("b.svg").read_text()
    with pytest.raises(WeftError, match="unknown format"):
        weft.draw("gpt2", "a.bmp")


@pytest.mark.parametrize("target", ["ort-cpu", "torch"])
def test_compiled_folders_are_drawn_with_their_parameters(target: str, arch: str) -> None:
    done("compile", arch, "-o", "out", "--target", target)
    done("viz", "out", "--trust", "-o", "out.svg")
    texts = [e.text for e in ET.parse("out.svg").iter("{http://www.w3.org/2000/svg}text")]
    rows = dict(itertools.pairwise(texts))  # a fact stands behind its name
    norms = 6 * 32 if target == "ort-cpu" else 0  # scales went into the next layer
    assert texts[0] == "arch" and rows["Parameters"] == f"{24_032 - norms:,}"
    assert int(rows["Operations"] or 0) > 30


# -- galleries
