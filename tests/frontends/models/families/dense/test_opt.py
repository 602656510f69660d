"""OPT: learned positions counted from 2, optional biases, norms before or after."""

from __future__ import annotations

from ..tables import names, read, refusal

OPT = {"ffn_dim": 48}


def test_positions_are_counted_from_two() -> None:
    s = read("opt", **OPT)
    assert (s.learned_positions, s.position_offset, s.activation, s.arrangement) == (64, 2, "relu", "pre")


def test_flags_of_the_350m_model() -> None:
    s = read("opt", **OPT, do_layer_norm_before=False, enable_bias=False, layer_norm_elementwise_affine=False)
    assert (s.arrangement, s.qkv_bias, s.out_bias, s.ffn_bias, s.norm_weight) == ("post", False, False, False, False)


def test_names_have_the_prefix_of_the_decoder() -> None:
    assert names("opt", "layers.2.attn.o.bias", **OPT) == ["model.decoder.layers.2.self_attn.out_proj.bias"]
    assert names("opt", "layers.2.ffn_norm.weight", **OPT) == ["model.decoder.layers.2.final_layer_norm.weight"]


def test_projected_embeddings_are_refused() -> None:
    assert "word_embed_proj_dim=16 must be hidden_size=" in refusal("opt", **OPT, word_embed_proj_dim=16)
    assert read("opt", **OPT, word_embed_proj_dim=32).dim == 32
