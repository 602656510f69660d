"""Write the classes of a program, innermost first: the base of the writers of models and decode steps."""

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
from .structure import Method
from .value_names import Named


@dataclass(frozen=True)
class Class:
    """Template data of a class.

    `cache` is the expression that constructs its cache ("" for none), and `cache_type` its annotation.
    """

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
        """Return the source of the parameter `like` of `new_cache`, "" if a weight of the class gives the dtype."""
        return ", like: Tensor" if "like" in re.findall(r"\w+", self.cache) else ""


class ClassWriter(ABC):
    """Writes the classes of a program into `classes` (by name); the class of the whole model is called `top`."""

    top = "Model"
    body: type[Writer] = Writer

    def __init__(self, program: Program) -> None:
        self.inputs, self.nodes, self.functions = program.inputs, program.nodes, program.functions
        self.makers = {v: s for s in program.statements for v in s.results}
        self.names: dict[Hashable, str] = {}
        self.classes: dict[str, Class] = {}

    # -- to override

    @abstractmethod
    def init(self, method: Method, inner: Mapping[str, str]) -> list[str]:
        """Return the lines of ``__init__`` of a class; `inner` maps paths of inner methods to class names."""

    @abstractmethod
    def top_parameters(self, method: Method) -> list[Named]:
        """Return the parameters of the forward of the whole model, in order."""

    @abstractmethod
    def state(self, method: Method) -> str:
        """Return the source of the cache parameter of an inner method that has states."""

    def parameter(self, o: Named, name: str, top: bool) -> str:
        """Return the source of a parameter: `name` and its annotation. `top`: of the whole model's forward."""
        return f"{name}: Tensor" if isinstance(o, ParamRef) else f"{name}: {o.type}"

    def keeps(self, method: Method) -> tuple[str, str]:
        """Return the expression that constructs a class's cache, and its type; ("", "") without a cache."""
        return "", ""

    def described_nodes(self, method: Method) -> list[Node]:
        """Return the nodes that the docstring of the class describes: those whose statements are in `method` itself."""
        return own_nodes(method)

    # -- writing

    def write(self, method: Method) -> str:
        """Return the name of the class of `method`; a new one is added to `classes` after those of inner methods."""
        if not self.names:
            self.names = class_names(method, self.top, self.nodes, {*library(), *IMPORTS, *keyword.kwlist})
        name = self.names[method.key]
        if name in self.classes:
            return name
        inner = {path: self.write(m) for path, m in method.modules.items()}
        top = method.path == TOP
        inputs = self.top_parameters(method) if top else method.inputs
        hidden = None if top else next((v for v in inputs if isinstance(v, Var) and self._is_hidden(v)), None)
        names, lines = self.body(method, inputs, hidden, top).write(self.functions)
        parameters = ["self", *(self.parameter(o, n, top) for o, n in zip(inputs, names, strict=True))]
        if method.slots and not top:
            parameters.append(self.state(method))
        types = [o.type if isinstance(o, Var) else "Tensor" for o in method.outputs]
        returns = types[0] if len(types) == 1 else f"tuple[{', '.join(types)}]"
        constants = top and any(isinstance(h, ParamRef) and h.constant for m in method.walk() for h in m.holds.values())
        doc = class_doc(method, inner, self.described_nodes(method))
        init, cache = self.init(method, inner), self.keeps(method)
        self.classes[name] = Class(name, doc, init, parameters, lines, returns, *cache, constants)
        return name

    def _is_hidden(self, v: Var) -> bool:
        """Return whether `v` is a float tensor that layers compute and pass on: the hidden state, called `stream`."""
        if v not in self.makers or v.type != "Tensor":
            return False
        maker = self.makers[v]
        floats = maker.node is None or maker.node.output.type.dtype.is_float
        return floats and not maker.early and (maker.scope != TOP or maker.node is not None)
