"""weft inspect: counted by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import weft
from weft import Attention, Block, Decoder, GatedMLP, LinearAttention, Mamba, MoE, RMSNorm, RoPE
from weft.frontends import load_source
from weft.frontends.app.api.inspect.counting import find_layer, inspect
from weft.frontends.app.api.inspect.inspection import format_ranges
from weft.frontends.app.cli import cli
from weft.frontends.app.cli.terminal import format_bytes, format_count

DIM, HEADS, KV, HEAD, FFN, VOCAB = 32, 4, 2, 8, 48, 50
LINEAR = DIM * (HEADS + 2 * KV) * HEAD + HEADS * HEAD * DIM + 3 * DIM * FFN  # weights of a block's seven products


def model() -> Decoder:
    local = Block(Attention(HEADS, KV, rope=RoPE(), window=16), GatedMLP(FFN), RMSNorm())
    wide = Block(Attention(HEADS, KV, rope=RoPE(5e5)), GatedMLP(FFN), RMSNorm())
    return Decoder(VOCAB, DIM, [local, local, wide] * 2, tie_embeddings=True, context=64)


def test_a_mixed_model_is_counted() -> None:
    found = inspect(load_source(model()), tokens=20)
    assert found.parameters == VOCAB * DIM + 6 * (LINEAR + 2 * DIM) + DIM
    assert found.parameters_by_storage == {"f32": found.parameters}
    assert (found.layers, found.vocab, found.context, found.random) == (6, VOCAB, 64, True)
    assert found.cache_per_token == 6 * 2 * KV * HEAD
    assert found.cache_at_context == (4 * 16 + 2 * 64) * 2 * KV * HEAD
    assert found.json()["cache_per_token_bytes"] == {"f32": 768, "f16": 384}
    products = 2 * (6 * LINEAR + VOCAB * DIM)
    attention = (4 * 16 + 2 * 20) * HEADS * 4 * HEAD
    assert products + attention <= found.flops_per_token <= 1.25 * (products + attention)  # norms, softmax and rope
    assert found.flops_prefill // 20 == found.flops_per_token


def test_equal_blocks_fold() -> None:
    found = inspect(load_source(model()))
    folded = {b.scopes: b for b in found.blocks}
    local, wide = folded["layers.0", "layers.1", "layers.3", "layers.4"], folded["layers.2", "layers.5"]
    assert local.parameters == wide.parameters == LINEAR + 2 * DIM
    assert local.cache == wide.cache == 2 * KV * HEAD
    assert local.flops < wide.flops
    assert "attention(heads=4, kv_heads=2, causal, window=16)" in local.ops
    assert found.parameters == sum(b.parameters * len(b.scopes) for b in found.blocks)
    assert abs(sum(b.flops * len(b.scopes) for b in found.blocks) - found.flops_per_token) < 20


def test_experts_and_states_are_counted() -> None:
    blocks = [Block(Mamba(48, state=5, conv=4), MoE(8, FFN, 2)), Block(LinearAttention(HEADS), GatedMLP(FFN))]
    found = inspect(load_source(Decoder(VOCAB, DIM, blocks)))
    assert found.parameters - found.active_parameters == 6 * 3 * DIM * FFN
    sums, rows = 48 * 5 + HEADS * (HEAD * HEAD + HEAD), 48 * 3  # rows of x are kept as they are, sums in f32
    assert found.cache_per_token == 0
    assert found.json()["state_bytes"] == {"f32": 4 * (sums + rows), "f16": 4 * sums + 2 * rows}


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
def test_what_is_particular_is_shown(name: str, lines: list[str]) -> None:
    shown = [" ".join(line.split()) for line in CliRunner().invoke(cli, ["inspect", name]).stdout.splitlines()]
    assert set(lines) <= set(shown)


def test_an_encoder_has_no_cache(minilm_folder: Path) -> None:
    found = inspect(load_source(minilm_folder))
    assert (found.kind, found.layers, found.parameters) == ("encoder", 6, 22_713_216)
    assert found.cache_per_token is found.cache_at_context is found.state_bytes is None
    assert found.ignored == ("embeddings.position_ids: a buffer that the graph computes",) and not found.random


def test_storage_is_what_the_checkpoint_says(smollm2_gguf: Path) -> None:
    found = inspect(load_source(smollm2_gguf))
    assert found.parameters == sum(found.parameters_by_storage.values()) == 134_515_008
    assert set(found.parameters_by_storage) == {"q4_1", "q8_0", "f32"}


def test_the_command_prints_tables_and_json(tmp_path: Path) -> None:
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


def test_keys_that_nothing_reads_are_named(save: Callable[..., tuple[Any, Path]]) -> None:
    from safetensors.numpy import load_file, save_file

    _, folder = save("llama")
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "model.surprise.weight": np.zeros(3, np.float32)}, folder / "model.safetensors")
    assert inspect(load_source(folder)).unread == ("model.surprise.weight",)
    shown = CliRunner().invoke(cli, ["inspect", str(folder)]).output
    assert "that nothing reads:\n  model.surprise.weight" in shown


@pytest.mark.parametrize(
    ("scopes", "text"),
    [
        (("layers.0",), "layers.0"),
        (("layers.0", "layers.1", "layers.2", "layers.5"), "layers.0-2,5"),
        (("layers.1", "layers.3"), "layers.1,3"),
        (("embed",), "embed"),
    ],
)
def test_ranges(scopes: tuple[str, ...], text: str) -> None:
    assert format_ranges(scopes) == text


def test_numbers_for_people() -> None:
    assert [format_count(n) for n in (7, 1234, 12_345, 134_515_008, 405_000_000_000, 5 * 10**15)] == [
        *("7", "1.23 k", "12.3 k", "135 M", "405 G", "5,000 T")
    ]
    assert [format_bytes(n) for n in (12, 46_080, 5 << 20, 3 << 30)] == ["12 B", "45.0 KiB", "5.0 MiB", "3.00 GiB"]


def test_layers_of_scopes() -> None:
    assert [find_layer(s) for s in ("layers.3.attn", "encoder.layers.12", "embed", "a.b", "")] == [
        *("layers.3", "encoder.layers.12", "embed", "a", "")
    ]


def test_any_source_is_inspected(tmp_path: Path) -> None:
    graph = model().graph()
    found = weft.inspect(model(), tokens=20)
    assert found.parameters == weft.inspect(graph).parameters == weft.inspect(load_source(graph)).parameters
    (tmp_path / "model.weft").write_text(str(graph), encoding="utf-8")
    assert weft.inspect(tmp_path / "model.weft").parameters == found.parameters
    assert weft.inspect("llama3.1-8b").parameters == 8_030_261_248
    with pytest.raises(weft.WeftError, match=r"'llama3\.1-8' is neither a preset"):
        weft.inspect("llama3.1-8")
    with pytest.raises(weft.WeftError, match="tokens=0 must be positive"):
        weft.inspect(model(), tokens=0)


def test_an_inspection_prints_what_the_command_prints() -> None:
    found = weft.inspect("gpt2")
    shown, printed = str(found).splitlines(), CliRunner().invoke(cli, ["inspect", "gpt2"]).stdout.splitlines()
    assert repr(found) == str(found)
    assert [" ".join(line.split()) for line in shown] == [" ".join(line.split()) for line in printed if "─" not in line]


def test_names_of_tensors_steer_no_terminal() -> None:
    assert "\x1b" not in str(replace(weft.inspect("gpt2"), unread=("a\x1b[31mb",)))


def test_a_notebook_shows_tables() -> None:
    page = weft.inspect(Decoder(VOCAB, DIM, 2, Block(Attention(HEADS), GatedMLP(FFN))))._repr_html_()
    assert page.count("<table>") == 2 and "<td style='text-align: right'>× 2</td>" in page
    assert "<script" not in weft.frontends.app.api.inspect.inspection.format_html(
        replace(weft.inspect("gpt2"), unread=("<script>",))
    )
