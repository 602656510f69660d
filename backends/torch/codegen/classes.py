"""Write the classes of a program, innermost first: the base of the writers for models and for decode steps."""

from __future__ import annotations

import keyword
import re
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from weft.ir.graph import Node

from ..program.snippets import IMPORTS, read_library
from ..program.statements import TOP, ParamRef, Program, Var
from .class_names import list_own_nodes, name_classes
from .docstrings import write_class_doc
from .method_writer import MethodWriter
from .structure import Method
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
