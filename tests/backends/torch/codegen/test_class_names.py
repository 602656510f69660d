"""Names of generated classes: the words that distinguish them, by their ops or their place."""

from __future__ import annotations

import pytest

from ..generated import class_docs, graph_of


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("family/llama-gqa-tied", "Attention FeedForward Block Model"),
        ("family/gemma3", "WindowAttention FeedForward WindowBlock Attention GlobalBlock Model"),
        ("family/smollm3", "Attention FeedForward Block NoPEAttention NoPEBlock Model"),
        ("family/deepseek-v3", "LatentAttention FeedForward DenseBlock Experts Shared MoE MoEBlock Model"),
        ("family/jamba", "Mamba FeedForward MambaBlock Attention Experts MoE MoEBlock AttentionBlock Model"),
        (
            "family/bart",
            "EncoderAttention EncoderFeedForward EncoderBlock Encoder "
            "DecoderAttention CrossAttention DecoderFeedForward DecoderBlock Decoder Model",
        ),
        ("family/albert", "Attention FeedForward Block BlockGroup Model"),
    ],
)
def test_classes_are_named_after_the_ops_that_differ(name: str, wanted: str) -> None:
    assert " ".join(class_docs(graph_of(name))) == wanted
