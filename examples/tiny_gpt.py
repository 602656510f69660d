"""Learned positions, LayerNorm and a plain feed-forward (Radford 2019)."""

from weft import MLP, Attention, Block, Decoder, LayerNorm, LearnedPositions

block = Block(
    Attention(heads=4, qkv_bias=True, out_bias=True),
    MLP(512, "gelu_tanh", bias=True),
    norm=LayerNorm(1e-5),
)

model = Decoder(
    vocab=1000,
    dim=128,
    layers=4,
    block=block,
    positions=LearnedPositions(256),
    tie_embeddings=True,
)
