"""Graph, Node, Value, Param: flat SSA with use lists.

A `Graph` owns an ordered list of `Node`s; a node applies an `Op` to `Value`s and defines new ones. A `Param` is a value
whose bytes come from a recipe. Hierarchy is a string on the node, its `scope` ("layers.3.attn").

The graph keeps the uses of every value: they change only through `Graph` and `Node` methods and cannot go stale.
Walking ``graph.nodes`` while editing is defined: nodes inserted after the current one are visited, those inserted
before are not, and erasing any node, the current one included, is safe.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from ..errors import WeftError
from ..recipes.readers import EMPTY, Archive
from ..recipes.recipe import Recipe
from ..types import TensorType
from .operators import Operators
from .origins import Origin
from .outputs import Outputs

if TYPE_CHECKING:
    import networkx as nx

    from ..schema.op import Op

AttrValue = Any  # int | float | bool | str | DType | Size | tuple of those | None: what text can spell


class Value(Operators):
    """A tensor in the graph: a graph input, a parameter, or an output of a node.

    ``x * 2 + y`` emits ops (see `operators`). Only code that keeps the graph well typed (`verify`) may assign `type`.
    """

    __slots__ = ("_uses", "graph", "index", "name", "producer", "type")

    def __init__(self, graph: Graph, name: str, type: TensorType, producer: Node | None = None, index: int = 0) -> None:
        self.graph, self.name, self.type = graph, name, type
        self.producer, self.index = producer, index
        self._uses: dict[tuple[Node, int], None] = {}

    def __repr__(self) -> str:
        return f"%{self.name}: {self.type}"

    @property
    def uses(self) -> tuple[tuple[Node, int], ...]:
        """(node, operand index) of every use, in order of creation. Graph outputs are not uses."""
        return tuple(self._uses)

    @property
    def users(self) -> tuple[Node, ...]:
        """The nodes that read this value, each once."""
        return tuple(dict.fromkeys(node for node, _ in self._uses))

    @property
    def is_output(self) -> bool:
        return bool(self.graph.outputs.names(self))

    @property
    def shape(self) -> tuple[Any, ...]:
        return self.type.shape

    @property
    def width(self) -> int:
        """Size of the last axis.

        Raises:
            WeftError: if it is symbolic.
        """
        size = self.type.shape[-1]
        if not isinstance(size, int):
            raise WeftError(f"the last axis of {self!r} has no fixed size")
        return size

    def replace_uses(self, new: Value, keep: Iterable[Node] = ()) -> None:
        """Make every user (but those in `keep`) and every graph output read `new` instead."""
        kept = set(keep)
        for node, i in self.uses:
            if node not in kept:
                node.set_input(i, new)
        for name in self.graph.outputs.names(self):
            self.graph.outputs[name] = new


class Param(Value):
    """A value whose bytes come from `recipe`. Never mutated in place by passes: derive a new one."""

    __slots__ = ("__weakref__", "recipe")

    def __init__(self, graph: Graph, name: str, type: TensorType, recipe: Recipe) -> None:
        super().__init__(graph, name, type)
        self.recipe = recipe


class Node:
    """One application of `op` to `inputs` (None where an optional operand is absent)."""

    __slots__ = ("_next", "_prev", "attrs", "erased", "graph", "inputs", "op", "outputs", "scope")

    def __init__(
        self, graph: Graph, op: Op, inputs: Sequence[Value | None], attrs: Mapping[str, AttrValue], scope: str
    ):
        self.graph = graph
        self.op = op
        self.inputs: tuple[Value | None, ...] = tuple(inputs)
        self.attrs: dict[str, AttrValue] = dict(attrs)
        self.outputs: tuple[Value, ...] = ()
        self.scope = scope
        self.erased = False
        self._prev: Node | None = None
        self._next: Node | None = None

    def __repr__(self) -> str:
        args = ", ".join("_" if v is None else f"%{v.name}" for v in self.inputs)
        return f"{self.op.name}({args}) in {self.scope or 'the top scope'}"

    @property
    def output(self) -> Value:
        """The first output."""
        return self.outputs[0]

    def operand(self, name: str) -> Value | None:
        """The operand called `name` in the signature of the op; None if absent."""
        i = self.op.operand_index(name)
        return self.inputs[i] if i < len(self.inputs) else None

    def set_input(self, index: int, value: Value | None) -> None:
        """Replace one operand, keeping use lists right; absent ones at the end are dropped, as where nodes are made."""
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


class Graph:
    """A computation: ordered `inputs` and `outputs` by name, `params` by name, `nodes` in execution order.

    `meta` holds facts of the whole model that text can spell (kind of model, special tokens …); `archive` is the
    checkpoint that `Source` recipes refer to, and `tokenize` makes token ids of texts, where the model came with a
    tokenizer; `origins` say by scope what emitted it, where a frontend knows. None of these is part of equality.
    """

    drawn: ClassVar[Callable[[Graph], str] | None] = None  # how a notebook shows one, if there is what draws graphs

    def __init__(self, name: str = "model", archive: Archive = EMPTY) -> None:
        self.name, self.archive = name, archive
        self.tokenize: Callable[[Sequence[str]], list[list[int]]] | None = None
        self.origins: dict[str, Origin] = {}
        self.meta: dict[str, AttrValue] = {}
        self.inputs: dict[str, Value] = {}
        self.outputs = Outputs()
        self.params: dict[str, Param] = {}
        self._names: dict[str, int] = {}
        self._first: Node | None = None
        self._last: Node | None = None
        self._count = 0
        self._anchor: Node | None = None  # new nodes go before it; None means at the end
        self._scope = ""

    def __len__(self) -> int:
        return self._count

    def __str__(self) -> str:
        from ..text.printer import print_graph

        return print_graph(self)

    def _repr_html_(self) -> str | None:
        return Graph.drawn(self) if Graph.drawn else None

    def __eq__(self, other: object) -> bool:
        return str(self) == str(other) if isinstance(other, Graph) else NotImplemented

    __hash__ = object.__hash__

    # -- names and scopes

    def fresh(self, hint: str) -> str:
        """A value name not used before: `hint`, or `hint` with the next free number."""
        if hint not in self._names:
            self._names[hint] = 1
            return hint
        while True:
            self._names[hint] += 1
            name = f"{hint}_{self._names[hint]}"
            if name not in self._names:
                self._names[name] = 1
                return name

    @contextlib.contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """New nodes and parameters inside get `name` appended to their scope."""
        outer = self._scope
        self._scope = f"{outer}.{name}" if outer and name else outer or name
        try:
            yield
        finally:
            self._scope = outer

    @property
    def insertion_scope(self) -> str:
        """The scope that new nodes get."""
        return self._scope

    @contextlib.contextmanager
    def inserting(self, *, before: Node | None = None, after: Node | None = None) -> Iterator[None]:
        """New nodes inside go before (or after) the given node and take over its scope."""
        node = before or after
        assert node is not None and node.graph is self
        outer = self._anchor, self._scope
        self._anchor, self._scope = (before or node._next), node.scope
        try:
            yield
        finally:
            self._anchor, self._scope = outer

    # -- building

    def add_input(self, name: str, type: TensorType, value_name: str | None = None) -> Value:
        """A new graph input; its value is called `value_name`, or like the input."""
        if name in self.inputs:
            raise WeftError(f"graph {self.name} already has an input {name!r}")
        value = Value(self, self.fresh(value_name or name), type)
        self.inputs[name] = value
        return value

    def add_param(self, name: str, type: TensorType, recipe: Recipe) -> Param:
        """A new parameter; a taken name gets a number."""
        unique = self.fresh(name)
        param = Param(self, unique, type, recipe)
        self.params[unique] = param
        return param

    def add_output(self, name: str, value: Value) -> None:
        """Make `value` the graph output called `name`."""
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
        """Insert a node at the insertion point. Ops call this after checking; prefer calling the op on values."""
        node = Node(self, op, inputs, attrs, self._scope if scope is None else scope)
        node.outputs = tuple(
            Value(self, self.fresh(n), t, node, i) for i, (n, t) in enumerate(zip(names, types, strict=True))
        )
        for i, value in enumerate(node.inputs):
            if value is not None:
                self._check_owned(value)
                value._uses[node, i] = None
        while self._anchor is not None and self._anchor.erased:
            self._anchor = self._anchor._next
        after = self._anchor._prev if self._anchor else self._last
        node._prev, node._next = after, self._anchor
        if after:
            after._next = node
        else:
            self._first = node
        if self._anchor:
            self._anchor._prev = node
        else:
            self._last = node
        self._count += 1
        return node

    def _check_owned(self, value: Value) -> None:
        if value.graph is not self:
            raise ValueError(f"value {value!r} belongs to another graph")
        if value.producer is not None and value.producer.erased:
            raise ValueError(f"value {value!r} was erased")

    # -- walking and erasing

    @property
    def nodes(self) -> Iterator[Node]:
        """Nodes in execution order; see the module docstring for editing while walking."""
        node = self._first
        while node is not None:
            if not node.erased:
                yield node
            node = node._next

    @property
    def reversed_nodes(self) -> Iterator[Node]:
        """Nodes from last to first; erasing is safe, inserted earlier nodes are visited."""
        node = self._last
        while node is not None:
            if not node.erased:
                yield node
            node = node._prev

    def nodes_before(self, node: Node) -> Iterator[Node]:
        """The nodes before `node`, nearest first."""
        while (node_before := node._prev) is not None:
            yield node_before
            node = node_before

    def nodes_after(self, node: Node) -> Iterator[Node]:
        """The nodes after `node`, nearest first."""
        while (node_after := node._next) is not None:
            yield node_after
            node = node_after

    def first(self, nodes: Iterable[Node]) -> Node:
        """The one of `nodes` that runs first; it takes no longer than they are apart."""
        found, *others = dict.fromkeys(nodes)
        left: set[Node | None] = set(others)
        for before, after in itertools.zip_longest(self.nodes_before(found), self.nodes_after(found)):
            if not left:
                break
            found = before if before and before in left else found
            left -= {before, after}
        return found

    def erase(self, node: Node) -> None:
        """Remove a node whose outputs nobody reads.

        Raises:
            ValueError: if an output is still in use.
        """
        for value in node.outputs:
            if value._uses or value.is_output:
                raise ValueError(f"cannot erase {node!r}: {value!r} is still in use")
        for i, operand in enumerate(node.inputs):
            if operand is not None:
                del operand._uses[node, i]
        if node._prev:
            node._prev._next = node._next
        else:
            self._first = node._next
        if node._next:
            node._next._prev = node._prev
        else:
            self._last = node._prev
        node.erased = True  # keeps its links, so that walkers standing on it find their way
        self._count -= 1

    def erase_param(self, param: Param) -> None:
        """Remove a parameter that nobody reads; its name is free again."""
        if param._uses or param.is_output:
            raise ValueError(f"cannot erase parameter {param!r}: still in use")
        del self.params[param.name], self._names[param.name]

    def replace(self, node: Node, *new: Value) -> None:
        """Make users read `new` instead of the outputs of `node`, hand over their names, and erase the node."""
        for old, value in zip(node.outputs, new, strict=True):
            old.replace_uses(value)
            if value.producer is not None and not value.producer.erased:
                old.name, value.name = value.name, old.name
        self.erase(node)

    def clone(self) -> Graph:
        """An independent copy sharing ops, recipes and the archive."""
        other = Graph(self.name, self.archive)
        other.tokenize, other.meta, other.origins = self.tokenize, dict(self.meta), dict(self.origins)
        mapped: dict[Value, Value] = {}
        for name, v in self.inputs.items():
            mapped[v] = other.add_input(name, v.type, v.name)
        for p in self.params.values():
            mapped[p] = other.add_param(p.name, p.type, p.recipe)
        for node in self.nodes:
            operands = [None if v is None else mapped[v] for v in node.inputs]
            outs = node.outputs
            copy = other.add_node(
                node.op, operands, node.attrs, [v.type for v in outs], [v.name for v in outs], node.scope
            )
            mapped.update(zip(outs, copy.outputs, strict=True))
        for name, v in self.outputs.items():
            other.add_output(name, mapped[v])
        other._names = dict(self._names)
        return other

    def to_networkx(self) -> nx.MultiDiGraph:
        """The analysis view, see `view.to_networkx`."""
        from .analysis import to_networkx

        return to_networkx(self)
