"""The residual block in its arrangements, and what goes around blocks."""

from __future__ import annotations

from collections.abc import Callable

from weft.ir import ops
from weft.ir.errors import WeftError
from weft.ir.graph import Value
from weft.ir.op import Growth
from weft.ir.ops.elementwise import masked
from weft.ir.types import dtypes

from .build import (
    Init,
    Layer,
    contribute,
    current,
    fill,
    initializing,
    module,
    named,
    param,
    provided,
    providing,
    scope,
)
from .checks import need, need_few, need_finite, need_modules, need_one_of, need_whole
from .layers import Norm, RMSNorm, linear, positions

ARRANGEMENTS = ("pre", "pre_ffn", "post", "sandwich", "post_sublayer", "parallel", "parallel_norms")


@module
class Block:
    """A residual block of a mixer `attn`, attention `cross` to an encoder, and a feed-forward `ffn`.

    Each is any module [..., dim] → [..., dim], or None.

    `arrangement`, f being each sublayer and N each norm (all norms have weights of their own):

    - pre: x + f(N(x)) (GPT-2, Llama)
    - pre_ffn: as pre, but x + attn(x): x is normalized already (the first block of ModernBERT)
    - post: N(x + f(x)) (Vaswani 2017, BERT)
    - sandwich: x + N(f(N(x))) (Gemma 2)
    - post_sublayer: x + N(f(x)) (OLMo 2)
    - parallel: x + attn(N(x)) + ffn(N(x)), one norm (Phi, Falcon)
    - parallel_norms: x + attn(N₁(x)) + ffn(N₂(x)) (GPT-NeoX)

    `residual_scale` multiplies what each sublayer adds (Granite); with `weighted_residual` what it is added to is
    multiplied by ``attn_residual_weight``, ``ffn_residual_weight`` and so on [dim] (Doge). `dropout` is the
    share of what a sublayer adds that is dropped in training.
    """

    attn: Layer | None
    ffn: Layer | None = None
    norm: Norm = RMSNorm()
    arrangement: str = "pre"
    residual_scale: float = 1.0
    cross: Layer | None = None
    weighted_residual: bool = False
    dropout: float = 0.0

    def __post_init__(self) -> None:
        need_one_of(self, "arrangement", ARRANGEMENTS)
        need(self, 0 <= self.dropout < 1, f"dropout={self.dropout} must be at least 0 and below 1")
        need(self, any(f is not None for f in (self.attn, self.cross, self.ffn)), "it has no attn, cross or ffn")
        need_modules(self, "attn", "cross", "ffn", "norm")
        need_finite(self, "residual_scale")

    def __call__(self, x: Value) -> Value:
        known = ("attn", self.attn), ("cross", self.cross), ("ffn", self.ffn)
        sublayers = {name: f for name, f in known if f is not None}
        if self.arrangement.startswith("parallel"):
            return self._parallel(x, sublayers)
        before = {"pre": ("attn", "cross", "ffn"), "sandwich": ("attn", "cross", "ffn"), "pre_ffn": ("cross", "ffn")}
        after = self.arrangement in ("sandwich", "post_sublayer")
        for name, f in sublayers.items():
            y = f(named(self.norm, f"{name}_norm")(x) if name in before.get(self.arrangement, ()) else x)
            y = named(self.norm, f"{name}_post_norm")(y) if after else y
            x = self._added(x, y, name)
            x = named(self.norm, f"{name}_norm")(x) if self.arrangement == "post" else x
        return x

    def _parallel(self, x: Value, sublayers: dict[str, Callable[[Value], Value]]) -> Value:
        shared = None if self.arrangement == "parallel_norms" else named(self.norm, "norm")(x)
        total = x
        for name, f in sublayers.items():
            total = self._added(total, f(named(self.norm, f"{name}_norm")(x) if shared is None else shared), name)
        return total

    def _added(self, x: Value, y: Value, name: str) -> Value:
        if y.type != x.type:
            raise WeftError(f"{name} makes {y.type} where the residual is {x.type}; its last linear must be as wide")
        if self.residual_scale != 1:
            y = ops.affine(y, by=self.residual_scale, name=f"{name}_scaled")
        if self.dropout:
            y = ops.dropout(y, share=self.dropout, name=f"{name}_dropped")
        if self.weighted_residual:
            x = ops.mul(x, param(f"{name}_residual_weight", (x.width,), fill(1.0)), name=f"{name}_carried")
        return ops.add(x, y, name=f"{name}_residual")


@module
class Repeat:
    """`block` applied `times` times with the same weights (Dehghani 2018, Universal Transformer; Lan 2019, ALBERT)."""

    block: Layer
    times: int

    def __post_init__(self) -> None:
        need_modules(self, "block")
        need_whole(self, "times")
        need_few(self, "times")

    def __call__(self, x: Value) -> Value:
        """x [batch, seq, dim] → the same."""
        for _ in range(self.times):
            x = self.block(x)
        return x


@module
class Initialized:
    """`module`, whose parameters begin as `init` says (``normal(std)``, ``uniform(bound)``, ``fill(value)``), but for
    norms, biases and others that have initial values of their own. Its parameters are called as without."""

    module: Layer
    init: Init

    def __post_init__(self) -> None:
        need_modules(self, "module")
        need(self, callable(self.init), f"init={self.init!r} must be normal(…), uniform(…) or fill(…)")

    def __call__(self, *operands: Value) -> Value:
        """Return what `module` makes of `operands`."""
        with initializing(self.init):
            return named(self.module, "")(*operands)


@module
class AdaptedBlock:
    """`block`, and behind it a bottleneck `adapter` of one language or task (Houlsby 2019; X-MOD, Pfeiffer 2022).

    x = block(x), then N(x + adapter(x)); with `normed_residual` n + adapter(n) of n = N(x) instead.
    """

    block: Layer
    adapter: Layer
    norm: Norm = RMSNorm()
    normed_residual: bool = False

    def __post_init__(self) -> None:
        need_modules(self, "block", "adapter", "norm")

    def __call__(self, x: Value) -> Value:
        """x [batch, seq, dim] → the same."""
        x, norm = self.block(x), named(self.norm, "adapter_norm")
        x = norm(x) if self.normed_residual else x
        y = ops.add(x, self.adapter(x), name="adapted")
        return y if self.normed_residual else norm(y)


@module
class ShortcutBlock:
    """Two pre-norm blocks of `attn` and `ffn`, and `moe` beside all that follows the first attention
    (Cai 2024, ScMoE, arXiv 2404.05019; LongCat-Flash): n = N(x + attn₁(N(x))), y = moe(n) + what the rest of both
    blocks makes.

    Norms and sublayers are called ``first.attn_norm``, ``first.attn``, ``first.ffn_norm``, ``first.ffn``, ``second.…``,
    and ``moe``.
    """

    attn: Layer
    ffn: Layer
    moe: Layer
    norm: Norm = RMSNorm()

    def __post_init__(self) -> None:
        need_modules(self, "attn", "ffn", "moe", "norm")

    def __call__(self, x: Value) -> Value:
        """x [batch, seq, dim] → the same."""
        beside: Value | None = None
        for half in ("first", "second"):
            with scope(half):
                x = ops.add(x, named(self.attn, "attn")(named(self.norm, "attn_norm")(x)), name="attn_residual")
                normed = named(self.norm, "ffn_norm")(x)
            beside = self.moe(normed) if beside is None else beside
            with scope(half):
                x = ops.add(x, named(self.ffn, "ffn")(normed), name="ffn_residual")
        assert beside is not None
        return ops.add(x, beside, name="moe_residual")


@module
class MixtureOfDepths:
    """`block` for the tokens that a router chooses: x + σ(r)·(block(x) − x), and x for the others
    (Raposo 2024, arXiv 2404.02258).

    r = x · ``router.weight`` [1, dim]. With `capacity` the so many tokens of a text with the largest r are chosen, and
    `block` runs on nothing else: on [batch, capacity, dim], in the order of the text, at their positions in it. A text
    must have that many tokens. So a model is trained, but it cannot write: whether a token is chosen depends on later
    ones. Without `capacity` a token is chosen if r > 0, and `block` runs on all tokens, but attention in it sees chosen
    ones only; nothing else may mix tokens there. The parameters are the same. Windows and biases by distance count
    chosen tokens in the first way, all in the second.

    `aux_loss` λ, which needs a capacity, adds λ · the mean binary cross-entropy of σ(r) as a forecast of the choice to
    the graph output ``aux_loss``, for one to agree with the other (section 3.5 there).
    """

    block: Layer
    capacity: int | None = None
    aux_loss: float = 0.0

    def __post_init__(self) -> None:
        need_modules(self, "block")
        need_whole(self, "capacity")
        need(self, self.aux_loss >= 0, f"aux_loss={self.aux_loss} must not be negative")
        need(self, self.capacity is not None or not self.aux_loss, "aux_loss needs a capacity")

    def __call__(self, x: Value) -> Value:
        """x [batch, seq, dim] → the same."""
        if provided("key_mask") is not None:
            raise WeftError("a mask hides tokens already: mixture of depths is for decoders, and none inside another")
        r = ops.squeeze(linear(x, 1, "router"), axes=(2,), name="scores")
        return self._by_sign(x, r) if self.capacity is None else self._by_rank(x, r, self.capacity)

    def _by_sign(self, x: Value, r: Value) -> Value:
        chosen, nodes = ops.less(ops.affine(r, by=0.0), r, name="chosen"), current().graph.nodes
        before = set(nodes)
        mask = ops.cast(chosen, to=dtypes.i64, name="chosen_mask")
        with providing(routed=chosen, chosen=chosen, key_mask=mask):
            y = self.block(x)
        if mask.producer and not mask.uses:
            current().graph.erase(mask.producer)
        for node in (n for n in nodes if n not in before):
            kept = node.op.states_of([None if v is None else v.type for v in node.inputs], node.attrs)
            if any(spec.growth is Growth.CONSTANT for spec in kept):
                raise WeftError(f"{node.op.name} sees all tokens before it, chosen or not: give a capacity")
        return ops.add(x, masked(ops.unsqueeze(chosen, axes=(2,)), _weighed(x, y, r)), name="mixed")

    def _by_rank(self, x: Value, r: Value, capacity: int) -> Value:
        scores, best = ops.top_k.emit(r, k=capacity, name=("best_scores", "best"))
        if self.aux_loss:
            least = ops.slice(scores, axis=1, start=capacity - 1, stop=capacity, name="least_score")
            surprise = ops.sub(ops.softplus(r), masked(ops.less_equal(least, r), r), name="cross_entropy")
            contribute("aux_loss", ops.affine(ops.mean(surprise, axes=(0, 1)), by=self.aux_loss, name="weighted_loss"))
        backward, _ = ops.top_k.emit(ops.affine(best, by=-1), k=capacity, name=("negated", "ranks"))
        chosen = ops.affine(backward, by=-1, name="chosen")
        rows = ops.gather_rows(x, chosen, name="chosen_rows")
        weighed = _weighed(rows, _at(x, chosen, self.block, rows), ops.gather_rows(r, chosen, name="chosen_scores"))
        return ops.scatter_rows(x, ops.add(rows, weighed), chosen, name="mixed")


def _weighed(x: Value, y: Value, r: Value) -> Value:
    """σ(r)·(y − x), r [batch, seq] without their last axis."""
    return ops.mul(ops.sub(y, x), ops.unsqueeze(ops.sigmoid(r), axes=(2,)), name="weighed")


def _at(x: Value, chosen: Value, block: Layer, rows: Value) -> Value:
    """`block` of `rows`, which are those of x at `chosen`, told where they stand."""
    graph = current().graph
    told = "position_ids" in graph.inputs or provided("positions") is not None
    at = positions(x)
    theirs = ops.gather_rows(at, chosen, name="chosen_positions")
    with providing(positions=theirs, routed=chosen):
        y = block(rows)
    if theirs.producer and not theirs.uses:
        graph.erase(theirs.producer)
        if not told:
            graph.forget(graph.inputs.pop("position_ids"))
    return y
