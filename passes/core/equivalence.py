"""Checks of a pass's effect: run graphs on small random inputs and weights in the float64 interpreter.

Float tensors of the checkpoint and normal initializations become random float64 values, seeded by the tensor's name;
uniform and constant ones keep their values, in float64. A graph before and after a rewrite therefore sees the same
weights, and rounding in recipes neither hides an error nor causes one.
"""

from __future__ import annotations

import copy
import functools
import math
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from weft.ir import DType, Graph, Recipe, TensorReader, WeftError, interpret, ops
from weft.ir.graph import Value
from weft.ir.interpreter import list_named_sizes
from weft.ir.recipes import Full, Map, Normal, Source, Uniform
from weft.ir.recipes.readers import EMPTY, Array
from weft.ir.schema.states import CODES
from weft.ir.types import dtypes, sizes

EXACT = 1e-12  # the largest difference that exact passes may cause, relative to the largest magnitude of an output
SIZES = {"batch": 3, "seq": 5}
TILE = 65_521  # big weights repeat this number of values; it is prime, so that rows differ


@dataclass(eq=False)
class RandomReader:
    """A tensor reader that returns random float64 values in place of the float tensors of the checkpoint `real`.

    Integer tensors and all shapes are unchanged.
    shapes: tensor names -> shapes, for tensors that are not in `real`.
    exact: tensor names -> values to return instead of random ones.
    signs: tensor names -> 1 or -1, the sign of all elements, for tensors of which a recipe takes the logarithm.
    """

    real: TensorReader
    shapes: Mapping[str, tuple[int, ...]]
    seed: int
    exact: Mapping[str, Array] = field(default_factory=dict)
    signs: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.present = set(self.real.keys())
        # Weights are read block by block but drawn at once. A cache on the class would keep readers alive.
        self.draw = functools.lru_cache(maxsize=2)(self._draw)

    @property
    def path(self) -> Path:
        return self.real.path

    def keys(self) -> Iterable[str]:
        return [*self.present, *self.shapes]

    def shape(self, key: str) -> tuple[int, ...]:
        if key in self.present:
            return self.real.shape(key)
        if key not in self.shapes:
            raise WeftError(f"the shape of tensor {key!r} is unknown without a checkpoint; load one to verify")
        return self.shapes[key]

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
        return self.signs[key] * np.abs(self._sample(key)) if key in self.signs else self._sample(key)

    def _sample(self, key: str) -> Array:
        shape = self.shape(key)
        rng = np.random.default_rng((self.seed, zlib.crc32(key.encode())))
        if len(shape) < 2:  # norm weights, biases, decays: none of them zero or negative
            return rng.uniform(0.5, 1.5, shape)
        tile = rng.standard_normal(min(TILE, math.prod(shape)))
        # 1/√n keeps activations near 1 from layer to layer.
        return np.resize(tile / math.sqrt(shape[-1]), shape)


class EquivalenceCheck:
    """A comparison of graphs on random weights and inputs from one `seed`.

    `largest` is the largest relative difference that `check_close` has measured so far; None before its first call.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.largest: float | None = None
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.exact: dict[str, Array] = {}
        self.signs: dict[str, int] = {}

    def run(self, graph: Graph, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Run `graph` with random weights on `inputs` (by name); return its outputs by name."""
        return interpret(self.randomize_weights(graph), inputs)

    def run_as(
        self, graph: Graph, inputs: Mapping[str, Array], references: Mapping[str, Callable[..., Any]]
    ) -> dict[str, Array]:
        """Run `graph` as `run` does, with other reference functions for some nodes; return the outputs by name.

        `references` maps the name of a node's first output to a function of the node's operands and attributes.
        """
        staged = self.randomize_weights(graph)
        for node in staged.nodes:
            if node.output.name in references:
                # A copy: all graphs share their ops.
                node.op = copy.copy(node.op)
                node.op.reference = references[node.output.name]
        return interpret(staged, inputs)

    def randomize_weights(self, graph: Graph) -> Graph:
        """Return a copy of `graph` with random weights; the same tensor has the same values in every copy."""
        staged = graph.clone()
        for p in staged.params.values():
            if isinstance(p.recipe, Source):
                self.shapes.setdefault(p.recipe.key, p.type.concrete({}))
            p.recipe = self._randomize(p.recipe)
        staged.reader = RandomReader(graph.reader, self.shapes, self.seed, self.exact, self.signs)
        return staged

    def _randomize(self, recipe: Recipe) -> Recipe:
        if isinstance(recipe, (Normal, Uniform, Full)):
            key = f"{recipe.name} {recipe!r}"
            self.shapes[key] = recipe.dims
            if not isinstance(recipe, Normal):  # their own values, but in float64: recipes of them do not round
                self.exact[key] = recipe.evaluate(EMPTY).astype(np.float64)
            return Source(key)
        if isinstance(recipe, Map) and recipe.fn == "log":
            self._record_sign(recipe.item, 1)
        return recipe.map_parts(self._randomize)

    def _record_sign(self, recipe: Recipe, sign: int) -> None:
        """Record the signs that checkpoint tensors in `recipe` need so that all its elements have `sign` (1 or −1)."""
        if isinstance(recipe, Source):
            self.signs[recipe.key] = sign
        elif not (isinstance(recipe, Map) and recipe.fn == "exp"):
            flips = isinstance(recipe, Map) and recipe.fn == "neg"
            for part in recipe.parts:
                self._record_sign(part, -sign if flips else sign)

    def make_inputs(self, graph: Graph, **named_sizes: int) -> dict[str, Array]:
        """Return random inputs of `graph`, by name. Sizes that are not in `named_sizes` have small defaults.

        They are batch=3, seq=5 and otherwise 4, except that masks and convolutions may need longer axes.
        Token ids are below the number of rows of the smallest table they index. Masks are ones, then zeros; with a
        cache they include 0 to 3 cached tokens per row. Position ids start after these, within the position table.
        """
        rng = np.random.default_rng(self.seed)
        longest: int = graph.meta.get("max_positions") or 1_000_000  # the rows of the position table
        binding = {**SIZES, "seq": min(SIZES["seq"], longest), **named_sizes}
        batch, seq = binding["batch"], binding["seq"]
        past = np.zeros(batch, int)
        mask = graph.inputs.get("attention_mask")
        if mask is not None and mask.shape[-1] == sizes.sym("total"):
            past = rng.integers(0, max(1, min(4, longest - seq + 1)), batch)
            binding.setdefault("total", int(past.max()) + seq)
            binding.setdefault("capacity", binding["total"] + 2)
        for name in list_named_sizes(graph):
            binding.setdefault(name, 4)
        _double_lengths(graph, binding)
        valid = rng.integers(1, seq + 1, batch)
        # One row is full, so that the last tokens are compared too.
        valid[0] = seq
        arrays: dict[str, Array] = {}
        for name, value in graph.inputs.items():
            shape = value.type.concrete(binding)
            if name.endswith("attention_mask") and value.shape[1] == sizes.sym("samples"):
                arrays[name] = (np.arange(shape[1]) < shape[1] * valid[:, None] // seq).astype(np.int64)
            elif name == "attention_mask":
                arrays[name] = (np.arange(shape[1]) < (past + valid)[:, None]).astype(np.int64)
            elif name == "position_ids":
                arrays[name] = past[:, None] + np.arange(shape[1])
            elif value.type.dtype in CODES.values():
                arrays[name] = rng.integers(-8, 8, shape)
            elif value.type.dtype.is_int:
                arrays[name] = rng.integers(0, _find_id_bound(value), shape)
            elif value.type.dtype == dtypes.bool_:
                arrays[name] = rng.random(shape) < 0.6
            else:
                arrays[name] = rng.standard_normal(shape)
        return arrays

    def check_close(self, expected: Mapping[str, Array], actual: Mapping[str, Array], bound: float) -> None:
        """Check that outputs agree in names (with their order), shapes and values; update `largest`.

        Values may differ by at most `bound`, relative to the largest expected magnitude of each output.

        Raises:
            WeftError: naming the first output that differs.
        """
        if list(expected) != list(actual):
            raise WeftError(f"the outputs must be {', '.join(expected)}, but are {', '.join(actual)}")
        for name, a in expected.items():
            b = actual[name]
            if a.shape != b.shape:
                raise WeftError(f"output {name} must have shape {list(a.shape)}, but has {list(b.shape)}")
            error = measure_difference(a, b)
            self.largest = max(self.largest or 0.0, error)
            # Not `error > bound`: NaN has to fail.
            if not error <= bound:
                raise WeftError(
                    f"output {name} differs by {error:.1e} of its largest magnitude, but at most {bound:.0e} is allowed"
                )


def measure_difference(expected: Array, actual: Array) -> float:
    """Return max |expected - actual| / max |expected|; 0 for equal or empty arrays, NaN if others contain a NaN."""
    if not expected.size:
        return 0.0
    a, b = expected.astype(np.float64), actual.astype(np.float64)
    # Equal infinities end here: their difference would be NaN.
    if np.array_equal(a, b, equal_nan=True):
        return 0.0
    return float(np.max(np.abs(a - b)) / max(float(np.max(np.abs(a))), np.finfo(np.float64).tiny))


def _double_lengths(graph: Graph, binding: dict[str, int]) -> None:
    """Double samples and frames in `binding`, in place, until every conv1d of `graph` returns at least 5 frames."""
    lengths = [name for name in ("samples", "frames") if name in binding]
    frame_counts = [node.output.shape[1] for node in graph.nodes if node.op is ops.conv1d] if lengths else []
    while any(sizes.evaluate(frames, binding) < 5 for frames in frame_counts if isinstance(frames, sizes.Poly)):
        binding.update((name, 2 * binding[name]) for name in lengths)


def _find_id_bound(ids: Value) -> int:
    """Return the exclusive upper bound for values of `ids`: the size of the smallest axis indexed; 2 without any."""
    rows = []
    for node, i in ids.uses:
        table = node.inputs[1 - i] if (node.op, i) in ((ops.embedding, 0), (ops.gather, 1)) else None
        size = None if table is None else table.shape[node.attrs.get("axis", 0)]
        if isinstance(size, int):
            rows.append(size)
    return min(rows, default=2)
