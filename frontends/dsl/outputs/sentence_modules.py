"""Sentence embeddings: the modules of sentence-transformers (Reimers & Gurevych 2019)."""

from __future__ import annotations

import math
from typing import Any

from weft.ir import ops
from weft.ir.graph import Value
from weft.ir.ops.activation import activate
from weft.ir.ops.elementwise import mask_fill
from weft.ir.recipes import Literal
from weft.ir.types import dtypes

from ..build import Layer, constant_param, fill, keep, kept, module, named, param
from ..checks import need
from ..layers import linear


@module(leaf=True)
class UnitLength:
    """Normalization x / max(‖x‖, 1e-12) over the last axis, as in torch's F.normalize."""

    def __call__(self, x: Value) -> Value:
        length = ops.clip(ops.sqrt(ops.sum(ops.square(x), axes=(-1,), keepdims=True)), low=1e-12)
        return ops.div(x, length, name="normalized")


@module(leaf=True)
class Unchanged:
    """The identity, used as the only layer of a model that consists of an embedding table."""

    def __call__(self, x: Value) -> Value:
        return x


@module
class Dense:
    """A dense layer act(x Wᵀ + b) to `width` features: ``linear.weight`` [width, dim], with `bias` ``linear.bias``.
    `residual` adds x to the result; if the widths differ, it adds x mapped by ``residual.weight`` [width, dim]."""

    width: int
    activation: str = "tanh"
    bias: bool = True
    residual: bool = False

    def __call__(self, x: Value) -> Value:
        """Map x [..., dim] to [..., width]."""
        y = activate(linear(x, self.width, "linear", self.bias), self.activation)
        if not self.residual:
            return y
        return ops.add(y, x if x.width == self.width else linear(x, self.width, "residual"), name="residual_added")


@module
class WeightedLayerPooling:
    """The weighted mean Σ wᵢ hᵢ / Σ wᵢ over the hidden states hᵢ of a model's layers, from index `start` on.

    h₀ is the embedding, the last state the model's output (after its final norm). w is the parameter
    ``layer_weights`` [layers + 1 − start]. Used in `SentencePooling.before`.
    """

    start: int = 4

    def __call__(self, x: Value) -> Value:
        """Map x [..., dim], the last state, to a value of the same shape."""
        states = [*kept("hidden_states")[:-1], x][self.start :]
        need(self, len(states) > 0, f"start={self.start} must be at most {len(kept('hidden_states')) - 1}")
        weights = param("layer_weights", (len(states),), fill(1.0))
        shares = (ops.slice(weights, axis=0, start=i, stop=i + 1) for i in range(len(states)))
        total, *summands = (ops.mul(*pair) for pair in zip(states, shares, strict=True))
        for summand in summands:
            total = ops.add(total, summand)
        return ops.div(total, ops.sum(weights, axes=(0,)), name="layers_averaged")


@module
class WordWeights:
    """A factor ``weights[token id]`` of each token, in `SentencePooling.before`; means divide by the sum of factors."""

    weights: tuple[float, ...]

    def __call__(self, x: Value) -> Value:
        """Return x [batch, seq, dim], each token times its weight, and padding times 0; store these weights as
        ``token_weights``. Token ids and mask are read from ``text``, where `SentencePooling` stored them."""
        ids, unpadded = kept("text")
        table = constant_param("weights", (len(self.weights), 1), Literal(self.weights, (len(self.weights), 1)))
        weights = ops.mul(mask_fill(ops.unsqueeze(unpadded, axes=(2,)), _emit_ones(x)), ops.embedding(ids, table))
        keep("token_weights", weights)
        return ops.mul(x, weights, name="words_weighted")


@module
class SentencePooling:
    """Pooling of token vectors to one vector per sequence, of unit length with `normalize`; `sentence` of `Encoder`.

    `mode` is one of these, or a tuple of modes except token and end, whose vectors are concatenated:

    - mean, cls (the first token), max (per feature), last (the last token)
    - weighted: the mean with weights 1, 2, 3, … by position (Muennighoff 2022, SGPT)
    - mean_sqrt_len: the sum divided by the square root of the number of tokens
    - token: the first token with the id `token`, or if `token` is None with the largest id of the sequence (CLIP)
    - end: the last position, even if it is padding (SigLIP)

    Modes token and end ignore the mask; all other modes skip padding, and without `include_prompt` also tokens with
    mask 2 (a prompt), which attention sees. The modules `before` map token vectors, the modules `after` the pooled
    vector before it is normalized.
    """

    mode: str | tuple[str, ...] = "mean"
    normalize: bool = False
    before: tuple[Layer, ...] = ()
    after: tuple[Layer, ...] = ()
    include_prompt: bool = True
    token: int | None = None

    def __post_init__(self) -> None:
        modes, valid = ((self.mode,), ALONE) if isinstance(self.mode, str) else (self.mode, MODES)
        fits = 0 < len(modes) == sum(m in valid for m in modes)
        need(self, fits, f"mode={self.mode!r} must be of {', '.join(valid)}")
        need(self, all(map(callable, (*self.before, *self.after))), "before and after must be lists of modules")

    @property
    def facts(self) -> dict[str, Any]:
        """Return the entries for graph.meta: "pooling" and "normalize" if `mode` is in `PLAIN` and no modules are
        `before` or `after`; "padding": "max_length" for mode end."""
        plain = self.mode in PLAIN and not (self.before or self.after)
        facts: dict[str, Any] = {"pooling": self.mode, "normalize": self.normalize} if plain else {}
        return facts | ({"padding": "max_length"} if self.mode == "end" else {})

    def __call__(self, x: Value, mask: Value, ids: Value) -> Value:
        """Map x [batch, seq, dim] to [batch, width]; mask (0: padding, on either side) and ids are [batch, seq]."""
        unpadded = pooled = ops.cast(mask, to=dtypes.bool_)
        keep("text", ids, unpadded)
        for i, layer in enumerate(self.before):
            x = named(layer, f"before_{i}")(x)
        if not self.include_prompt:
            pooled = ops.equal(mask, ops.affine(mask, by=0, plus=1))
        if self.mode == "token":
            largest = ops.max(ids, axes=(1,), keepdims=True)
            pooled = ops.equal(ids, largest if self.token is None else ops.affine(ids, by=0, plus=self.token))
        elif self.mode == "end":
            pooled = ops.equal(ids, ids)
        weights = kept("token_weights")[0] if any(isinstance(layer, WordWeights) for layer in self.before) else None
        vectors = [
            _pool_tokens(mode, x, unpadded, pooled, weights)
            for mode in ([self.mode] if isinstance(self.mode, str) else self.mode)
        ]
        y = vectors[0] if len(vectors) == 1 else ops.concat(*vectors, axis=1, name="pooled_together")
        for i, layer in enumerate(self.after):
            y = named(layer, f"after_{i}")(y)
        return UnitLength()(y) if self.normalize else y


PLAIN = ("cls", "max", "mean", "weighted", "last")  # modes that `encode` supports without other modules
MODES = (*PLAIN, "mean_sqrt_len")
ALONE = (*MODES, "token", "end")


def _pool_tokens(mode: str, x: Value, unpadded: Value, pooled: Value, weights: Value | None) -> Value:
    """Return the pooling [batch, dim] of x [batch, seq, dim] by `mode` over the tokens where `pooled` [batch, seq] is
    true. For mode weighted, positions count the tokens where `unpadded` [batch, seq] is true. Means divide by the sum
    of `weights` [batch, seq, 1] if given, else by the number of tokens (in mode weighted, of their weights)."""
    if mode == "max":
        return ops.max(mask_fill(ops.unsqueeze(pooled, axes=(2,)), x, -math.inf), axes=(1,), name="largest")
    if mode in ("cls", "last", "token", "end"):
        first = mode in ("cls", "token")
        index = ops.clip(_find_last(_mask_first(pooled) if first else pooled), low=0)
        return ops.squeeze(ops.gather_rows(x, index), axes=(1,), name="first_token" if first else "last_token")
    ones = _emit_ones(x)
    token_shares = mask_fill(ops.unsqueeze(pooled, axes=(2,)), ones)
    if mode == "weighted":
        token_shares = ops.mul(token_shares, ops.cumsum(mask_fill(ops.unsqueeze(unpadded, axes=(2,)), ones), axis=1))
    total = ops.clip(ops.sum(token_shares if weights is None else weights, axes=(1,)), low=1e-9)
    total = ops.sqrt(total) if mode == "mean_sqrt_len" else total
    return ops.div(ops.sum(ops.mul(x, token_shares), axes=(1,)), total, name="mean_token")


def _emit_ones(x: Value) -> Value:
    return ops.affine(ops.slice(x, axis=2, start=0, stop=1), by=0.0, plus=1.0)


def _find_last(shown: Value) -> Value:
    """Return the index [batch, 1] of the last token where `shown` [batch, seq] is true; −1 if there is none."""
    indices = ops.mul(ops.cast(shown, to=dtypes.i64), ops.affine(ops.iota(shown, axis=1), plus=1))
    return ops.affine(ops.max(indices, axes=(1,), keepdims=True), plus=-1)


def _mask_first(shown: Value) -> Value:
    """Return a mask [batch, seq] that is true only at the first token where `shown` [batch, seq] is true."""
    count = ops.cumsum(ops.cast(shown, to=dtypes.i64), axis=1)
    return ops.logical_and(shown, ops.equal(count, ops.affine(count, by=0, plus=1)))
