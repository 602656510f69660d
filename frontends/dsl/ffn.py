"""Feed-forward networks (Shazeer 2020)."""

from __future__ import annotations

from weft.ir import ops
from weft.ir.graph import Value
from weft.ir.ops.activation import activate

from .build import module
from .checks import need_activation, need_positive, need_whole
from .layers import linear


@module
class MLP:
    """act(x W_up) W_down with an inner width of `hidden`; activations by name: relu, gelu, gelu_tanh, silu, …"""

    hidden: int
    activation: str = "gelu"
    bias: bool = False

    def __post_init__(self) -> None:
        need_whole(self, "hidden")
        need_activation(self, self.activation)

    def __call__(self, x: Value) -> Value:
        return linear(activate(linear(x, self.hidden, "up", self.bias), self.activation), x.width, "down", self.bias)


@module
class GatedMLP:
    """(act(x W_gate) ⊙ x W_up) W_down: SwiGLU for silu, GEGLU for gelu, ReGLU, GLU (sigmoid), bilinear (identity).

    `limit` clamps gate and up as the op `glu` says.
    """

    hidden: int
    activation: str = "silu"
    bias: bool = False
    limit: float | None = None

    def __post_init__(self) -> None:
        need_whole(self, "hidden")
        need_activation(self, self.activation)
        need_positive(self, "limit")

    @classmethod
    def matched(cls, hidden: int, multiple: int = 1, activation: str = "silu", bias: bool = False) -> GatedMLP:
        """As many parameters as an ungated MLP of `hidden`: ⌊2/3 · hidden⌋, rounded up to a multiple of `multiple`."""
        return cls(-(-(2 * hidden // 3) // multiple) * multiple, activation, bias)

    def __call__(self, x: Value) -> Value:
        gate = linear(x, self.hidden, "gate", self.bias)
        up = linear(x, self.hidden, "up", self.bias)
        return linear(ops.glu(gate, up, activation=self.activation, limit=self.limit), x.width, "down", self.bias)
