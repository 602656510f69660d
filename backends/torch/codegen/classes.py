"""Write the classes of a program, innermost first, and their constructors: the base of the writers for models and for
decode steps.
"""

from __future__ import annotations

import keyword
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.ir.graph import Node

from ..program.snippets import IMPORTS, read_library
from ..program.statements import TOP, ParamRef, Program, Statement, Submodule, Var, relative_to
from .docstrings import list_own_nodes, name_classes, write_class_doc
from .method_writer import MethodWriter, write_attribute, write_periodic_list
from .structure import Method, ModuleCall
from .value_names import NamedOperand


@dataclass(frozen=True)
class ClassSource:
    """A generated class, as a template needs it. `init` and `lines` are the lines of ``__init__`` and of the forward,
    whose parameters and return type are `parameters` and `returns`. `cache` is the expression that constructs the cache
    ("" for none), and `cache_type` its annotation. `constants`: it is the whole model, with constant tables."""

    name: str
    doc: str
    init: list[str]
    parameters: list[str]
    lines: list[str]
    returns: str
    cache: str = ""
    cache_type: str = ""
    constants: bool = False

    @property
    def checkpointing(self) -> bool:
        """Return whether the forward supports activation checkpointing."""
        return any("self.checkpointing" in line for line in self.lines)

    @property
    def like(self) -> str:
        """Return the source of `new_cache`'s extra parameter `like`; "" if a weight of the class gives the dtype."""
        return ", like: Tensor" if "like" in re.findall(r"\w+", self.cache) else ""


class ClassWriter(ABC):
    """Writes the classes of a program into the dictionary `classes`, keyed by name. `top` is the name of the whole
    model's class; `body` is the type of the writer of a method."""

    top = "Model"
    body: type[MethodWriter] = MethodWriter

    def __init__(self, program: Program) -> None:
        self.inputs, self.nodes, self.functions = program.inputs, program.nodes, program.functions
        self.producers = {v: s for s in program.statements for v in s.results}
        self.names: dict[Hashable, str] = {}
        self.classes: dict[str, ClassSource] = {}

    # -- to override

    @abstractmethod
    def write_init(self, method: Method, inner: Mapping[str, str]) -> list[str]:
        """Return the lines of ``__init__`` of a class; `inner` maps paths of inner methods to class names."""

    @abstractmethod
    def list_top_parameters(self, method: Method) -> list[NamedOperand]:
        """Return the parameters of the forward of the whole model, in order."""

    @abstractmethod
    def write_cache_parameter(self, method: Method) -> str:
        """Return the source of the parameter through which the method of an inner module receives its cache."""

    def write_parameter(self, o: NamedOperand, name: str, top: bool) -> str:
        """Return the source of a parameter: `name` and its annotation. `top`: the method is the model's forward."""
        return f"{name}: Tensor" if isinstance(o, ParamRef) else f"{name}: {o.type}"

    def write_cache(self, method: Method) -> tuple[str, str]:
        """Return the expression that constructs the cache of a class, and its type; by default ("", "") for none."""
        return "", ""

    def list_described_nodes(self, method: Method) -> list[Node]:
        """Return the nodes that the docstring of the class describes: by default those computed in `method` itself."""
        return list_own_nodes(method)

    # -- writing

    def write(self, method: Method) -> str:
        """Return the class name of `method`; if `classes` lacks it, add the class, after classes of inner methods."""
        if not self.names:
            self.names = name_classes(method, self.top, self.nodes, {*read_library(), *IMPORTS, *keyword.kwlist})
        name = self.names[method.key]
        if name in self.classes:
            return name
        inner = {path: self.write(m) for path, m in method.modules.items()}
        top = method.path == TOP
        inputs = self.list_top_parameters(method) if top else method.inputs
        hidden = None if top else next((v for v in inputs if isinstance(v, Var) and self._is_hidden(v)), None)
        names, lines = self.body(method, inputs, hidden, top).write(self.functions)
        parameters = ["self", *(self.write_parameter(o, n, top) for o, n in zip(inputs, names, strict=True))]
        if method.slots and not top:
            parameters.append(self.write_cache_parameter(method))
        types = [o.type if isinstance(o, Var) else "Tensor" for o in method.outputs]
        returns = types[0] if len(types) == 1 else f"tuple[{', '.join(types)}]"
        members = (member for m in method.walk() for member in m.members.values())
        constants = top and any(isinstance(member, ParamRef) and member.constant for member in members)
        doc = write_class_doc(method, inner, self.list_described_nodes(method))
        init, cache = self.write_init(method, inner), self.write_cache(method)
        self.classes[name] = ClassSource(name, doc, init, parameters, lines, returns, *cache, constants)
        return name

    def _is_hidden(self, v: Var) -> bool:
        """Return whether `v` is a hidden state: a computed float tensor that is not hoisted before the layers."""
        if v not in self.producers or v.type != "Tensor":
            return False
        maker = self.producers[v]
        floats = maker.node is None or maker.node.output.type.dtype.is_float
        return floats and not maker.early and (maker.scope != TOP or maker.node is not None)


class Constructor:
    """Writes the lines of ``__init__`` that construct the modules, parameters and buffers of a class."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    # -- to override

    def construct(self, place: str, name: str) -> str:
        """Return the expression that constructs a module of the class `name`; `place` is its path in this class."""
        return f"{name}()"

    def construct_list(self, place: str, names: Sequence[str]) -> str:
        """Return the expression that constructs a ModuleList of the classes `names` in order; `place` is its path."""
        if len({*names}) == 1:
            return f"nn.ModuleList({names[0]}() for _ in range({len(names)}))"
        return f"nn.ModuleList(kind() for kind in {write_periodic_list([*names])})"

    # -- writing

    def write(self, method: Method, inner: Mapping[str, str], tables: Collection[str]) -> list[str]:
        """Return the lines of ``__init__`` of the class of `method`, with members in order of first use. `inner` maps
        paths of modules to class names; `tables` are paths of weights to construct as ``nn.Embedding``."""
        tree: dict[str, Any] = {}
        entries: dict[str, str | Submodule | ParamRef] = {
            relative_to(p, method.path): name for p, name in inner.items()
        }
        for path, member in method.members.items():
            local = relative_to(path, method.path)
            home = local.removesuffix(".weight")
            if path in tables and isinstance(member, ParamRef) and home not in (local, *entries):
                local = home
                member = Submodule(local, f"nn.Embedding({', '.join(map(str, member.shape))})", ("weight",))
            entries[local] = member
        order = _rank_members(method)
        for path, entry in sorted(entries.items(), key=lambda e: order.get(e[0], len(order))):
            *outer, last = path.split(".")
            node = tree
            for part in outer:
                inner_node = node.setdefault(part, {})
                if not isinstance(inner_node, dict):  # a module that gets another member
                    node[part] = inner_node = {"": inner_node}
                node = inner_node
            if isinstance(node.get(last), dict):
                node[last][""] = entry
            else:
                node[last] = entry
        self._assign_members("self", "", tree)
        return self.lines

    def _assign_members(self, base: str, path: str, tree: dict[str, Any]) -> None:
        """Append the lines that construct the members of the module at `path`, whose source is `base`. `tree` maps each
        name to a class name, a `Submodule`, a `ParamRef`, or a dictionary of inner members."""
        for name, entry in tree.items():
            place, local = write_attribute(base, name), f"{path}.{name}" if path else name
            if isinstance(entry, ParamRef):
                if entry.constant:
                    self.lines.append(f'{base}.register_buffer("{name}", {_write_empty(entry)})')
                else:
                    self.lines.append(f"{place} = {_write_parameter(entry)}")
            elif isinstance(entry, (Submodule, str)):
                self.lines.append(f"{place} = {self._construct_entry(local, entry)}")
            elif all(k.isdigit() for k in entry):
                self._assign_list(place, local, entry)
            else:
                self.lines.append(f"{place} = {self._construct_entry(local, entry.pop('', None))}")
                self._assign_members(place, local, entry)

    def _construct_entry(self, path: str, entry: Any) -> str:
        if isinstance(entry, Submodule):
            return entry.init
        return self.construct(path, entry) if isinstance(entry, str) else "nn.Module()"

    def _assign_list(self, place: str, path: str, entries: dict[str, Any]) -> None:
        """Append lines that construct the list at `path` with source `place`; `entries`: index to member."""
        count = max(int(k) for k in entries) + 1
        items = [entries.get(str(i)) for i in range(count)]
        params = [i for i in items if isinstance(i, ParamRef)]
        if len(params) == count:
            self.lines.append(f"{place} = nn.ParameterList([{', '.join(map(_write_parameter, params))}])")
        elif any(isinstance(i, Submodule) for i in items):
            kinds = [self._construct_entry(f"{path}.{n}", i) for n, i in enumerate(items)]
            self.lines.append(f"{place} = nn.ModuleList([{', '.join(kinds)}])")
        else:
            names = [i if isinstance(i, str) else "nn.Module" for i in items]
            self.lines.append(f"{place} = {self.construct_list(path, names)}")
        for i, item in enumerate(items):
            if isinstance(item, dict):
                self._assign_members(f"{place}[{i}]", f"{path}.{i}", item)


def write_constructor(method: Method, inner: Mapping[str, str], tables: Collection[str]) -> list[str]:
    """Return the lines of ``__init__`` of the class of `method` (see `Constructor.write`), or ``pass`` for none."""
    return Constructor().write(method, inner, tables) or ["pass"]


def _rank_members(method: Method) -> dict[str, int]:
    """Map the relative path of each member to its rank in order of first use."""
    order: dict[str, int] = {}
    for item in method.items:
        members = item.operands if isinstance(item, Statement) else item.calls
        for member in (m for m in members if isinstance(m, (ModuleCall, Submodule, ParamRef))):
            order.setdefault(relative_to(member.path, method.path), len(order))
    return order


def _write_parameter(param: ParamRef) -> str:
    return f"nn.Parameter({_write_empty(param)})"


def _write_empty(param: ParamRef) -> str:
    shape = ", ".join(map(str, param.shape)) or "()"
    return f"torch.empty({shape}{f', dtype={param.dtype}' if param.dtype else ''})"
