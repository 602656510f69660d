"""The text of small graphs before and after the default pipeline, kept so that a change of either is seen in review.

After a change that is meant: ``WEFT_GOLDEN=write pytest tests/golden``, and read the diff.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from weft import MLP, Attention, Block, Decoder, Encoder, GatedMLP, LayerNorm, LearnedPositions, RMSNorm, RoPE
from weft.ir import Graph, parse
from weft.passes import run_passes

LOCAL = Block(Attention(heads=4, kv_heads=2, rope=RoPE(10_000), window=8), GatedMLP(48), norm=RMSNorm(1e-6))
WIDE = Block(
    Attention(heads=4, kv_heads=2, rope=RoPE(1_000_000), qk_norm=RMSNorm(1e-6)), GatedMLP(48), norm=RMSNorm(1e-6)
)
OLD = Block(
    Attention(heads=4, qkv_bias=True, out_bias=True), MLP(64, activation="gelu_tanh", bias=True), norm=LayerNorm(1e-5)
)
MODELS = {
    "local_global": Decoder(vocab=97, dim=32, layers=[LOCAL, WIDE], tie_embeddings=True),
    "gpt2": Decoder(vocab=97, dim=32, layers=1, block=OLD, positions=LearnedPositions(64), tie_embeddings=True),
    "encoder": Encoder(
        vocab=97,
        dim=32,
        layers=1,
        block=Block(Attention(heads=4, causal=False), MLP(64), norm=LayerNorm(1e-5)),
        context=64,
    ),
}


def agrees(path: Path, graph: Graph) -> None:
    text = str(graph)
    if os.environ.get("WEFT_GOLDEN") == "write":
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")
    assert parse(text) == graph


@pytest.mark.parametrize("name", MODELS)
def test_graph_text_equals_golden_file(name: str) -> None:
    here = Path(__file__).parent
    graph = MODELS[name].graph()
    agrees(here / f"{name}.weft", graph)
    agrees(here / f"{name}.default.weft", run_passes(graph, "default"))
