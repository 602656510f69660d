"""User code with the types that tests/test_typing.py expects of each `reveal_type`. Checked, never run."""

from typing import reveal_type

import weft
from weft import Attention, Block, Decoder, GatedMLP, module, ops, sigmoid

reveal_type(weft.Attention)
reveal_type(weft.compile)
reveal_type(weft.ops.linear)
reveal_type(weft.linear)
reveal_type(weft.softmax)
reveal_type(weft.load("out").generate("Hello"))
reveal_type(weft.inspect("gpt2").parameters)
reveal_type(weft.__version__)


@module
class SiLU:
    """x · σ(βx), written with operators."""

    beta: float = 1.0

    def __call__(self, x: weft.ir.Value) -> weft.ir.Value:
        best = ops.top_k(x, k=2)
        reveal_type(best.indices)
        state = ops.causal_conv(x, best.values, past=x)
        reveal_type(state)
        reveal_type(ops.causal_conv(x, best.values))
        reveal_type(ops.split(x, sizes=(1, 2)))
        reveal_type(ops.where(x > 0, x, 0.0))
        reveal_type(1 - x * 2)
        reveal_type(x <= 3)
        return x * sigmoid(self.beta * x)


reveal_type(SiLU(beta=2.0))
model = Decoder(vocab=32, dim=8, layers=2, block=Block(Attention(heads=2, kv_heads=1), GatedMLP(16)))
reveal_type(model.graph())
reveal_type(weft.inspect(model))
reveal_type(weft.torch(model))

weft.compile(model, "out", traget="onnx")  # expected: [call-arg]
Attention(heads="2")  # expected: [arg-type]
ops.linear(1, 2)  # expected: [arg-type]
_ = weft.atention  # expected: [attr-defined]
