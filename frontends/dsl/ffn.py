"""Feed-forward networks (Shazeer 2020)."""

from __future__ import annotations

from weft.ir import ops
from weft.ir.graph import Value
from weft.ir.ops.activation import activate

from .build import Layer, fill, module, param
from .checks import need_activation, need_finite, need_modules, need_positive, need_whole
from .layers import Norm, linear


@module
class MLP:
    """act(x W_up) W_down with an inner width of `hidden`; activations by name: relu, gelu, gelu_tanh, silu, …, or a
    module such as `XIELU`. `sub_norm` normalizes what W_down takes (Wang 2022, Magneto)."""

    hidden: int
    activation: str | Layer = "gelu"
    bias: bool = False
    sub_norm: Norm | None = None

    def __post_init__(self) -> None:
        need_whole(self, "hidden")
        if isinstance(self.activation, str):
            need_activation(self, self.activation)
        else:
            need_modules(self, "activation")
        need_modules(self, "sub_norm")

    def __call__(self, x: Value) -> Value:
        """x [..., dim] → the same."""
        y = linear(x, self.hidden, "up", self.bias)
        y = activate(y, self.activation) if isinstance(self.activation, str) else self.activation(y)
        return linear(y if self.sub_norm is None else self.sub_norm(y), x.width, "down", self.bias)


@module
class GatedMLP:
    """(act(x W_gate) ⊙ x W_up) W_down: SwiGLU for silu, GEGLU for gelu, ReGLU, GLU (sigmoid), bilinear (identity).

    `limit` clamps gate and up as the op `glu` says; `sub_norm` as in `MLP`.
    """

    hidden: int
    activation: str = "silu"
    bias: bool = False
    limit: float | None = None
    sub_norm: Norm | None = None

    def __post_init__(self) -> None:
        need_whole(self, "hidden")
        need_activation(self, self.activation)
        need_positive(self, "limit")
        need_modules(self, "sub_norm")

    @classmethod
    def matched(cls, hidden: int, multiple: int = 1, activation: str = "silu", bias: bool = False) -> GatedMLP:
        """As many parameters as an ungated MLP of `hidden`: ⌊2/3 · hidden⌋, rounded up to a multiple of `multiple`."""
        return cls(-(-(2 * hidden // 3) // multiple) * multiple, activation, bias)

    def __call__(self, x: Value) -> Value:
        """x [..., dim] → the same."""
        gate = linear(x, self.hidden, "gate", self.bias)
        y = ops.glu(gate, linear(x, self.hidden, "up", self.bias), activation=self.activation, limit=self.limit)
        return linear(y if self.sub_norm is None else self.sub_norm(y), x.width, "down", self.bias)


@module
class XIELU:
    """αp x² + βx for x > 0, else αn (e^min(x, ε) − 1 − x) + βx (Huang 2024, arXiv 2411.13010).

    Parameters of one number each: ``alpha_p`` and ``alpha_n``, αp = softplus(alpha_p), αn = β + softplus(alpha_n);
    ``beta`` and ``eps``, which start as given.
    """

    beta: float = 0.5
    eps: float = -1e-6

    def __post_init__(self) -> None:
        need_finite(self, "beta", "eps")

    def __call__(self, x: Value) -> Value:
        """x [..., width] → the same."""
        beta, eps = param("beta", (1,), fill(self.beta)), param("eps", (1,), fill(self.eps))
        # softplus of these is 0.8 and 0.3, so both α begin as 0.8
        positive = ops.softplus(param("alpha_p", (1,), fill(0.2032)))
        negative = ops.add(beta, ops.softplus(param("alpha_n", (1,), fill(-1.0502))))
        curved = ops.affine(ops.exp(ops.minimum(x, eps)), plus=-1.0)
        above, below = ops.mul(ops.square(x), positive), ops.mul(ops.sub(curved, x), negative)
        bent = ops.where(ops.less(ops.affine(x, by=0.0), x), above, below)
        return ops.add(bent, ops.mul(x, beta), name="xielu")
