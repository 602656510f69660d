"""Axes of a graph that are one size by construction: a width, a number of heads, a vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from weft.ir import ops
from weft.ir.graph import Graph, Node, Param, Value
from weft.ir.op import Op, Trait
from weft.ir.types import sizes
from weft.ir.types.sizes import Poly, Size

Axis = tuple[Value, int]


class Axes:
    """The axes of the values of `graph`, gathered into classes of equal size, and what the classes are called.

    Axes of whole numbers only: ``batch`` and ``seq`` have names already.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._parents: dict[Axis, Axis] = {}
        self._names: dict[Axis, Size] = {}
        for node in graph.nodes:
            RULES.get(node.op, _aligned)(self, node)

    # -- classes

    def same(self, a: Axis | None, b: Axis | None) -> None:
        """Put two axes into one class, if they are whole numbers and equal."""
        if a is None or b is None or self.number(a) != self.number(b) or self.number(a) is None:
            return
        a, b = self._root(a), self._root(b)
        if a != b:
            self._parents[a] = b
            if (name := self._names.pop(a, None)) is not None:
                self._names.setdefault(b, name)

    def number(self, axis: Axis) -> int | None:
        """The size of an axis; None where it has a name, or is one."""
        size = axis[0].shape[axis[1]]
        return size if isinstance(size, int) and size > 1 else None

    def _root(self, axis: Axis) -> Axis:
        while axis in self._parents:
            axis = self._parents[axis]
        return axis

    # -- names

    def name(self, axis: Axis | None, name: Size) -> bool:
        """Give the class of `axis` a name, if it has none; return whether it is new."""
        if axis is None or self.number(axis) is None or (root := self._root(axis)) in self._names:
            return False
        self._names[root] = name
        return True

    def named(self, axis: Axis | None) -> Size | None:
        """The name of the class of `axis`, an expression over names."""
        return None if axis is None or self.number(axis) is None else self._names.get(self._root(axis))

    def deduce(self, values: dict[str, int]) -> None:
        """Name what follows from names: parts of a sum or a product, and a whole of its parts. `values` are those of
        the names."""
        changed = True
        while changed:
            changed = False
            for node in self.graph.nodes:
                if node.op in (ops.split, ops.concat):
                    changed |= self._deduce_sum(node)
                elif node.op is ops.reshape:
                    changed |= self._deduce_product(node, values)

    def _deduce_sum(self, node: Node) -> bool:
        """The whole is the sum of its parts, each part the whole less the others."""
        parts = [v for v in (node.outputs if node.op is ops.split else node.inputs) if v is not None]
        whole = node.required("x") if node.op is ops.split else node.output
        axis = node.attrs["axis"] % len(whole.shape)
        total, known = self.named((whole, axis)), [self.named((p, axis)) for p in parts]
        if None not in known:
            return self.name((whole, axis), sizes.total(s for s in known if s is not None))
        if total is None or known.count(None) != 1:
            return False
        rest = sizes.total(s for s in known if s is not None)
        return self.name((parts[known.index(None)], axis), total + rest * -1)

    def _deduce_product(self, node: Node, values: dict[str, int]) -> bool:
        """The last axis of one side is the product of the last two of the other."""
        x, y = node.required("x"), node.output
        joined, split = (x, y) if len(x.shape) < len(y.shape) else (y, x)
        if len(split.shape) != len(joined.shape) + 1 or len(joined.shape) < 1:
            return False
        outer, inner, whole = last(split, -2), last(split), last(joined)
        sizes_ = [self.number(axis) for axis in (outer, inner, whole)]
        if None in sizes_ or (sizes_[0] or 0) * (sizes_[1] or 0) != sizes_[2]:
            return False
        a, b, product = self.named(outer), self.named(inner), self.named(whole)
        if a is not None and b is not None:
            return self.name(whole, a * b)
        if product is None:
            return False
        if b is not None:
            return self.name(outer, sizes.floordiv(product, b))
        if a is not None:
            return self.name(inner, sizes.floordiv(product, a))
        found = _factor(product, self.number(inner) or 0, values)
        return found is not None and self.name(inner, found)


def last(value: Value | None, axis: int = -1) -> Axis:
    """An axis counted from the end."""
    assert value is not None
    return value, len(value.shape) + axis


def _factor(size: Size, value: int, values: dict[str, int]) -> Size | None:
    """The one name in the product `size` that has a `value`."""
    if not isinstance(size, Poly) or len(size.terms) != 1:
        return None
    ((mono, _),) = size.terms
    found = [atom for atom, power in mono if isinstance(atom, str) and power == 1 and values.get(atom) == value]
    return sizes.sym(found[0]) if len(found) == 1 else None


# -- rules: which axes of a node's operands and outputs are one


def _aligned(axes: Axes, node: Node) -> None:
    """Operands broadcast against the output, axis by axis from the last."""
    traits = node.op.traits
    if not traits.intersection((Trait.ELEMENTWISE, Trait.ROWWISE, Trait.NORM, Trait.COMPARES)):
        return
    for value in (v for v in node.inputs if v is not None):
        for i in range(1, 1 + min(len(value.shape), len(node.output.shape))):
            axes.same(last(value, -i), last(node.output, -i))


def _linear(axes: Axes, node: Node) -> None:
    x, weight, bias = node.required("x"), node.required("weight"), node.operand("bias")
    axes.same((weight, 1), last(x))
    axes.same((weight, 0), last(node.output))
    if bias is not None:
        axes.same((bias, 0), (weight, 0))


def _embedding(axes: Axes, node: Node) -> None:
    axes.same((node.required("table"), 1), last(node.output))


def _conv(axes: Axes, node: Node) -> None:
    x, weight, bias = node.required("x"), node.required("weight"), node.operand("bias")
    axes.same(last(x), last(node.output))
    axes.same((weight, 0), last(x))
    if bias is not None:
        axes.same((bias, 0), last(x))


def _scan(axes: Axes, node: Node) -> None:
    x, delta, a, b, c, d = (node.operand(o.name) for o in node.op.operands[:6])
    axes.same(last(x), last(node.output))
    axes.same(last(b), last(c))
    axes.same(last(delta), (a, 0) if a is not None else None)
    if d is not None:
        axes.same((d, 0), last(delta))
    if node.op is ops.selective_scan and a is not None:
        axes.same(last(x), last(delta))
        axes.same((a, 1), last(b))


def _moe(axes: Axes, node: Node) -> None:
    x, up = node.required("x"), node.required("up")
    axes.same(last(x), last(node.output))
    axes.same(last(node.required("combine")), (up, 0))
    roles: dict[str, tuple[int, ...]] = {"up": (0, 1, 2), "gate": (0, 1, 2), "down": (0, 2, 1)}  # experts, hidden, dim
    roles |= {"up_bias": (0, 1), "gate_bias": (0, 1)}
    for name, order in roles.items():
        if (stack := node.operand(name)) is not None:
            for mine, of_up in enumerate(order):
                axes.same((stack, mine), (up, of_up))
    if (bias := node.operand("down_bias")) is not None:
        axes.same((bias, 0), (up, 0))
        axes.same((bias, 1), last(x))
    axes.same((up, 2), last(x))


def _reshape(axes: Axes, node: Node) -> None:
    """Axes in front that stay."""
    x, y = node.required("x"), node.output
    for i, (a, b) in enumerate(zip(x.shape, y.shape, strict=False)):
        if a != b:
            break
        axes.same((x, i), (y, i))


def _moved(order: Callable[[Node], Iterator[tuple[int, int]]]) -> Callable[[Axes, Node], None]:
    """A rule for an op that moves axes: `order` gives pairs of an axis of x and one of the output."""

    def rule(axes: Axes, node: Node) -> None:
        for mine, made in order(node):
            axes.same((node.required("x"), mine), (node.output, made))

    return rule


def _transposed(node: Node) -> Iterator[tuple[int, int]]:
    return ((a, i) for i, a in enumerate(node.attrs["axes"]))


def _squeezed(node: Node) -> Iterator[tuple[int, int]]:
    rank, gone = len(node.required("x").shape), {a % len(node.required("x").shape) for a in node.attrs["axes"]}
    return ((a, i) for i, a in enumerate(a for a in range(rank) if a not in gone))


def _unsqueezed(node: Node) -> Iterator[tuple[int, int]]:
    rank = len(node.output.shape)
    new = {a % rank for a in node.attrs["axes"]}
    return ((i, a) for i, a in enumerate(a for a in range(rank) if a not in new))


def _others(node: Node) -> Iterator[tuple[int, int]]:
    """All axes but the one that is cut."""
    x = node.required("x")
    cut = node.attrs.get("axis", -1) % len(x.shape)
    return ((a, a) for a in range(len(x.shape)) if a != cut)


def _cut(axes: Axes, node: Node) -> None:
    """The axes beside the one that is split or joined."""
    for value in (*node.outputs, *(v for v in node.inputs if v is not None)):
        for axis in range(len(value.shape)):
            if axis != node.attrs["axis"] % len(value.shape):
                axes.same((value, axis), (node.output, axis))


def _reduced(axes: Axes, node: Node) -> None:
    if node.attrs["keepdims"]:
        x = node.required("x")
        for axis in range(len(x.shape)):
            axes.same((x, axis), (node.output, axis))


def _nothing(axes: Axes, node: Node) -> None:
    """Attention and its like: the widths of queries, keys and values are products that `naming` knows."""


RULES: dict[Op, Callable[[Axes, Node], None]] = {
    ops.linear: _linear,
    ops.embedding: _embedding,
    ops.causal_conv: _conv,
    ops.selective_scan: _scan,
    ops.ssd: _scan,
    ops.moe: _moe,
    ops.reshape: _reshape,
    ops.transpose: _moved(_transposed),
    ops.squeeze: _moved(_squeezed),
    ops.unsqueeze: _moved(_unsqueezed),
    ops.slice_: _moved(_others),
    ops.split: _cut,
    ops.concat: _cut,
    **dict.fromkeys((ops.sum, ops.mean, ops.max, ops.min, ops.prod), _reduced),
    **dict.fromkeys((ops.attention, ops.relative_attention, ops.head_linear), _nothing),
    **dict.fromkeys((ops.linear_attention, ops.gated_linear_attention, ops.gated_delta_rule), _nothing),
}


def params_of(graph: Graph) -> Iterator[Param]:
    """The parameters that nodes read, in order."""
    seen: set[Param] = set()
    for node in graph.nodes:
        for value in node.inputs:
            if isinstance(value, Param) and value not in seen:
                seen.add(value)
                yield value
