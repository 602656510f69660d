"""Sentence embeddings: the modules of sentence-transformers (Reimers & Gurevych 2019)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from weft.ir import ops
from weft.ir.graph import Value
from weft.ir.ops.activation import activate
from weft.ir.ops.elementwise import masked
from weft.ir.types import dtypes

from ..build import Layer, module, named
from ..checks import need, need_activation, need_whole
from ..layers import linear


@module(leaf=True)
class UnitLength:
    """x / ‖x‖ over the last axis; lengths below 1e-12 count as that, as in torch's F.normalize."""

    def __call__(self, x: Value) -> Value:
        length = ops.clip(ops.sqrt(ops.sum(ops.square(x), axes=(-1,), keepdims=True)), low=1e-12)
        return ops.div(x, length, name="normalized")


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
class SentencePooling:
    """One vector of a text out of those of its tokens, of unit length with `normalize`.

    `mode`: their mean, the first (cls), the largest of each number (max), the last, their mean weighted by position, 1
    for the first token (weighted; Muennighoff 2022, SGPT), or their sum over the root of their number (mean_sqrt_len);
    several are concatenated. The modules `before` change the vectors of tokens, those `after` the vector of the text,
    which then is normalized. Without `include_prompt`, tokens whose mask is 2 are attended to, but not pooled. A field
    `sentence` of `Encoder`.
    """

    mode: str | tuple[str, ...] = "mean"
    normalize: bool = False
    before: tuple[Layer, ...] = ()
    after: tuple[Layer, ...] = ()
    include_prompt: bool = True

    def __post_init__(self) -> None:
        known = bool(self.modes) and set(self.modes) <= _MODES.keys()
        need(self, known, f"unknown mode={self.mode!r}; known are {', '.join(_MODES)}")
        for name in ("before", "after"):
            layers = getattr(self, name)
            need(
                self,
                isinstance(layers, (list, tuple)) and all(map(callable, layers)),
                f"{name}={layers!r} must be modules",
            )

    @property
    def modes(self) -> tuple[str, ...]:
        """The modes, in the order of their vectors."""
        return (self.mode,) if isinstance(self.mode, str) else self.mode

    @property
    def facts(self) -> dict[str, Any]:
        """The mode and the normalization for graph.meta; none if there is more to it."""
        plain = isinstance(self.mode, str) and self.mode != "mean_sqrt_len" and not (self.before or self.after)
        return {"pooling": self.mode, "normalize": self.normalize} if plain else {}

    def __call__(self, x: Value, mask: Value) -> Value:
        """x [batch, seq, dim] and mask [batch, seq], 0 for padding on either side → [batch, width]."""
        for i, layer in enumerate(self.before):
            x = named(layer, f"before_{i}")(x)
        vectors = [_MODES[mode](x, mask, self._pooled(mask)) for mode in self.modes]
        y = ops.concat(*vectors, axis=1, name="pooled_together") if len(vectors) > 1 else vectors[0]
        for i, layer in enumerate(self.after):
            y = named(layer, f"after_{i}")(y)
        return UnitLength()(y) if self.normalize else y

    def _pooled(self, mask: Value) -> Value:
        """Where tokens are pooled."""
        if self.include_prompt:
            return ops.cast(mask, to=dtypes.bool_)
        return ops.equal(mask, ops.affine(mask, by=0, plus=1))


def _counted(pooled: Value) -> Value:
    """Ones and zeros, i64 [batch, seq]."""
    return ops.cast(pooled, to=dtypes.i64)


def _end(pooled: Value) -> Value:
    """The position after the last pooled token, [batch]."""
    places = ops.affine(ops.iota(pooled, axis=1), plus=1)
    return ops.max(ops.mul(_counted(pooled), places), axes=(1,))


def _start(pooled: Value) -> Value:
    """The position of the first pooled token, [batch, 1]: they stand together."""
    return ops.sub(*(ops.unsqueeze(v, axes=(1,)) for v in (_end(pooled), ops.sum(_counted(pooled), axes=(1,)))))


def _first(x: Value, mask: Value, pooled: Value) -> Value:
    return ops.squeeze(ops.gather_rows(x, _start(pooled)), axes=(1,), name="first_token")


def _last(x: Value, mask: Value, pooled: Value) -> Value:
    at = ops.clip(ops.affine(ops.unsqueeze(_end(pooled), axes=(1,)), plus=-1), low=0)
    return ops.squeeze(ops.gather_rows(x, at), axes=(1,), name="last_token")


def _largest(x: Value, mask: Value, pooled: Value) -> Value:
    return ops.max(masked(ops.unsqueeze(pooled, axes=(2,)), x, -math.inf), axes=(1,), name="largest")


def _averaged(x: Value, weights: Value, root: bool = False) -> Value:
    """Σ w x over Σ w, or over its `root`, for `weights` [batch, seq]."""
    scaled = ops.cast(ops.unsqueeze(weights, axes=(2,)), to=x.type.dtype)
    total = ops.clip(ops.sum(scaled, axes=(1,)), low=1e-9)
    return ops.div(ops.sum(ops.mul(x, scaled), axes=(1,)), ops.sqrt(total) if root else total, name="mean_token")


def _weighted(x: Value, mask: Value, pooled: Value) -> Value:
    places = ops.affine(ops.iota(x, axis=1), plus=1)
    counts = ops.sub(places, _start(ops.cast(mask, to=dtypes.bool_)))  # the first token of the text counts 1
    return _averaged(x, ops.mul(_counted(pooled), counts))


_MODES: dict[str, Callable[[Value, Value, Value], Value]] = {  # in the order of sentence-transformers
    "cls": _first,
    "max": _largest,
    "mean": lambda x, mask, pooled: _averaged(x, _counted(pooled)),
    "mean_sqrt_len": lambda x, mask, pooled: _averaged(x, _counted(pooled), root=True),
    "weighted": _weighted,
    "last": _last,
}
