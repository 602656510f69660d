"""The upper layers attend to keys and values of a layer in the middle; those below see a window (after YOCO, Sun 2024,
arXiv 2405.05254). Their projections are saved, and of these layers one has a cache, which all of them read."""

from weft import Attention, Block, Decoder, GatedMLP, RMSNorm, RoPE

ffn, norm, rope = GatedMLP(384), RMSNorm(1e-6), RoPE(10_000)
local = Block(Attention(heads=4, kv_heads=2, rope=rope, window=64), ffn, norm)
writer = Block(Attention(heads=4, kv_heads=2, rope=rope, keep_kv="memory"), ffn, norm)
reader = Block(Attention(heads=4, kv_heads=2, rope=rope, share_kv="memory"), ffn, norm)

model = Decoder(vocab=1000, dim=128, layers=[local] * 3 + [writer] + [reader] * 3, context=512)
