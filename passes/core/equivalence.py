"""Trials: small random inputs and weights on which a pass shows its effect, through the float64 interpreter.

Checkpoint tensors and random initializations are replaced by float64 numbers of the same shape, drawn from their name,
so that a graph before and after a rewrite sees the same weights and no rounding of recipes hides or feigns an error.
"""

from __future__ import annotations

import copy
import functools
import math
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from weft.ir import DType, Graph, Recipe, TensorReader, WeftError, interpret, ops
from weft.ir.graph import Value
from weft.ir.interpreter import free_sizes
from weft.ir.recipes import Full, Map, Normal, Source, Uniform
from weft.ir.recipes.readers import EMPTY, Array
from weft.ir.schema.states import CODES
from weft.ir.types import dtypes, sizes

EXACT = 1e-12  # the largest difference of exact passes, relative to the largest number of an output
SIZES = {"batch": 3, "seq": 5}
TILE = 65_521  # big weights repeat this many numbers; it is prime, so that rows differ


class RandomReader:
    """Stands in for the checkpoint of `graphs`: the same names and shapes, random float64 numbers; integers as they
    are.

    Without a checkpoint a tensor has the shape of the parameter that it alone makes. `exact` are numbers of `known`
    tensors that are not drawn, `signs` those that all numbers of a tensor have, where its logarithm is read.
    """

    def __init__(
        self,
        real: TensorReader,
        known: Mapping[str, tuple[int, ...]],
        seed: int,
        exact: Mapping[str, Array] | None = None,
        signs: Mapping[str, int] | None = None,
    ) -> None:
        self.real = real
        self.known = known
        self.seed = seed
        self.exact, self.signs = exact or {}, signs or {}
        self.present = set(real.keys())
        # Weights are read block by block but drawn whole. A cache on the class would keep readers alive.
        self.draw = functools.lru_cache(maxsize=2)(self._draw)

    @property
    def path(self) -> Path:
        return self.real.path

    def keys(self) -> Iterable[str]:
        return [*self.present, *self.known]

    def shape(self, key: str) -> tuple[int, ...]:
        if key in self.present:
            return self.real.shape(key)
        if key not in self.known:
            raise WeftError(f"there is no checkpoint to tell the shape of tensor {key!r}; give one to verify with")
        return self.known[key]

    def dtype(self, key: str) -> DType:
        return self.real.dtype(key) if key in self.present and self.real.dtype(key).is_int else dtypes.f64

    def read(self, key: str, start: int, stop: int) -> Array:
        if self.dtype(key).is_int:
            return self.real.read(key, start, stop)
        drawn: Array = self.draw(key)
        return drawn[start:stop] if drawn.ndim else drawn

    def _draw(self, key: str) -> Array:
        if key in self.exact:
            return self.exact[key]
        return self.signs[key] * np.abs(self._drawn(key)) if key in self.signs else self._drawn(key)

    def _drawn(self, key: str) -> Array:
        shape = self.shape(key)
        rng = np.random.default_rng((self.seed, zlib.crc32(key.encode())))
        if len(shape) < 2:  # norm weights, biases, decays: none of them zero or negative
            return rng.uniform(0.5, 1.5, shape)
        tile = rng.standard_normal(min(TILE, math.prod(shape)))
        # 1/√n keeps activations near 1 from layer to layer.
        return np.resize(tile / math.sqrt(shape[-1]), shape)


class EquivalenceCheck:
    """Random weights and inputs from one `seed`. `largest` is the largest difference that `same` has seen so far, None
    where it was not asked."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.largest: float | None = None
        self.known: dict[str, tuple[int, ...]] = {}
        self.exact: dict[str, Array] = {}
        self.signs: dict[str, int] = {}

    def run(self, graph: Graph, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Outputs by name, with random weights."""
        return interpret(self.stage(graph), inputs)

    def run_as(
        self, graph: Graph, inputs: Mapping[str, Array], meanings: Mapping[str, Callable[..., Any]]
    ) -> dict[str, Array]:
        """`run`, where the nodes whose first outputs have the names in `meanings` compute those functions of their
        operands and attributes instead."""
        staged = self.stage(graph)
        for node in staged.nodes:
            if node.output.name in meanings:
                # A copy: all graphs share their ops.
                node.op = copy.copy(node.op)
                node.op.reference = meanings[node.output.name]
        return interpret(staged, inputs)

    def stage(self, graph: Graph) -> Graph:
        """A copy of `graph` whose weights are random."""
        staged = graph.clone()
        for p in staged.params.values():
            if isinstance(p.recipe, Source):
                self.known.setdefault(p.recipe.key, _fixed(p))
            p.recipe = self._randomized(p.recipe)
        staged.reader = RandomReader(graph.reader, self.known, self.seed, self.exact, self.signs)
        return staged

    def _randomized(self, recipe: Recipe) -> Recipe:
        if isinstance(recipe, (Normal, Uniform, Full)):
            key = f"{recipe.name} {recipe!r}"
            self.known[key] = recipe.dims
            if not isinstance(recipe, Normal):  # the numbers themselves, but no rounding of what is made of them
                self.exact[key] = recipe.evaluate(EMPTY).astype(np.float64)
            return Source(key)
        if isinstance(recipe, Map) and recipe.fn == "log":
            self._sign(recipe.item, 1)
        return recipe.map_parts(self._randomized)

    def _sign(self, recipe: Recipe, sign: int) -> None:
        """Note that the numbers of `recipe` have `sign`."""
        if isinstance(recipe, Source):
            self.signs[recipe.key] = sign
        elif not (isinstance(recipe, Map) and recipe.fn == "exp"):
            flips = isinstance(recipe, Map) and recipe.fn == "neg"
            for part in recipe.parts:
                self._sign(part, -sign if flips else sign)

    def inputs(self, graph: Graph, **given: int) -> dict[str, Array]:
        """Random inputs by name, of the sizes `given` (batch, seq … otherwise small odd numbers).

        Token ids stay below the rows of the tables they index, masks are ones followed by zeros, positions run on from
        where the mask says that the cache ends, and no text is longer than a table of positions.
        """
        rng = np.random.default_rng(self.seed)
        longest: int = graph.meta.get("max_positions") or 1_000_000  # a table of positions ends there
        binding = {**SIZES, "seq": min(SIZES["seq"], longest), **given}
        batch, seq = binding["batch"], binding["seq"]
        past = np.zeros(batch, int)
        mask = graph.inputs.get("attention_mask")
        if mask is not None and mask.shape[-1] == sizes.sym("total"):
            past = rng.integers(0, max(1, min(4, longest - seq + 1)), batch)
            binding.setdefault("total", int(past.max()) + seq)
            binding.setdefault("capacity", binding["total"] + 2)
        for name in free_sizes(graph):
            binding.setdefault(name, 4)
        _lengthen(graph, binding)
        valid = rng.integers(1, seq + 1, batch)
        # One row is full, so that the last tokens are compared too.
        valid[0] = seq
        found: dict[str, Array] = {}
        for name, value in graph.inputs.items():
            shape = value.type.concrete(binding)
            if name.endswith("attention_mask") and value.shape[1] == sizes.sym("samples"):
                found[name] = (np.arange(shape[1]) < shape[1] * valid[:, None] // seq).astype(np.int64)
            elif name == "attention_mask":
                found[name] = (np.arange(shape[1]) < (past + valid)[:, None]).astype(np.int64)
            elif name == "position_ids":
                found[name] = past[:, None] + np.arange(shape[1])
            elif value.type.dtype in CODES.values():
                found[name] = rng.integers(-8, 8, shape)
            elif value.type.dtype.is_int:
                found[name] = rng.integers(0, _limit(value), shape)
            elif value.type.dtype == dtypes.bool_:
                found[name] = rng.random(shape) < 0.6
            else:
                found[name] = rng.standard_normal(shape)
        return found

    def same(self, expected: Mapping[str, Array], actual: Mapping[str, Array], bound: float) -> None:
        """Outputs agree within `bound` of the largest expected number.

        Raises:
            WeftError: naming the first output that does not.
        """
        if list(expected) != list(actual):
            raise WeftError(f"the outputs were {', '.join(expected)} and are {', '.join(actual)}")
        for name, a in expected.items():
            b = actual[name]
            if a.shape != b.shape:
                raise WeftError(f"output {name} had shape {list(a.shape)} and has {list(b.shape)}")
            error = difference(a, b)
            self.largest = max(self.largest or 0.0, error)
            # Not `error > bound`: NaN has to fail.
            if not error <= bound:
                raise WeftError(f"output {name} differs by {error:.1e} of its largest number; {bound:.0e} is allowed")


def difference(expected: Array, actual: Array) -> float:
    """The largest absolute difference over the largest expected magnitude; NaN unless both are NaN at the same
    places.
    """
    if not expected.size:
        return 0.0
    a, b = expected.astype(np.float64), actual.astype(np.float64)
    # Equal infinities end here: their difference would be NaN.
    if np.array_equal(a, b, equal_nan=True):
        return 0.0
    return float(np.max(np.abs(a - b)) / max(float(np.max(np.abs(a))), np.finfo(np.float64).tiny))


def _lengthen(graph: Graph, binding: dict[str, int]) -> None:
    """Double the lengths of sounds in `binding` until convolutions make some frames of them."""
    lengths = [name for name in ("samples", "frames") if name in binding]
    made = [node.output.shape[1] for node in graph.nodes if node.op is ops.conv1d] if lengths else []
    while any(sizes.evaluate(frames, binding) < 5 for frames in made if isinstance(frames, sizes.Poly)):
        binding.update((name, 2 * binding[name]) for name in lengths)


def _limit(ids: Value) -> int:
    """Return a bound on `ids`: the rows of the smallest table that they index."""
    rows = []
    for node, i in ids.uses:
        table = node.inputs[1 - i] if (node.op, i) in ((ops.embedding, 0), (ops.gather, 1)) else None
        size = None if table is None else table.shape[node.attrs.get("axis", 0)]
        if isinstance(size, int):
            rows.append(size)
    return min(rows, default=2)


def _fixed(param: Value) -> tuple[int, ...]:
    return param.type.concrete({})
