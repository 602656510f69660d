"""From graphs to folders of PyTorch: the generated model, the scripts beside it, and what its weights are."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from weft.ir.graph import Graph
from weft.ir.recipes.recipe import Recipe
from weft.ir.types.dtypes import DType

from .formulas import stored_dtype
from .source import Source, write_source
from .step.source import write_step

MODEL, STEP, KERNELS = "model.py", "decode.py", "kernels"
SCRIPTS = {
    "decoder": ("load.py", "sampling.py", "generate.py"),
    "encoder-decoder": ("load.py", "sampling.py", "generate.py"),
    "encoder": ("load.py", "embed.py"),
}
_HERE = Path(__file__).parent


class Weight(NamedTuple):
    """A tensor of the state_dict: its numbers, to be stored as `dtype`."""

    recipe: Recipe
    shape: tuple[int, ...]
    dtype: DType


@dataclass(frozen=True)
class Built:
    """A generated model of some `kind` (decoder …), whose weights are still recipes.

    `keeps`: it takes a cache of what later calls need. `step` is the text of its decode step, empty where no kernel
    would be of use. `kernels` are the files of those that either calls.
    """

    kind: str
    source: Source
    keeps: bool = False
    step: str = ""
    kernels: list[str] = field(default_factory=list)


def build(graph: Graph) -> Built:
    """The model of `graph`, and where it generates its decode step.

    Raises:
        WeftError: naming an op that cannot be written.
    """
    kind, source = graph.meta.get("kind", "decoder"), write_source(graph)
    if "def new_cache" not in source.text:
        return Built(kind, source, kernels=source.kernels)
    step, kernels = write_step(graph)
    return Built(kind, source, True, step if kernels else "", sorted({*source.kernels, *kernels}))


def weights(built: Built, dtype: DType) -> dict[str, Weight]:
    """The weights of a model by state_dict key, the widest numbers first, so that all are aligned in a file.

    Those that are trained are stored as `dtype`, the others as `stored_dtype` says.
    """
    found = {
        key: Weight(param.recipe, param.type.concrete({}), stored_dtype(param, dtype))
        for key, param in built.source.weights.items()
    }
    return dict(sorted(found.items(), key=lambda item: -item[1].dtype.bits))


def write_code(built: Built, folder: Path) -> None:
    """Write the model into `folder`, and beside it the scripts that use it, its decode step and the kernels of that."""
    (folder / MODEL).write_text(built.source.text, encoding="utf-8")
    for name in SCRIPTS.get(built.kind, ()):
        (folder / name).write_bytes((_HERE / "shipped" / name).read_bytes())
    if built.step:
        (folder / STEP).write_text(built.step, encoding="utf-8")
    if built.kernels:
        (folder / KERNELS).mkdir()
        for name in kernel_files(built.kernels):
            (folder / KERNELS / name).write_bytes((_HERE / KERNELS / name).read_bytes())


def kernel_files(kernels: Iterable[str]) -> list[str]:
    """The files that hold `kernels`, and those that they import, by name."""
    found, queue = {"__init__"}, list(kernels)
    while queue:
        name = queue.pop()
        if name not in found:
            found.add(name)
            tree = ast.parse((_HERE / KERNELS / f"{name}.py").read_text(encoding="utf-8"))
            for node in ast.walk(tree):
                if isinstance(node, ast.ImportFrom) and node.level == 1:
                    queue += [node.module] if node.module else [alias.name for alias in node.names]
    return sorted(f"{name}.py" for name in found)
