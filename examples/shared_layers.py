"""Each layer runs twice with the same weights (as in the Universal Transformer and ALBERT)."""

from weft import Attention, Block, Decoder, GatedMLP, Repeat, RMSNorm, RoPE

block = Block(Attention(heads=4, kv_heads=2, rope=RoPE(10_000)), GatedMLP(512), norm=RMSNorm(1e-6))

model = Decoder(vocab=1000, dim=128, layers=3, block=Repeat(block, times=2), context=256)
