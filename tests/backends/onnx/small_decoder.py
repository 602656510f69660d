"""A small decoder, and the operators of the folder that it is compiled to."""

from __future__ import annotations

from pathlib import Path

import onnx

from weft import Attention, Block, Decoder, GatedMLP, RMSNorm, RoPE


def decoder(heads: int = 4, kv_heads: int = 2, dim: int = 64, tie: bool = True) -> Decoder:
    attention = Attention(heads=heads, kv_heads=kv_heads, rope=RoPE(10_000))
    return Decoder(
        vocab=96,
        dim=dim,
        layers=2,
        block=Block(attention, GatedMLP(80), norm=RMSNorm(1e-5)),
        tie_embeddings=tie,
        context=64,
    )


def op_types(path: Path) -> list[str]:
    return [n.op_type for n in onnx.load(path / "model.onnx", load_external_data=False).graph.node]
