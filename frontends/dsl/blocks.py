"""The residual block in its arrangements, and wrappers around blocks."""

from __future__ import annotations

from collections.abc import Callable

from weft.ir import ops
from weft.ir.errors import WeftError
from weft.ir.graph import Value
from weft.ir.op import Growth
from weft.ir.ops.elementwise import mask_fill
from weft.ir.types import dtypes

from .build import (
    Init,
    Layer,
    contribute,
    fill,
    get_builder,
    initializing,
    module,
    named,
    param,
    provided,
    providing,
    scope,
)
from .checks import need, need_choice
from .layers import Norm, RMSNorm, linear, positions

ARRANGEMENTS = ("pre", "pre_ffn", "post", "sandwich", "post_sublayer", "parallel", "parallel_norms")


@module
class Block:
    """A residual block of a mixer `attn`, attention `cross` to an encoder, and a feed-forward `ffn`, in this order.

    A sublayer is any module [..., dim] → [..., dim]; None leaves it out.

    `arrangement`, where f is each sublayer and N each norm (every norm has separate weights):

    - pre: x + f(N(x)) (GPT-2, Llama)
    - pre_ffn: as pre, except x + attn(x): x is already normalized (the first block of ModernBERT)
    - post: N(x + f(x)) (Vaswani 2017, BERT)
    - sandwich: x + N(f(N(x))) (Gemma 2)
    - post_sublayer: x + N(f(x)) (OLMo 2)
    - parallel: x + attn(N(x)) + ffn(N(x)), one norm (Phi, Falcon)
    - parallel_norms: x + attn(N₁(x)) + ffn(N₂(x)) (GPT-NeoX)

    `residual_scale` multiplies the value that a sublayer adds to the residual (Granite). `weighted_residual` multiplies
    the residual before each addition by a parameter [dim] such as ``attn_residual_weight`` (Doge). `dropout` is the
    probability that training drops an element of that value.
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
        need_choice(self, "arrangement", ARRANGEMENTS)
        need(self, 0 <= self.dropout < 1, f"dropout={self.dropout} must be at least 0 and below 1")
        need(self, any(f is not None for f in (self.attn, self.cross, self.ffn)), "attn, cross and ffn are all None")

    def __call__(self, x: Value) -> Value:
        sublayer_fields = ("attn", self.attn), ("cross", self.cross), ("ffn", self.ffn)
        sublayers = {name: f for name, f in sublayer_fields if f is not None}
        if self.arrangement.startswith("parallel"):
            return self._run_parallel(x, sublayers)
        prenorm = {"pre": ("attn", "cross", "ffn"), "sandwich": ("attn", "cross", "ffn"), "pre_ffn": ("cross", "ffn")}
        norm_after = self.arrangement in ("sandwich", "post_sublayer")
        for name, f in sublayers.items():
            y = f(named(self.norm, f"{name}_norm")(x) if name in prenorm.get(self.arrangement, ()) else x)
            y = named(self.norm, f"{name}_post_norm")(y) if norm_after else y
            x = self._add_branch(x, y, name)
            x = named(self.norm, f"{name}_norm")(x) if self.arrangement == "post" else x
        return x

    def _run_parallel(self, x: Value, sublayers: dict[str, Callable[[Value], Value]]) -> Value:
        shared = None if self.arrangement == "parallel_norms" else named(self.norm, "norm")(x)
        total = x
        for name, f in sublayers.items():
            total = self._add_branch(total, f(named(self.norm, f"{name}_norm")(x) if shared is None else shared), name)
        return total

    def _add_branch(self, x: Value, y: Value, name: str) -> Value:
        if y.type != x.type:
            raise WeftError(f"{name} returns {y.type}, but the block needs {x.type}: make its output {x.width} wide")
        if self.residual_scale != 1:
            y = ops.affine(y, by=self.residual_scale, name=f"{name}_scaled")
        if self.dropout:
            y = ops.dropout(y, share=self.dropout, name=f"{name}_dropped")
        if self.weighted_residual:
            x = ops.mul(x, param(f"{name}_residual_weight", (x.width,), fill(1.0)), name=f"{name}_carried")
        return ops.add(x, y, name=f"{name}_residual")


@module
class Repeat:
    """The layer `block` applied `times` times with the same weights (Dehghani 2018, Universal Transformer; ALBERT)."""

    block: Layer
    times: int

    def __call__(self, x: Value) -> Value:
        for _ in range(self.times):
            x = self.block(x)
        return x


@module
class Initialized:
    """The layer `module` with parameters initialized by `init` (``normal(std)``, ``uniform(bound)``, ``fill(value)``).

    Norms, biases and other parameters with their own initial values keep those. Parameter names do not change.
    """

    module: Layer
    init: Init

    def __post_init__(self) -> None:
        need(self, callable(self.init), f"init={self.init!r} must be normal(…), uniform(…) or fill(…)")

    def __call__(self, *operands: Value) -> Value:
        """Return the output of `module` for `operands`."""
        with initializing(self.init):
            return named(self.module, "")(*operands)


@module
class AdaptedBlock:
    """A `block` followed by a bottleneck `adapter` for a language or task (Houlsby 2019; X-MOD, Pfeiffer 2022).

    With y = block(x), the result is N(y + adapter(y)); with `normed_residual` it is n + adapter(n), where n = N(y).
    """

    block: Layer
    adapter: Layer
    norm: Norm = RMSNorm()
    normed_residual: bool = False

    def __call__(self, x: Value) -> Value:
        x, norm = self.block(x), named(self.norm, "adapter_norm")
        x = norm(x) if self.normed_residual else x
        y = ops.add(x, self.adapter(x), name="adapted")
        return y if self.normed_residual else norm(y)


@module
class ShortcutBlock:
    """Two pre-norm blocks of `attn` and `ffn`, with `moe` in parallel to all sublayers after the first attention.

    The result is block₂(block₁(x)) + moe(n), where n = N(x + attn₁(N(x))) is the input of the first feed-forward
    (Cai 2024, ScMoE, arXiv 2404.05019; LongCat-Flash). Every sublayer and norm has separate weights.

    Norms and sublayers are called ``first.attn_norm``, ``first.attn``, ``first.ffn_norm``, …, ``second.…``, ``moe``.
    """

    attn: Layer
    ffn: Layer
    moe: Layer
    norm: Norm = RMSNorm()

    def __call__(self, x: Value) -> Value:
        moe_output: Value | None = None
        for half in ("first", "second"):
            with scope(half):
                x = ops.add(x, named(self.attn, "attn")(named(self.norm, "attn_norm")(x)), name="attn_residual")
                normed = named(self.norm, "ffn_norm")(x)
            moe_output = self.moe(normed) if moe_output is None else moe_output
            with scope(half):
                x = ops.add(x, named(self.ffn, "ffn")(normed), name="ffn_residual")
        assert moe_output is not None
        return ops.add(x, moe_output, name="moe_residual")


@module
class MixtureOfDepths:
    """A `block` that runs only on tokens that a router selects (Raposo 2024, arXiv 2404.02258).

    Selected tokens become x + σ(r)·(block(x) − x), all other tokens stay x, with r = x · ``router.weight`` [1, dim].

    With `capacity`, the `capacity` tokens of each sequence with the largest r are selected, and `block` runs on these
    only: [batch, capacity, dim], in order, at their original positions. A sequence must have at least `capacity`
    tokens. This form is for training and cannot generate, since the selection depends on later tokens. Without
    `capacity`, a token is selected if r > 0. `block` runs on all tokens, but its attention sees only selected tokens,
    and no other op in it may mix tokens. The parameters of both forms are the same. Windows count selected tokens with
    `capacity`, all tokens without; biases such as `ALiBi` always read original positions.

    `aux_loss` λ, which needs a capacity, adds λ times the mean binary cross-entropy between σ(r) and the selection to
    the graph output ``aux_loss`` (section 3.5 of the paper); 0 adds no output.
    """

    block: Layer
    capacity: int | None = None
    aux_loss: float = 0.0

    def __post_init__(self) -> None:
        need(self, self.aux_loss >= 0, f"aux_loss={self.aux_loss} must not be negative")
        need(self, self.capacity is not None or not self.aux_loss, "aux_loss needs capacity=...")

    def __call__(self, x: Value) -> Value:
        if provided("key_mask") is not None:
            raise WeftError("a mixture of depths must be in a Decoder, and not in another mixture of depths")
        r = ops.squeeze(linear(x, 1, "router"), axes=(2,), name="scores")
        return self._select_by_sign(x, r) if self.capacity is None else self._select_by_rank(x, r, self.capacity)

    def _select_by_sign(self, x: Value, r: Value) -> Value:
        chosen, nodes = ops.less(ops.affine(r, by=0.0), r, name="chosen"), get_builder().graph.nodes
        nodes_before = set(nodes)
        mask = ops.cast(chosen, to=dtypes.i64, name="chosen_mask")
        with providing(routed=chosen, chosen=chosen, key_mask=mask):
            y = self.block(x)
        if mask.producer and not mask.uses:
            get_builder().graph.erase(mask.producer)
        for node in (n for n in nodes if n not in nodes_before):
            states = node.op.states_of([None if v is None else v.type for v in node.inputs], node.attrs)
            if any(spec.growth is Growth.CONSTANT for spec in states):
                raise WeftError(f"{node.op.name} would also read tokens that are not selected: set capacity=...")
        return ops.add(x, mask_fill(ops.unsqueeze(chosen, axes=(2,)), _weigh(x, y, r)), name="mixed")

    def _select_by_rank(self, x: Value, r: Value, capacity: int) -> Value:
        scores, indices = ops.top_k.emit(r, k=capacity, name=("best_scores", "best"))
        if self.aux_loss:
            lowest = ops.slice(scores, axis=1, start=capacity - 1, stop=capacity, name="least_score")
            error = ops.sub(ops.softplus(r), mask_fill(ops.less_equal(lowest, r), r), name="cross_entropy")
            contribute("aux_loss", ops.affine(ops.mean(error, axes=(0, 1)), by=self.aux_loss, name="weighted_loss"))
        ranks, _ = ops.top_k.emit(ops.affine(indices, by=-1), k=capacity, name=("negated", "ranks"))
        chosen = ops.affine(ranks, by=-1, name="chosen")
        rows = ops.gather_rows(x, chosen, name="chosen_rows")
        change = _weigh(rows, _run_at(x, chosen, self.block, rows), ops.gather_rows(r, chosen, name="chosen_scores"))
        return ops.scatter_rows(x, ops.add(rows, change), chosen, name="mixed")


def _weigh(x: Value, y: Value, r: Value) -> Value:
    """Return σ(r)·(y − x), [batch, seq, dim], for x and y [batch, seq, dim] and r [batch, seq]."""
    return ops.mul(ops.sub(y, x), ops.unsqueeze(ops.sigmoid(r), axes=(2,)), name="weighed")


def _run_at(x: Value, chosen: Value, block: Layer, rows: Value) -> Value:
    """Return ``block(rows)``; `rows` [batch, n, dim] are the tokens of x [batch, seq, dim] at the indices `chosen`
    [batch, n], and their original positions are provided. If `block` reads no positions, the nodes that compute them
    are removed, and so is the input position_ids if it was added for them."""
    graph = get_builder().graph
    had_positions = "position_ids" in graph.inputs or provided("positions") is not None
    all_positions = positions(x)
    chosen_positions = ops.gather_rows(all_positions, chosen, name="chosen_positions")
    with providing(positions=chosen_positions, routed=chosen):
        y = block(rows)
    if chosen_positions.producer and not chosen_positions.uses:
        graph.erase(chosen_positions.producer)
        if not had_positions:
            graph.release_name(graph.inputs.pop("position_ids"))
    return y
