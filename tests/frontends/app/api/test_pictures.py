"""weft viz and weft gallery on the command line: formats, what is open, and what is refused."""

from __future__ import annotations

import itertools
import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

import weft
from weft import WeftError
from weft.backends.viz.formats.style import DARK, LIGHT
from weft.frontends.app.api.draw.galleries import build_card
from weft.frontends.models.presets import PRESETS

from ...command import TINY, done, refused

TREE = """\
arch                 architecture arch.py:model · decoder                       24 k
├─ input_ids         i64[batch, seq]
├─ position_ids      i64[batch, seq]
├─ embed             Embedding · 12 × 32                                           384
"""


@pytest.fixture
def arch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "arch.py").write_text(TINY)
    monkeypatch.chdir(tmp_path)
    return "arch.py"


STARTS = {
    "html": "<!doctype html>",
    "svg": "<svg ",
    "mmd": '---\ntitle: "arch"\n---\nflowchart TD\n',
    "dot": 'digraph "arch" {\n',
    "txt": TREE.partition("\n")[0].partition(" ")[0],
}


@pytest.mark.parametrize("ending", STARTS)
def test_the_ending_is_the_format(ending: str, arch: str) -> None:
    said = done("viz", arch, "-o", f"a.{ending}")
    assert said.stderr == f"weft: a.{ending} written\n" and said.stdout == ""
    assert Path(f"a.{ending}").read_text().startswith(STARTS[ending])


def test_a_page_is_the_default(arch: str) -> None:
    done("viz", arch)
    assert Path("arch.html").read_text().startswith("<!doctype html>")


def test_pixels_by_scale(arch: str) -> None:
    done("viz", arch, "-o", "a.svg")
    wide = int(ET.parse("a.svg").getroot().get("width", "0"))
    for scale, options in ((2, []), (1, ["--scale", "1"]), (3, ["--scale", "3"])):
        done("viz", arch, "-o", "a.png", *options)
        assert int.from_bytes(Path("a.png").read_bytes()[16:20], "big") == scale * wide


def test_the_tree_on_stdout(arch: str) -> None:
    text = done("viz", arch, "-o", "-").stdout
    assert [re.sub(" +", " ", line) for line in text.splitlines()[:4]] == [
        re.sub(" +", " ", line) for line in TREE.splitlines()
    ]
    assert not any(line.endswith(" ") for line in text.splitlines())
    done("viz", arch, "-o", "a.txt")
    assert Path("a.txt").read_text() == text


def test_what_is_open(arch: str) -> None:
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


def test_themes(arch: str) -> None:
    for options, paper in (([], LIGHT), (["--theme", "light"], LIGHT), (["--theme", "dark"], DARK)):
        done("viz", arch, "-o", "a.svg", *options)
        assert f".paper{{fill:{paper.paper}}}" in Path("a.svg").read_text()


def test_what_is_refused(arch: str) -> None:
    line = refused("viz", arch, "-o", "a.gif")
    assert "unknown format '.gif'; write one of .html, .svg, .png, .mmd, .dot, .txt" in line
    assert "unknown format 'a'" in refused("viz", arch, "-o", "a")
    assert "unknown part 'atn'; did you mean" not in refused("viz", arch, "-o", "a.svg", "--open", "zzz")
    assert "unknown part 'layers.0.atn'; did you mean layers.0.attn" in refused(
        "viz", arch, "-o", "a.svg", "--open", "layers.0.atn"
    )
    assert "--theme is for .svg and .png" in refused("viz", arch, "-o", "a.mmd", "--theme", "dark")
    assert "--scale is for .png" in refused("viz", arch, "-o", "a.svg", "--scale", "2")
    assert "try another scale than 900" in refused("viz", arch, "-o", "a.png", "--scale", "900")
    assert "is neither a preset nor an existing file or folder" in refused("viz", "nothing-there", "-o", "a.svg")
    assert [path.name for path in Path().iterdir()] == ["arch.py"]


def test_an_older_picture_stays_where_the_new_one_fails(arch: str) -> None:
    Path("a.svg").write_text("older")
    refused("viz", arch, "-o", "a.svg", "--open", "zzz")
    assert Path("a.svg").read_text() == "older"


def test_in_python(arch: str) -> None:
    weft.draw("gpt2", "a.mmd", depth=0)
    assert "layers 0-11 × 12" in Path("a.mmd").read_text()
    weft.draw(weft.load_source(arch), Path("b.svg"), parts=["attn"], dark=True)
    assert "layers.0.attn.q" in Path("b.svg").read_text()
    with pytest.raises(WeftError, match="unknown format"):
        weft.draw("gpt2", "a.bmp")


@pytest.mark.parametrize("target", ["ort-cpu", "torch"])
def test_what_was_compiled(target: str, arch: str) -> None:
    done("compile", arch, "-o", "out", "--target", target)
    done("viz", "out", "--trust", "-o", "out.svg")
    texts = [e.text for e in ET.parse("out.svg").iter("{http://www.w3.org/2000/svg}text")]
    rows = dict(itertools.pairwise(texts))  # a fact stands behind its name
    name, norms = ("arch", 6 * 32) if target == "ort-cpu" else ("model", 0)  # scales went into what follows
    assert texts[0] == name and rows["Parameters"] == f"{24_032 - norms:,}"
    assert int(rows["Operations"] or 0) > 30


# -- galleries


def cards(path: str) -> list[dict[str, object]]:
    text = Path(path).read_text()
    data = re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.DOTALL)
    assert data is not None
    found: list[dict[str, object]] = json.loads(data[1])["cards"]
    return found


def test_a_gallery_of_own_models(arch: str) -> None:
    said = done("gallery", arch, "gpt2", arch, "-o", "mine.html")
    assert said.stderr == "weft: mine.html written: 3 models\n"
    assert [found["name"] for found in cards("mine.html")] == ["arch", "gpt2", "arch-2"]


def test_galleries_that_are_refused(arch: str) -> None:
    assert "a gallery is a page: all.svg must end in .html" in refused("gallery", "-o", "all.svg")
    assert "'zzz' is neither a preset" in refused("gallery", "gpt2", "zzz")
    assert not Path("gallery.html").exists()


GROUPS = {
    "llama3.1-8b": ("decoder", "dense", "grouped-query", "RoPE"),
    "gpt3-175b": ("decoder", "dense", "multi-head, window", "learned"),
    "mixtral-8x7b": ("decoder", "experts", "grouped-query", "RoPE"),
    "deepseek-v3": ("decoder", "experts", "latent", "RoPE"),
    "mamba-130m": ("decoder", "recurrent", "none", "none"),
    "bert-base": ("encoder", "dense", "multi-head", "learned"),
    "t5-base": ("encoder-decoder", "dense", "multi-head", "relative"),
    "transformer-base": ("encoder-decoder", "dense", "multi-head", "sinusoidal"),
}


@pytest.mark.parametrize("preset", GROUPS)
def test_groups_of_a_gallery(preset: str) -> None:
    found = build_card(preset)
    told = tuple(", ".join(found.groups[sort]) for sort in ("Kind", "Built", "Attention", "Positions"))
    assert told == GROUPS[preset]
    assert found.numbers["parameters"] == PRESETS[preset].parameters
