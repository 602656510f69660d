"""An architecture nobody has named: three Mamba layers to one of attention, and every second block has experts."""

from weft import ALiBi, Attention, Block, Decoder, GatedMLP, Mamba, MoE, RMSNorm, Router

DIM, LAYERS = 128, 8

mamba = Mamba(inner=2 * DIM)
local = Attention(heads=8, kv_heads=2, window=16, sinks=True)
wide = Attention(heads=8, kv_heads=2, bias=ALiBi())
mixers = [mamba, mamba, mamba, local, mamba, mamba, mamba, wide] * (LAYERS // 8)

dense = GatedMLP(2 * DIM)
experts = MoE(8, hidden=DIM, k=2, router=Router("expert"))  # each of the 8 takes the 2/8 of the tokens it likes best

model = Decoder(
    vocab=1000,
    dim=DIM,
    layers=[Block(mixer, experts if i % 2 else dense, norm=RMSNorm(1e-6)) for i, mixer in enumerate(mixers)],
    tie_embeddings=True,
    context=512,
)
