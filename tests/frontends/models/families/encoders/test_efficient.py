"""Encoders of long sequences: windows, global tokens, blocks, Fourier transforms."""

from __future__ import annotations

from weft.frontends.dsl import BlockSparse

from ..tables import ABSENT, names, read, refusal

T5 = {"num_hidden_layers": ABSENT, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
LED = {
    "num_hidden_layers": ABSENT,
    **{"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48},
    **{"decoder_layers": 3, "decoder_attention_heads": 2, "decoder_ffn_dim": 40},
    **{"max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 32},
}


def test_longformer_sees_half_its_window_on_each_side() -> None:
    assert read("longformer", attention_window=8).window == (5, 5, 5, 5)
    assert read("longformer", attention_window=[8, 4, 8, 4]).window == (5, 3, 5, 3)
    assert read("longformer").window == (257,) * 4


def test_led_decoder_has_its_own_sizes_and_no_window() -> None:
    s = read("led", **LED, attention_window=8)
    assert (s.window, s.context, s.learned_positions) == ((5, 5), 64, 64)
    assert s.decoder == {"layers": 3, "heads": 2, "ffn": 40, "context": 32, "learned_positions": 32, "window": None}
    at = "led.encoder.layers.0.self_attn"
    assert names("led", "encoder.layers.0.attn.q.weight", **LED) == [f"{at}.longformer_self_attn.query.weight"]


def test_longt5_attention_is_local_or_has_global_tokens() -> None:
    local, tokens = read("longt5", **T5), read("longt5", **T5, encoder_attention_type="transient-global")
    assert (local.window, local.mixer, local.relative) == (128, None, None)
    assert local.position_bias is not None and tokens.position_bias is None
    assert tokens.mixer is not None and tokens.relative is not None
    assert tokens.decoder["window"] is None and tokens.decoder["layers"] == 2
    assert "encoder_attention_type='other' is not supported" in refusal("longt5", **T5, encoder_attention_type="other")


def test_longt5_names_follow_the_class_of_attention() -> None:
    for config, kind in ({}, "Local"), ({"encoder_attention_type": "transient-global"}, "TransientGlobal"):
        found = names("longt5", "encoder.layers.1.attn.q.weight", **T5, **config)
        assert found == [f"encoder.block.1.layer.0.{kind}SelfAttention.q.weight"]


def test_bigbird_blocks_count_the_first_once_more_for_each_random_block() -> None:
    mask = read("big_bird", block_size=4, num_random_blocks=2).mask
    assert mask == BlockSparse(4, first_weight=3, dense=36)
    assert read("big_bird", attention_type="original_full").mask is None
    assert "attention_type='other' is unknown" in refusal("big_bird", attention_type="other")
    assert read("big_bird", rescale_embeddings=True).embed_scale == 32**0.5


def test_fnet_has_no_heads() -> None:
    s = read("fnet")
    assert (s.heads, s.token_types, s.embed_dim) == (None, 4, 32)
    assert names("fnet", "layers.0.attn_norm.weight") == ["fnet.encoder.layer.0.fourier.output.LayerNorm.weight"]
