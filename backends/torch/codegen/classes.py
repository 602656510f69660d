"""The classes of a program, innermost first: what models and their decode steps have in common."""

from __future__ import annotations

import keyword
import re
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from weft.ir.graph import Node

from ..program.snippets import IMPORTS, library
from ..program.statements import TOP, ParamRef, Program, Var
from .class_names import class_names, own_nodes
from .docstrings import class_doc
from .method_writer import Writer
from .naming import Named
from .structure import Method


@dataclass(frozen=True)
class Class:
    """Template data of a class; `cache` is the text that makes its cache, of type `cache_type`."""

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
        """Return whether its forward supports activation checkpointing."""
        return any("self.checkpointing" in line for line in self.lines)

    @property
    def like(self) -> str:
        """The parameter of `new_cache` that has the dtype of the model, where the class has no such weight."""
        return ", like: Tensor" if "like" in re.findall(r"\w+", self.cache) else ""


class ClassWriter(ABC):
    """Writes the classes of a program: by the name of each in `classes`, that of the whole is called `top`."""

    top = "Model"
    body: type[Writer] = Writer

    def __init__(self, program: Program) -> None:
        self.inputs, self.nodes, self.functions = program.inputs, program.nodes, program.functions
        self.makers = {v: s for s in program.statements for v in s.results}
        self.names: dict[Hashable, str] = {}
        self.classes: dict[str, Class] = {}  # written

    # -- what kinds of classes differ in

    @abstractmethod
    def init(self, method: Method, inner: Mapping[str, str]) -> list[str]:
        """The lines that make what the class holds; `inner` are the classes of inner methods by path."""

    @abstractmethod
    def given(self, method: Method) -> list[Named]:
        """The parameters of the method of the whole model."""

    @abstractmethod
    def state(self, method: Method) -> str:
        """The parameter of an inner method that keeps something."""

    def parameter(self, o: Named, name: str, top: bool) -> str:
        """A parameter with its annotation and default."""
        return f"{name}: Tensor" if isinstance(o, ParamRef) else f"{name}: {o.type}"

    def keeps(self, method: Method) -> tuple[str, str]:
        """The text that makes what calls of the class keep, and its type."""
        return "", ""

    def own(self, method: Method) -> list[Node]:
        """The nodes that the class of `method` is to be described by: those that it computes itself."""
        return own_nodes(method)

    # -- writing

    def write(self, method: Method) -> str:
        """The name of the class of `method`, which is written where it is new, behind those of inner methods."""
        if not self.names:
            self.names = class_names(method, self.top, self.nodes, {*library(), *IMPORTS, *keyword.kwlist})
        name = self.names[method.key]
        if name in self.classes:
            return name
        inner = {path: self.write(m) for path, m in method.modules.items()}
        top = method.path == TOP
        given = self.given(method) if top else method.inputs
        hidden = None if top else next((v for v in given if isinstance(v, Var) and self._is_hidden(v)), None)
        called, lines = self.body(method, given, hidden, top).write(self.functions)
        parameters = ["self", *(self.parameter(o, n, top) for o, n in zip(given, called, strict=True))]
        if method.slots and not top:
            parameters.append(self.state(method))
        types = [o.type if isinstance(o, Var) else "Tensor" for o in method.outputs]
        returns = types[0] if len(types) == 1 else f"tuple[{', '.join(types)}]"
        constants = top and any(isinstance(h, ParamRef) and h.constant for m in method.walk() for h in m.holds.values())
        doc = class_doc(method, inner, self.own(method))
        init, cache = self.init(method, inner), self.keeps(method)
        self.classes[name] = Class(name, doc, init, parameters, lines, returns, *cache, constants)
        return name

    def _is_hidden(self, v: Var) -> bool:
        """Return whether `v` is a hidden state on its way through the layers: an expert calls it x."""
        if v not in self.makers or v.type != "Tensor":
            return False
        maker = self.makers[v]
        floats = maker.node is None or maker.node.output.type.dtype.is_float
        return floats and not maker.early and (maker.scope != TOP or maker.node is not None)
