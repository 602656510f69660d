"""Classes of axes of a graph that have equal sizes by construction, such as all axes of the residual width."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from weft.ir import ops
from weft.ir.graph import Graph, Node, Param, Value
from weft.ir.op import Op, Trait
from weft.ir.types import sizes
from weft.ir.types.sizes import Poly, Size

Axis = tuple[Value, int]


class AxisClasses:
    """A union-find of the axes of all values of `graph`; axes of one class have equal sizes, and the class may have a
    name: an expression over config fields. Only axes of a fixed size above 1 are in classes, not batch or seq."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._parents: dict[Axis, Axis] = {}
        self._names: dict[Axis, Size] = {}
        for node in graph.nodes:
            RULES.get(node.op, _match_broadcast)(self, node)

    # -- classes

    def merge(self, a: Axis | None, b: Axis | None) -> None:
        """Merge the classes of axes a and b if their sizes are fixed, above 1 and equal; else do nothing."""
        if a is None or b is None or self.get_size(a) != self.get_size(b) or self.get_size(a) is None:
            return
        a, b = self._find_root(a), self._find_root(b)
        if a != b:
            self._parents[a] = b
            if (name := self._names.pop(a, None)) is not None:
                self._names.setdefault(b, name)

    def get_size(self, axis: Axis) -> int | None:
        """Return the size of an axis; None if it is symbolic or 1."""
        size = axis[0].shape[axis[1]]
        return size if isinstance(size, int) and size > 1 else None

    def _find_root(self, axis: Axis) -> Axis:
        while axis in self._parents:
            axis = self._parents[axis]
        return axis

    # -- names

    def set_name(self, axis: Axis | None, name: Size) -> bool:
        """Name the class of `axis`, and return True; return False if it has a name or no class, or `axis` is None."""
        if axis is None or self.get_size(axis) is None or (root := self._find_root(axis)) in self._names:
            return False
        self._names[root] = name
        return True

    def get_name(self, axis: Axis | None) -> Size | None:
        """Return the name of the class of `axis`, an expression over config fields; None without a name."""
        return None if axis is None or self.get_size(axis) is None else self._names.get(self._find_root(axis))

    def deduce_names(self, values: dict[str, int]) -> None:
        """Derive names of further classes from sums (split, concat) and products (reshape) of named classes, until none
        is left to derive. `values` maps config fields to their values."""
        changed = True
        while changed:
            changed = False
            for node in self.graph.nodes:
                if node.op in (ops.split, ops.concat):
                    changed |= self._name_sum(node)
                elif node.op is ops.reshape:
                    changed |= self._name_product(node, values)

    def _name_sum(self, node: Node) -> bool:
        """Name the axis that `node` splits or concatenates as the sum of its parts, or its only unnamed part as the
        total minus the others. Return whether a name was added."""
        parts = [v for v in (node.outputs if node.op is ops.split else node.inputs) if v is not None]
        total_value = node.required_operand("x") if node.op is ops.split else node.output
        axis = node.attrs["axis"] % len(total_value.shape)
        total, part_names = self.get_name((total_value, axis)), [self.get_name((p, axis)) for p in parts]
        if None not in part_names:
            return self.set_name((total_value, axis), sizes.sum_sizes(s for s in part_names if s is not None))
        if total is None or part_names.count(None) != 1:
            return False
        rest = sizes.sum_sizes(s for s in part_names if s is not None)
        return self.set_name((parts[part_names.index(None)], axis), total + rest * -1)

    def _name_product(self, node: Node, values: dict[str, int]) -> bool:
        """Name the last axis that the reshape `node` splits in two, or merges from two, as the product, or one
        of the two as a quotient. Return whether a name was added."""
        x, y = node.required_operand("x"), node.output
        joined, split = (x, y) if len(x.shape) < len(y.shape) else (y, x)
        if len(split.shape) != len(joined.shape) + 1 or len(joined.shape) < 1:
            return False
        outer, inner, merged = get_axis(split, -2), get_axis(split), get_axis(joined)
        sizes_ = [self.get_size(axis) for axis in (outer, inner, merged)]
        if None in sizes_ or (sizes_[0] or 0) * (sizes_[1] or 0) != sizes_[2]:
            return False
        a, b, product = self.get_name(outer), self.get_name(inner), self.get_name(merged)
        if a is not None and b is not None:
            return self.set_name(merged, a * b)
        if product is None:
            return False
        if b is not None:
            return self.set_name(outer, sizes.floordiv(product, b))
        if a is not None:
            return self.set_name(inner, sizes.floordiv(product, a))
        factor = _find_factor(product, self.get_size(inner) or 0, values)
        return factor is not None and self.set_name(inner, factor)


def get_axis(value: Value | None, axis: int = -1) -> Axis:
    """Return (value, index) of an axis of `value`, given its negative index `axis`, by default the last."""
    assert value is not None
    return value, len(value.shape) + axis


def _find_factor(size: Size, value: int, values: dict[str, int]) -> Size | None:
    """Return the only config field with this `value` in the product `size`; None if there is not exactly one."""
    if not isinstance(size, Poly) or len(size.terms) != 1:
        return None
    ((mono, _),) = size.terms
    fields = [atom for atom, power in mono if isinstance(atom, str) and power == 1 and values.get(atom) == value]
    return sizes.sym(fields[0]) if len(fields) == 1 else None


# -- rules: merge the axes of a node's operands and outputs that have equal sizes


def _match_broadcast(axes: AxisClasses, node: Node) -> None:
    """Merge the axes of operands and output of an elementwise, rowwise or norm op, pairwise from the last axis."""
    traits = node.op.traits
    if not traits.intersection((Trait.ELEMENTWISE, Trait.ROWWISE, Trait.NORM, Trait.COMPARES)):
        return
    for value in (v for v in node.inputs if v is not None):
        for i in range(1, 1 + min(len(value.shape), len(node.output.shape))):
            axes.merge(get_axis(value, -i), get_axis(node.output, -i))


def _match_linear(axes: AxisClasses, node: Node) -> None:
    x, weight, bias = node.required_operand("x"), node.required_operand("weight"), node.operand("bias")
    axes.merge((weight, 1), get_axis(x))
    axes.merge((weight, 0), get_axis(node.output))
    if bias is not None:
        axes.merge((bias, 0), (weight, 0))


def _match_embedding(axes: AxisClasses, node: Node) -> None:
    axes.merge((node.required_operand("table"), 1), get_axis(node.output))


def _match_conv(axes: AxisClasses, node: Node) -> None:
    x, weight, bias = node.required_operand("x"), node.required_operand("weight"), node.operand("bias")
    axes.merge(get_axis(x), get_axis(node.output))
    axes.merge((weight, 0), get_axis(x))
    if bias is not None:
        axes.merge((bias, 0), get_axis(x))


def _match_scan(axes: AxisClasses, node: Node) -> None:
    x, delta, a, b, c, d = (node.operand(o.name) for o in node.op.operands[:6])
    axes.merge(get_axis(x), get_axis(node.output))
    axes.merge(get_axis(b), get_axis(c))
    axes.merge(get_axis(delta), (a, 0) if a is not None else None)
    if d is not None:
        axes.merge((d, 0), get_axis(delta))
    if node.op is ops.selective_scan and a is not None:
        axes.merge(get_axis(x), get_axis(delta))
        axes.merge((a, 1), get_axis(b))


def _match_moe(axes: AxisClasses, node: Node) -> None:
    x, up = node.required_operand("x"), node.required_operand("up")
    axes.merge(get_axis(x), get_axis(node.output))
    axes.merge(get_axis(node.required_operand("combine")), (up, 0))
    roles: dict[str, tuple[int, ...]] = {"up": (0, 1, 2), "gate": (0, 1, 2), "down": (0, 2, 1)}  # experts, hidden, dim
    roles |= {"up_bias": (0, 1), "gate_bias": (0, 1)}
    for name, order in roles.items():
        if (stack := node.operand(name)) is not None:
            for mine, of_up in enumerate(order):
                axes.merge((stack, mine), (up, of_up))
    if (bias := node.operand("down_bias")) is not None:
        axes.merge((bias, 0), (up, 0))
        axes.merge((bias, 1), get_axis(x))
    axes.merge((up, 2), get_axis(x))


def _match_reshape(axes: AxisClasses, node: Node) -> None:
    """Merge the leading axes of operand and output, up to the first whose size the reshape changes."""
    x, y = node.required_operand("x"), node.output
    for i, (a, b) in enumerate(zip(x.shape, y.shape, strict=False)):
        if a != b:
            break
        axes.merge((x, i), (y, i))


def _make_axis_rule(order: Callable[[Node], Iterator[tuple[int, int]]]) -> Callable[[AxisClasses, Node], None]:
    """Return a rule that merges the pairs (axis of x, axis of the output) that `order` yields for a node."""

    def rule(axes: AxisClasses, node: Node) -> None:
        for old, new in order(node):
            axes.merge((node.required_operand("x"), old), (node.output, new))

    return rule


def _pair_transposed(node: Node) -> Iterator[tuple[int, int]]:
    return ((a, i) for i, a in enumerate(node.attrs["axes"]))


def _pair_squeezed(node: Node) -> Iterator[tuple[int, int]]:
    rank, gone = (
        len(node.required_operand("x").shape),
        {a % len(node.required_operand("x").shape) for a in node.attrs["axes"]},
    )
    return ((a, i) for i, a in enumerate(a for a in range(rank) if a not in gone))


def _pair_unsqueezed(node: Node) -> Iterator[tuple[int, int]]:
    rank = len(node.output.shape)
    new = {a % rank for a in node.attrs["axes"]}
    return ((i, a) for i, a in enumerate(a for a in range(rank) if a not in new))


def _pair_sliced(node: Node) -> Iterator[tuple[int, int]]:
    """Return pairs (axis of x, axis of the output): all axes except the sliced one."""
    x = node.required_operand("x")
    cut = node.attrs.get("axis", -1) % len(x.shape)
    return ((a, a) for a in range(len(x.shape)) if a != cut)


def _match_split(axes: AxisClasses, node: Node) -> None:
    """Merge each axis of all operands and outputs, except the one that is split or concatenated."""
    for value in (*node.outputs, *(v for v in node.inputs if v is not None)):
        for axis in range(len(value.shape)):
            if axis != node.attrs["axis"] % len(value.shape):
                axes.merge((value, axis), (node.output, axis))


def _match_reduced(axes: AxisClasses, node: Node) -> None:
    if node.attrs["keepdims"]:
        x = node.required_operand("x")
        for axis in range(len(x.shape)):
            axes.merge((x, axis), (node.output, axis))


def _match_nothing(axes: AxisClasses, node: Node) -> None:
    """Merge nothing: widths of queries, keys and values are products of heads, which `size_names` names."""


RULES: dict[Op, Callable[[AxisClasses, Node], None]] = {
    ops.linear: _match_linear,
    ops.embedding: _match_embedding,
    ops.causal_conv: _match_conv,
    ops.selective_scan: _match_scan,
    ops.ssd: _match_scan,
    ops.moe: _match_moe,
    ops.reshape: _match_reshape,
    ops.transpose: _make_axis_rule(_pair_transposed),
    ops.squeeze: _make_axis_rule(_pair_squeezed),
    ops.unsqueeze: _make_axis_rule(_pair_unsqueezed),
    ops.slice_: _make_axis_rule(_pair_sliced),
    ops.split: _match_split,
    ops.concat: _match_split,
    **dict.fromkeys((ops.sum, ops.mean, ops.max, ops.min, ops.prod), _match_reduced),
    **dict.fromkeys((ops.attention, ops.relative_attention, ops.head_linear), _match_nothing),
    **dict.fromkeys((ops.linear_attention, ops.gated_linear_attention, ops.gated_delta_rule), _match_nothing),
}


def list_read_params(graph: Graph) -> Iterator[Param]:
    """Yield the parameters that nodes read, each once, in order of their first reader."""
    seen: set[Param] = set()
    for node in graph.nodes:
        for value in node.inputs:
            if isinstance(value, Param) and value not in seen:
                seen.add(value)
                yield value
