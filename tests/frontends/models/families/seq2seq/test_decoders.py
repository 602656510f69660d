"""GPT, CTRL and BioGPT: norms after sublayers, names numbered from one, sinusoids."""

from __future__ import annotations

from ..tables import names, read, refusal

GPT = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64}


def test_gelu_of_gpt_means_its_tanh_form() -> None:
    assert read("openai-gpt", **GPT).activation == "gelu_new"
    assert read("openai-gpt", **GPT, afn="relu").activation == "relu"
    assert "afn='mish' is not supported" in refusal("openai-gpt", **GPT, afn="mish")


def test_gpt_norms_follow_sublayers_and_are_numbered_from_one() -> None:
    assert read("openai-gpt", **GPT).arrangement == "post"
    assert names("openai-gpt", "layers.0.attn_norm.weight", **GPT) == ["transformer.h.0.ln_1.weight"]
    assert names("openai-gpt", "layers.0.ffn_norm.weight", **GPT) == ["transformer.h.0.ln_2.weight"]


def test_ctrl_adds_sinusoids_to_scaled_embeddings() -> None:
    s = read("ctrl", **GPT, dff=48)
    assert (s.embed_scale, s.learned_positions, s.sinusoids.length, s.ffn, s.head_bias) == (32**0.5, None, 64, 48, True)
    assert "layer_norm_epsilon=1e-05 is not supported" in refusal("ctrl", **GPT, dff=48, layer_norm_epsilon=1e-5)
    assert names("ctrl", "layers.1.attn.v.bias", **GPT, dff=48) == ["transformer.h.1.multi_head_attention.Wv.bias"]


def test_biogpt_scales_embeddings_by_default() -> None:
    assert read("biogpt").embed_scale == 32**0.5
    assert read("biogpt", scale_embedding=False).embed_scale == 1.0
    assert names("biogpt", "final_norm.weight") == ["biogpt.layer_norm.weight"]
