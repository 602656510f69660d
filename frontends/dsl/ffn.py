"""Feed-forward networks (Shazeer 2020)."""

from __future__ import annotations

from statistics import NormalDist

from weft.ir import ops
from weft.ir.graph import Value
from weft.ir.ops.activation import activate

from .build import Layer, fill, module, param
from .checks import need, need_activation, need_finite, need_modules, need_positive, need_whole
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

    `limit` clamps gate and up as the op `glu` says; `sub_norm` as in `MLP`. With `sparsity` p, of every token's gates
    only what exceeds their mean by the p-quantile of a normal distribution passes (Gemma 3n's Gaussian top-k).
    """

    hidden: int
    activation: str = "silu"
    bias: bool = False
    limit: float | None = None
    sub_norm: Norm | None = None
    sparsity: float = 0.0

    def __post_init__(self) -> None:
        need_whole(self, "hidden")
        need_activation(self, self.activation)
        need_positive(self, "limit")
        need(self, 0 <= self.sparsity < 1, f"sparsity={self.sparsity} must be from 0 to below 1")
        need_modules(self, "sub_norm")

    @classmethod
    def matched(cls, hidden: int, multiple: int = 1, activation: str = "silu", bias: bool = False) -> GatedMLP:
        """As many parameters as an ungated MLP of `hidden`: ⌊2/3 · hidden⌋, rounded up to a multiple of `multiple`."""
        return cls(-(-(2 * hidden // 3) // multiple) * multiple, activation, bias)

    def __call__(self, x: Value) -> Value:
        """x [..., dim] → the same."""
        gate = linear(x, self.hidden, "gate", self.bias)
        if self.sparsity:
            gate = _above_quantile(gate, self.sparsity)
        y = ops.glu(gate, linear(x, self.hidden, "up", self.bias), activation=self.activation, limit=self.limit)
        return linear(y if self.sub_norm is None else self.sub_norm(y), x.width, "down", self.bias)


def _above_quantile(x: Value, share: float) -> Value:
    """By how much each of x exceeds the `share`-quantile of a normal distribution with its mean and deviation."""
    last = (len(x.shape) - 1,)
    mean = ops.mean(x, axes=last, keepdims=True)
    deviation = ops.sqrt(ops.mean(ops.square(ops.sub(x, mean)), axes=last, keepdims=True))
    cutoff = ops.add(mean, ops.affine(deviation, by=NormalDist().inv_cdf(share)))
    return ops.relu(ops.sub(x, cutoff))


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
