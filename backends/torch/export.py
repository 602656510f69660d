"""From graphs to folders of PyTorch: the generated model, the scripts beside it, and what its weights are."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from weft.ir import dtypes
from weft.ir.dtypes import DType
from weft.ir.graph import Graph
from weft.ir.recipe import Recipe

from .formulas import is_constant
from .source import Source, write_source

MODEL = "model.py"
SCRIPTS = {"decoder": ("load.py", "sampling.py", "generate.py")}
_SHIPPED = Path(__file__).parent / "shipped"


class Weight(NamedTuple):
    """A tensor of the state_dict: its numbers, to be stored as `dtype`."""

    recipe: Recipe
    shape: tuple[int, ...]
    dtype: DType


def build(graph: Graph) -> Source:
    """The source of `graph`, whose weights are still recipes.

    Raises:
        WeftError: naming an op that cannot be written.
    """
    return write_source(graph)


def weights(source: Source, dtype: DType) -> dict[str, Weight]:
    """The weights of `source` by state_dict key, the widest numbers first, so that all are aligned in a file.

    Those that are trained are stored as `dtype`, tables in f32, whole numbers as they are.
    """
    found = {}
    for key, param in source.weights.items():
        kind = param.type.dtype
        stored = kind if not kind.is_float else dtypes.f32 if is_constant(param.recipe) else dtype
        found[key] = Weight(param.recipe, param.type.concrete({}), stored)
    return dict(sorted(found.items(), key=lambda item: -item[1].dtype.bits))


def write_scripts(source: Source, kind: str, folder: Path) -> None:
    """Write the model of `source`, a `kind` such as decoder, and the scripts that use it into `folder`."""
    (folder / MODEL).write_text(source.text, encoding="utf-8")
    for name in SCRIPTS.get(kind, ()):
        (folder / name).write_bytes((_SHIPPED / name).read_bytes())
