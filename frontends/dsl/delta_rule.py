"""Linear attention with a gated state that is updated by the delta rule: Gated DeltaNet, Kimi Delta Attention."""

from __future__ import annotations

from weft.ir import ops
from weft.ir.graph import Value
from weft.ir.ops.activation import activate

from .build import module, named, param
from .checks import need_activation, need_divisor, need_int
from .hybrids import causal_conv
from .layers import Norm, RMSNorm, linear
from .state_space import init_random_decays, init_step_bias, negate_exp

_TINY = 1e-6  # added to the squared norm of a key


@module
class GatedDeltaNet:
    """The gated delta rule with `heads` value heads in `groups` groups that share q and k (Yang 2024, Gated DeltaNet).

    - q, k, v: projected by ``qkv.weight`` [2·groups·head_dim + heads·v_head_dim, dim], in this order; then a causal
      convolution over `conv` tokens, ``conv.weight``, and SiLU; q and k of each head are divided by their norms, q also
      by √head_dim.
    - β = σ(W x), W = ``beta.weight`` [heads, dim]; doubled with `negative`, for negative eigenvalues (Grazzi 2024).
    - log decay of the state: −e^a_log · softplus(W x + b), W = ``dt.weight`` [heads, dim], b = ``dt.bias``, ``a_log``
      [heads]. With `per_key` every key feature has a decay (Kimi Linear, 2025), and dt has heads·head_dim outputs.
    - The output of the op `gated_delta_rule` is normalized per head by `norm`, multiplied by the activation `gate` of
      W x, W = ``gate.weight`` [heads·v_head_dim, dim], and projected by ``out.weight``.

    With `rank`, decay and gate have factorized projections: ``dt_down.weight`` and ``gate_down.weight`` [rank, dim],
    ``dt.weight`` and ``gate.weight`` [..., rank]. `groups` defaults to `heads`, `v_head_dim` to `head_dim`.
    """

    heads: int
    head_dim: int
    v_head_dim: int | None = None
    groups: int | None = None
    conv: int = 4
    gate: str = "silu"
    norm: Norm = RMSNorm()
    negative: bool = False
    per_key: bool = False
    rank: int | None = None

    def __post_init__(self) -> None:
        need_int(self, "conv", least=2)
        need_activation(self, self.gate)
        if self.groups is not None:
            need_divisor(self, "groups", "heads")

    @property
    def widths(self) -> tuple[int, int]:
        """Return the widths of k (groups · head_dim) and of v (heads · v_head_dim)."""
        return (self.groups or self.heads) * self.head_dim, self.heads * (self.v_head_dim or self.head_dim)

    def __call__(self, x: Value) -> Value:
        keys, values = self.widths
        mixed = causal_conv(linear(x, 2 * keys + values, "qkv"), self.conv, False, "silu")
        q, k, v = ops.split.emit(mixed, sizes=(keys, keys, values), name=("q", "k", "v"))
        # RMSNorm divides by √mean, not by the length: a factor 1/√head_dim gives length 1, and q gets it twice.
        q, k = self._normalize(q, 1 / self.head_dim, "q_unit"), self._normalize(k, self.head_dim**-0.5, "k_unit")
        beta = ops.sigmoid(linear(x, self.heads, "beta"), name="rate")
        beta = ops.affine(beta, by=2.0, name="rate_doubled") if self.negative else beta
        groups = self.groups or self.heads
        y = ops.gated_delta_rule(q, k, v, beta, self._compute_decay(x), heads=self.heads, groups=groups)
        by_head = ops.reshape(y, shape=(*y.shape[:2], self.heads, values // self.heads), name="by_head")
        normed = ops.reshape(named(self.norm, "norm")(by_head), shape=y.shape, name="normed")
        gate = linear(self._project_down(x, "gate_down"), values, "gate")
        return linear(ops.mul(normed, activate(gate, self.gate), name="gated"), x.width, "out")

    def _normalize(self, x: Value, factor: float, name: str) -> Value:
        """Return x [batch, seq, n·head_dim] with each head divided by its root mean square, times `factor`."""
        by_head = ops.reshape(x, shape=(*x.shape[:2], x.width // self.head_dim, self.head_dim))
        normed = ops.rms_norm(by_head, eps=_TINY / self.head_dim)
        return ops.reshape(ops.affine(normed, by=factor), shape=x.shape, name=name)

    def _compute_decay(self, x: Value) -> Value:
        """Return the log decay [batch, seq, heads], or [batch, seq, heads·head_dim] with `per_key`; at most 0."""
        rates = negate_exp(param("a_log", (self.heads,), init_random_decays))
        width = self.heads * (self.head_dim if self.per_key else 1)
        step = linear(self._project_down(x, "dt_down"), width, "dt")
        delta = ops.softplus(ops.add(step, param("dt.bias", (width,), init_step_bias), name="dt_biased"), name="delta")
        if not self.per_key:
            return ops.mul(delta, rates, name="decay")
        by_head = ops.reshape(delta, shape=(*x.shape[:2], self.heads, self.head_dim))
        return ops.reshape(ops.mul(by_head, ops.unsqueeze(rates, axes=(1,))), shape=delta.shape, name="decay")

    def _project_down(self, x: Value, name: str) -> Value:
        return x if self.rank is None else linear(x, self.rank, name)
