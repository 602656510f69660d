"""Attention by hand: the difference of two softmax maps, which cancels what both see (Ye 2024, arXiv 2410.05258)."""

import math

import weft
from weft import Block, Decoder, GatedMLP, RMSNorm, RoPE, affine, linear, module, mul, normal, param, reshape, sub

DIM, LAYERS = 128, 4


@module
class DifferentialAttention:
    """(softmax(q₁ k₁ᵀ/√d) − λ softmax(q₂ k₂ᵀ/√d)) v per head, normed, where λ = e^(a₁·b₁) − e^(a₂·b₂) + `start`."""

    heads: int
    rope: RoPE
    start: float

    def __call__(self, x):
        value = linear(x, x.width, "v")
        share = affine(sub(self.weight(x, "1"), self.weight(x, "2")), plus=self.start)
        y = sub(self.attend(x, value, "1"), mul(self.attend(x, value, "2"), share))
        y = RMSNorm(1e-5)(reshape(y, shape=(*x.shape[:2], self.heads, x.width // self.heads)))
        return linear(affine(reshape(y, shape=x.shape), by=1 - self.start), x.width, "o")

    def attend(self, x, value, name):
        q, k = (self.rope(linear(x, x.width // 2, n + name), self.heads, f"{n}{name}_rope") for n in "qk")
        return weft.attention(q, k, value, heads=self.heads, kv_heads=self.heads, causal=True)

    def weight(self, x, name):
        width = x.width // self.heads // 2
        a, b = (param(n + name, (width,), normal(0.1)) for n in "ab")
        return weft.exp(weft.sum(mul(a, b), axes=(0,)))


def layer(depth):
    mixer = DifferentialAttention(heads=4, rope=RoPE(10_000), start=0.8 - 0.6 * math.exp(-0.3 * depth))
    return Block(mixer, GatedMLP(2 * DIM), norm=RMSNorm(1e-5))


model = Decoder(vocab=1000, dim=DIM, layers=[layer(depth) for depth in range(LAYERS)], context=256)
