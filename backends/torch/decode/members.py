"""Members of the classes of a decode step: attributes, and the lines that take them from the modules of the model."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ..codegen.method_writer import periodic
from ..codegen.structure import Method
from ..program.statements import ParamRef, Submodule, relative


def attributes(method: Method) -> dict[str, str]:
    """Name all that a class holds, by path: each after its module, as far as that leaves them apart.

    What is in a list is reached by its number, as in ``layers[0]``.
    """
    found: dict[str, str] = {}
    for path in sorted([*method.modules, *method.holds], key=lambda p: p in method.holds and not p.endswith(".module")):
        local = relative(path, method.path)
        stem, _, number = local.rpartition(".")
        if path in method.modules and number.isdigit():
            found[path.rpartition(".")[0]] = stem.replace(".", "_")
            found[path] = f"{stem.replace('.', '_')}[{number}]"
            continue
        short = re.sub(r"(\.(module|norm|table\d*|weight)|_weight)$", "", local).replace(".", "_")
        found[path] = short if short not in found.values() else local.replace(".", "_")
    return found


def constructor(method: Method, inner: Mapping[str, str]) -> list[str]:
    """The lines that make what a class holds; `inner` are the classes of its modules by path."""
    called = attributes(method)
    lines = [f"self.{called[p]} = {_taken(source, relative(p, method.path))}" for p, source in method.holds.items()]
    lists: dict[str, list[str]] = {}
    for path, name in inner.items():
        local = relative(path, method.path)
        stem, _, number = local.rpartition(".")
        if number.isdigit():
            lists.setdefault(stem, []).append(name)
        else:
            lines.append(f"self.{called[path]} = {name}({reached(local)})")
    for stem, kinds in lists.items():
        if len({*kinds}) == 1:
            made = f"[{kinds[0]}(layer) for layer in {reached(stem)}]"
        else:
            made = f"[kind(layer) for kind, layer in zip({periodic(kinds)}, {reached(stem)})]"
        lines.append(f"self.{stem.replace('.', '_')} = {made}")
    return lines or ["pass"]


def _taken(source: Submodule | ParamRef, path: str) -> str:
    """The expression that makes an attribute of the model's ``module``."""
    outer = path.rpartition(".")[0]
    return reached(path) if isinstance(source, ParamRef) else source.init.format(reached(outer))


def member(name: str) -> str:
    """The text that takes `name` from a module, or the module of that number from a list."""
    return f"[{name}]" if name.isdigit() else f".{name}"


def reached(path: str) -> str:
    """The text that reaches `path` from ``module``."""
    return "module" + "".join(member(part) for part in path.split(".") if part)
