"""Pictures to print: valid XML within its paper, a legend of what there is, text for screen readers."""

from __future__ import annotations

import functools
import re
import struct
import sys
import xml.etree.ElementTree as ET
import zlib
from collections.abc import Iterator

import numpy as np
import pytest

from weft import WeftError, load_source
from weft.backends.viz.formats.style import LOOKS, Sheet, list_colours
from weft.backends.viz.formats.svg import render_png, render_svg
from weft.backends.viz.layout.coordinates import place_shapes
from weft.backends.viz.layout.font import measure_text
from weft.backends.viz.layout.scene import build_scene, list_default_open
from weft.backends.viz.model.labels import KINDS
from weft.backends.viz.model.network import build_network
from weft.frontends.app.api.draw.fact_sheet import build_fact_sheet

from ..pages import drawn, model_of

NS = "{http://www.w3.org/2000/svg}"


PRESETS = ("llama3.1-8b", "deepseek-v3", "t5-base", "mamba-130m", "gpt3-175b")


SIZES = {"name": 22, "about": 12, "about s": 12, "t": 13, "t m": 13}  # of text, by class; any other is 11


@functools.cache
def render(preset: str, dark: bool = False) -> str:
    root = drawn(preset)
    return render_svg(root, list_default_open(root), build_fact_sheet(model_of(preset)), dark)


def list_boxes(node: ET.Element, x: float = 0, y: float = 0) -> Iterator[tuple[float, float, float, float]]:
    """Left, top, right and bottom of every box, circle and text, where the groups around put them."""
    if moved := re.fullmatch(r"translate\(([-\d.]+) ([-\d.]+)\)", node.get("transform", "")):
        x, y = x + float(moved[1]), y + float(moved[2])

    def at(name: str) -> float:
        return float(node.get(name, "0"))

    style = node.get("class", "")
    if node.tag == f"{NS}rect":
        yield x + at("x"), y + at("y"), x + at("x") + at("width"), y + at("y") + at("height")
    elif node.tag == f"{NS}circle":
        yield x + at("cx") - at("r"), y + at("cy") - at("r"), x + at("cx") + at("r"), y + at("cy") + at("r")
    elif node.tag == f"{NS}text":
        wide = measure_text(node.text or "", SIZES.get(style, 11), bold=style in ("name", "t", "t m"))
        left = x + at("x") - (wide / 2 if style.endswith("m") or style == "m s" else 0)
        yield left, y + at("y") - SIZES.get(style, 11), left + wide, y + at("y") + 3
    for child in node:
        if child.tag not in (f"{NS}defs", f"{NS}style"):
            yield from list_boxes(child, x, y)


@pytest.mark.parametrize("preset", PRESETS)
def test_all_elements_are_within_the_paper(preset: str) -> None:
    root = ET.fromstring(render(preset))
    w, h = float(root.get("width", "0")), float(root.get("height", "0"))
    assert root.get("viewBox") == f"0 0 {w:g} {h:g}"
    found = list(list_boxes(root))
    assert len(found) > 40
    for left, top, right, bottom in found:
        assert left >= 0 and top >= 0 and right <= w and bottom <= h


@pytest.mark.parametrize("preset", PRESETS)
def test_texts_do_not_overlap(preset: str) -> None:
    root = ET.fromstring(render(preset))
    texts = list(list_boxes(ET.fromstring(keep_texts(root))))
    for i, (left, top, right, bottom) in enumerate(texts):
        for x0, y0, x1, y1 in texts[i + 1 :]:
            assert right <= x0 or x1 <= left or bottom - 3 <= y0 + 2 or y1 - 3 <= top + 2


def keep_texts(root: ET.Element) -> str:
    """`root` without its boxes and circles."""
    copy = ET.fromstring(ET.tostring(root))
    for parent in list(copy.iter()):
        for child in list(parent):
            if child.tag in (f"{NS}rect", f"{NS}circle"):
                parent.remove(child)
    return ET.tostring(copy, encoding="unicode")


@pytest.mark.parametrize("preset", PRESETS)
def test_drawn_parts_equal_placed_parts(preset: str) -> None:
    root = drawn(preset)
    tree = ET.fromstring(render(preset))
    placed = [p for p in place_shapes(root, list_default_open(root)).all() if p.shape is not root]
    titles = [e.text for e in tree.iter(f"{NS}title")][1:]
    assert sorted(filter(None, titles)) == sorted(p.shape.key for p in placed)
    texts = {e.text for e in tree.iter(f"{NS}text")}
    for p in placed:
        assert p.shape.label.symbol or p.shape.label.title in texts
        assert p.open or p.shape.label.symbol or {*p.shape.label.lines, *p.shape.captions} <= texts


@pytest.mark.parametrize("preset", PRESETS)
def test_legend_lists_the_kinds_that_occur(preset: str) -> None:
    root = drawn(preset)
    texts = [e.text for e in ET.fromstring(render(preset)).iter(f"{NS}text")]
    shown = {p.shape.label.kind for p in place_shapes(root, list_default_open(root)).all() if p.shape is not root}
    assert {kind for kind, name in KINDS.items() if name in texts} == shown


def test_marks_distinguish_kinds_without_colour() -> None:
    assert len({look.mark for look in LOOKS.values()}) >= len(LOOKS) - 1  # a sum and the stream are one
    tree = ET.fromstring(render("llama3.1-8b"))
    for group in tree.iter(f"{NS}g"):
        if (kind := group.get("class", "").removeprefix("k-")) in LOOKS and group.find(f"{NS}rect") is not None:
            mark = group.find(f"{NS}path[@class='mark']")
            assert mark is not None and mark.get("d") == LOOKS[kind].mark


def test_picture_has_title_and_description() -> None:
    root = ET.fromstring(render("llama3.1-8b"))
    assert root.get("role") == "img"
    title, described = root.find(f"{NS}title"), root.find(f"{NS}desc")
    assert title is not None and described is not None and title.text == "llama3.1-8b"
    assert root.get("aria-labelledby") == f"{title.get('id')} {described.get('id')}"
    text = described.text or ""
    assert "Parameters: 8,030,261,248" in text
    assert "layers 0-31 × 32 of RMSNorm, Grouped-query attention, RMSNorm, SwiGLU feed-forward" in text


@pytest.mark.parametrize("dark", [False, True])
def test_colours_equal_those_of_the_page(dark: bool) -> None:
    text = render("deepseek-v3", dark)
    style = text[text.index("<style>") : text.index("</style>")]
    painted = set(re.findall(r"#[0-9a-f]{6}\b", style))
    assert painted <= set(list_colours(dark).values())
    for kind in LOOKS:
        assert f".k-{kind}>rect{{fill:{list_colours(dark)[kind]};stroke:{list_colours(dark)[f'{kind}-edge']}}}" in style
    assert f".paper{{fill:{list_colours(dark)['paper']}}}" in style


def test_names_are_escaped_for_xml() -> None:
    root = drawn("gpt2")
    sheet = Sheet("a <b> & \x07\ud800", 'it\'s "quoted"', (("<name>", "]]>"),))
    tree = ET.fromstring(render_svg(root, [root.key], sheet).encode())
    texts = [e.text for e in tree.iter(f"{NS}text")]
    assert "a <b> & ��" in texts and 'it\'s "quoted"' in texts and "<name>" in texts and "]]>" in texts


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
