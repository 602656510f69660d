"""A feed-forward written by hand: max(0, x W)² W' (So 2021)."""

from weft import Attention, Block, Decoder, RMSNorm, RoPE, linear, module, relu


@module
class SquaredReLU:
    hidden: int

    def __call__(self, x):
        return linear(relu(linear(x, self.hidden, "up")) ** 2, x.width, "down")


block = Block(Attention(heads=4, rope=RoPE(10_000)), SquaredReLU(hidden=512), norm=RMSNorm(1e-6))

model = Decoder(vocab=1000, dim=128, layers=4, block=block, context=256)
