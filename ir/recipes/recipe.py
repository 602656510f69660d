"""The base class of weight recipes: expressions, as data, that compute a parameter from checkpoint tensors.

A recipe is an immutable expression tree with a text form. Passes derive new recipes and compute no weights. Evaluation
is lazy, mostly in float32, one block of rows at a time (`Recipe.blocks`), and the cast to the dtype of the parameter
comes last, so compiling needs memory only for a slice of the largest tensor.

The methods take the `TensorReader` that has the tensors of `Source` leaves. All axes are non-negative.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, fields, replace
from typing import Any, ClassVar

from ..frozen import Frozen
from .readers import Array, TensorReader

BLOCK_ELEMENTS = 1 << 19  # a block of rows is at most 2 MiB of float32: it fits into the processor's cache
SWEEP_ELEMENTS = 1 << 23  # 32 MiB where every block costs a full read of the item
REGISTRY: dict[str, type[Recipe]] = {}


def order_fields(kind: Any) -> tuple[Field[Any], ...]:
    """Return the fields of the dataclass `kind`, positional ones before keyword-only ones, as in its constructor."""
    return tuple(sorted(fields(kind), key=lambda f: f.kw_only is True))


class Recipe(Frozen):
    """Base of all recipes. Subclasses are registered in REGISTRY under their snake_case `name`, such as mean_pool."""

    name: ClassVar[str] = ""
    trained: ClassVar[bool] = True  # of a leaf: its values are weights or initial ones, not a constant table

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.name = "".join("_" + c.lower() if c.isupper() else c for c in cls.__name__).lstrip("_")
        if not cls.__name__.startswith("_"):  # private recipes have no text form
            REGISTRY[cls.name] = cls

    def __post_init__(self) -> None:
        """Convert integers in float fields to floats, so that equal recipes have equal text forms."""
        for f in fields(self):
            value = getattr(self, f.name)
            # The type is a string where a module has `from __future__ import annotations`.
            if f.type in ("float", float):
                object.__setattr__(self, f.name, float(value))
            elif f.type == "tuple[float, ...]":
                object.__setattr__(self, f.name, tuple(map(float, value)))

    def shape(self, reader: TensorReader) -> tuple[int, ...]:
        """Return the shape of the tensor, by default that of the first of `parts`.

        Raises:
            WeftError: if a checkpoint tensor is missing, or shapes do not fit.
        """
        if not self.parts:
            raise TypeError(f"recipe {self.name} defines no shape")
        return self.parts[0].shape(reader)

    def read(self, reader: TensorReader, start: int, stop: int) -> Array:
        """Return ``start:stop`` on axis 0 of the tensor: float32 (float64 where a recipe states it) or integers."""
        raise TypeError(f"recipe {self.name} defines no read")

    @property
    def parts(self) -> tuple[Recipe, ...]:
        """The operands of this recipe: the recipes in its fields, also in tuples, in the order of the fields."""
        parts: list[Recipe] = []
        for f in fields(self):
            value = getattr(self, f.name)
            parts += [v for v in (value if isinstance(value, tuple) else (value,)) if isinstance(v, Recipe)]
        return tuple(parts)

    def map_parts(self, change: Callable[[Recipe], Recipe]) -> Recipe:
        """Return this recipe with `change` applied to each of its `parts`."""
        changed: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Recipe):
                changed[f.name] = change(value)
            elif isinstance(value, tuple) and any(isinstance(v, Recipe) for v in value):
                changed[f.name] = tuple(change(v) for v in value)
        return replace(self, **changed) if changed else self

    def substitute(self, table: Mapping[str, Recipe]) -> Recipe:
        """Return this recipe with each `Source` whose key is in `table` replaced by the recipe there."""
        return self.map_parts(lambda part: part.substitute(table))

    def has(self, *kinds: type[Recipe]) -> bool:
        """Return whether this recipe, or a recipe inside it at any depth, is an instance of one of `kinds`."""
        return isinstance(self, kinds) or any(part.has(*kinds) for part in self.parts)

    @property
    def is_constant(self) -> bool:
        """True if the tensor is never trained: all leaves are constant tables, none a checkpoint or initial value."""
        parts = self.parts
        return all(part.is_constant for part in parts) if parts else not self.trained

    def sources(self) -> Iterator[str]:
        """Yield the keys of all checkpoint tensors that the recipe reads, in order, with repetitions."""
        for part in self.parts:
            yield from part.sources()

    def label(self, reader: TensorReader) -> str:
        """Return the keys and the shape of the tensor for an error message, such as "w [2, 3]"."""
        return f"{', '.join(self.sources()) or 'a constant'} {list(self.shape(reader))}"

    def evaluate(self, reader: TensorReader) -> Array:
        """Return the full tensor, with its shape (() for a scalar)."""
        shape = self.shape(reader)
        return self.read(reader, 0, shape[0] if shape else 1).reshape(shape)

    @property
    def needs_full_read(self) -> bool:
        """True if reading one row reads all rows of an operand, as in a transposition."""
        return any(p.needs_full_read for p in self.parts)

    def blocks(self, reader: TensorReader, elements: int | None = None) -> Iterator[Array]:
        """Yield the tensor as consecutive blocks of rows of at most `elements` elements, but at least one row each.

        The default of `elements` is `SWEEP_ELEMENTS` if the recipe needs a full read, else `BLOCK_ELEMENTS`.
        """
        shape = self.shape(reader)
        elements = elements or (SWEEP_ELEMENTS if self.needs_full_read else BLOCK_ELEMENTS)
        rows = shape[0] if shape else 1
        step = max(1, elements // max(1, math.prod(shape[1:])))
        for start in range(0, rows, step):
            yield self.read(reader, start, min(rows, start + step))
