# local_global.py
from weft import Attention, Block, Decoder, GatedMLP, RMSNorm, RoPE

local = Block(Attention(heads=8, kv_heads=2, rope=RoPE(10_000), window=512), GatedMLP(2048), norm=RMSNorm(1e-6))
wide = Block(Attention(heads=8, kv_heads=2, rope=RoPE(1_000_000)), GatedMLP(2048), norm=RMSNorm(1e-6))

model = Decoder(vocab=32_000, dim=512, layers=([local] * 5 + [wide]) * 4, tie_embeddings=True)
