"""Recipes of linear algebra: products and inverses of matrices, centring, row norms, orthogonal and identity matrices.

Products are summed in float64 and rounded once to the precision of their operands (float32 from checkpoints), so that
rows do not depend on which other rows are computed with them. Centred and normalized rows stay float64.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.random import default_rng  # at import: loading it at the first draw would swallow a Ctrl-C

from ..errors import WeftError
from .readers import Array, TensorReader
from .recipe import Recipe


class MatMul(Recipe):
    """`left` [..., m, k] times `right` [k, n] or [k]: [..., m, n] or [..., m]."""

    left: Recipe
    right: Recipe

    def shape(self, reader: TensorReader) -> tuple[int, ...]:
        left, right = self.left.shape(reader), self.right.shape(reader)
        if len(left) < 2 or len(right) not in (1, 2) or left[-1] != right[0]:
            raise WeftError(f"cannot multiply {self.left.label(reader)} by {self.right.label(reader)}")
        return (*left[:-1], *right[1:])

    @property
    def needs_full_read(self) -> bool:
        return True  # all of `right`

    def read(self, reader: TensorReader, start: int, stop: int) -> Array:
        rows, matrix = self.left.read(reader, start, stop), self.right.evaluate(reader)
        product = rows.astype(np.float64) @ matrix.astype(np.float64)
        return np.asarray(product.astype(np.result_type(rows, matrix)))


class Centre(Recipe):
    """`item` minus its mean over `axis`: (I − 11ᵀ/n) applied to that axis."""

    item: Recipe
    axis: int

    def shape(self, reader: TensorReader) -> tuple[int, ...]:
        shape = self.item.shape(reader)
        if self.axis >= len(shape):
            raise WeftError(f"cannot centre axis {self.axis} of {self.item.label(reader)}")
        return shape

    @property
    def needs_full_read(self) -> bool:
        return self.axis == 0 or self.item.needs_full_read

    def read(self, reader: TensorReader, start: int, stop: int) -> Array:
        rows = self.item.read(reader, start, stop)
        if self.axis:
            return np.asarray(rows - rows.mean(self.axis, keepdims=True, dtype=np.float64))
        total, count = np.float64(0), self.item.shape(reader)[0]
        for block in self.item.blocks(reader):
            total = total + block.sum(0, dtype=np.float64)
        return np.asarray(rows - total / count)


class RowNorm(Recipe):
    """`item` normalized over the last axis as by `rms_norm` or `layer_norm` (`kind` rms or layer), times `weight`
    [width] and plus `bias` [width] if present."""

    item: Recipe
    kind: str
    eps: float
    weight: Recipe | None = None
    bias: Recipe | None = None

    def shape(self, reader: TensorReader) -> tuple[int, ...]:
        shape = self.item.shape(reader)
        for part in self.parts[1:]:
            if part.shape(reader) != shape[-1:]:
                raise WeftError(f"the norm weight or bias {part.label(reader)} must be [{shape[-1]}]")
        return shape

    def read(self, reader: TensorReader, start: int, stop: int) -> Array:
        rows = self.item.read(reader, start, stop).astype(np.float64)
        if self.kind == "layer":
            rows = rows - rows.mean(-1, keepdims=True)
        rows = rows / np.sqrt(np.square(rows).mean(-1, keepdims=True) + self.eps)
        rows = rows if self.weight is None else rows * self.weight.evaluate(reader)
        return np.asarray(rows if self.bias is None else rows + self.bias.evaluate(reader))


class Norms(Recipe):
    """The Euclidean norm of the slice of `item` at each index of `axis`: f32 [size of that axis]."""

    item: Recipe
    axis: int = 0

    def shape(self, reader: TensorReader) -> tuple[int, ...]:
        shape = self.item.shape(reader)
        if self.axis >= len(shape):
            raise WeftError(f"cannot take norms along axis {self.axis} of {self.item.label(reader)}")
        return (shape[self.axis],)

    @property
    def needs_full_read(self) -> bool:
        return self.axis != 0 or self.item.needs_full_read

    def read(self, reader: TensorReader, start: int, stop: int) -> Array:
        axes = tuple(a for a in range(len(self.item.shape(reader))) if a != self.axis)
        if self.axis == 0:
            squares = np.square(self.item.read(reader, start, stop), dtype=np.float64).sum(axes)
        else:
            squares = np.zeros(self.shape(reader))
            for block in self.item.blocks(reader):
                squares += np.square(block, dtype=np.float64).sum(axes)
            squares = squares[start:stop]
        return np.asarray(np.sqrt(squares).astype(np.float32))


class Identity(Recipe):
    """The identity matrix [size, size]."""

    size: int

    def shape(self, reader: TensorReader) -> tuple[int, ...]:
        return self.size, self.size

    def read(self, reader: TensorReader, start: int, stop: int) -> Array:
        return np.eye(stop - start, self.size, start, np.float32)


class Inverse(Recipe):
    """The inverses of the square matrices `item` [..., n, n]; WeftError if one is singular."""

    item: Recipe

    def shape(self, reader: TensorReader) -> tuple[int, ...]:
        shape = self.item.shape(reader)
        if len(shape) < 2 or shape[-1] != shape[-2]:
            raise WeftError(f"cannot invert {self.item.label(reader)}: a matrix must be square")
        return shape

    @property
    def needs_full_read(self) -> bool:
        return True

    def read(self, reader: TensorReader, start: int, stop: int) -> Array:
        matrices = self.item.evaluate(reader)
        try:
            inverses: Array = np.linalg.inv(matrices.astype(np.float64))[start:stop]
        except np.linalg.LinAlgError:
            raise WeftError(f"cannot invert {self.item.label(reader)}: a matrix in it is singular") from None
        return inverses.astype(matrices.dtype if matrices.dtype == np.float64 else np.float32)


class RandomOrthogonal(Recipe):
    """A random orthogonal matrix [size, size] from `seed`: a randomized Hadamard transform (QuaRot, Ashkboos 2024).

    With size = 2^k · m and m odd, it is a diagonal of random signs times the Kronecker product of the normalized
    Hadamard matrix of size 2^k and a uniformly random orthogonal matrix of size m.
    """

    size: int
    seed: int = 0

    def shape(self, reader: TensorReader) -> tuple[int, ...]:
        return self.size, self.size

    def read(self, reader: TensorReader, start: int, stop: int) -> Array:
        return _draw_orthogonal(self.size, self.seed)[start:stop]


@functools.lru_cache(maxsize=1)
def _draw_orthogonal(size: int, seed: int) -> Array:
    rng = default_rng(seed)
    # The lowest set bit: the largest power of two that divides `size`.
    power = size & -size
    odd, triangle = np.linalg.qr(rng.standard_normal((size // power,) * 2))
    # QR alone is not uniform; with the signs of R's diagonal it is (Mezzadri 2007, math-ph/0609050).
    odd = odd * np.sign(np.diag(triangle))
    hadamard = np.ones((1, 1))
    while len(hadamard) < power:
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    matrix: Array = rng.choice((-1.0, 1.0), (size, 1)) * np.kron(hadamard / np.sqrt(power), odd)
    # The cache returns the same array to every caller.
    matrix.flags.writeable = False
    return matrix
