"""Pictures as pixels: their size, their colours, and letters of the fonts that come with weft."""

from __future__ import annotations

import struct
import sys
import zlib

import numpy as np
import pytest

from weft import WeftError, load_source
from weft.backends.viz.formats.png import render_png
from weft.backends.viz.formats.style import list_colours
from weft.backends.viz.formats.svg import render_svg
from weft.backends.viz.layout.scene import build_scene, list_default_open
from weft.backends.viz.model.network import build_network
from weft.frontends.app.api.draw.fact_sheet import build_fact_sheet


def draw_picture(dark: bool = False) -> str:
    model = load_source("llama3.1-8b")
    root = build_scene(build_network(model.graph))
    return render_svg(root, list_default_open(root), build_fact_sheet(model), dark)


def decode_png(data: bytes, most: int | None = None) -> np.ndarray:
    """[height, width, 4] of a PNG of 8-bit RGBA that is not interlaced (ISO/IEC 15948); its first rows, if so many."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, packed, head = 8, b"", b""
    while at < len(data):
        (size,), kind = struct.unpack(">I", data[at : at + 4]), data[at + 4 : at + 8]
        body = data[at + 8 : at + 8 + size]
        head, packed = (body if kind == b"IHDR" else head), packed + (body if kind == b"IDAT" else b"")
        at += 12 + size
    w, h, depth, colour, _, _, interlace = struct.unpack(">IIBBBBB", head)
    assert (depth, colour, interlace) == (8, 6, 0)
    rows = np.frombuffer(zlib.decompress(packed), np.uint8).reshape(h, 1 + 4 * w)[:most]
    return undo_filters(rows[:, 0], rows[:, 1:].reshape(len(rows), w, 4).astype(np.int64))


def undo_filters(filters: np.ndarray, image: np.ndarray) -> np.ndarray:
    """Undo the filter of every row, which adds what its neighbours at the left, above and above left predict.

    A pixel waits for these three alone, so those of an antidiagonal, one in each row, are computed at once.
    """
    h, w, _ = image.shape
    padded = np.zeros((h + 1, w + 1, 4), np.int64)  # a row above and a column at the left of zeros
    for diagonal in range(h + w - 1):
        y = np.arange(max(0, diagonal - w + 1), min(h, diagonal + 1))
        x = diagonal - y
        a, b, c = padded[y + 1, x], padded[y, x + 1], padded[y, x]
        p = a + b - c
        near = np.abs(np.stack([p - a, p - b, p - c])).argmin(0)  # ties go to the first: as Paeth has it
        guesses = [np.zeros_like(a), a, b, (a + b) // 2, np.choose(near, [a, b, c])]
        padded[y + 1, x + 1] = (image[y, x] + np.choose(filters[y, None], guesses)) % 256
    return padded[1:, 1:]


def rgb(colour: str) -> list[int]:
    return [int(colour[i : i + 2], 16) for i in (1, 3, 5)]


def count_share(image: np.ndarray, colour: str) -> float:
    """Return the share of an image's pixels with exactly that colour."""
    return float((image[..., :3] == rgb(colour)).all(-1).mean())


@pytest.mark.parametrize("dark", [False, True])
def test_pixels_have_the_colours_and_letters_of_the_picture(dark: bool) -> None:
    text, named = draw_picture(dark), list_colours(dark)
    wide, high = (int(n) for n in text.split('viewBox="0 0 ')[1].split('"')[0].split())
    image = decode_png(render_png(text, scale=0.5))
    assert image.shape[:2] == (pytest.approx(high / 2, abs=1), pytest.approx(wide / 2, abs=1))
    assert count_share(image, named["paper"]) > 0.4 and (image[..., 3] == 255).all()
    for edge in (image[0], image[-1], image[:, 0], image[:, -1]):
        assert count_share(edge, named["paper"]) == 1
    assert 0.01 < count_share(image, named["attention"]) < 0.1
    title = image[8:26, 14:160, :3]  # where the title stands, in half of its size
    assert np.abs(title - rgb(named["ink"])).sum(-1).min() < 60  # there are letters
    assert (np.abs(title - rgb(named["paper"])).sum(-1) > 60).mean() > 0.1


def test_titles_are_bold() -> None:
    text = draw_picture()
    plain = text.replace('class="name"', 'class="about" style="font-size:22px"')
    bold, regular = (
        (np.abs(decode_png(render_png(t, scale=0.5), 26)[8:, 14:160, :3] - 255).sum(-1) / 765).mean()
        for t in (text, plain)
    )
    assert bold > 1.15 * regular


@pytest.mark.parametrize("scale", [1000, 1e-9])
def test_impossible_sizes_are_refused(scale: float) -> None:
    with pytest.raises(WeftError, match=r"pixels cannot be drawn: choose another scale than"):
        render_png(draw_picture(), scale)


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    with pytest.raises(WeftError, match=r"needs the package resvg-py: install weft\[viz\], or write .svg"):
        render_png(draw_picture())
