"""The source of a model: the snippets that it uses, then its classes, innermost first."""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2

from ..lower.lower import LoweredGraph
from ..program.snippets import find_names, list_kernel_modules, select_snippets, write_imports
from ..program.statements import TOP, CacheSlot, ParamRef, Program, Statement, Submodule, relative_to
from .classes import ClassWriter, write_constructor
from .docstrings import write_model_doc
from .method_writer import find_layer_slice, write_attribute
from .structure import Item, Loop, Method, ModuleCall, group_statements
from .value_names import NamedOperand


@dataclass(frozen=True)
class GeneratedSource:
    """The source of a generated module (`text`), with a class `Model`. weights: parameters of the graph by state_dict
    key. kernels: module names of the kernels that the source imports."""

    text: str
    weights: dict[str, Any]
    kernels: list[str] = field(default_factory=list)


def write_source(lowered: LoweredGraph, package: str = "kernels") -> GeneratedSource:
    """Return the source, weights and kernels of a model; the source imports its kernels from `package`."""
    program = lowered.program
    top = group_statements(program)
    writer = ModelWriter(program)
    writer.write(top)
    classes, functions = list(writer.classes.values()), list(program.functions.values())
    # Rendered once without imports and snippets, to find the ones that the classes use.
    draft = load_template("model.py.j2").render(about=[], imports=[], parts=functions, classes=classes)
    used = find_names(ast.parse(draft))
    parts = select_snippets(used)
    used = used.union({"torch"}, *(p.uses for p in parts))
    files = list_kernel_modules(used)
    text = load_template("model.py.j2").render(
        about=write_model_doc(lowered.graph, program, bool(files)),
        imports=write_imports(used, package),
        parts=[*(p.source for p in parts), *functions],
        classes=classes,
    )
    return GeneratedSource(format_source(text), dict(program.weights), files)


def format_source(text: str) -> str:
    """Return `text` formatted by ruff; if ruff is not installed, only surplus blank lines are removed."""
    if importlib.util.find_spec("ruff") is None:
        return re.sub(r"\n{4,}", "\n\n\n", text).strip() + "\n"
    program = Path(sysconfig.get_path("scripts"), "ruff")  # `python -m ruff` starts six times slower
    ruff = [program] if program.exists() else [sys.executable, "-P", "-m", "ruff"]
    command = [*ruff, "format", "--isolated", "--line-length", "120", "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout


@functools.cache
def load_template(name: str, folder: Path = Path(__file__).parent) -> jinja2.Template:
    """Return the Jinja template with the file name `name` in `folder`/templates; it is read once."""
    loader, strict = jinja2.FileSystemLoader(folder / "templates"), jinja2.StrictUndefined
    environment = jinja2.Environment(loader=loader, trim_blocks=True, lstrip_blocks=True, undefined=strict)
    return environment.get_template(name)


class ModelWriter(ClassWriter):
    """Writes the classes of a model, subclasses of ``nn.Module``."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        rows = (s.operands[1] for s in program.statements if s.text == "F.embedding({0}, {1})")
        named = (o.path for o in rows if isinstance(o, ParamRef) and not o.constant)
        self.tables = {path for path in named if path.endswith(".weight")}

    def write_init(self, method: Method, inner: Mapping[str, str]) -> list[str]:
        return write_constructor(method, inner, self.tables)

    def list_top_parameters(self, method: Method) -> list[NamedOperand]:
        inputs = [v for v in self.inputs if v in method.inputs or not v.default]
        return [*sorted(inputs, key=lambda v: bool(v.default))]

    def write_cache_parameter(self, method: Method) -> str:
        return f"cache: {_write_cache_type(method)} | None = None"

    def write_parameter(self, o: NamedOperand, name: str, top: bool) -> str:
        if isinstance(o, ParamRef):
            return super().write_parameter(o, name, top)
        maybe = o.type == "Tensor" and o in self.producers and self.producers[o].text.startswith("None if ")
        kind = "Tensor" if o.skips and not top else o.type
        return f"{name}: {kind}{' | None' if maybe else ''}" + (f" = {o.default}" if o.default and top else "")

    def write_cache(self, method: Method) -> tuple[str, str]:
        if not method.slots:
            return "", ""
        cache = _write_new_cache(method)
        if method.path != TOP:
            return cache, _write_cache_type(method)
        single = len(method.stateful) == 1
        listed = cache if single and isinstance(method.stateful[0], Loop) else f"[{cache if single else cache[1:-1]}]"
        return f"Cache({listed}, length)", "Cache"


def _write_cache_type(method: Method) -> str:
    kinds = [_write_item_type(item) for item in method.stateful]
    return kinds[0] if len(kinds) == 1 else f"tuple[{', '.join(kinds)}]"


def _write_item_type(item: Item) -> str:
    if isinstance(item, Loop):
        return f"list[{_write_cache_type(item.calls[0].callee)}]"
    if isinstance(item, ModuleCall):
        return _write_cache_type(item.callee)
    return next(o.type for o in item.operands if isinstance(o, CacheSlot))


def _write_new_cache(method: Method) -> str:
    texts = []
    for item in method.stateful:
        if isinstance(item, Statement):
            slot = next(o for o in item.operands if isinstance(o, CacheSlot))
            texts.append(slot.init.format(like=_find_weight(method)))
            continue
        first, repeated = item.calls[0], len({call.path for call in item.calls}) == 1
        path = write_attribute("self", relative_to(first.path, method.path))
        needs_like = "like" in re.findall(r"\w+", _write_new_cache(first.callee))  # a weight of another module
        arguments = f"batch, length, {_find_weight(method)}" if needs_like else "batch, length"
        if isinstance(item, ModuleCall):
            texts.append(f"{path}.new_cache({arguments})")
        elif repeated:
            texts.append(f"[{path}.new_cache({arguments}) for _ in range({len(item.calls)})]")
        else:
            container, cut = find_layer_slice(method, item.calls)
            texts.append(f"[layer.new_cache({arguments}) for layer in {write_attribute('self', container)}{cut}]")
    return texts[0] if len(texts) == 1 else f"({', '.join(texts)})"


def _find_weight(method: Method) -> str:
    """Return the source of a weight that gives the cache its dtype and device: a member of the class, else the module's
    first parameter. Return ``like``, an argument of `new_cache`, if the module has no parameters."""
    for path, member in method.members.items():
        # Codes of quantized blocks are integers: a cache takes its dtype from other weights.
        if isinstance(member, Submodule) and "codes" not in member.tensors:
            return write_attribute("self", relative_to(path, method.path)) + ".weight"
        if isinstance(member, ParamRef) and not member.constant:
            return write_attribute("self", relative_to(path, method.path))
    return "next(self.parameters())" if method.path == TOP or _has_parameters(method) else "like"


def _has_parameters(method: Method) -> bool:
    """Return whether the module or one inside it has parameters; codes of quantized blocks and buffers do not count."""
    members = (member for inner in method.walk() for member in inner.members.values())
    return any("codes" not in m.tensors if isinstance(m, Submodule) else not m.constant for m in members)
