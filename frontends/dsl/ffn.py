"""Feed-forward networks (Shazeer 2020) and mixtures of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from statistics import NormalDist
from typing import Any

from weft.ir import ops
from weft.ir.graph import Value
from weft.ir.ops.activation import activate
from weft.ir.ops.experts import moe
from weft.ir.ops.routing import emit_hierarchical_routing, emit_noisy_logits, emit_sparse_mixer

from .build import Layer, contribute, fill, format_module, get_builder, module, param, select_attrs
from .checks import check_fields, need, need_choice, need_positive
from .layers import Norm, linear

CHOICES = ("token", "expert", "hierarchical", "sparsemixer")


@module
class MLP:
    """The feed-forward W_down act(W_up x), with ``up.weight`` [hidden, dim] and ``down.weight`` [dim, hidden].

    `activation` is a name (relu, gelu, gelu_tanh, silu, …) or a module such as `XIELU`. `sub_norm` normalizes the input
    of W_down (Wang 2022, Magneto). `bias` adds ``up.bias`` and ``down.bias``.
    """

    hidden: int
    activation: str | Layer = "gelu"
    bias: bool = False
    sub_norm: Norm | None = None

    def __call__(self, x: Value) -> Value:
        """Map x [..., dim] to a value of the same shape."""
        y = linear(x, self.hidden, "up", self.bias)
        y = activate(y, self.activation) if isinstance(self.activation, str) else self.activation(y)
        return linear(y if self.sub_norm is None else self.sub_norm(y), x.width, "down", self.bias)


@module
class GatedMLP:
    """The gated feed-forward W_down (act(W_gate x) ⊙ W_up x): SwiGLU for silu, GEGLU for gelu, ReGLU for relu.

    It is GLU for sigmoid, bilinear for identity. `limit` clamps W_gate x to at most limit and W_up x to ±limit.
    `sub_norm` normalizes the input of W_down. With `sparsity` p, each element g of W_gate x first becomes
    max(g − c, 0), where c is the p-quantile of the normal distribution with the mean and deviation of the token's
    elements (Gaussian top-k, Gemma 3n). Parameters: ``gate.weight`` and ``up.weight`` [hidden, dim], ``down.weight``
    [dim, hidden]; `bias` adds a bias to each.
    """

    hidden: int
    activation: str = "silu"
    bias: bool = False
    limit: float | None = None
    sub_norm: Norm | None = None
    sparsity: float = 0.0

    def __post_init__(self) -> None:
        need(self, 0 <= self.sparsity < 1, f"sparsity={self.sparsity} must be at least 0 and below 1")

    @classmethod
    def matched(cls, hidden: int, multiple: int = 1, activation: str = "silu", bias: bool = False) -> GatedMLP:
        """Return a `GatedMLP` with about the parameter count of an `MLP` of width `hidden`: its width is
        ⌊2/3 · hidden⌋, rounded up to a multiple of `multiple`."""
        return cls(-(-(2 * hidden // 3) // multiple) * multiple, activation, bias)

    def __call__(self, x: Value) -> Value:
        """Map x [..., dim] to a value of the same shape."""
        gate = linear(x, self.hidden, "gate", self.bias)
        if self.sparsity:
            gate = _subtract_quantile(gate, self.sparsity)
        y = ops.glu(gate, linear(x, self.hidden, "up", self.bias), activation=self.activation, limit=self.limit)
        return linear(y if self.sub_norm is None else self.sub_norm(y), x.width, "down", self.bias)


def _subtract_quantile(x: Value, share: float) -> Value:
    """Return max(x − c, 0), where c is the `share`-quantile of the normal distribution fitted to x on its last axis."""
    last = (len(x.shape) - 1,)
    mean = ops.mean(x, axes=last, keepdims=True)
    deviation = ops.sqrt(ops.mean(ops.square(ops.sub(x, mean)), axes=last, keepdims=True))
    cutoff = ops.add(mean, ops.affine(deviation, by=NormalDist().inv_cdf(share)))
    return ops.relu(ops.sub(x, cutoff))


@module
class XIELU:
    """The activation αp x² + βx for x > 0, else αn (e^min(x, ε) − 1 − x) + βx (Huang 2024, arXiv 2411.13010).

    Parameters, [1] each: ``alpha_p`` and ``alpha_n``, with αp = softplus(alpha_p) and αn = β + softplus(alpha_n);
    ``beta`` (β) and ``eps`` (ε), whose initial values are the fields of these names.
    """

    beta: float = 0.5
    eps: float = -1e-6

    def __call__(self, x: Value) -> Value:
        """Map x [..., width] to a value of the same shape."""
        beta, eps = param("beta", (1,), fill(self.beta)), param("eps", (1,), fill(self.eps))
        # softplus of these is 0.8 and 0.3, so both α are 0.8 initially
        positive = ops.softplus(param("alpha_p", (1,), fill(0.2032)))
        negative = ops.add(beta, ops.softplus(param("alpha_n", (1,), fill(-1.0502))))
        curved = ops.affine(ops.exp(ops.minimum(x, eps)), plus=-1.0)
        above, below = ops.mul(ops.square(x), positive), ops.mul(ops.sub(curved, x), negative)
        bent = ops.where(ops.less(ops.affine(x, by=0.0), x), above, below)
        return ops.add(bent, ops.mul(x, beta), name="xielu")


@dataclass(frozen=True, repr=False)
class Router:
    """The router of a mixture of experts: how tokens and experts are assigned to each other.

    `choice` is the routing scheme (k is a field of `MoE`):

    - token: each token selects the k experts with the best scores (`scoring` of the logits: softmax or sigmoid).
      `renormalize` divides the k weights by their sum, `scale` multiplies them. With `groups` of experts, only the
      `top_groups` best groups can be selected, by the `group_score` max or sum of the best two (top2), as in the op
      `route`. `correction` adds ``router.correction`` [experts] to the scores for the selection only (DeepSeek-V3).
    - expert: each expert selects its best `capacity` tokens; the default is k experts per token on average (Zhou 2022).
    - hierarchical: each token selects `top_groups` of the `groups` by ``group_router.weight`` [groups, dim], then its
      best k experts of each by ``router.weight`` (Shazeer 2017, appendix B).
    - sparsemixer: each token selects two experts, weighted by `emit_sparse_mixer` with `jitter` (Liu 2024: Phi-3.5).

    `bias` adds ``router.bias`` [experts] to the logits. `noisy` adds noise · softplus(W x), with W = ``noise.weight``
    [experts, dim]; the noise of the i-th noisy router is the graph input ``router_noise.{i}`` [batch, seq, experts],
    standard normal. `capacity` is a number of tokens per expert: an integer, or a float for ⌈capacity · seq / experts⌉
    (Fedus 2021). Unless experts choose, an expert drops further tokens, and None means no limit. Tokens compete for an
    expert within each sequence, or if `batched` in the whole batch. `zero_experts` additional experts, the last of the
    router, return tokens unchanged (Meituan 2025, LongCat-Flash). `aux_loss` λ adds λ · experts · Σ_j f_j p_j (f_j:
    share of tokens of expert j, p_j: its mean probability) to the output ``aux_loss`` (Fedus 2021).
    """

    choice: str = "token"
    scoring: str = "softmax"
    renormalize: bool = True
    scale: float = 1.0
    bias: bool = False
    correction: bool = False
    groups: int = 1
    top_groups: int = 1
    group_score: str = "top2"
    noisy: bool = False
    capacity: int | float | None = None
    batched: bool = False
    jitter: float = 0.01
    zero_experts: int = 0
    aux_loss: float = 0.0
    __repr__ = format_module

    def __post_init__(self) -> None:
        check_fields(self)
        need_positive(self, "scale")
        need_choice(self, "choice", CHOICES)
        need_choice(self, "scoring", ("softmax", "sigmoid"))
        need_choice(self, "group_score", ("max", "top2"))
        need(self, self.top_groups <= self.groups, f"top_groups={self.top_groups} exceeds groups={self.groups}")
        for name in () if self.choice == "token" else ("scoring", "correction", "scale", "renormalize"):
            default = next(f.default for f in fields(Router) if f.name == name)
            need(self, getattr(self, name) == default, f"{name} needs choice='token', not {self.choice!r}")
        need(self, self.choice == "token" or not self.zero_experts, "zero_experts needs choice='token'")
        need(self, self.choice != "expert" or self.groups == 1, f"groups={self.groups} must be 1 for choice='expert'")
        has_capacity = self.choice == "expert" or self.capacity is not None
        need(self, has_capacity or not self.batched, "batched needs choice='expert' or capacity=...")
        need(self, self.aux_loss >= 0, f"aux_loss={self.aux_loss} must not be negative")


def _merge_router(router: None, old: Mapping[str, Any]) -> Router:
    return Router(**{name.removeprefix("router_"): value for name, value in old.items()})


RENAMED_FIELDS = ("router_bias", *(f.name for f in fields(Router) if f.name != "bias"))


@module(renamed={"router": (RENAMED_FIELDS, _merge_router)})
class MoE:
    """A mixture of experts Σ_e g_e(x) E_e(x): `k` of `experts` feed-forwards process each token (Shazeer 2017).

    The experts are gated feed-forwards of width `hidden` (`activation`, `limit` and `shift` as in the op `glu`), or
    plain ones if not `gated`, with biases if `bias`. `router` selects experts and computes g. Parameters:
    ``router.weight`` [experts + zero_experts, dim], ``experts.gate`` and ``experts.up`` [experts, hidden, dim],
    ``experts.down`` [experts, dim, hidden], with `bias` ``experts.gate_bias``, ``experts.up_bias`` [experts, hidden]
    and ``experts.down_bias`` [experts, dim].

    With `latent` the experts have that width, between ``latent_in.weight`` [latent, dim] and ``latent_out.weight``
    [dim, latent]; the router and `shared` read the full width (LatentMoE, Nemotron 3).

    The output of the module `shared` for every token is added; with `shared_gate` it is first multiplied by σ(W x),
    W = ``shared_gate.weight`` [1, dim]. `weigh_input`, for k = 1, multiplies the expert's input by g, not its output
    (Llama 4). `out_bias` adds ``out_bias`` [dim] to the mixture.
    """

    experts: int
    hidden: int
    k: int
    activation: str = "silu"
    router: Router = Router()
    gated: bool = True
    bias: bool = False
    shared: Layer | None = None
    shared_gate: bool = False
    limit: float | None = None
    shift: float = 0.0
    weigh_input: bool = False
    out_bias: bool = False
    latent: int | None = None

    def __post_init__(self) -> None:
        router = self.router
        divides = self.experts % router.groups == 0
        need(self, divides, f"groups={router.groups} does not divide experts={self.experts}")
        members = self.experts // router.groups
        too_few = router.choice == "token" and router.groups > 1 and router.group_score == "top2" and members < 2
        need(self, not too_few, f"group_score='top2' needs 2 experts per group, not {members}")
        choices = members * (1 if router.choice == "hierarchical" else router.top_groups)
        among = f" in top_groups={router.top_groups} of groups={router.groups}" if router.groups > 1 else ""
        need(self, self.k <= choices, f"k={self.k} exceeds the {choices} experts to choose from{among}")
        need(self, router.choice != "sparsemixer" or self.k == 2, f"k={self.k} must be 2 for choice='sparsemixer'")
        single = self.k == 1 and router.choice == "token" and router.capacity is None and not router.zero_experts
        wanted = "k=1, choice='token' and no capacity or zero_experts"
        need(self, single or not self.weigh_input, f"weigh_input needs {wanted}")
        need(self, self.gated or (self.limit is None and self.shift == 0), "limit and shift need gated=True")
        need(self, self.shared is not None or not self.shared_gate, "shared_gate needs shared=...")

    def __call__(self, x: Value, routed_by: Value | None = None) -> Value:
        """Map x [batch, seq, dim] to a value of the same shape; the router reads `routed_by` if given, else x."""
        combine = self._compute_weights(x if routed_by is None else routed_by)
        if self.latent is None:
            y = self._mix_experts(x, combine)
        else:
            y = linear(self._mix_experts(linear(x, self.latent, "latent_in"), combine), x.width, "latent_out")
        if self.out_bias:
            y = ops.add(y, param("out_bias", (x.width,), fill(0.0)), name="with_bias")
        if self.shared is None:
            return y
        shared = self.shared(x)
        if self.shared_gate:
            shared = ops.mul(shared, ops.sigmoid(linear(x, 1, "shared_gate")), name="shared_gated")
        return ops.add(y, shared, name="with_shared")

    def _mix_experts(self, x: Value, combine: Value) -> Value:
        """Return Σ_e combine_e E_e(x), of the shape of x [batch, seq, width]; for a zero expert, E_e(x) is x. `combine`
        is [batch, seq, experts + zero_experts]. With `weigh_input`, the weight multiplies the expert's input."""
        if self.weigh_input:
            weight = ops.sum(combine, axes=(2,), keepdims=True, name="weight")
            return self._mix(ops.mul(x, weight, name="weighed"), ops.div(combine, weight, name="chosen"))
        if not self.router.zero_experts:
            return self._mix(x, combine)
        routed, zero = ops.split.emit(
            combine, sizes=(self.experts, self.router.zero_experts), name=("combine", "combine_zero")
        )
        identity = ops.mul(x, ops.sum(zero, axes=(2,), keepdims=True), name="through_zero_experts")
        return ops.add(self._mix(x, routed), identity, name="with_zero_experts")

    def _compute_weights(self, x: Value) -> Value:
        """Return the weight of every expert for each token of x, [batch, seq, experts + zero_experts]."""
        router = self.router
        logits = linear(x, self.experts + router.zero_experts, "router", router.bias)
        if router.noisy:
            noise = _add_noise_input(logits)
            logits = emit_noisy_logits(logits, linear(x, logits.width, "noise", init=fill(0.0)), noise)
        combine = self._route(x, logits)
        if router.aux_loss:
            loss = ops.load_balance_loss(logits, combine)
            contribute("aux_loss", ops.affine(loss, by=router.aux_loss, name="weighted_loss"))
        if router.choice != "expert" and router.capacity is not None:
            combine = ops.limit_capacity(combine, batched=router.batched, **_convert_capacity(router.capacity))
        return combine

    def _route(self, x: Value, logits: Value) -> Value:
        router = self.router
        if router.choice == "expert":
            capacity = float(self.k) if router.capacity is None else router.capacity
            return ops.expert_choice(logits, batched=router.batched, **_convert_capacity(capacity))
        if router.choice == "hierarchical":
            by_group = linear(x, router.groups, "group_router")
            return emit_hierarchical_routing(by_group, logits, top_groups=router.top_groups, k=self.k)
        if router.choice == "sparsemixer":
            return emit_sparse_mixer(logits, jitter=router.jitter)
        correction = param("router.correction", (logits.width,), fill(0.0)) if router.correction else None
        return ops.route(logits, correction, k=self.k, **select_attrs(router, ops.route))

    def _mix(self, x: Value, combine: Value) -> Value:
        wide, narrow = (self.experts, self.hidden, x.width), (self.experts, x.width, self.hidden)
        gate = param("experts.gate", wide) if self.gated else None
        up, down = param("experts.up", wide), param("experts.down", narrow)
        biases: list[Value | None] = [None, None, None]
        if self.bias:
            names = ("up", "down", *(["gate"] if self.gated else []))
            biases = [param(f"experts.{n}_bias", (narrow if n == "down" else wide)[:2], fill(0.0)) for n in names]
        active_by_choice = {"token": self.k, "sparsemixer": 2, "hierarchical": self.k * self.router.top_groups}
        active = active_by_choice.get(self.router.choice)
        return moe(
            *(x, combine, up, down, gate, *biases),
            activation=self.activation,
            limit=self.limit,
            shift=self.shift,
            active=active,
        )


def _convert_capacity(capacity: int | float) -> dict[str, Any]:
    return {"capacity": capacity} if isinstance(capacity, int) else {"factor": capacity}


def _add_noise_input(logits: Value) -> Value:
    """Return a new graph input ``router_noise.{i}`` with the next free i and the type of `logits`."""
    graph = get_builder().graph
    count = sum(name.startswith("router_noise.") for name in graph.inputs)
    return graph.add_input(f"router_noise.{count}", logits.type)
