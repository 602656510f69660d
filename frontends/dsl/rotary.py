"""Rotary position embeddings and their scalings."""

from __future__ import annotations

import math
from dataclasses import dataclass

from weft.ir import ops
from weft.ir.graph import Value
from weft.ir.recipes import Literal
from weft.ir.recipes.frequencies import SCALINGS, RopeFrequencies, RopeScaling
from weft.ir.types import dtypes

from .build import constant_param, format_module, module
from .checks import need, need_choice, need_int, need_positive
from .layers import positions

BLOCKS = 512  # of a `Temperature`


@dataclass(frozen=True, repr=False)
class RoPE(RopeScaling):
    """Rotary positions (Su 2021): pair k of each head is rotated by the angle position · theta^(−2k/dim).

    `dim` (by default `fraction` · head_dim) is the number of features of a head that are rotated, the first ones.
    `interleaved` pairs adjacent features (GPT-J) instead of features dim/2 apart (NeoX, Llama). `scaling` extends the
    context: none, linear, ntk, dynamic, yarn, llama3, longrope or proportional, with `factor`, `original` (the context
    before) and the constants of `RopeScaling`. Scalings that depend on the sequence length (dynamic, longrope) use the
    fixed `length`. `amplitude` multiplies the rotated features (YaRN's √(1/t), with t the temperature of attention).
    All layers with equal settings share one table of frequencies.
    """

    theta: float = 10_000.0
    dim: int | None = None
    fraction: float = 1.0
    interleaved: bool = False
    amplitude: float = 1.0

    def __post_init__(self) -> None:
        need_choice(self, "scaling", tuple(SCALINGS))
        need_int(self, "dim", least=2)
        need_int(self, "original", "rotated", "length", least=0)
        need_positive(self, "theta", "factor", "amplitude", "beta_fast", "beta_slow", "low_freq", "high_freq")
        need(self, 0 < self.fraction <= 1, f"fraction={self.fraction} must be above 0 and at most 1")
        need(self, self.dim is None or self.dim % 2 == 0, f"dim={self.dim} must be even: RoPE rotates pairs")
        fits = "original" not in self.used_settings or self.original > 0
        need(self, fits, f"scaling={self.scaling!r} needs original=..., the context before scaling")
        fits = "factors" not in self.used_settings or bool(self.factors)
        need(self, fits, f"scaling={self.scaling!r} needs factors=...")
        if self.dim is not None:
            self.recipe(self.dim)

    __repr__ = format_module

    def recipe(self, head_dim: int) -> RopeFrequencies:
        """Return the recipe of frequencies [dim/2] for heads of `head_dim`; raise WeftError if settings do not fit."""
        dim = int(head_dim * self.fraction) if self.dim is None else self.dim
        fits = dim % 2 == 0 and 0 < dim <= head_dim
        need(self, fits, f"dim={dim} must be even and at most head_dim={head_dim}")
        for name in ("factors", "long_factors"):
            count = len(getattr(self, name)) or dim // 2
            need(self, count == dim // 2, f"{name} must have length {dim // 2} for dim={dim}, not {count}")
        need(self, dim > 2 or self.scaling not in ("ntk", "dynamic"), f"scaling={self.scaling!r} needs dim above 2")
        return RopeFrequencies(dim, self.theta, **self.settings)

    def __call__(self, x: Value, heads: int, name: str = "rope") -> Value:
        """Return x [batch, seq, heads·d], rotated by the positions of its tokens; `name` is the name of the node."""
        options = {"heads": heads, "interleaved": self.interleaved, "amplitude": self.amplitude}
        return ops.rope(x, *self.angles(x, x.width // heads), **options, name=name)

    def angles(self, x: Value, head_dim: int) -> tuple[Value, Value]:
        """Return the positions [batch, seq] of the tokens of x, and the frequencies [dim/2] for heads of `head_dim`."""
        recipe = self.recipe(head_dim)
        return positions(x), constant_param("rope.frequencies", (recipe.dim // 2,), recipe)


@module
class Temperature:
    """A scale of queries x at position p: x · (1 + `strength` · ln(1 + ⌊(p + `offset`)/`length`⌋)) (Llama 4).

    Softmax flattens as the number of keys grows; larger queries compensate. From p + offset = 511 · length on, the
    factor is constant.
    """

    strength: float
    length: int
    offset: int = 0

    def __call__(self, x: Value) -> Value:
        """Map x [batch, seq, width] to a value of the same shape."""
        # Positions in f32, because f16 represents integers only up to 2,048; an added half position prevents quotients
        # of integers from being rounded down to the block before. The table follows the dtype of the model.
        at = ops.affine(
            ops.cast(positions(x), to=dtypes.f32), by=1 / self.length, plus=(self.offset + 0.5) / self.length
        )
        blocks = ops.cast(ops.clip(ops.floor(at), high=BLOCKS - 1.0), to=dtypes.i64)
        rows = tuple(1 + self.strength * math.log(1 + n) for n in range(BLOCKS))
        table = constant_param("temperatures", (BLOCKS, 1), Literal(rows, (BLOCKS, 1)))
        return ops.mul(x, ops.embedding(blocks, table, name="factor"), name="scaled")
