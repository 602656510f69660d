"""Classes of axes of a graph that have equal sizes by construction, such as all axes of the residual width."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from networkx.utils import UnionFind

from weft.ir import ops
from weft.ir.graph import Graph, Node, Param, Value
from weft.ir.op import Op, Trait
from weft.ir.types import sizes
from weft.ir.types.sizes import Poly, Size

Axis = tuple[Value, int]


class AxisClasses:
    """Classes of the axes of all values of `graph`. Axes of one class have equal sizes. A class may have
    a name, an expression over config fields. Only axes of a fixed size above 1 are in classes: not batch and seq."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._classes = UnionFind()
        self._names: dict[Axis, Size] = {}
        for node in graph.nodes:
            RULES.get(node.op, _match_broadcast)(self, node)

    # -- classes

    def merge(self, a: Axis | None, b: Axis | None) -> None:
        """Merge the classes of axes a and b, which have no names yet. Do nothing if an axis is None, or if their sizes
        are not fixed, above 1 and equal."""
        if a is not None and b is not None and self.get_size(a) == self.get_size(b) is not None:
            self._classes.union(a, b)

    def get_size(self, axis: Axis) -> int | None:
        """Return the size of an axis; None if it is symbolic or 1."""
        size = axis[0].shape[axis[1]]
        return size if isinstance(size, int) and size > 1 else None

    # -- names

    def set_name(self, axis: Axis | None, name: Size) -> bool:
        """Name the class of `axis`. Return False if it has a name, or if `axis` is None or in no class; else True."""
        if axis is None or self.get_size(axis) is None or (root := self._classes[axis]) in self._names:
            return False
        self._names[root] = name
        return True

    def get_name(self, axis: Axis | None) -> Size | None:
        """Return the name of the class of `axis`, None without one. The name is an expression over config fields."""
        return None if axis is None or self.get_size(axis) is None else self._names.get(self._classes[axis])

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
        """Name the total of a split or concat by its parts, or its only unnamed part; return whether it did."""
        parts = [v for v in (node.outputs if node.op is ops.split else node.inputs) if v is not None]
        total_value = node.required_operand("x") if node.op is ops.split else node.output
        axis = node.attrs["axis"] % len(total_value.shape)
        total, part_names = self.get_name((total_value, axis)), [self.get_name((p, axis)) for p in parts]
        named_sum = sizes.sum_sizes(s for s in part_names if s is not None)
        if None not in part_names:
            return self.set_name((total_value, axis), named_sum)
        if total is None or part_names.count(None) != 1:
            return False
        return self.set_name((parts[part_names.index(None)], axis), total + named_sum * -1)

    def _name_product(self, node: Node, values: dict[str, int]) -> bool:
        """Name an axis of a reshape that splits the last axis in two or merges the last two: merged = outer · inner,
        one of the two = merged // other, or inner = a field in merged. Return whether a name was added."""
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
    """Merge operand and output axes of elementwise, rowwise, norm and comparison ops, pairwise from the last axis."""
    traits = node.op.traits
    if not traits.intersection((Trait.ELEMENTWISE, Trait.ROWWISE, Trait.NORM, Trait.COMPARES)):
        return
    for value in (v for v in node.inputs if v is not None):
        for i in range(1, 1 + min(len(value.shape), len(node.output.shape))):
            axes.merge(get_axis(value, -i), get_axis(node.output, -i))


def _match_equal(axes: AxisClasses, node: Node) -> None:
    def find_axis(name: str, axis: int) -> Axis | None:
        value = node.operand(name) if name else node.output
        return None if value is None else (value, axis % len(value.shape))

    for a, i, b, j in EQUAL_AXES[node.op]:
        axes.merge(find_axis(a, i), find_axis(b, j))


def _match_moves(axes: AxisClasses, node: Node) -> None:
    for a, b in _pair_axes(node, node.required_operand("x"), node.output):
        axes.merge((node.required_operand("x"), a), (node.output, b))


def _pair_axes(node: Node, x: Value, y: Value) -> Iterable[tuple[int, int]]:
    """Return (axis of x, axis of y) for each axis that `node`, which computes y from x, keeps."""
    match node.op:
        case ops.transpose:
            return ((a, i) for i, a in enumerate(node.attrs["axes"]))
        case ops.squeeze:
            removed = {a % len(x.shape) for a in node.attrs["axes"]}
            return ((a, i) for i, a in enumerate(a for a in range(len(x.shape)) if a not in removed))
        case ops.unsqueeze:
            added = {a % len(y.shape) for a in node.attrs["axes"]}
            return enumerate(a for a in range(len(y.shape)) if a not in added)
        case ops.slice_:
            return ((a, a) for a in range(len(x.shape)) if a != node.attrs["axis"] % len(x.shape))
        case ops.reshape:  # the leading axes
            changed = (i for i, (a, b) in enumerate(zip(x.shape, y.shape, strict=False)) if a != b)
            return ((a, a) for a in range(next(changed, min(len(x.shape), len(y.shape)))))
    return ((a, a) for a in range(len(x.shape) if node.attrs["keepdims"] else 0))  # a reduction


def _match_split(axes: AxisClasses, node: Node) -> None:
    """Merge axis i of all operands and outputs for each i, except the axis that is split or concatenated."""
    for value in (*node.outputs, *(v for v in node.inputs if v is not None)):
        for axis in range(len(value.shape)):
            if axis != node.attrs["axis"] % len(value.shape):
                axes.merge((value, axis), (node.output, axis))


_SCAN = (("x", -1, "", -1), ("b", -1, "c", -1), ("delta", -1, "a", 0), ("d", 0, "delta", -1))
EQUAL_AXES: dict[Op, tuple[tuple[str, int, str, int], ...]] = {  # (operand, axis, operand, axis); "": the output
    ops.linear: (("weight", 1, "x", -1), ("weight", 0, "", -1), ("bias", 0, "weight", 0)),
    ops.embedding: (("table", 1, "", -1),),
    ops.causal_conv: (("x", -1, "", -1), ("weight", 0, "x", -1), ("bias", 0, "x", -1)),
    ops.ssd: _SCAN,
    ops.selective_scan: (*_SCAN, ("x", -1, "delta", -1), ("a", 1, "b", -1)),
    ops.moe: (
        *(("x", -1, "", -1), ("combine", -1, "up", 0), ("up", 2, "x", -1)),
        *(("gate", 0, "up", 0), ("gate", 1, "up", 1), ("gate", 2, "up", 2)),
        *(("down", 0, "up", 0), ("down", 1, "up", 2), ("down", 2, "up", 1)),
        *(("up_bias", 0, "up", 0), ("up_bias", 1, "up", 1), ("gate_bias", 0, "up", 0), ("gate_bias", 1, "up", 1)),
        *(("down_bias", 0, "up", 0), ("down_bias", 1, "x", -1)),
    ),
    ops.head_linear: (),  # its widths are products of heads, which `size_names` names
}
MOVES = (ops.reshape, ops.transpose, ops.squeeze, ops.unsqueeze, ops.slice_, ops.sum, ops.mean, ops.max, ops.min)
RULES: dict[Op, Callable[[AxisClasses, Node], None]] = {  # for other ops `_match_broadcast`
    **dict.fromkeys(EQUAL_AXES, _match_equal),
    **dict.fromkeys((*MOVES, ops.prod), _match_moves),
    **dict.fromkeys((ops.split, ops.concat), _match_split),
}


def list_read_params(graph: Graph) -> list[Param]:
    """Return the parameters that nodes read, each once, in order of their first reader."""
    return [*dict.fromkeys(v for node in graph.nodes for v in node.inputs if isinstance(v, Param))]
