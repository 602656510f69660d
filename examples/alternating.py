"""Windows on every other layer, norms before and behind each sublayer, squashed scores and logits (as in Gemma 2)."""

from weft import Attention, Block, Decoder, GatedMLP, RMSNorm, RoPE


def block(window):
    attention = Attention(heads=8, kv_heads=4, head_dim=32, rope=RoPE(10_000), window=window, softcap=50.0)
    return Block(attention, GatedMLP(1024, "gelu_tanh"), norm=RMSNorm(1e-6), arrangement="sandwich")


model = Decoder(
    vocab=1000,
    dim=128,
    layers=[block(window=16), block(window=None)] * 3,
    tie_embeddings=True,
    embed_scale=128**0.5,
    logit_softcap=30.0,
    context=512,
)
