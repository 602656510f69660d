"""GGUF metadata for the settings of a graph."""

from __future__ import annotations

from weft.frontends.export.gguf import keys


def test_the_plainest_architecture_is_proposed_first() -> None:
    architectures = """llama qwen2 qwen3 gemma gemma2 gemma3 phi2 phi3 gpt2 gptneox starcoder2 stablelm olmo2 olmo
        granite smollm3 command-r qwen2moe qwen3moe olmoe granitemoe arcee seed_oss hunyuan-dense nemotron cohere2"""
    assert keys.list_architectures(None) == (None, architectures.split())
    assert keys.list_architectures("gemma3_text")[1][:2] == ["gemma3", "llama"]
