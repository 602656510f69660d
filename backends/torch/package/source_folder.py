"""Generate folders of PyTorch from graphs: the model, its scripts, and the recipes of its weights."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import resolve_name
from pathlib import Path

from weft.ir.graph import Graph
from weft.ir.recipes.streams import stream_rows
from weft.ir.types.dtypes import DType

from ...safetensors import Tensor
from ...target import MODEL as MODEL_FORM
from ...weights import StoredTensor
from ..codegen.model_source import GeneratedSource, write_source
from ..decode.lower_step import DecodeStep, lower_step
from ..decode.step_source import write_step
from ..lower.lower import LoweredGraph, lower
from ..program.statements import get_stored_dtype

STEP_FORM = "step"  # the form of the decode step
MODEL, STEP, KERNELS = "model.py", "decode.py", "kernels"
SCRIPTS = {
    "decoder": ("load.py", "sampling.py", "generate.py"),
    "encoder-decoder": ("load.py", "sampling.py", "generate.py"),
    "encoder": ("load.py", "embed.py"),
}
_SHIPPED = Path(__file__).parent / "shipped"
_KERNELS = Path(__file__).parent.parent / "kernels"


@dataclass(frozen=True)
class GeneratedModel:
    """A generated model, whose weights are still recipes. kind: decoder, encoder or encoder-decoder. keeps: the model
    takes a cache. step: its decode step or None. step_text: source of the step, "" if it is None or
    calls no kernel. kernels: module names of the kernels that the model or the step imports."""

    kind: str
    lowered: LoweredGraph
    source: GeneratedSource
    keeps: bool
    step: DecodeStep | None
    step_text: str
    kernels: list[str]


def generate_model(forms: Mapping[str, Graph], float8_caches: bool = False) -> GeneratedModel:
    """Generate the model of `forms` (graphs by name), and its decode step if `forms` has one and the model takes a
    cache. With `float8_caches` keys and values are stored in FP8."""
    lowered = lower(forms[MODEL_FORM], float8_caches)
    kind, source = lowered.graph.meta.get("kind", "decoder"), write_source(lowered)
    keeps = "def new_cache" in source.text
    step = lower_step_of(forms, lowered) if keeps else None
    text, kernels = write_step(lowered, step)
    return GeneratedModel(kind, lowered, source, keeps, step, text, sorted({*source.kernels, *kernels}))


def lower_step_of(forms: Mapping[str, Graph], lowered: LoweredGraph) -> DecodeStep | None:
    """Return the decode step of `lowered`; None if `forms` has none, or the step would nest the cache differently."""
    return lower_step(lowered, forms[STEP_FORM]) if STEP_FORM in forms else None


def list_weights(built: GeneratedModel, dtype: DType) -> dict[str, Tensor]:
    """Return the weights of a model by state_dict key, widest dtypes first, so that all are aligned in a file. Trained
    weights are stored as `dtype`, all other tensors as `get_stored_dtype` returns."""
    reader = built.lowered.graph.reader
    tensors = {
        key: Tensor(param.type.concrete({}), get_stored_dtype(param, dtype), partial(stream_rows, param.recipe, reader))
        for key, param in built.source.weights.items()
    }
    return dict(sorted(tensors.items(), key=lambda item: -item[1].dtype.bits))


def describe_tensors(built: GeneratedModel, tensors: Mapping[str, Tensor]) -> dict[str, StoredTensor]:
    """Return the recipe, dtype and shape of each of `tensors`, which `list_weights` returned for `built`."""
    params = built.source.weights
    return {key: StoredTensor(params[key].recipe, tensor.dtype, tensor.shape) for key, tensor in tensors.items()}


def write_code(built: GeneratedModel, folder: Path) -> None:
    """Write model.py and its scripts into `folder`, and, if there are any, decode.py and the kernels."""
    (folder / MODEL).write_text(built.source.text, encoding="utf-8")
    for name in SCRIPTS.get(built.kind, ()):
        (folder / name).write_bytes((_SHIPPED / name).read_bytes())
    if built.step_text:
        (folder / STEP).write_text(built.step_text, encoding="utf-8")
    for name in list_kernel_files(built.kernels) if built.kernels else ():
        (folder / KERNELS / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / KERNELS / name).write_bytes((_KERNELS / name).read_bytes())


def list_kernel_files(kernels: Iterable[str]) -> list[str]:
    """Return the sorted paths, in the folder kernels, of modules such as ``shared.launch`` and of their imports."""
    needed, queue = {"__init__"}, list(kernels)
    while queue:
        name = queue.pop()
        if name in needed:
            continue
        package = name.rpartition(".")[0]
        needed |= {name, f"{package}.__init__"} if package else {name}
        queue += _find_imports(name)
    return sorted(map(_make_file_path, needed))


@functools.cache
def _find_imports(name: str) -> tuple[str, ...]:
    """Return the kernel modules that the module `name` imports; cached, because files do not change."""
    package, imported = f"{KERNELS}.{name}".rpartition(".")[0], list[str]()
    for node in ast.walk(ast.parse((_KERNELS / _make_file_path(name)).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            module = resolve_name("." * node.level + (node.module or ""), package).removeprefix(KERNELS).lstrip(".")
            # Functions of a module, as in ``from .a import f``, or modules of a package, as in ``from . import a``.
            is_file = (_KERNELS / _make_file_path(module)).is_file()
            imported += [module] if is_file else [f"{module}.{a.name}".lstrip(".") for a in node.names]
    return tuple(imported)


def _make_file_path(module: str) -> str:
    return f"{module.replace('.', '/')}.py"
