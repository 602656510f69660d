"""Three layers of the gated delta rule to one of attention, as in Qwen3-Next (Yang 2024, arXiv 2412.06464)."""

from weft import Attention, Block, Decoder, GatedDeltaNet, GatedMLP, RMSNorm, RoPE

norm, ffn = RMSNorm(1e-6), GatedMLP(384)
delta = Block(GatedDeltaNet(heads=4, head_dim=32, groups=2), ffn, norm)
wide = Block(Attention(heads=4, kv_heads=2, rope=RoPE(1_000_000, fraction=0.25), qk_norm=norm, gate=True), ffn, norm)

model = Decoder(vocab=1000, dim=128, layers=([delta] * 3 + [wide]) * 2, context=512)
