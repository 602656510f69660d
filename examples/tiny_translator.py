"""An encoder and a decoder that attends to it, as in the first Transformer (Vaswani 2017)."""

from weft import MLP, Attention, Block, CrossAttention, Decoder, Encoder, EncoderDecoder, LayerNorm, Sinusoidal

attn, ffn, norm = Attention(heads=4), MLP(512, "relu", bias=True), LayerNorm(1e-6)
reads = Block(attn, ffn, norm, arrangement="post")
writes = Block(attn, ffn, norm, arrangement="post", cross=CrossAttention(heads=4))
positions, scale = Sinusoidal(256), 128**0.5

model = EncoderDecoder(
    Encoder(vocab=1000, dim=128, layers=3, block=reads, positions=positions, embed_scale=scale),
    Decoder(vocab=1000, dim=128, layers=3, block=writes, positions=positions, embed_scale=scale, tie_embeddings=True),
)
