"""Attributes of the classes of a decode step, and the lines that set them from the modules of the model."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ..codegen.method_writer import write_attribute, write_periodic_list
from ..codegen.structure import Method
from ..program.statements import ParamRef, Submodule, relative_to


def name_attributes(method: Method) -> dict[str, str]:
    """Map the path of each member of the class of `method` to an attribute name: a short one, or if that is in use, the
    relative path with "_" for dots. Modules of a list are indexed, as in ``layers[0]``; the list has a name as well."""
    names: dict[str, str] = {}
    paths = [*method.modules, *method.members]
    for path in sorted(paths, key=lambda p: p in method.members and not p.endswith(".module")):
        local = relative_to(path, method.path)
        stem, _, number = local.rpartition(".")
        if path in method.modules and number.isdigit():
            names[path.rpartition(".")[0]] = stem.replace(".", "_")
            names[path] = f"{stem.replace('.', '_')}[{number}]"
            continue
        short = re.sub(r"(\.(module|norm|table\d*|weight)|_weight)$", "", local).replace(".", "_")
        names[path] = short if short not in names.values() else local.replace(".", "_")
    return names


def write_constructor(method: Method, inner: Mapping[str, str]) -> list[str]:
    """Return the lines of ``__init__`` of the class of `method`; `inner` maps paths of inner methods to class names."""
    names = name_attributes(method)
    members = ((names[p], source, relative_to(p, method.path)) for p, source in method.members.items())
    lines = [f"self.{name} = {_write_member(source, path)}" for name, source, path in members]
    lists: dict[str, list[str]] = {}
    for path, name in inner.items():
        local = relative_to(path, method.path)
        stem, _, number = local.rpartition(".")
        if number.isdigit():
            lists.setdefault(stem, []).append(name)
        else:
            lines.append(f"self.{names[path]} = {name}({write_attribute('module', local)})")
    for stem, kinds in lists.items():
        layers = write_attribute("module", stem)
        if len({*kinds}) == 1:
            modules = f"[{kinds[0]}(layer) for layer in {layers}]"
        else:
            modules = f"[kind(layer) for kind, layer in zip({write_periodic_list(kinds)}, {layers})]"
        lines.append(f"self.{stem.replace('.', '_')} = {modules}")
    return lines or ["pass"]


def _write_member(source: Submodule | ParamRef, path: str) -> str:
    if isinstance(source, ParamRef):
        return write_attribute("module", path)
    return source.init.format(write_attribute("module", path.rpartition(".")[0]))
