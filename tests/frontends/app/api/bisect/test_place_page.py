"""Pages of a bisection: the place of the first difference is marked on both sides."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import weft
from weft.frontends.app.api.bisect.bisection import bisect
from weft.ir import WeftError

TINY = """
from weft import Attention, Block, Decoder, GatedMLP, RMSNorm, RoPE

def build(window):
    return Decoder(97, 32, 2, Block(Attention(4, 2, rope=RoPE(), window=window), GatedMLP(48), RMSNorm()), context=64)

right, wrong = build(8), build(7)
"""


def test_page_marks_the_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny.py").write_text(TINY)
    weft.compile("tiny.py:right", "out")
    for source, count in (("tiny.py:wrong", 1), ("tiny.py:right", 0)):
        found = bisect(source, "optimized:out", viz="place.html")
        assert found.differs == bool(count)
        text = Path("place.html").read_text(encoding="utf-8")
        assert ("window is 8 instead of 7" in text) == bool(count)
        assert f'"changed": {count}' in text or f'"changed":{count}' in text


def test_what_cannot_be_drawn_is_refused(llamas: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(WeftError, match=r"name a file that ends in \.html, not place\.svg"):
        bisect(*llamas, viz=tmp_path / "place.svg")
    net: torch.nn.Module = weft.torch(llamas[0])
    with pytest.raises(WeftError, match="a PyTorch module cannot be drawn"):
        bisect(llamas[0], net, ids=[1, 2], viz=tmp_path / "place.html")
    assert not any(tmp_path.iterdir())
