"""Scales of quantized KV caches: of 8-bit floats, computed from projections, and of integers, fitted by a pass."""

from __future__ import annotations

import numpy as np

from ..errors import WeftError
from .readers import Array, TensorReader
from .recipe import Recipe


class HeadScales(Recipe):
    """Scales f32 [heads] of KV caches of 8-bit floats: the expected magnitude of the keys or values of each head.

    It is the root mean square, over the `width` rows of a head, of `weight` x + `biases` [heads · width], or 1 if that
    is 0. x [in] is random, with independent elements whose magnitudes are the product of `gains` [in] (none: 1).
    `weight` is [heads · width, in], or [width, in] for all heads. 8-bit floats keep all bits from 1/64 to 448 times the
    scale.
    """

    weight: Recipe
    heads: int
    width: int
    gains: tuple[Recipe, ...] = ()
    biases: tuple[Recipe, ...] = ()

    @property
    def is_constant(self) -> bool:
        return True

    def shape(self, reader: TensorReader) -> tuple[int, ...]:
        rows = self.weight.shape(reader)[0]
        if rows not in (self.width, self.heads * self.width):
            sizes = f"{self.width} or {self.heads * self.width}, for {self.heads} heads of {self.width}"
            raise WeftError(f"{', '.join(self.sources())} has {rows} rows, but must have {sizes}")
        return (self.heads,)

    def read(self, reader: TensorReader, start: int, stop: int) -> Array:
        gain = np.prod([g.evaluate(reader).astype(np.float64) for g in self.gains] or [np.ones(1)], axis=0)
        squares = np.concatenate([np.square(rows * gain).sum(1) for rows in self.weight.blocks(reader)])
        for bias in self.biases:
            squares += np.square(bias.evaluate(reader).astype(np.float64))
        sizes = np.sqrt(squares.reshape(-1, self.width).mean(1))
        scales = np.broadcast_to(np.where(sizes > 0, sizes, 1), self.heads)
        return scales[start:stop].astype(np.float32)


class FittedScales(Recipe):
    """The scales `item`, f32, that a pass fitted for a KV cache of integer codes; they are never trained."""

    item: Recipe

    @property
    def is_constant(self) -> bool:
        return True

    def read(self, reader: TensorReader, start: int, stop: int) -> Array:
        return self.item.read(reader, start, stop)
