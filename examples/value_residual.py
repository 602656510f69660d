"""Attention by hand: later layers add the values of the first to their own (Zhou 2024, arXiv 2410.17897)."""

import weft
from weft import Block, Decoder, GatedMLP, RMSNorm, RoPE, fill, keep, kept, linear, module, param, sigmoid


@module
class ValueResidualAttention:
    heads: int
    rope: RoPE
    first: bool = False

    def __call__(self, x):
        q, k = (self.rope(linear(x, x.width, name), self.heads) for name in "qk")
        v = linear(x, x.width, "v")
        if self.first:
            keep("first_values", v)
        else:
            share = sigmoid(param("share", (1,), fill(0.0)))
            (first,) = kept("first_values")
            v = share * v + (1 - share) * first
        y = weft.attention(q, k, v, heads=self.heads, kv_heads=self.heads, causal=True)
        return linear(y, x.width, "o")


def layer(first):
    return Block(ValueResidualAttention(heads=4, rope=RoPE(10_000), first=first), GatedMLP(384), RMSNorm(1e-6))


model = Decoder(vocab=1000, dim=128, layers=[layer(True)] + [layer(False)] * 3, context=256)
