"""`weft inspect`: facts, tables and JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from weft.frontends.app.cli import cli


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("mixtral-8x7b", ["active 12,879,925,248 per token (12.9 G)"]),
        ("mamba-130m", ["constant state 2.7 MiB in f32, 2.5 MiB in f16"]),
        ("switch-base-8", ["model preset switch-base-8: encoder-decoder", "layers 24"]),
        ("t5-base", ["cache per token 72.0 KiB in f32, 36.0 KiB in f16"]),
        ("t5-base", ["cache per source token 72.0 KiB in f32, 36.0 KiB in f16"]),  # 12 layers · 2 · 768 numbers
    ],
)
def test_inspect_shows_facts_of_special_architectures(name: str, lines: list[str]) -> None:
    shown = [" ".join(line.split()) for line in CliRunner().invoke(cli, ["inspect", name]).stdout.splitlines()]
    assert set(lines) <= set(shown)


def test_inspect_prints_tables_and_json(tmp_path: Path) -> None:
    path = tmp_path / "mixed.py"
    path.write_text(
        "from weft import *\n"
        "local = Block(Attention(4, 2, rope=RoPE(), window=16), GatedMLP(48), RMSNorm())\n"
        "wide = Block(Attention(4, 2, rope=RoPE()), GatedMLP(48), RMSNorm())\n"
        "model = Decoder(50, 32, [local, local, wide] * 2, context=64)\n"
    )
    shown = CliRunner().invoke(cli, ["inspect", str(path)])
    assert shown.exit_code == 0, shown.output
    assert "layers.0-1,3-4" in shown.output and "× 4" in shown.output and "random, no checkpoint" in shown.output
    found = json.loads(CliRunner().invoke(cli, ["inspect", str(path), "--json"]).output)
    assert found["layers"] == 6 and found["parameters"] > 0


def test_inspect_parts_as_table_and_json() -> None:
    told = json.loads(CliRunner().invoke(cli, ["inspect", "smollm2-135m", "--json", "--dtype", "f32"]).output)
    assert told["dtype"] == "f32" and told["parts"][0]["parameters"] == told["parameters"] == 134_515_008
    assert told["parts"][0]["cache"] == 512 * told["cache_per_token_bytes"]["f32"]
    shown = CliRunner().invoke(cli, ["inspect", "smollm2-135m", "--parts"]).output
    line = next(line for line in shown.splitlines() if line.startswith("layers.0.attn "))
    assert "Grouped-query attention" in line and "× 30" in line and "885 k" in line and "+FLOPs" in shown
    assert "+FLOPs" not in CliRunner().invoke(cli, ["inspect", "bert-base", "--parts"]).output
    assert "parts:" not in CliRunner().invoke(cli, ["inspect", "smollm2-135m"]).output


def test_layer_without_residual_is_noted_when_inspected_and_compiled(tmp_path: Path) -> None:
    path = tmp_path / "forgets.py"
    path.write_text(
        "from weft import *\n"
        "@module\n"
        "class Forgets:\n"
        "    attn: Attention\n"
        "    def __call__(self, x):\n"
        "        return self.attn(RMSNorm()(x))\n"
        "good = Block(Attention(4), GatedMLP(48), RMSNorm())\n"
        "model = Decoder(50, 32, [good, Forgets(Attention(4))] * 5, context=64)\n"
    )
    note = "weft: no residual connection in layers.1, layers.3, layers.5 and 2 more: the output"
    for command in (["inspect", str(path)], ["compile", str(path), "-o", str(tmp_path / "out")]):
        shown = CliRunner().invoke(cli, command)
        assert shown.exit_code == 0 and sum(note in line for line in shown.stderr.splitlines()) == 1
    path.write_text(path.read_text().replace("return", "return x +"))
    assert "residual connection" not in CliRunner().invoke(cli, ["inspect", str(path)]).output
