"""BART and its relatives: sizes of both halves, decoders alone, positions, scales of embeddings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ..tables import ABSENT, counting, names, read, refusal, weight

BART: dict[str, Any] = {
    **{"num_hidden_layers": ABSENT, "num_attention_heads": ABSENT, "d_model": 32},
    **{"encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48},
    **{"decoder_layers": 3, "decoder_attention_heads": 2, "decoder_ffn_dim": 40},
}
XGLM = {"d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48}


def test_halves_have_separate_sizes() -> None:
    s = read("bart", **BART)
    assert (s.kind, s.layers, s.heads, s.ffn, s.position_offset) == ("encoder-decoder", 2, 4, 48, 2)
    assert s.decoder == {"layers": 3, "heads": 2, "ffn": 40}


def test_a_decoder_alone_has_the_decoders_sizes() -> None:
    s = read("bart", **BART, is_encoder_decoder=False)
    assert (s.kind, s.layers, s.heads, s.ffn) == ("decoder", 3, 2, 40)
    found = names("bart", "layers.0.attn.q.weight", **BART, is_encoder_decoder=False)
    assert found == ["model.decoder.layers.0.self_attn.q_proj.weight"]


def test_head_is_tied_unless_stored_and_its_bias_is_a_row() -> None:
    assert read("bart", **BART).tie
    assert not read("bart", **BART, keys=["lm_head.weight"]).tie
    stored = {"final_logits_bias": counting(1, 97)}
    np.testing.assert_array_equal(weight("bart", "decoder.lm_head.bias", stored, **BART), counting(97))


def test_shared_embedding_has_two_spellings() -> None:
    spelled = "model.decoder.embed_tokens.weight"
    assert names("bart", "embed.weight", keys=[spelled], **BART) == [spelled]


@pytest.mark.parametrize(("family", "scale"), [("bart", 1.0), ("plbart", 32**0.5), ("m2m_100", 32**0.5)])
def test_embedding_scale_has_a_default_per_family(family: str, scale: float) -> None:
    assert read(family, **BART).embed_scale == pytest.approx(scale)
    assert read(family, **BART, scale_embedding=True).embed_scale == pytest.approx(32**0.5)


@pytest.mark.parametrize(
    ("family", "arrangement"),
    [("bart", "post"), ("mbart", "pre"), ("marian", "post"), ("pegasus", "pre"), ("blenderbot", "pre")],
)
def test_norms_before_or_after(family: str, arrangement: str) -> None:
    assert read(family, **BART).arrangement == arrangement


def test_marian_sinusoids_may_be_stored() -> None:
    s = read("marian", **BART)
    assert (s.learned_positions, s.sinusoids.length, s.sinusoids.interleaved, s.stored_sinusoids) == (
        None,
        64,
        False,
        False,
    )
    assert read("marian", **BART, keys=["model.encoder.embed_positions.weight"]).stored_sinusoids


def test_m2m_positions_start_after_the_padding_token() -> None:
    assert (read("m2m_100", **BART).sinusoids.offset, read("m2m_100", **BART, pad_token_id=3).sinusoids.offset) == (
        2,
        4,
    )


def test_blenderbot_small_normalizes_embeddings_before_positions_in_the_decoder() -> None:
    s = read("blenderbot-small", **BART)
    assert not s.embed_norm_first and s.decoder["embed_norm_first"]


def test_xglm_is_a_decoder() -> None:
    assert (read("xglm", **XGLM).kind, read("xglm", **XGLM).sinusoids.offset) == ("decoder", 2)
    assert "pad_token_id=5 is not supported" in refusal("xglm", **XGLM, pad_token_id=5)
    assert "share_encoder_decoder_embeddings=False" in refusal("marian", **BART, share_encoder_decoder_embeddings=False)
