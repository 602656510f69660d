"""Relatives of BERT: projected embeddings, task rows, relative positions, adapters of a language, proteins."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from weft.frontends.models.families.encoders.bert_relatives import read_embedding_width

from ..tables import counting, names, read, refusal, weight

XMOD = {"default_language": "de_DE", "languages": ["en_XX", "de_DE"]}


def test_distilbert_has_its_own_size_keys_and_no_token_types() -> None:
    s = read("distilbert", dim=32, n_layers=3, n_heads=4, hidden_dim=40)
    assert (s.dim, s.heads, s.ffn, s.token_types) == (32, 4, 40, 0)


def test_embeddings_are_projected_only_if_narrower() -> None:
    rule = read_embedding_width("embedding_size", 128)
    assert rule({"hidden_size": 32}) == 128
    assert rule({"hidden_size": 32, "embedding_size": 32}) is None
    assert (read("electra", embedding_size=8).embed_dim, read("rembert").embed_dim) == (8, 256)


def test_ernie_adds_the_row_of_task_zero_to_token_types() -> None:
    types, tasks = counting(2, 32), 100 * counting(3, 32) + 1
    at = "ernie.embeddings"
    stored = {f"{at}.token_type_embeddings.weight": types}
    np.testing.assert_array_equal(weight("ernie", "token_types.weight", stored), types)
    stored[f"{at}.task_type_embeddings.weight"] = tasks
    np.testing.assert_array_equal(weight("ernie", "token_types.weight", stored), types + tasks[0])


@pytest.mark.parametrize("family", ["megatron-bert", "xlm-roberta-xl", "roberta-prelayernorm"])
def test_norms_before_the_sublayers(family: str) -> None:
    assert read(family).arrangement == "pre"


def test_mpnet_has_relative_positions_of_all_heads() -> None:
    s = read("mpnet")
    assert (s.position_bias.heads, s.position_bias.buckets, s.learned_positions, s.position_offset) == (4, 32, 62, 2)
    assert names("mpnet", "layers.0.attn.o.weight") == ["mpnet.encoder.layer.0.attention.attn.o.weight"]


@pytest.mark.parametrize(
    ("family", "config", "message"),
    [
        ("mpnet", {"relative_attention_num_buckets": 16}, "relative_attention_num_buckets=16 is not supported"),
        ("xlm", {"n_langs": 2}, "n_langs=2 with use_lang_emb is not supported"),
        ("xlm", {"causal": True}, "causal=True is not supported"),
        ("flaubert", {"pre_norm": True}, "pre_norm=True is not supported"),
        ("esm", {"is_folding_model": True}, "is_folding_model=True is not supported"),
    ],
)
def test_refusals(family: str, config: dict[str, Any], message: str) -> None:
    assert message in refusal(family, **config)


def test_xlm_sizes_and_names() -> None:
    s = read("xlm", emb_dim=32, n_heads=4, n_langs=2, use_lang_emb=False, gelu_activation=False)
    assert (s.dim, s.ffn, s.token_types, s.activation) == (32, 128, 0, "relu")
    assert names("xlm", "layers.1.attn.q.weight", emb_dim=32) == ["transformer.attentions.1.q_lin.weight"]


def test_xmod_reads_the_adapter_of_the_default_language() -> None:
    at = "roberta.encoder.layer.0.output"
    assert names("xmod", "layers.0.adapter.up.weight", **XMOD) == [f"{at}.adapter_modules.de_DE.dense1.weight"]
    assert "adapter_reuse_layer_norm=False" in refusal("xmod", **XMOD, adapter_reuse_layer_norm=False)


def test_esm_positions_are_absolute_or_rotary() -> None:
    absolute, rotary = read("esm"), read("esm", position_embedding_type="rotary", rope_theta=5e3)
    assert (absolute.learned_positions, absolute.rope) == (62, None)
    assert (rotary.learned_positions, rotary.rope.theta, rotary.context) == (None, 5e3, 64)


def test_esm_scales_masked_sequences_with_token_dropout() -> None:
    assert read("esm").mask_scaling is None
    scaling = read("esm", token_dropout=True, mask_token_id=7).mask_scaling
    assert scaling is not None and 7 in vars(scaling).values()


def test_esm_reads_stored_frequencies() -> None:
    rotary = {"position_embedding_type": "rotary"}
    stored = "esm.encoder.layer.0.attention.self.rotary_embeddings.inv_freq"
    assert names("esm", "rope.frequencies", keys=[stored], **rotary) == [stored]
    np.testing.assert_allclose(weight("esm", "rope.frequencies", {}, **rotary), 1e4 ** (-np.arange(4) / 4), rtol=1e-6)
