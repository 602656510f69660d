"""BERT, RoBERTa and ALBERT: post-norm blocks, positions counted after the padding token, shared layers."""

from __future__ import annotations

import pytest

from weft.frontends.models.families import FAMILIES

from ..tables import names, read, refusal


def test_bert_is_a_post_norm_encoder_with_two_token_types() -> None:
    s = read("bert")
    assert (s.kind, s.arrangement, s.norm, s.eps, s.token_types, s.embed_norm) == (
        "encoder",
        "post",
        "layer",
        1e-12,
        2,
        True,
    )
    assert (s.learned_positions, s.position_offset, s.pooler) == (64, 0, False)


def test_pooler_is_read_if_stored() -> None:
    assert read("bert", keys=["bert.pooler.dense.weight"]).pooler
    assert read("albert", keys=["pooler.weight"]).pooler


@pytest.mark.parametrize("spelling", ["LayerNorm.weight", "LayerNorm.gamma"])
def test_norms_have_two_spellings(spelling: str) -> None:
    stored = f"bert.encoder.layer.1.attention.output.{spelling}"
    assert names("bert", "layers.1.attn_norm.weight", keys=[stored]) == [stored]


def test_roberta_positions_follow_the_padding_token() -> None:
    s = read("roberta")
    assert (s.learned_positions, s.context, s.position_offset) == (62, 62, 2)
    assert read("roberta", pad_token_id=4).position_offset == 5
    assert FAMILIES["xlm-roberta"] is FAMILIES["camembert"] is FAMILIES["roberta"]


def test_albert_shares_layers_and_projects_narrow_embeddings() -> None:
    s = read("albert", embedding_size=8, num_hidden_groups=2)
    assert (s.embed_dim, s.shared_layers, s.activation) == (8, 2, "gelu_new")
    group = "albert.encoder.albert_layer_groups.1.albert_layers.0"
    assert names("albert", "layers.1.block.ffn.up.weight") == [f"{group}.ffn.weight"]


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("bert", "is_decoder", True),
        ("bert", "position_embedding_type", "relative_key"),
        ("albert", "inner_group_num", 2),
    ],
)
def test_refusals(family: str, key: str, value: object) -> None:
    assert f"{key}={value!r} is not supported for {family} models" in refusal(family, **{key: value})
