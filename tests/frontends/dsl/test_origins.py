"""Graphs know which module of an architecture file made what, and where."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from weft import Attention, Block, Decoder, GatedMLP, RMSNorm, RoPE, load_source
from weft.backends.viz.model.network import build_network
from weft.passes import run_passes

TEXT = """from dataclasses import replace

from weft import *

local = Block(
    Attention(4, 2, rope=RoPE(), window=16),
    GatedMLP(48),
    RMSNorm(),
)
wide = replace(local, attn=Attention(4, 2, rope=RoPE(5e5)))
model = Decoder(50, 32, [local, wide], context=64)
"""


def test_modules_and_lines_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mixed.py"
    path.write_text(TEXT)
    found = build_network(load_source(path).graph).origins
    assert found["layers.0.attn"] == ("Attention(heads=4, kv_heads=2, rope=RoPE(), window=16)", "mixed.py:6")
    assert found["layers.1.attn"] == ("Attention(heads=4, kv_heads=2, rope=RoPE(theta=500000.0))", "mixed.py:10")
    assert found["layers.0.ffn"] == ("GatedMLP(hidden=48)", "mixed.py:7")
    assert found["layers.0.attn_norm"][1] == "mixed.py:8"
    text, line = found["layers.1"]
    assert text.startswith("Block(") and line == "mixed.py:10"


def test_what_weft_makes_itself_has_no_line() -> None:
    found = build_network(load_source(Decoder(50, 32, [Block(Attention(4), GatedMLP(48))])).graph).origins
    assert found["layers.0.attn"][1] == f"{Path(__file__).name}:{_line('[Block(Attention(4), ')}"
    preset = build_network(load_source("llama3.1-8b").graph).origins
    text, line = preset["layers.0.attn"]
    assert text.startswith("Attention(heads=32, kv_heads=8, rope=RoPE(theta=500000") and str(line).startswith(
        "presets.py:"
    )
    assert not any(str(line).startswith(("build.py", "blocks.py", "attention.py")) for _, line in preset.values())


def test_origins_are_no_part_of_a_model() -> None:
    attn = Attention(4, 2, rope=RoPE())
    again = Attention(4, 2, rope=RoPE())
    assert attn == again and hash(attn) == hash(again) and repr(attn) == repr(again)
    assert [f.name for f in dataclasses.fields(attn)] == [f.name for f in dataclasses.fields(again)]
    one, two = (load_source(Decoder(50, 32, [Block(a, GatedMLP(48), RMSNorm())])).graph for a in (attn, again))
    assert one == two and one.origins != {} and one.clone().origins == one.origins
    assert run_passes(one, "kv-cache").origins == one.origins


def _line(text: str) -> int:
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return next(i for i, line in enumerate(lines, 1) if text in line)
