"""The text of decode.py: the classes of a decode step, which take their weights from the modules of model.py."""

from __future__ import annotations

import ast
from collections.abc import Hashable
from typing import Any

from weft.ir.graph import Graph

from ..about import class_doc, class_name
from ..body import Writer
from ..library import imports, library, names, used_parts
from ..program import TOP, Held, Program, Var
from ..source import Class, formatted, template
from ..structure import Method
from .lowering import lower_step, refusal
from .members import attributes, constructor

LAUNCHERS = {  # what a step calls, and the files of these kernels
    **{name: name for name in ("conv_step", "decode_attention", "latent_decode", "linear_residual", "moe_decode")},
    **{name: name for name in ("norm_glu", "norm_linear", "norm_qkv", "route")},
    **{"selective_step": "selective_scan", "ssd_step": "ssd"},
}
HELPERS = {"Norm": "norm", "Tickets": "tickets"}
OWN = {"pack", "pack_bias", "written", "written_latent"}  # parts that steps have, and models have not
STEP = ("input_ids", "position_ids", "cache")  # what every step is given


def write_step(graph: Graph, model: str = "model", package: str = "kernels") -> tuple[str, list[str]]:
    """The source of the decode step of `graph`, and the files of kernels that it imports from `package`; nothing, where
    there is no step of the graph, or none of its kernels would be called.

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
    used = used.union(*(p.uses for p in own))
    if not used & LAUNCHERS.keys():
        return "", []
    files = {name: file for name, file in (LAUNCHERS | HELPERS).items() if name in used}
    lines = [f"from {package}.{file} import {name}" for name, file in files.items()]
    text = template("decode.py.j2").render(
        **given, imports=imports(used), kernels=sorted(lines), shared=shared, parts=[p.source for p in own]
    )
    return formatted(text), sorted({*files.values()})


class _Body(Writer):
    trains = False

    def __init__(self, method: Method, given: list[Var | Held], hidden: Var | None, top: bool) -> None:
        super().__init__(method, given, hidden, top)
        self.attributes = attributes(method)

    def member(self, path: str) -> str:
        return f"self.{self.attributes[path]}"


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
        name = self._fresh("Step" if top else class_name(method))
        self.names[method.key] = name
        given = self._given(method) if top else method.inputs
        hidden = None if top else next((v for v in given if isinstance(v, Var) and self._is_hidden(v)), None)
        called, lines = _Body(method, given, hidden, top).write()
        parameters = ["self", *(_parameter(o, n) for o, n in zip(given, called, strict=True))]
        if method.slots and not top:
            parameters.append("cache: Any")
        returns = "Tensor" if len(method.outputs) == 1 else f"tuple[{', '.join(['Tensor'] * len(method.outputs))}]"
        doc = class_doc(method, inner)
        self.classes[name] = Class(name, doc, constructor(method, inner), parameters, lines, returns)
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
