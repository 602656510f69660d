"""Small experts beside one that all tokens pass, chosen by sigmoids that a bias corrects (DeepSeek-V3, 2024)."""

from weft import Attention, Block, Decoder, GatedMLP, MoE, RMSNorm, RoPE, Router

attention, norm = Attention(heads=4, kv_heads=2, rope=RoPE(10_000)), RMSNorm(1e-6)
experts = MoE(16, hidden=64, k=4, shared=GatedMLP(64), router=Router(scoring="sigmoid", correction=True, scale=2.5))

dense = Block(attention, GatedMLP(384), norm)
sparse = Block(attention, experts, norm)

model = Decoder(vocab=1000, dim=128, layers=[dense] + [sparse] * 3, context=512)
