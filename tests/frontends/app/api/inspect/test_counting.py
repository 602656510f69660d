"""weft inspect: counted by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import weft
from weft import Attention, Block, Decoder, GatedMLP, LinearAttention, Mamba, MoE, RMSNorm, RoPE, load_source
from weft.frontends.app.api.inspect.counting import PartCost, compute_part_costs, find_layer, inspect
from weft.frontends.app.api.rewrite import rewrite
from weft.frontends.app.cli import cli

DIM, HEADS, KV, HEAD, FFN, VOCAB = 32, 4, 2, 8, 48, 50
LINEAR = DIM * (HEADS + 2 * KV) * HEAD + HEADS * HEAD * DIM + 3 * DIM * FFN  # weights of a block's seven products


def model() -> Decoder:
    local = Block(Attention(HEADS, KV, rope=RoPE(), window=16), GatedMLP(FFN), RMSNorm())
    wide = Block(Attention(HEADS, KV, rope=RoPE(5e5)), GatedMLP(FFN), RMSNorm())
    return Decoder(VOCAB, DIM, [local, local, wide] * 2, tie_embeddings=True, context=64)


def test_counts_of_a_model_with_windows() -> None:
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


def test_equal_blocks_share_a_row() -> None:
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


def test_an_encoder_has_no_cache(minilm_folder: Path) -> None:
    found = inspect(load_source(minilm_folder))
    assert (found.kind, found.layers, found.parameters) == ("encoder", 6, 22_713_216)
    assert found.cache_per_token is found.cache_at_context is found.state_bytes is None
    assert found.ignored == ("embeddings.position_ids: a buffer that the graph computes",) and not found.random


def test_parameters_by_dtype_of_the_checkpoint(smollm2_gguf: Path) -> None:
    found = inspect(load_source(smollm2_gguf))
    assert found.parameters == sum(found.parameters_by_storage.values()) == 134_515_008
    assert set(found.parameters_by_storage) == {"q4_1", "q8_0", "f32"}


def test_keys_that_nothing_reads_are_named(save: Callable[..., tuple[Any, Path]]) -> None:
    from safetensors.numpy import load_file, save_file

    _, folder = save("llama")
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "model.surprise.weight": np.zeros(3, np.float32)}, folder / "model.safetensors")
    assert inspect(load_source(folder)).unread == ("model.surprise.weight",)
    shown = CliRunner().invoke(cli, ["inspect", str(folder)]).output
    assert "that nothing reads:\n  model.surprise.weight" in shown


def test_layer_of_a_scope() -> None:
    assert [find_layer(s) for s in ("layers.3.attn", "encoder.layers.12", "embed", "a.b", "")] == [
        *("layers.3", "encoder.layers.12", "embed", "a", "")
    ]


def test_inspect_accepts_any_source(tmp_path: Path) -> None:
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


DIM, HEADS, KV, HEAD, FFN, VOCAB = 32, 4, 2, 8, 48, 50
ATTENTION = DIM * (HEADS + 2 * KV) * HEAD + HEADS * HEAD * DIM  # weights of its four products
PUBLISHED = {"gpt2": 124_439_808, "llama3.1-8b": 8_030_261_248, "bert-base": 109_482_240, "t5-base": 222_903_552}


def costs(model: object, tokens: int, item: int) -> dict[str, PartCost]:
    return {cost.path: cost for cost in compute_part_costs(load_source(model).graph, tokens, item)}


def test_a_layer_is_counted_by_hand() -> None:
    local = Block(Attention(HEADS, KV, rope=RoPE(), window=16), GatedMLP(FFN), RMSNorm())
    found = costs(Decoder(VOCAB, DIM, [local] * 3, context=64), 40, 2)
    attn, layers = found["layers.0.attn"], found["layers.0-2"]
    assert (attn.times, layers.times) == (3, 3)
    assert attn.parameters == ATTENTION
    assert layers.parameters == 3 * (ATTENTION + 3 * DIM * FFN + 2 * DIM)
    scores = 40 * 16 * HEADS * (2 * 2 * HEAD + 5)  # two products and the softmax, of 16 keys for every token
    turned = 40 * (HEADS + KV) * HEAD * 3
    assert attn.flops == 2 * 40 * ATTENTION + scores + turned
    assert attn.step_flops == attn.flops // 40
    assert attn.cache == 16 * 2 * KV * HEAD * 2 and layers.cache == 3 * attn.cache
    ffn = found["layers.0.ffn"]
    hidden, numbers = 40 * FFN, 3 * DIM * FFN
    assert ffn.read == 2 * (numbers + 2 * 40 * DIM + 3 * hidden)  # x twice, both halves, what goes down
    assert ffn.written == 2 * (3 * hidden + 40 * DIM)
    assert ffn.step_read == 2 * (numbers + 2 * DIM + 3 * FFN)


@pytest.mark.parametrize("preset", ["gpt2", "llama3.1-8b", "bert-base", "t5-base", "mamba-130m"])
def test_costs_of_parts_sum_to_those_of_the_model(preset: str) -> None:
    model = rewrite(load_source(preset), "fold-constants")  # what is made of weights alone costs no token anything
    told, found = inspect(model, 100), costs(model, 100, 2)
    whole = found.pop("")
    assert whole.parameters == told.parameters == PUBLISHED.get(preset, told.parameters)
    assert whole.flops == told.flops_prefill
    assert (whole.step_flops is None) == (told.kind == "encoder")
    top = [c for c in found.values() if "." not in c.path or c.path in ("layers.0-11", "layers.0-31", "layers.0-23")]
    assert sum(c.parameters for c in top) == whole.parameters
    assert sum(c.flops for c in top) == whole.flops
    if told.kind == "decoder":
        assert whole.step_flops == told.flops_per_token
        assert whole.cache == 100 * (told.cache_per_token or 0) * 2
        assert told.state_bytes is not None and whole.state == told.state_bytes["f16"]


def test_states_are_kept_in_their_own_dtypes() -> None:
    found = costs(Decoder(VOCAB, DIM, [Block(Mamba(48, state=5, conv=4), norm=RMSNorm())]), 10, 2)[""]
    assert found.state == 4 * 48 * 5 + 2 * 48 * 3
    assert found.cache == 0 and found.step_flops
