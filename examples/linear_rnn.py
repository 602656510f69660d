"""A linear RNN of one's own, as a function of one token: a memory that each channel rewrites at its own rate."""

from weft import Block, Decoder, GatedMLP, RMSNorm, linear, module, scan, sigmoid, silu


@module
class Memory:
    def __call__(self, x):
        def step(memory, keep, new):
            memory = keep * memory + (1 - keep) * new
            return memory, memory

        keep, new = sigmoid(linear(x, x.width, "keep", bias=True)), linear(x, x.width, "new")
        memory = scan(step, keep, new, state=(x.width,))
        return linear(memory * silu(linear(x, x.width, "gate")), x.width, "out")


block = Block(Memory(), GatedMLP(512), norm=RMSNorm(1e-6))

model = Decoder(vocab=1000, dim=128, layers=4, block=block, context=256)
