"""`weft viz`: the default file, the tree on stdout, parts that are open, themes and refusals."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

from weft.backends.viz.formats.style import DARK, LIGHT

from ...command import done, refused

TREE = """\
arch                 architecture arch.py:model · decoder                       24 k
├─ input_ids         i64[batch, seq]
├─ position_ids      i64[batch, seq]
├─ embed             Embedding · 12 × 32                                           384
"""


def test_viz_writes_a_page_by_default(arch: str) -> None:
    done("viz", arch)
    assert Path("arch.html").read_text().startswith("<!doctype html>")


def test_scale_multiplies_pixels(arch: str) -> None:
    done("viz", arch, "-o", "a.svg")
    wide = int(ET.parse("a.svg").getroot().get("width", "0"))
    for scale, options in ((2, []), (1, ["--scale", "1"]), (3, ["--scale", "3"])):
        done("viz", arch, "-o", "a.png", *options)
        assert int.from_bytes(Path("a.png").read_bytes()[16:20], "big") == scale * wide


def test_viz_prints_a_tree_on_stdout(arch: str) -> None:
    text = done("viz", arch, "-o", "-").stdout
    assert [re.sub(" +", " ", line) for line in text.splitlines()[:4]] == [
        re.sub(" +", " ", line) for line in TREE.splitlines()
    ]
    assert not any(line.endswith(" ") for line in text.splitlines())
    done("viz", arch, "-o", "a.txt")
    assert Path("a.txt").read_text() == text


def test_depth_and_open_choose_the_parts(arch: str) -> None:
    def parts(*options: str) -> list[str]:
        lines = done("viz", arch, "-o", "-", *options).stdout.splitlines()[1:]
        return [re.split(r"  +", line.lstrip("│├└─ "))[0] for line in lines]

    layer = ["attn_norm", "attn", "attn_residual", "ffn_norm", "ffn", "ffn_residual"]
    ends = ["final_norm", "lm_head", "logits"]
    start = ["input_ids", "position_ids", "embed", "layers 0-2 × 3"]
    feed = ["gate", "up", "glu", "down"]
    with_feed = [*layer[:5], *feed, *layer[5:]]
    assert parts() == parts("--depth", "1") == [*start, *layer, *ends]
    assert parts("--depth", "0") == [*start, *ends]
    assert parts("--open", "ffn") == parts("--depth", "0", "--open", "layers.0.ffn") == [*start, *with_feed, *ends]
    everything = parts("--depth", "2")
    assert set(with_feed) < set(everything) and {"q", "k", "v", "o"} < set(everything)
    assert everything == parts("--open", "attn", "--open", "ffn") == parts("--depth", "9")


def test_theme_sets_the_colours(arch: str) -> None:
    for options, paper in (([], LIGHT), (["--theme", "light"], LIGHT), (["--theme", "dark"], DARK)):
        done("viz", arch, "-o", "a.svg", *options)
        assert f".paper{{fill:{paper.paper}}}" in Path("a.svg").read_text()


def test_viz_refuses_bad_options(arch: str) -> None:
    line = refused("viz", arch, "-o", "a.gif")
    assert "unknown format '.gif'; write one of .html, .svg, .png, .mmd, .dot, .txt" in line
    assert "unknown format 'a'" in refused("viz", arch, "-o", "a")
    assert "unknown part 'atn'; did you mean" not in refused("viz", arch, "-o", "a.svg", "--open", "zzz")
    assert "unknown part 'layers.0.atn'; did you mean layers.0.attn" in refused(
        "viz", arch, "-o", "a.svg", "--open", "layers.0.atn"
    )
    assert "--theme is for .svg and .png" in refused("viz", arch, "-o", "a.mmd", "--theme", "dark")
    assert "--scale is for .png" in refused("viz", arch, "-o", "a.svg", "--scale", "2")
    assert "choose another scale than 900" in refused("viz", arch, "-o", "a.png", "--scale", "900")
    assert "is neither a preset nor an existing file or folder" in refused("viz", "nothing-there", "-o", "a.svg")
    assert [path.name for path in Path().iterdir()] == ["arch.py"]


def test_failed_picture_leaves_the_previous_file(arch: str) -> None:
    Path("a.svg").write_text("older")
    refused("viz", arch, "-o", "a.svg", "--open", "zzz")
    assert Path("a.svg").read_text() == "older"
