"""An encoder: learned positions, token types, a norm behind each residual, and a pooler (Devlin 2018)."""

from weft import MLP, Attention, Block, Encoder, LayerNorm, LearnedPositions

norm = LayerNorm(1e-12)
block = Block(
    Attention(heads=2, qkv_bias=True, out_bias=True),
    MLP(512, "gelu", bias=True),
    norm=norm,
    arrangement="post",
)

model = Encoder(
    vocab=1000,
    dim=128,
    layers=2,
    block=block,
    positions=LearnedPositions(128),
    token_types=2,
    embed_norm=norm,
    pooler=True,
)
