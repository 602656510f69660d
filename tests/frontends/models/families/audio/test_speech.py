"""Whisper and Moonshine: convolutions numbered from one, keys without biases, decoders with other settings."""

from __future__ import annotations

import numpy as np

from ..tables import ABSENT, counting, names, read, refusal, weight

WHISPER = {
    **{"d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48},
    **{"decoder_layers": 3, "decoder_attention_heads": 2, "decoder_ffn_dim": 40},
    **{"max_source_positions": 16, "max_target_positions": 24, "num_mel_bins": 20},
}
MOONSHINE = {
    **{"num_hidden_layers": ABSENT, "num_attention_heads": ABSENT, "encoder_num_hidden_layers": 2},
    **{"encoder_num_attention_heads": 4, "decoder_num_hidden_layers": 3},
}


def test_whisper_halves_the_frames_of_its_spectrogram() -> None:
    s = read("whisper", **WHISPER)
    assert (s.stem.bins, s.stem.length, s.context) == (20, 32, 16)
    assert s.decoder["context"] == s.decoder["learned_positions"] == 24
    assert (s.decoder["layers"], s.decoder["heads"], s.decoder["ffn"], s.decoder["stem"]) == (3, 2, 40, None)


def test_whisper_convolutions_are_numbered_from_one() -> None:
    assert names("whisper", "encoder.stem.convolutions.0.conv.weight", **WHISPER) == ["model.encoder.conv1.weight"]
    assert names("whisper", "encoder.stem.convolutions.1.conv.bias", **WHISPER) == ["model.encoder.conv2.bias"]


def test_whisper_keys_have_zero_biases() -> None:
    np.testing.assert_array_equal(weight("whisper", "decoder.layers.1.cross.k.bias", {}, **WHISPER), np.zeros(32))
    assert names("whisper", "decoder.layers.1.cross.q.bias", **WHISPER) == [
        "model.decoder.layers.1.encoder_attn.q_proj.bias"
    ]


def test_moonshine_encoder_and_decoder_have_separate_sizes() -> None:
    s = read("moonshine", **MOONSHINE)
    assert (s.layers, s.heads, s.activation, s.gated) == (2, 4, "gelu", False)
    assert (s.decoder["layers"], s.decoder["heads"], s.decoder["activation"], s.decoder["gated"]) == (
        3,
        8,
        "silu",
        True,
    )
    assert (s.rope.interleaved, s.rope.fraction, s.context) == (True, 0.9, 4096)


def test_moonshine_decoder_stores_up_above_gate() -> None:
    packed = counting(96, 32)
    stored = {"model.decoder.layers.0.mlp.fc1.weight": packed}
    np.testing.assert_array_equal(weight("moonshine", "decoder.layers.0.ffn.up.weight", stored), packed[:48])
    np.testing.assert_array_equal(weight("moonshine", "decoder.layers.0.ffn.gate.weight", stored), packed[48:])


def test_decoder_only_configs_are_refused() -> None:
    assert "is_encoder_decoder=False is not supported" in refusal("whisper", **WHISPER, is_encoder_decoder=False)
