"""Docstrings of generated sources: residual branches, places of norms, and imports."""

from __future__ import annotations

import pytest

from weft.backends.torch.codegen.model_source import write_source

from ....lowered import lower
from ..generated import class_docs, graph_of


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("family/llama-gqa-tied", "A pre-norm block: Attention, then FeedForward, each added to the residual stream."),
        ("family/bert", "A post-norm block: Attention, then FeedForward, each added to the residual stream."),
        ("family/gptj", "A pre-norm block: Attention and FeedForward side by side, both added to the residual stream."),
        (
            "family/olmo2-gqa",
            "A block with a norm after each part: Attention, then FeedForward, each added to the residual stream.",
        ),
        (
            "variant/sandwich",
            "A block with norms around its parts: Attention, then FeedForward, each added to the residual stream.",
        ),
    ],
)
def test_docstring_of_a_block_describes_its_residual_branches(name: str, wanted: str) -> None:
    assert class_docs(graph_of(name))["Block"] == wanted


@pytest.mark.parametrize(
    ("name", "needed"), [("family/llama-gqa-tied", "only torch. "), ("family/gemma3", "only torch and kernels/. ")]
)
def test_docstring_of_a_model_names_its_imports(name: str, needed: str) -> None:
    text = write_source(lower(graph_of(name))).text
    assert f"needs {needed}" in text
    assert ("from kernels." in text) == ("kernels" in needed)


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
