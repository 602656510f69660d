"""Feed-forward networks (Shazeer 2020)."""

from __future__ import annotations

from weft.ir import ops
from weft.ir.errors import WeftError
from weft.ir.graph import Value
from weft.ir.ops.activation import ACTIVATIONS, activate

from .build import module
from .layers import linear


def check_activation(kind: str, name: str) -> None:
    """Refuse an activation that no op computes, in the words of the module `kind`.

    Raises:
        WeftError: naming those that are known.
    """
    if name not in ACTIVATIONS and name != "identity" and not name.startswith("swish("):
        raise WeftError(f"{kind}: unknown activation={name!r}; known are identity, swish(β), {', '.join(ACTIVATIONS)}")


@module
class MLP:
    """act(x W_up) W_down with an inner width of `hidden`; activations by name: relu, gelu, gelu_tanh, silu, …"""

    hidden: int
    activation: str = "gelu"
    bias: bool = False

    def __post_init__(self) -> None:
        check_activation("MLP", self.activation)

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
        check_activation("GatedMLP", self.activation)

    @classmethod
    def matched(cls, hidden: int, multiple: int = 1, activation: str = "silu", bias: bool = False) -> GatedMLP:
        """As many parameters as an ungated MLP of `hidden`: ⌊2/3 · hidden⌋, rounded up to a multiple of `multiple`."""
        return cls(-(-(2 * hidden // 3) // multiple) * multiple, activation, bias)

    def __call__(self, x: Value) -> Value:
        gate = linear(x, self.hidden, "gate", self.bias)
        up = linear(x, self.hidden, "up", self.bias)
        return linear(ops.glu(gate, up, activation=self.activation, limit=self.limit), x.width, "down", self.bias)
