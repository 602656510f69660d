"""Move a factor of a value into the weights of the nodes that compute the value, or of the nodes that read it.

`absorb_factor` walks from a value back to its producers, through ops that commute with the factor, until every path
ends at a parameter. It returns one `Edit` per parameter to multiply; only `apply_edits` changes the graph.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from weft.ir import Node, Param, Recipe, Value, ops
from weft.ir.recipes import Concat, Full, Reshape, Scale
from weft.ir.recipes.matrices import MatMul

from ...analysis.feed_forward import find_projection
from ...analysis.projections import slice_rows
from ...edits.absorb import OUTPUT_WEIGHTS
from ...edits.edit import set_recipe

Factor = float | Recipe  # a number, or a vector along the last axis of the multiplied value
# Ops that commute with a scalar factor; most may move or mix the last axis, so a vector does not pass.
_HOMOGENEOUS = {
    *(ops.rope, ops.reshape, ops.transpose, ops.squeeze, ops.unsqueeze, ops.expand, ops.slice_, ops.gather),
    ops.head_linear,
}


@dataclass(frozen=True)
class Edit:
    """A multiplication of rows start:stop of the parameter that is operand `index` of `node`.
    `factor` is a number, or a vector along `axis` of the parameter."""

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
    def change(self) -> tuple[Factor, int, int, int | None]:
        """Return (factor, axis, start, stop): all fields except those that name the parameter."""
        return self.factor, self.axis, self.start, self.stop


def apply_edits(edits: Sequence[Edit]) -> None:
    """Replace the parameters of `edits` in the graph by new ones whose recipes multiply the old ones."""
    for e in edits:
        set_recipe(e.node, e.index, _scale_param(e, e.param))


def _scale_param(e: Edit, param: Param) -> Recipe:
    if e.stop is None:
        return Scale(param.recipe, e.factor, e.axis)
    reader, count = param.graph.reader, int(param.shape[0])
    parts: list[Recipe] = []
    for first, last in ((0, e.start), (e.start, e.stop), (e.stop, count)):
        if first < last:
            part = slice_rows(param.recipe, first, last, reader)
            parts.append(Scale(part, e.factor, 0) if first == e.start else part)
    return Concat(tuple(parts)) if len(parts) > 1 else parts[0]


def repeat_scalar(scalar: Recipe, width: int) -> Recipe:
    """Return a recipe [width] that repeats the single element of `scalar`."""
    return MatMul(Full(1.0, (width, 1)), Reshape(scalar, (1,)))


def list_writer_edits(node: Node, factor: Factor, start: int = 0, stop: int | None = None) -> list[Edit] | str:
    """Return the edits of weights and biases that multiply features start:stop of the result of `node` by `factor`.
    Return a reason (str) if it has no weight, or if a weight or bias is computed."""
    edits, at = list[Edit](), f"{node.op.name} (%{node.output.name})"
    for name, axis in OUTPUT_WEIGHTS[node.op].items():
        operand = node.operand(name)
        if operand is None and not edits:
            return f"{at} has no weight"
        if operand is not None and not isinstance(operand, Param):
            return f"an operand of {at} is computed"
        if operand is not None:
            edits.append(Edit(node, node.op.operand_index(name), factor, len(operand.shape) - axis, start, stop))
    return edits


def list_reader_edits(value: Value, factor: Factor) -> list[Edit] | str:
    """Return edits that multiply the columns of the weights of all readers of `value` by `factor`.
    Return a reason (str) if a reader is not a linear with a weight parameter, or if `value` is a graph output."""
    if value.is_output:
        return f"%{value.name} is an output of the graph"
    for node, i in value.uses:
        if node.op is not ops.linear or i or not isinstance(node.inputs[1], Param):
            return f"%{value.name} is read by {node.op.name} (%{node.output.name})"
    return [Edit(node, 1, factor, axis=1) for node in value.users]


def absorb_factor(uses: Iterable[tuple[Node, int]], factor: Factor, order: Mapping[Node, int]) -> list[Edit] | str:
    """Return the edits that multiply the operands `uses` (reader, index) by `factor`; a reason (str) if that is
    impossible, for example because a value on the path to a parameter has other readers. `order` maps each node to its
    position in execution order."""
    walk = _Walk(order)
    for reader, index in uses:
        walk.demand_factor(reader, index, factor)
    return walk.run()


def find_other_use(edits: Sequence[Edit], edited: Mapping[tuple[Node, int], object]) -> str | None:
    """Return a sentence that names a reader of a parameter of `edits` that `edited` does not change in the same way;
    None without one. `edited` maps (node, operand index) to the `Edit.change` planned there."""
    for e in edits:
        for node, i in e.param.uses:
            if edited.get((node, i)) != e.change:
                return f"%{e.param.name} is also a weight of {node.op.name} (%{node.output.name})"
    return None


class _Walk:
    """A walk from readers to producers that collects the edits which multiply values by demanded factors.
    demand_factor() adds a demand; run() returns the edits, or the first reason (str) why a demand cannot be met."""

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

    def demand_factor(self, reader: Node, index: int, factor: Factor) -> None:
        """Demand that operand `index` of `reader` is multiplied by `factor`."""
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
            position = self.order[value.producer]
            if position not in self.nodes:
                self.nodes[position] = value.producer
                # The latest node first: all readers of a value are visited before its producer.
                heapq.heappush(self.waiting, (-position, position))

    def run(self) -> list[Edit] | str:
        while self.waiting and self.why is None:
            node = self.nodes[heapq.heappop(self.waiting)[1]]
            demands = [(v, self.factors[v]) for v in node.outputs if v in self.factors]
            for v, _ in demands:
                other_uses = [n for n, i in v.uses if (n, i) not in self.readers[v]]
                if other_uses:
                    self.refuse(f"%{v.name} is also read by {other_uses[0].op.name} (%{other_uses[0].output.name})")
                elif v.is_output:
                    self.refuse(f"%{v.name} is also an output")
            if self.why is None:
                self.visit(node, demands)
        return self.edits if self.why is None else self.why

    def visit(self, node: Node, demands: list[tuple[Value, Factor]]) -> None:
        """Replace demands on outputs of `node` by demands on its operands and edits of its parameters, or set `why`."""
        op, (value, factor) = node.op, demands[0]
        is_number = not isinstance(factor, Recipe)
        if op in (ops.linear, ops.norm_linear):
            self.visit_linear(node, factor)
        elif op is ops.split:
            self.visit_split(node, demands)
        elif op is ops.add_norm and (value.index or len(demands) > 1):
            self.refuse(f"%{value.name} is a sum of residuals")
        elif op in OUTPUT_WEIGHTS:
            self.add_edits(list_writer_edits(node, factor))
        elif (op in (ops.add, ops.sub) and (is_number or _has_full_width(node))) or (op is ops.concat and is_number):
            for i in range(len(node.inputs)):
                self.demand_factor(node, i, factor)
        elif op is ops.mul and (is_number or _has_full_width(node)) and any(isinstance(v, Param) for v in node.inputs):
            # Scaling one operand of a product is enough; the walk ends at the parameter.
            self.demand_factor(node, next(i for i, v in enumerate(node.inputs) if isinstance(v, Param)), factor)
        elif op is ops.glu and node.attrs["limit"] is None and node.attrs["shift"] == 0:
            # act(gate) ⊙ up is linear in `up` only.
            self.demand_factor(node, 1, factor)
        elif op is ops.cast or (op is ops.affine and node.attrs["plus"] == 0) or (op in _HOMOGENEOUS and is_number):
            self.demand_factor(node, 0, factor)
        else:
            self.refuse(f"{op.name} (%{value.name}) is between the scale and the weights")

    def visit_linear(self, node: Node, factor: Factor) -> None:
        """Multiply weight and bias; or input and bias, if `factor` is a number and other ops share the weight."""
        weight, bias = node.operand("weight"), node.operand("bias")
        if not isinstance(weight, Param) or not (bias is None or isinstance(bias, Param)):
            self.refuse(f"the weight of %{node.output.name} is computed")
        elif isinstance(factor, Recipe) or all(n.op in (ops.linear, ops.norm_linear) for n in weight.users):
            self.add_edits(list_writer_edits(node, factor))
        else:
            self.add_edits([] if bias is None else [Edit(node, 2, factor)])
            self.demand_factor(node, 0, factor)

    def visit_split(self, node: Node, demands: list[tuple[Value, Factor]]) -> None:
        """Demand a number for all pieces from the input; for one piece, multiply its rows of the packed linear."""
        x, (value, factor) = node.required_operand("x"), demands[0]
        if len(demands) == len(node.outputs) and not isinstance(factor, Recipe):
            if any(f != factor for _, f in demands):
                self.refuse(f"the pieces of %{x.name} would be multiplied by different factors")
            self.demand_factor(node, 0, factor)
            return
        packed = find_projection(value)
        if packed is None or len(demands) > 1 or len(x.uses) > 1 or x.is_output:
            self.refuse(f"%{value.name} is a piece of %{x.name}, which is not a packed linear")
        else:
            self.add_edits(list_writer_edits(packed.node, factor, packed.start, packed.stop))

    def add_edits(self, edits: list[Edit] | str) -> None:
        if isinstance(edits, str):
            self.refuse(edits)
        else:
            self.edits += edits


def _has_full_width(node: Node) -> bool:
    """Return whether the last axis of each operand of `node` is as long as that of its result."""
    return all(v is not None and v.shape[-1:] == node.output.shape[-1:] for v in node.inputs)
