"""Graph, Node, Value, Param: flat SSA with use lists.

A `Graph` owns an ordered list of `Node`s; a node applies an `Op` to `Value`s and defines new ones. A `Param` is a value
whose bytes come from a recipe. Hierarchy is a string on the node, its `scope` ("layers.3.attn").

Every value has a list of its uses, which the methods of `Graph` and `Node` keep up to date. A graph may be edited
during iteration over ``graph.nodes`` (see the module `linked`).
"""

from __future__ import annotations

import contextlib
import json
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from ..display import Displayable
from ..errors import WeftError
from ..recipes import Recipe
from ..recipes.readers import EMPTY, TensorReader
from ..recipes.spelling import spell, spell_recipe
from ..schema.op_schema import Cost, OpSchema
from ..types import TensorType
from .linked import LinkedElement, LinkedList
from .operators import Operators

if TYPE_CHECKING:
    import networkx as nx


@dataclass(frozen=True)
class Origin:
    """The origin of the nodes of a scope: the DSL `module` that emitted them.

    The repr of `module` is its constructor call, which is in `file` at `line` (None if unknown).
    """

    module: object
    file: str | None = None
    line: int | None = None


V = TypeVar("V")


class Outputs(UserDict[str, V], Generic[V]):
    """The outputs of a graph: values by output name, in order of insertion; `names_of` takes constant time."""

    def __init__(self) -> None:
        self._names: dict[V, dict[str, None]] = {}
        super().__init__()

    def names_of(self, value: V) -> tuple[str, ...]:
        """Return all names under which `value` is an output, in order; () if it is not an output."""
        return tuple(self._names.get(value, ()))

    def __setitem__(self, name: str, value: V) -> None:
        if name in self.data:
            self._forget(name)
        self.data[name] = value
        self._names.setdefault(value, {})[name] = None

    def __delitem__(self, name: str) -> None:
        self._forget(name)
        del self.data[name]

    def _forget(self, name: str) -> None:
        names = self._names[self.data[name]]
        del names[name]
        if not names:
            del self._names[self.data[name]]


AttrValue = Any  # int | float | bool | str | DType | Size | tuple of them | None: values that the text form can spell


class Value(Operators["Value"]):
    """A tensor in the graph: a graph input, a parameter, or an output of a node.

    A node's output has the node as `producer` and its position as `index`. ``x * 2 + y`` emits ops (see `operators`).
    Code that assigns `type` must keep the graph well typed, as `verify` checks.
    """

    __slots__ = ("_uses", "graph", "index", "name", "producer", "type")

    def __init__(self, graph: Graph, name: str, type: TensorType, producer: Node | None = None, index: int = 0) -> None:
        self.graph, self.name, self.type = graph, name, type
        self.producer, self.index = producer, index
        self._uses: dict[tuple[Node, int], None] = {}  # an ordered set: rewrites must not depend on hashes

    def __repr__(self) -> str:
        return f"%{self.name}: {self.type}"

    def __emit__(
        self,
        op: OpSchema[Any],
        operands: Sequence[Value | None],
        attrs: Mapping[str, AttrValue],
        name: str | Sequence[str] | None,
    ) -> tuple[Value, ...]:
        """Insert a node of `op` at the insertion point and return its outputs; `name` as in `OpSchema.emit`."""
        full = op.check_attrs(attrs)
        types = op.types([None if v is None else v.type for v in operands], full)
        hints = [name] * len(types) if isinstance(name, str) else name or op.default_output_names(len(types), full)
        prefix = self.graph.insertion_scope
        names = [f"{prefix}.{hint}" if prefix else hint for hint in hints]
        assert isinstance(op, Op)
        return self.graph.add_node(op, operands, full, types, names).outputs

    @property
    def uses(self) -> tuple[tuple[Node, int], ...]:
        """(node, operand index) of every use, in the order in which the uses were added. Graph outputs are not uses."""
        return tuple(self._uses)

    @property
    def users(self) -> tuple[Node, ...]:
        """The nodes that read this value, each once, in the order of `uses`."""
        return tuple(dict.fromkeys(node for node, _ in self._uses))

    @property
    def is_output(self) -> bool:
        return bool(self.graph.outputs.names_of(self))

    @property
    def shape(self) -> tuple[Any, ...]:
        return self.type.shape

    @property
    def width(self) -> int:
        """Size of the last axis, which must be an integer: WeftError if it is symbolic."""
        size = self.type.shape[-1]
        if not isinstance(size, int):
            raise WeftError(f"{self!r} has no fixed width: the size of its last axis must be an integer")
        return size

    def replace_uses(self, new: Value, keep: Iterable[Node] = ()) -> None:
        """Make every node that reads this value, except those in `keep`, and every graph output read `new` instead."""
        keys = set(keep)
        for node, i in self.uses:
            if node not in keys:
                node.set_input(i, new)
        for name in self.graph.outputs.names_of(self):
            self.graph.outputs[name] = new


class Param(Value):
    """A weight: a value whose elements come from `recipe`. Passes do not change a recipe, they derive a new one."""

    __slots__ = ("__weakref__", "recipe")

    def __init__(self, graph: Graph, name: str, type: TensorType, recipe: Recipe) -> None:
        super().__init__(graph, name, type)
        self.recipe = recipe


class Op(OpSchema[Value]):
    """One operation on values: its schema, and methods on nodes that apply it."""

    def node_cost(self, node: Node) -> Cost:
        """Return the cost of `node`, which applies this op: the declared cost, or the default of `cost_of`."""
        operands = [None if v is None else v.type for v in node.inputs]
        return self.cost_of(operands, [v.type for v in node.outputs], node.attrs)

    def expand(self, node: Node) -> tuple[Value, ...]:
        """Insert the body of this op for the operands of `node`; return one value per output. `node` itself stays."""
        return self.emit_body(node.inputs, node.attrs)


class Node(LinkedElement):
    """One application of `op` to `inputs`; an absent one is None, or missing at the end. `attrs` includes defaults."""

    __slots__ = ("attrs", "graph", "inputs", "op", "outputs", "scope")

    def __init__(
        self, graph: Graph, op: Op, inputs: Sequence[Value | None], attrs: Mapping[str, AttrValue], scope: str
    ):
        super().__init__()
        self.graph, self.op, self.scope = graph, op, scope
        self.inputs: tuple[Value | None, ...] = tuple(inputs)
        self.attrs: dict[str, AttrValue] = dict(attrs)
        self.outputs: tuple[Value, ...] = ()

    def __repr__(self) -> str:
        args = ", ".join("_" if v is None else f"%{v.name}" for v in self.inputs)
        return f"{self.op.name}({args}) in {self.scope or 'the top scope'}"

    def __str__(self) -> str:
        """Return the line of the text form: outputs with types, op, operands, and attributes that are not defaults."""

        cut = len(self.scope)
        inside = f"{self.scope}." if cut else ""

        def ref(v: Value | None) -> str:
            if v is None:
                return "_"
            return f"%{v.name[cut:]}" if cut and v.name.startswith(inside) else f"%{v.name}"

        outputs = ", ".join(f"{ref(v)}: {v.type}" for v in self.outputs)
        args = [ref(v) for v in self.inputs]
        args += [f"{k}={spell(v)}" for k, v in self.attrs.items() if self.op.attrs[k].default != v]
        return f"{outputs} = {self.op.name}({', '.join(args)})"

    @property
    def output(self) -> Value:
        return self.outputs[0]

    def operand(self, name: str) -> Value | None:
        """Return the operand called `name` in the signature of the op (KeyError if it has none); None if absent."""
        i = self.op.operand_index(name, self.attrs)
        return self.inputs[i] if i < len(self.inputs) else None

    def required_operand(self, name: str) -> Value:
        """Return the operand called `name`, which must be present: its absence is an AssertionError."""
        value = self.operand(name)
        assert value is not None, name
        return value

    def set_input(self, index: int, value: Value | None) -> None:
        """Make `value` (None: absent) the operand at `index` and update use lists; drop absent operands at the end."""
        old = self.inputs[index]
        if old is value:
            return
        if old is not None:
            del old._uses[self, index]
        if value is not None:
            self.graph._check_owned(value)
            value._uses[self, index] = None
        inputs = [*self.inputs[:index], value, *self.inputs[index + 1 :]]
        while inputs and inputs[-1] is None:
            inputs.pop()
        self.inputs = tuple(inputs)


class Graph(Displayable):
    """A computation: ordered `inputs` and `outputs` by name, `params` by name, `nodes` in execution order.

    `meta` has metadata of the model (kind, special tokens, …) as JSON values. `reader` reads the checkpoint tensors of
    `Source` recipes. `tokenize` maps strings to lists of token ids (None without a tokenizer). `origins` maps scopes to
    the modules that emitted them, where known. Graphs are equal if their text forms, which include `meta`, are equal.
    """

    def __init__(self, name: str = "model", reader: TensorReader = EMPTY) -> None:
        self.name, self.reader = name, reader
        self.tokenize: Callable[[Sequence[str]], list[list[int]]] | None = None
        self.origins: dict[str, Origin] = {}
        self.meta: dict[str, AttrValue] = {}
        self.inputs: dict[str, Value] = {}
        self.outputs: Outputs[Value] = Outputs()
        self.params: dict[str, Param] = {}
        self._names: dict[str, int] = {}
        self.nodes: LinkedList[Node] = LinkedList()  # in execution order
        self._anchor: Node | None = None  # new nodes go before it; None means at the end
        self.insertion_scope = ""  # the scope of nodes that are inserted now

    def __len__(self) -> int:
        return len(self.nodes)

    def __str__(self) -> str:
        """Return the text form that `weft.ir.text` describes, with a newline at the end."""
        lines = [f"graph {self.name} {{", *(f"  meta {k} = {json.dumps(v)}" for k, v in self.meta.items())]
        for name, v in self.inputs.items():
            lines.append(f"  input %{v.name}: {v.type}" + ("" if name == v.name else f" as {name}"))
        lines += [f"  param %{p.name}: {p.type} = {spell_recipe(p.recipe)}" for p in self.params.values()]
        scope = ""
        for node in self.nodes:
            if node.scope != scope:
                scope = node.scope
                lines.append(f"  scope {scope or '_'}")
            indent = "\n    " if scope else "\n  "
            lines.append((indent + str(node).replace("\n", indent))[1:])
        lines += [f"  output {name} = %{v.name}" for name, v in self.outputs.items()]
        return "\n".join([*lines, "}"]) + "\n"

    def __eq__(self, other: object) -> bool:
        return str(self) == str(other) if isinstance(other, Graph) else NotImplemented

    __hash__ = object.__hash__  # a class with __eq__ would otherwise be unhashable

    # -- names and scopes

    def reserve_name(self, hint: str) -> str:
        """Reserve a value name that is not in use and return it: `hint`, or else `hint_2`, `hint_3`, …"""
        name = hint
        while name in self._names:
            self._names[hint] += 1
            name = f"{hint}_{self._names[hint]}"
        self._names[name] = 1
        return name

    @contextlib.contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Return a context in which new nodes are in the scope `name` within the current one; "" changes nothing."""
        outer = self.insertion_scope
        self.insertion_scope = f"{outer}.{name}" if outer and name else outer or name
        try:
            yield
        finally:
            self.insertion_scope = outer

    @contextlib.contextmanager
    def inserting(self, *, before: Node | None = None, after: Node | None = None) -> Iterator[None]:
        """Return a context in which new nodes are inserted before, or after, the given node (pass one of them), with
        the scope of that node."""
        node = before or after
        assert node is not None and node.graph is self
        outer = self._anchor, self.insertion_scope
        self._anchor, self.insertion_scope = (before or node._next), node.scope
        try:
            yield
        finally:
            self._anchor, self.insertion_scope = outer

    # -- building

    def add_input(self, name: str, type: TensorType, value_name: str | None = None) -> Value:
        """Add the graph input `name` and return its value, called `value_name` or by default `name`; raise WeftError if
        the graph already has such an input."""
        if name in self.inputs:
            raise WeftError(f"graph {self.name} already has an input {name!r}")
        value = Value(self, self.reserve_name(value_name or name), type)
        self.inputs[name] = value
        return value

    def add_param(self, name: str, type: TensorType, recipe: Recipe) -> Param:
        """Add and return a parameter with elements from `recipe`; append a number to `name` if that is in use."""
        unique = self.reserve_name(name)
        self.params[unique] = Param(self, unique, type, recipe)
        return self.params[unique]

    def add_output(self, name: str, value: Value) -> None:
        """Make `value` the graph output called `name`; raise WeftError if the graph already has such an output."""
        self._check_owned(value)
        if name in self.outputs:
            raise WeftError(f"graph {self.name} already has an output {name!r}")
        self.outputs[name] = value

    def add_node(
        self,
        op: Op,
        inputs: Sequence[Value | None],
        attrs: Mapping[str, AttrValue],
        types: Sequence[TensorType],
        names: Sequence[str],
        scope: str | None = None,
    ) -> Node:
        """Insert a node at the insertion point and return it. Its outputs have `types` and `names`.

        Types and attributes are not checked. `scope` defaults to the insertion scope. A name in use gets a number
        appended. ValueError if an operand belongs to another graph or was erased.
        """
        node = Node(self, op, inputs, attrs, self.insertion_scope if scope is None else scope)
        node.outputs = tuple(
            Value(self, self.reserve_name(n), t, node, i) for i, (n, t) in enumerate(zip(names, types, strict=True))
        )
        for i, value in enumerate(node.inputs):
            if value is not None:
                self._check_owned(value)
                value._uses[node, i] = None
        self.nodes.insert(node, self._anchor)
        return node

    def copy_node(self, node: Node, mapped: dict[Value, Value], names: Sequence[str], scope: str = "") -> None:
        """Insert a copy of `node`, which belongs to another graph, with output names `names`. `mapped` maps values of
        that graph to values of this one: it must have the operands of `node`, and its outputs are added to it."""
        operands = [None if v is None else mapped[v] for v in node.inputs]
        copy = self.add_node(node.op, operands, node.attrs, [v.type for v in node.outputs], names, scope)
        mapped.update(zip(node.outputs, copy.outputs, strict=True))

    def _check_owned(self, value: Value) -> None:
        if value.graph is not self:
            raise ValueError(f"value {value!r} belongs to another graph")
        if value.producer is not None and value.producer.erased:
            raise ValueError(f"value {value!r} was erased")

    def release_name(self, value: Value) -> None:
        """Allow the name of `value`, which is no longer part of the graph, to be used again."""
        self._names.pop(value.name, None)

    # -- erasing and replacing

    def erase(self, node: Node) -> None:
        """Remove `node`; the names of its outputs stay reserved. ValueError if one of its outputs is in use."""
        for value in node.outputs:
            if value._uses or value.is_output:
                raise ValueError(f"cannot erase {node!r}: {value!r} is still in use")
        for i, operand in enumerate(node.inputs):
            if operand is not None:
                del operand._uses[node, i]
        self.nodes.remove(node)

    def erase_param(self, param: Param) -> None:
        """Remove `param` and allow its name to be used again; raise ValueError if a node or output reads it."""
        if param._uses or param.is_output:
            raise ValueError(f"cannot erase parameter {param!r}: still in use")
        del self.params[param.name], self._names[param.name]

    def replace(self, node: Node, *new: Value) -> None:
        """Erase `node`; its readers and graph outputs use ``new[i]`` in place of its output i. If a node computes
        ``new[i]``, the two values swap names."""
        for old, value in zip(node.outputs, new, strict=True):
            old.replace_uses(value)
            if value.producer is not None and not value.producer.erased:
                old.name, value.name = value.name, old.name
        self.erase(node)

    def clone(self, recipes: Mapping[str, Recipe] | None = None) -> Graph:
        """Return an independent copy that shares ops, reader and tokenizer; `recipes` maps parameter names to new
        recipes."""
        clone = Graph(self.name, self.reader)
        clone.tokenize, clone.meta, clone.origins = self.tokenize, dict(self.meta), dict(self.origins)
        mapped: dict[Value, Value] = {}
        for name, v in self.inputs.items():
            mapped[v] = clone.add_input(name, v.type, v.name)
        for p in self.params.values():
            mapped[p] = clone.add_param(p.name, p.type, (recipes or {}).get(p.name, p.recipe))
        for node in self.nodes:
            clone.copy_node(node, mapped, [v.name for v in node.outputs], node.scope)
        for name, v in self.outputs.items():
            clone.add_output(name, mapped[v])
        clone._names = dict(self._names)  # fresh names go on as in the original
        return clone

    def to_networkx(self) -> nx.MultiDiGraph:
        """Return a multigraph for analysis, with an edge from producer to reader for each operand and graph output.

        Vertices are `Node`s, input and parameter `Value`s, and output names (str). Each has `kind` (node, input, param
        or output) and `label`; a `Node` also has `scope`. An edge has `value` and the operand's `index` (0 for a graph
        output).
        """
        import networkx as nx  # the import takes a fifth of a second

        view: nx.MultiDiGraph = nx.MultiDiGraph(name=self.name)
        for v in self.inputs.values():
            view.add_node(v, kind="input", label=v.name)
        for p in self.params.values():
            view.add_node(p, kind="param", label=p.name)
        for node in self.nodes:
            view.add_node(node, kind="node", label=node.op.name, scope=node.scope)
            for i, operand in enumerate(node.inputs):
                if operand is not None:
                    view.add_edge(operand.producer or operand, node, value=operand, index=i)
        for name, value in self.outputs.items():
            view.add_node(name, kind="output", label=name)
            view.add_edge(value.producer or value, name, value=value, index=0)
        return view
