"""Every other block takes few of the tokens (mixture of depths, Raposo 2024, arXiv 2404.02258).

`training` takes the best 16 of each text. That choice looks ahead, so `model`, with the same weights, takes each token
that its router gives a positive score:
weft train mixture_of_depths.py:training --save-as mixture_of_depths.py --text texts/kings.txt -o run
"""

from weft import Attention, Block, Decoder, GatedMLP, MixtureOfDepths, RMSNorm, RoPE

block = Block(Attention(heads=4, kv_heads=2, rope=RoPE(10_000)), GatedMLP(384), RMSNorm(1e-6))
best, positive = MixtureOfDepths(block, capacity=16, aux_loss=0.01), MixtureOfDepths(block)

training = Decoder(vocab=1000, dim=128, layers=[block, best] * 4, context=512)
model = Decoder(vocab=1000, dim=128, layers=[block, positive] * 4, context=512)
