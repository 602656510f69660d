"""Attention and feed-forward side by side behind one norm, and RoPE on half of each head (as in Phi)."""

from weft import MLP, Attention, Block, Decoder, LayerNorm, RoPE

block = Block(
    Attention(heads=8, kv_heads=4, rope=RoPE(10_000, fraction=0.5), qkv_bias=True, out_bias=True),
    MLP(1024, "gelu_tanh", bias=True),
    norm=LayerNorm(1e-5),
    arrangement="parallel",
)

model = Decoder(vocab=1000, dim=256, layers=6, block=block, head_bias=True, context=512)
