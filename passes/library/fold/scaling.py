"""Move a factor into weights: those that make a value, or those that read it.

`absorbed` walks from a value towards what makes it, through ops that hand a factor on, until every way ends at a
parameter; what it finds is a list of `Edit`s, each an operand that is multiplied. Nothing is changed before `apply`.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from weft.ir import Graph, Node, Param, Recipe, Value, ops
from weft.ir.recipes import Concat, Full, Reshape, Scale
from weft.ir.recipes.matrices import MatMul

from ...analysis.feed_forward import projected
from ...analysis.projections import rows
from ...edits.absorb import WRITERS
from ...edits.edit import derive, replace_param

Factor = float | Recipe  # a number, or a vector along the last axis of what is multiplied
# Ops that pass a number on from operand to result; most may move or mix the last axis: no vector passes.
_HANDS_ON = {
    *(ops.rope, ops.reshape, ops.transpose, ops.squeeze, ops.unsqueeze, ops.expand, ops.slice_, ops.gather),
    ops.head_linear,
}


@dataclass(frozen=True)
class Edit:
    """Operand `index` of `node`, a parameter, becomes `factor` times as large: along `axis`, in the rows start:stop."""

    node: Node
    index: int
    factor: Factor
    axis: int = 0
    start: int = 0
    stop: int | None = None  # None: all rows

    @property
    def param(self) -> Param:
        param = self.node.inputs[self.index]
        assert isinstance(param, Param)
        return param

    @property
    def what(self) -> tuple[Factor, int, int, int | None]:
        """The change without its place: two edits with equal `what` make the same of one parameter."""
        return self.factor, self.axis, self.start, self.stop


def apply(edits: Sequence[Edit]) -> None:
    """Multiply the parameters, by recipe."""
    for e in edits:
        old = e.param
        new = derive(old, _scaled(e, old))
        e.node.set_input(e.index, new)
        replace_param(old, new)


def _scaled(e: Edit, param: Param) -> Recipe:
    if e.stop is None:
        return Scale(param.recipe, e.factor, e.axis)
    reader, count = param.graph.reader, int(param.shape[0])
    parts: list[Recipe] = []
    for first, last in ((0, e.start), (e.start, e.stop), (e.stop, count)):
        if first < last:
            part = rows(param.recipe, first, last, reader)
            parts.append(Scale(part, e.factor, 0) if first == e.start else part)
    return Concat(tuple(parts)) if len(parts) > 1 else parts[0]


def spread(scalar: Recipe, width: int) -> Recipe:
    """The only number of `scalar`, `width` times: [width]."""
    return MatMul(Full(1.0, (width, 1)), Reshape(scalar, (1,)))


def writing(node: Node, factor: Factor, start: int = 0, stop: int | None = None) -> list[Edit] | str:
    """The edits that make what `node` writes `factor` times as large (rows start:stop of it), or why there are none."""
    edits, at = list[Edit](), f"{node.op.name} (%{node.output.name})"
    for name, axis in WRITERS[node.op].items():
        operand = node.operand(name)
        if operand is None and not edits:
            return f"{at} has no weight"
        if operand is not None and not isinstance(operand, Param):
            return f"an operand of {at} is computed"
        if operand is not None:
            edits.append(Edit(node, node.op.operand_index(name), factor, len(operand.shape) - axis, start, stop))
    return edits


def reading(value: Value, factor: Factor) -> list[Edit] | str:
    """The edits of what reads `value`, in place of multiplying it by `factor`: linears only."""
    if value.is_output:
        return f"%{value.name} is an output of the graph"
    for node, i in value.uses:
        if node.op is not ops.linear or i or not isinstance(node.inputs[1], Param):
            return f"%{value.name} is read by {node.op.name} (%{node.output.name})"
    return [Edit(node, 1, factor, axis=1) for node in value.users]


def absorbed(reader: Node, index: int, factor: Factor, order: Mapping[Node, int]) -> list[Edit] | str:
    """The edits that make operand `index` of `reader` `factor` times as large for it, or why there are none.

    `order` numbers the nodes as they run. Whoever else reads what is on the way stands in the way.
    """
    walk = _Walk(order)
    walk.demand(reader, index, factor)
    return walk.run()


def absorbed_for_all(value: Value, factor: Factor, order: Mapping[Node, int]) -> list[Edit] | str:
    """The edits that make `value` `factor` times as large for all that read it, or why there are none."""
    walk = _Walk(order)
    for reader, index in value.uses:
        walk.demand(reader, index, factor)
    return walk.run()


def other_use(edits: Sequence[Edit], edited: Mapping[tuple[Node, int], object]) -> str | None:
    """Say why a parameter of `edits` cannot be scaled: it has a use that is not among those `edited`, or otherwise."""
    for e in edits:
        for node, i in e.param.uses:
            if edited.get((node, i)) != e.what:
                return f"%{e.param.name} is also a weight of {node.op.name} (%{node.output.name})"
    return None


class _Walk:
    """Demands on values, met from the last made to the first."""

    def __init__(self, order: Mapping[Node, int]) -> None:
        self.order = order
        self.edits: list[Edit] = []
        self.factors: dict[Value, Factor] = {}
        self.readers: dict[Value, set[tuple[Node, int]]] = {}
        self.waiting: list[tuple[int, int]] = []
        self.nodes: dict[int, Node] = {}
        self.why: str | None = None

    def refuse(self, why: str) -> None:
        self.why = self.why or why

    def demand(self, reader: Node, index: int, factor: Factor) -> None:
        """Operand `index` of `reader` shall be `factor` times as large."""
        value = reader.inputs[index]
        assert value is not None
        if isinstance(value, Param):
            self.edits.append(Edit(reader, index, factor, axis=len(value.shape) - 1))
        elif value.producer is None:
            self.refuse(f"%{value.name} is an input of the graph")
        elif self.factors.setdefault(value, factor) != factor:
            self.refuse(f"%{value.name} would have to be multiplied by two factors")
        else:
            self.readers.setdefault(value, set()).add((reader, index))
            place = self.order[value.producer]
            if place not in self.nodes:
                self.nodes[place] = value.producer
                # The latest node first: all readers of a value have demanded before its producer is met.
                heapq.heappush(self.waiting, (-place, place))

    def run(self) -> list[Edit] | str:
        while self.waiting and self.why is None:
            node = self.nodes[heapq.heappop(self.waiting)[1]]
            demanded = [(v, self.factors[v]) for v in node.outputs if v in self.factors]
            for v, _ in demanded:
                others = [n for n, i in v.uses if (n, i) not in self.readers[v]]
                if others or v.is_output:
                    who = f"read by {others[0].op.name} (%{others[0].output.name})" if others else "an output"
                    self.refuse(f"%{v.name} is also {who}")
            if self.why is None:
                self.meet(node, demanded)
        return self.edits if self.why is None else self.why

    def meet(self, node: Node, demanded: list[tuple[Value, Factor]]) -> None:
        """Hand the demands on outputs of `node` on to its operands, or end them at its parameters."""
        op, (value, factor) = node.op, demanded[0]
        number = not isinstance(factor, Recipe)
        if op in (ops.linear, ops.norm_linear):
            self.linear(node, factor)
        elif op is ops.split:
            self.split(node, demanded)
        elif op is ops.add_norm and (value.index or len(demanded) > 1):
            self.refuse(f"%{value.name} is a sum of residuals")
        elif op in WRITERS:
            self.take(writing(node, factor))
        elif (op in (ops.add, ops.sub) and (number or _aligned(node))) or (op is ops.concat and number):
            for i in range(len(node.inputs)):
                self.demand(node, i, factor)
        elif op is ops.mul and (number or _aligned(node)) and any(isinstance(v, Param) for v in node.inputs):
            # One factor of a product is enough, and at the parameter the walk ends.
            self.demand(node, next(i for i, v in enumerate(node.inputs) if isinstance(v, Param)), factor)
        elif op is ops.glu and node.attrs["limit"] is None and node.attrs["shift"] == 0:
            # act(gate) ⊙ up is linear in `up` only.
            self.demand(node, 1, factor)
        elif op is ops.cast or (op is ops.affine and node.attrs["plus"] == 0) or (op in _HANDS_ON and number):
            self.demand(node, 0, factor)
        else:
            self.refuse(f"{op.name} (%{value.name}) stands between the scale and the weights")

    def linear(self, node: Node, factor: Factor) -> None:
        """Into weight and bias; past a weight that is a table too, into the bias and what is read."""
        weight, bias = node.operand("weight"), node.operand("bias")
        if not isinstance(weight, Param) or not (bias is None or isinstance(bias, Param)):
            self.refuse(f"the weight of %{node.output.name} is computed")
        elif isinstance(factor, Recipe) or all(n.op in (ops.linear, ops.norm_linear) for n in weight.users):
            self.take(writing(node, factor))
        else:
            self.take([] if bias is None else [Edit(node, 2, factor)])
            self.demand(node, 0, factor)

    def split(self, node: Node, demanded: list[tuple[Value, Factor]]) -> None:
        """On to all that is split if every piece is scaled alike; of a packed linear, into the rows of the piece."""
        x, (value, factor) = node.inputs[0], demanded[0]
        assert x is not None
        if len(demanded) == len(node.outputs) and not isinstance(factor, Recipe):
            if any(f != factor for _, f in demanded):
                self.refuse(f"the pieces of %{x.name} would be multiplied by different factors")
            self.demand(node, 0, factor)
            return
        packed = projected(value)
        if packed is None or len(demanded) > 1 or len(x.uses) > 1 or x.is_output:
            self.refuse(f"%{value.name} is a piece of %{x.name}, which is no packed linear")
        else:
            self.take(writing(packed.node, factor, packed.start, packed.stop))

    def take(self, found: list[Edit] | str) -> None:
        """End here, with these edits, or fail."""
        if isinstance(found, str):
            self.refuse(found)
        else:
            self.edits += found


def _aligned(node: Node) -> bool:
    """Return whether all operands are as wide as the result."""
    return all(v is not None and v.shape[-1:] == node.output.shape[-1:] for v in node.inputs)


def numbered(graph: Graph) -> dict[Node, int]:
    """The nodes of `graph`, numbered as they run."""
    return {node: i for i, node in enumerate(graph.nodes)}
