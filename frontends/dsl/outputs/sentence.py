"""Sentence embeddings: the modules of sentence-transformers (Reimers & Gurevych 2019)."""

from __future__ import annotations

import math
from typing import Any

from weft.ir import ops
from weft.ir.graph import Value
from weft.ir.ops.activation import activate
from weft.ir.ops.elementwise import masked
from weft.ir.recipes import Literal
from weft.ir.types import dtypes

from ..build import Layer, computed, fill, keep, kept, module, named, param
from ..checks import need, need_activation, need_whole
from ..layers import linear


@module(leaf=True)
class UnitLength:
    """x / ‖x‖ over the last axis; lengths below 1e-12 count as that, as in torch's F.normalize."""

    def __call__(self, x: Value) -> Value:
        length = ops.clip(ops.sqrt(ops.sum(ops.square(x), axes=(-1,), keepdims=True)), low=1e-12)
        return ops.div(x, length, name="normalized")


@module(leaf=True)
class Unchanged:
    """x: the only layer of a model that is a table of vectors."""

    def __call__(self, x: Value) -> Value:
        return x


@module
class Dense:
    """act(x Wᵀ + b) of `width`; with `residual` x is added to it, mapped by a matrix of its own to another width."""

    width: int
    activation: str = "tanh"
    bias: bool = True
    residual: bool = False

    def __post_init__(self) -> None:
        need_whole(self, "width")
        need_activation(self, self.activation)

    def __call__(self, x: Value) -> Value:
        """x [..., dim] → [..., width]."""
        y = activate(linear(x, self.width, "linear", self.bias), self.activation)
        if not self.residual:
            return y
        return ops.add(y, x if x.width == self.width else linear(x, self.width, "residual"), name="residual_added")


@module
class WeightedLayerPooling:
    """Σ wᵢ hᵢ / Σ wᵢ over the states of the layers of an `Encoder`, from number `start` on; 0 is the embedding, and the
    last is what the model returns. The weights are a parameter, ``layer_weights`` [layers + 1 − start]."""

    start: int = 4

    def __post_init__(self) -> None:
        need_whole(self, "start", least=0)

    def __call__(self, x: Value) -> Value:
        """x [..., dim], the last state → the same."""
        states = [*kept("hidden_states")[:-1], x][self.start :]
        need(self, len(states) > 0, f"start={self.start} is after the last layer")
        weights = param("layer_weights", (len(states),), fill(1.0))
        shares = (ops.slice(weights, axis=0, start=i, stop=i + 1) for i in range(len(states)))
        total, *others = (ops.mul(*pair) for pair in zip(states, shares, strict=True))
        for other in others:
            total = ops.add(total, other)
        return ops.div(total, ops.sum(weights, axes=(0,)), name="layers_averaged")


@module
class WordWeights:
    """x times the weight of its token, of `weights` by id; sums that become means are divided by the sum of these."""

    weights: tuple[float, ...]

    def __call__(self, x: Value) -> Value:
        """x [batch, seq, dim] of the tokens that a `SentencePooling` keeps as ``text`` → the same."""
        ids, whole = kept("text")
        table = computed("weights", (len(self.weights), 1), Literal(self.weights, (len(self.weights), 1)))
        weights = ops.mul(masked(ops.unsqueeze(whole, axes=(2,)), _one(x)), ops.embedding(ids, table))
        keep("token_weights", weights)
        return ops.mul(x, weights, name="words_weighted")


@module
class SentencePooling:
    """One vector of a text out of those of its tokens, of unit length with `normalize`.

    `mode`: their mean, the first (cls), the largest of each number (max), the last, their mean weighted by position, 1
    for the first token (weighted; Muennighoff 2022, SGPT), or their sum over the root of their number (mean_sqrt_len);
    several are concatenated. Alone: the first with the id `token`, None for the largest id of a text (token; CLIP), or
    the last of the batch, padding or not (end; SigLIP). The modules `before` change the vectors of tokens, those
    `after` the vector of the text, which then is normalized. Without `include_prompt`, tokens whose mask is 2 are
    attended to, but not pooled. A field `sentence` of `Encoder`.
    """

    mode: str | tuple[str, ...] = "mean"
    normalize: bool = False
    before: tuple[Layer, ...] = ()
    after: tuple[Layer, ...] = ()
    include_prompt: bool = True
    token: int | None = None

    def __post_init__(self) -> None:
        modes, known = ((self.mode,), ALONE) if isinstance(self.mode, str) else (self.mode, MODES)
        need(
            self, 0 < len(modes) == sum(m in known for m in modes), f"mode={self.mode!r} must be of {', '.join(known)}"
        )
        need_whole(self, "token", least=0)
        need(self, all(map(callable, (*self.before, *self.after))), "before and after must be lists of modules")

    @property
    def facts(self) -> dict[str, Any]:
        """The mode and the normalization for graph.meta, if there is no more to it; that all texts are padded to the
        longest that the model takes."""
        plain = self.mode in PLAIN and not (self.before or self.after)
        facts: dict[str, Any] = {"pooling": self.mode, "normalize": self.normalize} if plain else {}
        return facts | ({"padding": "max_length"} if self.mode == "end" else {})

    def __call__(self, x: Value, mask: Value, ids: Value) -> Value:
        """x [batch, seq, dim], mask [batch, seq], 0 for padding on either side, ids [batch, seq] → [batch, width]."""
        whole = pooled = ops.cast(mask, to=dtypes.bool_)
        keep("text", ids, whole)
        for i, layer in enumerate(self.before):
            x = named(layer, f"before_{i}")(x)
        if not self.include_prompt:
            pooled = ops.equal(mask, ops.affine(mask, by=0, plus=1))
        if self.mode == "token":
            largest = ops.max(ids, axes=(1,), keepdims=True)
            pooled = ops.equal(ids, largest if self.token is None else ops.affine(ids, by=0, plus=self.token))
        elif self.mode == "end":
            pooled = ops.equal(ids, ids)
        given = kept("token_weights")[0] if any(isinstance(layer, WordWeights) for layer in self.before) else None
        vectors = [
            _pool(mode, x, whole, pooled, given) for mode in ([self.mode] if isinstance(self.mode, str) else self.mode)
        ]
        y = vectors[0] if len(vectors) == 1 else ops.concat(*vectors, axis=1, name="pooled_together")
        for i, layer in enumerate(self.after):
            y = named(layer, f"after_{i}")(y)
        return UnitLength()(y) if self.normalize else y


PLAIN = ("cls", "max", "mean", "weighted", "last")  # that `encode` can do by itself
MODES = (*PLAIN, "mean_sqrt_len")
ALONE = (*MODES, "token", "end")


def _pool(mode: str, x: Value, whole: Value, pooled: Value, given: Value | None) -> Value:
    """The vector [batch, dim] of x, of whose tokens `whole` are a text, and `pooled` count, [batch, seq]; means are
    over the weights `given` [batch, seq, 1], if there are any."""
    if mode == "max":
        return ops.max(masked(ops.unsqueeze(pooled, axes=(2,)), x, -math.inf), axes=(1,), name="largest")
    if mode in ("cls", "last", "token", "end"):
        first = mode in ("cls", "token")
        at = ops.clip(_last(_first(pooled) if first else pooled), low=0)
        return ops.squeeze(ops.gather_rows(x, at), axes=(1,), name="first_token" if first else "last_token")
    one = _one(x)
    weights = masked(ops.unsqueeze(pooled, axes=(2,)), one)
    if mode == "weighted":
        weights = ops.mul(weights, ops.cumsum(masked(ops.unsqueeze(whole, axes=(2,)), one), axis=1))
    total = ops.clip(ops.sum(weights if given is None else given, axes=(1,)), low=1e-9)
    total = ops.sqrt(total) if mode == "mean_sqrt_len" else total
    return ops.div(ops.sum(ops.mul(x, weights), axes=(1,)), total, name="mean_token")


def _one(x: Value) -> Value:
    """Return 1 for each token of x [batch, seq, dim], [batch, seq, 1], in the dtype of x."""
    return ops.affine(ops.slice(x, axis=2, start=0, stop=1), by=0.0, plus=1.0)


def _last(shown: Value) -> Value:
    """The position of the last token that is `shown`, [batch, 1]; −1 where none is."""
    places = ops.mul(ops.cast(shown, to=dtypes.i64), ops.affine(ops.iota(shown, axis=1), plus=1))
    return ops.affine(ops.max(places, axes=(1,), keepdims=True), plus=-1)


def _first(shown: Value) -> Value:
    """Return where the first token that is `shown` is, [batch, seq]."""
    count = ops.cumsum(ops.cast(shown, to=dtypes.i64), axis=1)
    return ops.logical_and(shown, ops.equal(count, ops.affine(count, by=0, plus=1)))
