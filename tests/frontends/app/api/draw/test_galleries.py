"""Galleries: the cards of several models on one page, and how they are grouped."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from weft.frontends.app.api.draw.galleries import build_card
from weft.frontends.models.presets import PRESETS

from ....command import done, refused


def cards(path: str) -> list[dict[str, object]]:
    text = Path(path).read_text()
    data = re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.DOTALL)
    assert data is not None
    found: list[dict[str, object]] = json.loads(data[1])["cards"]
    return found


def test_gallery_gives_repeated_models_unique_names(arch: str) -> None:
    said = done("gallery", arch, "gpt2", arch, "-o", "mine.html")
    assert said.stderr == "weft: mine.html written: 3 models\n"
    assert [found["name"] for found in cards("mine.html")] == ["arch", "gpt2", "arch-2"]


def test_gallery_refuses_other_suffixes_and_unknown_sources(arch: str) -> None:
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
def test_gallery_groups_of_presets(preset: str) -> None:
    found = build_card(preset)
    told = tuple(", ".join(found.groups[sort]) for sort in ("Kind", "Built", "Attention", "Positions"))
    assert told == GROUPS[preset]
    assert found.numbers["parameters"] == PRESETS[preset].parameters
