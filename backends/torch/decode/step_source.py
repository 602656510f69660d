"""The source of decode.py: classes of a decode step that read their weights from the modules of model.py."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Any

from weft.ir.graph import Node

from ..codegen.classes import ClassWriter
from ..codegen.docstrings import list_calls
from ..codegen.method_writer import MethodWriter, write_attribute, write_periodic_list
from ..codegen.model_source import format_source, load_template
from ..codegen.structure import Method
from ..codegen.value_names import NamedOperand
from ..lower.lower import LoweredGraph
from ..program.snippets import find_bound_names, find_names, read_library, select_snippets, write_imports
from ..program.statements import ParamRef, Submodule, Var, is_inside, relative_to
from .lower_step import DecodeStep

LAUNCHERS = (  # of kernels, each in a file of its name
    *("conv_step", "decode_attention", "embed_tokens", "latent_decode", "latent_qk", "linear_by_head"),
    *("linear_residual", "matrix_step", "moe_decode", "norm_glu", "norm_linear", "norm_qkv", "norm_route", "route"),
    *("selective_step", "ssd_step"),
)
HELPERS = {
    **{"Codes": "shared.quantized_gemv", "Norm": "shared.norm", "Tickets": "shared.tickets"},
    **{"as_bytes": "shared.float8", "step_in_place": "shared.recurrence"},
}
IN_KERNELS = {  # names that generated kernels use
    **dict.fromkeys(("jit", "start_next", "tl", "wait_for_previous"), "shared.launch"),
    **{"activate": "shared.activation", "softplus": "shared.recurrence"},
}
STEP_SNIPPETS = {  # snippets of steps only, not of models
    *("linear_step", "pack", "pack_bias", "pack_blocks", "step_products"),
    *("update_cache", "update_cache_float8", "update_latent_cache"),
}
STEP_ARGUMENTS = ("input_ids", "position_ids", "cache")  # arguments of every step


def write_step(
    lowered: LoweredGraph, step: DecodeStep | None, model: str = "model", package: str = "kernels"
) -> tuple[str, list[str]]:
    """Return the source of decode.py, and the sorted names of the kernel files that it imports from `package`; both
    empty if `step` is None or calls no kernel. Functions of the model are imported from the Python module `model`."""
    if step is None:
        return "", []
    # A variable with the name of a kernel would hide the kernel.
    for var in (v for s in step.program.statements for v in s.results if v.name in LAUNCHERS):
        var.name = "y"
    writer = _StepWriter(step.program)
    writer.write(step.method)
    fields: dict[str, Any] = {"name": lowered.graph.name, "model": model, "classes": list(writer.classes.values())}
    fields |= {"any_length": step.any_length, "reads_prompts": step.reads_prompts}
    # Rendered once without imports and snippets, to find those that the classes use.
    draft = load_template("decode.py.j2").render(**fields, imports=[], kernels=[], shared=[], parts=[])
    used = find_names(ast.parse(draft))
    new = step.program.functions.keys() - lowered.program.functions.keys()
    functions = {name: text for name, text in step.program.functions.items() if name in used & new}
    used |= find_names(ast.parse("\n".join(functions.values())))
    generated = ast.parse("\n".join(step.kernels.values())).body
    in_kernels = {name for kernel in generated for name in find_names(kernel) - find_bound_names(kernel)}
    snippets = select_snippets(used & STEP_SNIPPETS)
    in_model = {*read_library(), *lowered.program.functions} - STEP_SNIPPETS
    shared = sorted(used & in_model)
    used = used.union(*(p.uses for p in snippets))
    if not used.intersection(LAUNCHERS):
        return "", []
    files = {name: file for name, file in ({n: n for n in LAUNCHERS} | HELPERS).items() if name in used}
    files |= {name: file for name, file in IN_KERNELS.items() if name in in_kernels}
    imported = {file: [name for name, home in files.items() if home == file] for file in files.values()}
    lines = [f"from {package}.{file} import {', '.join(some)}" for file, some in imported.items()]
    text = load_template("decode.py.j2").render(
        **fields,
        imports=write_imports(used),
        kernels=sorted(lines),
        shared=shared,
        parts=[*(p.source for p in snippets), *functions.values(), *step.kernels.values()],
    )
    return format_source(text), sorted({*files.values()})


class _StepMethodWriter(MethodWriter):
    trains = False

    def __init__(self, method: Method, given: list[Var | ParamRef], hidden: Var | None, top: bool) -> None:
        super().__init__(method, given, hidden, top)
        self.attributes = name_attributes(method)

    def member(self, path: str) -> str:
        return f"self.{self.attributes[path]}"


class _StepWriter(ClassWriter):
    top = "Step"
    body = _StepMethodWriter

    def write_init(self, method: Method, inner: Mapping[str, str]) -> list[str]:
        return write_constructor(method, inner)

    def list_described_nodes(self, method: Method) -> list[Node]:
        """Return the model's nodes in the scope of the class of `method`, except nodes of classes that it calls."""
        parts = [call.path for call in list_calls(method)]
        scopes = {n.scope for n in self.nodes if is_inside(f"{n.scope}.", method.path)}
        scopes -= {s for s in scopes for part in parts if is_inside(f"{s}.", part)}
        return [n for n in self.nodes if n.scope in scopes]

    def list_top_parameters(self, method: Method) -> list[NamedOperand]:
        inputs = {v.name: v for v in self.inputs}
        extra = [v for v in self.inputs if v in method.inputs and v.name not in STEP_ARGUMENTS]
        return [*(inputs.get(name, Var(name)) for name in STEP_ARGUMENTS), *extra]

    def write_parameter(self, o: NamedOperand, name: str, top: bool) -> str:
        text = super().write_parameter(o, name, top)
        return f"{text} = {o.default}" if top and isinstance(o, Var) and o.default else text

    def write_cache_parameter(self, method: Method) -> str:
        return "cache: Any"


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
