"""Fact sheets: every number is one of `weft inspect --json`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from weft import Decoder, Mamba, load_source
from weft.frontends.app.api.draw.fact_sheet import build_fact_sheet, make_title
from weft.frontends.app.api.inspect.counting import inspect
from weft.frontends.dsl import Attention, Block, GatedMLP, RMSNorm
from weft.frontends.models.presets import PRESETS
from weft.ir.readable import format_bytes, format_count

from .....sampling import each
from ....command import TINY, done


@pytest.mark.parametrize("preset", each(2, PRESETS))
def test_fact_sheet_has_the_values_of_inspect(preset: str) -> None:
    model = load_source(preset)
    inspected = inspect(model)
    found: dict[str, Any] = json.loads(json.dumps(inspected.json()))
    rows = dict(build_fact_sheet(model, inspected).rows)
    sizes = found["dimensions"]
    assert rows.pop("Parameters") == f"{found['parameters']:,}"
    active = rows.pop("Active for a token", rows.get("Parameters"))
    assert active in (None, f"{found['active_parameters']:,}")
    assert (active is None) == (found["active_parameters"] == found["parameters"])
    assert rows.pop("Layers") == str(found["layers"])
    assert (
        rows.pop("FLOPs per token")
        == f"{format_count(found['flops_per_token'])} with {found['tokens']} tokens of context"
    )
    for name, key in (("Vocabulary", "vocab"), ("Context", "context")):
        assert rows.pop(name, "") == (f"{found[key]:,}" if found[key] else "")
    for name, key in (("KV cache per token", "cache_per_token_bytes"), ("State of a sequence", "state_bytes")):
        kept = (found[key] or {}).get("f16")
        assert rows.pop(name, "") == (f"{format_bytes(kept)} in f16" if kept else "")
    for name, key in (
        ("Width", "width"),
        ("Window", "windows"),
        ("Feed-forward", "hidden"),
        ("Shared expert", "shared"),
    ):
        assert numbers(rows.pop(name, "")) == sizes[key]
    kinds = ("heads", "kv_heads", "head_dim", "latent")
    expected = [n for key in kinds if key != "kv_heads" or sizes[key] != sizes["heads"] for n in sizes[key]]
    assert numbers(rows.pop("Attention", "")) == expected
    expected = [n for e in sizes["experts"] for n in (e["count"], e["hidden"], e["active"]) if n]
    assert numbers(rows.pop("Experts", "")) == expected
    assert rows.pop("Positions", "") == "; ".join(sizes["positions"])
    assert rows.pop("Recurrence", "") == ("Mamba" if preset.startswith("mamba") else "")
    assert not rows


def numbers(text: str) -> list[int]:
    return [int(n.replace(",", "")) for n in re.findall(r"\d[\d,]*(?!\w)", text.replace(", ", " ; "))]


@pytest.mark.parametrize("preset", ["smollm2-135m", "switch-base-8"])
def test_viz_prints_the_fact_sheet(preset: str) -> None:
    printed = json.loads(done("inspect", preset, "--json").stdout)
    sheet = dict(build_fact_sheet(load_source(preset)).rows)
    assert sheet["Parameters"] == f"{printed['parameters']:,}"
    assert sheet["FLOPs per token"].startswith(format_count(printed["flops_per_token"]))
    assert sheet["KV cache per token"] == f"{format_bytes(printed['cache_per_token_bytes']['f16'])} in f16"
    assert sheet["Attention"].startswith(f"{printed['dimensions']['heads'][0]} heads")


def test_fact_sheet_of_deepseek() -> None:
    sheet = build_fact_sheet(load_source("deepseek-v3"))
    assert sheet.about == "DeepSeek-V3 (2024) without the layer that predicts one more token · decoder"
    assert dict(sheet.rows) | {"FLOPs per token": ""} == {
        "Parameters": "671,026,404,352",
        "Active for a token": "37,552,282,624",
        "Layers": "61",
        "Width": "7,168",
        "Attention": "128 heads, latent of 576",
        "Feed-forward": "18,432",
        "Experts": "256 of 2,048, 8 active",
        "Shared expert": "2,048",
        "Vocabulary": "129,280",
        "Context": "163,840",
        "Positions": "RoPE, base 10,000, yarn × 40",
        "KV cache per token": "68.6 KiB in f16",  # 61 layers × 576 numbers × 2 bytes
        "FLOPs per token": "",
    }


def test_several_sizes_share_a_row() -> None:
    blocks = [Block(Attention(4, 2), GatedMLP(48), RMSNorm()), Block(Mamba(64), GatedMLP(1056), RMSNorm())]
    rows = dict(build_fact_sheet(load_source(Decoder(50, 32, blocks))).rows)
    assert (rows["Feed-forward"], rows["Recurrence"]) == ("48 and 1,056", "Mamba")
    assert "Context" not in rows


def test_title_is_the_name_of_preset_file_or_folder(tmp_path: Path) -> None:
    (tmp_path / "arch.v2.py").write_text(TINY + "wide = model\n")
    names = {"gpt2": "gpt2", f"{tmp_path}/arch.v2.py": "arch.v2", f"{tmp_path}/arch.v2.py:wide": "arch.v2 · wide"}
    assert {spec: make_title(load_source(spec)) for spec in names} == names
    assert make_title(load_source(load_source("gpt2").graph)) == "gpt2"
