"""The text of decode.py: the classes of a decode step, which take their weights from the modules of model.py."""

from __future__ import annotations

import ast
from collections.abc import Hashable
from typing import Any

from weft.ir.graph import Graph

from ..about import class_doc
from ..body import Writer, periodic
from ..library import imports, library, names, used_parts
from ..program import TOP, Held, Leaf, Program, Var
from ..source import Class, class_name, formatted, template
from ..structure import Method, relative
from .lowering import lower_step, refusal

LAUNCHERS = {  # what a step calls, and the files of these kernels
    **{name: name for name in ("conv_step", "decode_attention", "latent_decode", "linear_residual", "moe_decode")},
    **{name: name for name in ("norm_glu", "norm_linear", "norm_qkv", "route")},
    **{"selective_step": "selective_scan", "ssd_step": "ssd"},
}
OWN = {"pack", "pack_bias", "written", "written_latent"}  # parts that steps have, and models have not
STEP = ("input_ids", "position_ids", "cache")  # what every step is given


def write_step(graph: Graph, model: str = "model", package: str = "kernels") -> tuple[str, list[str]]:
    """The source of the decode step of `graph`, and the files of kernels that it imports from `package`; nothing, where
    there is no step of the graph.

    What it has in common with the module's source it imports from the Python module `model`.
    """
    if refusal(graph):
        return "", []
    step = lower_step(graph)
    for var in (v for s in step.program.statements for v in s.results if v.name in LAUNCHERS):
        var.name = "y"
    writer = _StepWriter(step.program)
    writer.write(step.method)
    given: dict[str, Any] = {"name": graph.name, "model": model, "classes": list(writer.classes.values())}
    used = names(ast.parse(template("decode.py.j2").render(**given, imports=[], kernels=[], shared=[], parts=[])))
    own = used_parts(used & OWN)
    shared = sorted(n for n in used if (n in library() and n not in OWN) or n in step.program.functions)
    used = used.union({"torch"} if own else (), *(p.uses for p in own))
    called = sorted(used & LAUNCHERS.keys())
    lines = [f"from {package}.{LAUNCHERS[name]} import {name}" for name in called]
    if "Norm" in used:
        lines.append(f"from {package}.norm import Norm")
    text = template("decode.py.j2").render(
        **given, imports=imports(used), kernels=sorted(lines), shared=shared, parts=[p.source for p in own]
    )
    return formatted(text), sorted({LAUNCHERS[name] for name in called})


class _Body(Writer):
    trains = False

    def member(self, path: str) -> str:
        return f"self.{_flat(relative(path, self.method.path), self.modules)}"

    @property
    def modules(self) -> set[str]:
        """The paths of the modules that the method calls."""
        return _called(self.method)


class _StepWriter:
    def __init__(self, program: Program) -> None:
        self.inputs = program.inputs
        self.makers = {v: s for s in program.statements for v in s.results}
        self.names: dict[Hashable, str] = {}
        self.classes: dict[str, Class] = {}

    def write(self, method: Method) -> str:
        """The name of the class of `method`, written where it is new."""
        if method.key in self.names:
            return self.names[method.key]
        inner = {path: self.write(m) for path, m in method.modules.items()}
        top = method.path == TOP
        name = self._fresh("Step" if top else class_name(method.path))
        self.names[method.key] = name
        given = self._given(method) if top else method.inputs
        hidden = None if top else next((v for v in given if isinstance(v, Var) and self._is_hidden(v)), None)
        called, lines = _Body(method, given, hidden, top).write()
        parameters = ["self", *(_parameter(o, n) for o, n in zip(given, called, strict=True))]
        if method.slots and not top:
            parameters.append("cache: Any")
        returns = "Tensor" if len(method.outputs) == 1 else f"tuple[{', '.join(['Tensor'] * len(method.outputs))}]"
        doc = class_doc(method, inner)
        self.classes[name] = Class(name, doc, _init(method, inner), parameters, lines, returns)
        return name

    def _given(self, method: Method) -> list[Var | Held]:
        known = {v.name: v for v in self.inputs}
        more = [v for v in self.inputs if v in method.inputs and v.name not in STEP]
        return [*(known.get(name, Var(name)) for name in STEP), *more]

    def _is_hidden(self, v: Var) -> bool:
        return v in self.makers and (self.makers[v].scope != TOP or v.name == "x")

    def _fresh(self, name: str) -> str:
        found, n = name, 1
        while found in self.classes or found in library():
            n += 1
            found = f"{name}{n}"
        return found


def _parameter(o: Var | Held, name: str) -> str:
    if isinstance(o, Held):
        return f"{name}: Tensor"
    return f"{name}: {o.type}" + (f" = {o.default}" if o.default else "")


def _called(method: Method) -> set[str]:
    paths = (relative(p, method.path) for p in method.holds)
    return {p.removesuffix(".module") for p in paths if p.endswith(".module")}


def _flat(path: str, modules: set[str]) -> str:
    """An attribute for what the model has at `path`; a weight is called like its module, unless that is there too."""
    parts = path.removesuffix(".module").removesuffix(".norm").removesuffix("_weight")
    if parts.removesuffix(".weight") not in modules:
        parts = parts.removesuffix(".weight")
    stem, _, number = parts.rpartition(".")
    return f"{stem.replace('.', '_')}[{number}]" if stem and number.isdigit() else parts.replace(".", "_")


def _init(method: Method, inner: dict[str, str]) -> list[str]:
    modules = _called(method)
    lines = [
        f"self.{_flat(relative(path, method.path), modules)} = {_taken(held, relative(path, method.path))}"
        for path, held in method.holds.items()
    ]
    lists: dict[str, list[str]] = {}
    for path, name in inner.items():
        local = relative(path, method.path)
        stem, _, number = local.rpartition(".")
        if number.isdigit():
            lists.setdefault(stem, []).append(name)
        else:
            lines.append(f"self.{_flat(local, modules)} = {name}({_reach(local)})")
    for stem, kinds in lists.items():
        if len({*kinds}) == 1:
            made = f"[{kinds[0]}(layer) for layer in {_reach(stem)}]"
        else:
            made = f"[kind(layer) for kind, layer in zip({periodic(kinds)}, {_reach(stem)})]"
        lines.append(f"self.{_flat(stem, modules)} = {made}")
    return lines or ["pass"]


def _taken(held: Leaf | Held, path: str) -> str:
    """What an attribute is made of."""
    if isinstance(held, Held):
        return _reach(path)
    kind, _, rest = held.init.partition(":")
    if kind == "pack":
        which, _, parts = rest.partition(":")
        outer = path.rpartition(".")[0]
        places = (_reach(f"{outer}.{p}" if outer else p) for p in parts.split(","))
        return f"{'pack' if which == 'weight' else 'pack_bias'}({', '.join(places)})"
    if kind == "norm":
        which, eps, parts = rest.split(":")
        outer = path.rpartition(".")[0]
        given = "".join(f", {_reach(f'{outer}.{p}')}" for p in parts.split(",") if p)
        return f'Norm("{which}"{given}, eps={eps})'
    return _reach(path.removesuffix(".module"))


def _reach(path: str) -> str:
    text = "module"
    for part in path.split("."):
        text += f"[{part}]" if part.isdigit() else f".{part}"
    return text
