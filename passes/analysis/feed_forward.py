"""Feed-forwards in graphs: down(act(up x)), or down(act(gate x) ⊙ up x).

Projections may be pieces of a packed linear, and activations and gates may consist of several elementwise ops.
`match_activation` matches an activation, `match_gate` a gated unit, `match_feed_forward` the complete feed-forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from weft.ir import Node, Param, Recipe, Value, ops
from weft.ir.op import Trait
from weft.ir.ops.activation import ACTIVATIONS
from weft.ir.recipes import Full

from ..edits.edit import are_params, is_feature_split
from .projections import slice_rows


@dataclass(frozen=True)
class Projection:
    """Rows start:stop of the weight of `node` (linear or norm_linear), and the value that they compute.
    `value` is the output of `node`, or one output of a split of this output."""

    node: Node
    value: Value
    start: int
    stop: int

    @property
    def x(self) -> Value:
        return self.node.required_operand("x")

    def has_same_input(self, other: Projection) -> bool:
        """Return whether both projections have the same input, op and attributes (such as eps of a fused norm)."""
        return (self.x, self.node.op, self.node.attrs) == (other.x, other.node.op, other.node.attrs)

    @property
    def is_normed(self) -> bool:
        """Return whether `node` is a norm_linear, which normalizes `x`."""
        return self.node.op is ops.norm_linear

    @property
    def is_packed(self) -> bool:
        return self.value.producer is not self.node

    @property
    def params(self) -> tuple[Param, Param | None]:
        """Weight and bias (or None) of `node`, with all rows, not only start:stop."""
        weight, bias = self.node.operand("weight"), self.node.operand("bias")
        assert isinstance(weight, Param) and (bias is None or isinstance(bias, Param))
        return weight, bias

    @property
    def weight(self) -> Recipe:
        """Rows start:stop of the weight, [stop - start, width of x]."""
        return self._rows(self.params[0])

    @property
    def bias(self) -> Recipe | None:
        """Elements start:stop of the bias, [stop - start]; None without a bias."""
        bias = self.params[1]
        return None if bias is None else self._rows(bias)

    @property
    def full_bias(self) -> Recipe:
        """`bias`, or zeros [stop - start] without one."""
        return self.bias or Full(0.0, (self.stop - self.start,))

    def _rows(self, param: Param) -> Recipe:
        return slice_rows(param.recipe, self.start, self.stop, param.graph.reader) if self.is_packed else param.recipe


@dataclass(frozen=True)
class GatedUnit:
    """The gated unit act(gate) ⊙ (up + shift), with gate and up clamped at `limit` as in the op `glu`.
    `nodes` compute it from `gate` and `up`; the node whose output is the result comes first."""

    gate: Value
    up: Value
    activation: str
    limit: float | None
    shift: float
    nodes: tuple[Node, ...]

    @property
    def attrs(self) -> dict[str, Any]:
        """The attributes of the op `glu` that computes the same."""
        return {"activation": self.activation, "limit": self.limit, "shift": self.shift}


@dataclass(frozen=True)
class FeedForward:
    """A feed-forward down(act(up)), or down(act(gate) ⊙ (up + shift)) if `gate` is not None.
    No other nodes read its inner values. `nodes` compute the input of the linear `down` from the projections.
    `limit` and `shift` are the attributes of the op `glu`, None and 0 without a gate."""

    down: Node
    up: Projection
    gate: Projection | None
    activation: str
    limit: float | None
    shift: float
    nodes: tuple[Node, ...]

    @property
    def x(self) -> Value:
        return self.up.x

    @property
    def hidden(self) -> int:
        return self.up.stop - self.up.start

    @property
    def out(self) -> Projection:
        """The linear `down` as a projection with all its rows."""
        return Projection(self.down, self.down.output, 0, self.down.output.width)

    @property
    def parts(self) -> tuple[Projection, ...]:
        """The projections: up, gate (if not None), down."""
        return (self.up, self.out) if self.gate is None else (self.up, self.gate, self.out)

    @property
    def params(self) -> tuple[Param, ...]:
        """All weights and biases, each once."""
        return tuple(dict.fromkeys(p for part in self.parts for p in part.params if p is not None))

    @property
    def kind(self) -> tuple[object, ...]:
        """The properties that feed-forwards must share to be merged: has a gate, activation, limit, shift."""
        return self.gate is not None, self.activation, self.limit, self.shift


def find_projection(value: Value) -> Projection | None:
    """Return the projection that computes `value`; None if there is none.
    It is a linear or norm_linear whose weight and bias are parameters. `value` is its output, or one output of a split
    of this output along the last axis."""
    node, start = value.producer, 0
    if node is not None and node.op is ops.split:
        x = node.inputs[0]
        if x is None or not is_feature_split(node):
            return None
        start, node = sum(node.attrs["sizes"][: value.index]), x.producer
    if node is None or node.op not in (ops.linear, ops.norm_linear) or not are_params(node.inputs[1:]):
        return None
    return Projection(node, value, start, start + value.width)


def is_only_reader(value: Value, reader: Node) -> bool:
    """Return whether no node except `reader` reads `value`, and it is not a graph output."""
    return not value.is_output and set(value.users) <= {reader}


def find_activation_name(node: Node) -> str | None:
    """Return the name of the activation `node`, such as ``gelu`` or ``swish(1.5)``; None for other ops."""
    for name, (op, attrs) in ACTIVATIONS.items():
        if node.op is op and all(node.attrs[k] == attrs.get(k, a.default) for k, a in op.attrs.items()):
            return name
    return f"swish({node.attrs['beta']})" if node.op is ops.swish else None


def match_activation(value: Value) -> tuple[str, Value, tuple[Node, ...]] | None:
    """Return (name, operand, nodes) of the activation that computes `value`; the node that returns `value` comes first.
    x·σ(x), x·σ(βx) and max(0, x)² also match as several ops, unless other nodes read the values in between.
    Return None if `value` is not the result of an activation."""
    node = value.producer
    if node is None or Trait.ELEMENTWISE not in node.op.traits or not node.inputs:
        return None
    x = node.inputs[0]
    name = find_activation_name(node)
    if name is not None and x is not None:
        return name, x, (node,)
    inner = x.producer if x is not None else None
    is_square = node.op is ops.square or (node.op is ops.mul and x is node.inputs[1])
    if inner is not None and inner.op is ops.relu and is_square:
        before = inner.inputs[0]
        return None if before is None or not is_only_reader(inner.output, node) else ("relu2", before, (node, inner))
    if node.op is not ops.mul:
        return None
    for a, b in (node.inputs, node.inputs[::-1]):
        sigmoid = None if b is None else b.producer
        if a is None or sigmoid is None or sigmoid.op is not ops.sigmoid or not is_only_reader(sigmoid.output, node):
            continue
        inside = sigmoid.inputs[0]
        if inside is a:
            return "silu", a, (node, sigmoid)
        scaled = None if inside is None else inside.producer
        if scaled is None or scaled.op is not ops.affine or not is_only_reader(scaled.output, sigmoid):
            continue
        if scaled.inputs[0] is a and scaled.attrs["plus"] == 0:
            return f"swish({scaled.attrs['by']})", a, (node, sigmoid, scaled)
    return None


def match_gate(node: Node) -> GatedUnit | str | None:
    """Return the gated unit whose last node is `node`: a `glu`, or a product of up and an activated gate. In a product,
    gate and up must be projections of one value, clamped as in `glu` if at all, and no other nodes may read the values
    in between. Return a reason (str) if the clamps differ, or if the gate is a projection but another condition fails.
    Return None for all other nodes."""
    if node.op is ops.glu:
        gate, up = node.inputs
        assert gate is not None and up is not None
        return GatedUnit(gate, up, node.attrs["activation"], node.attrs["limit"], node.attrs["shift"], (node,))
    a, b = node.inputs if node.op is ops.mul else (None, None)
    if a is None or b is None or a is b or a.type != b.type:
        return None
    for activated, up in ((a, b), (b, a)):
        match = match_activation(activated)
        if match is None:
            continue
        name, gate, nodes = match
        if gate is up:
            return None  # an activation itself, spelled out
        return _match_gate(node, name, gate, up, nodes)
    if find_projection(a) is None or find_projection(b) is None:
        return None
    return _match_gate(node, "identity", a, b, ())


def _match_gate(node: Node, name: str, gate: Value, up: Value, nodes: tuple[Node, ...]) -> GatedUnit | str | None:
    """Return `match_gate` of the product `node` = act(gate) ⊙ up, given the activation's `name` and `nodes`."""
    inside = [node, *nodes]
    shift, limit = 0.0, None
    if up.producer is not None and up.producer.op is ops.affine and up.producer.attrs["by"] == 1:
        shift, inside, up = up.producer.attrs["plus"], [*inside, up.producer], up.producer.required_operand("x")
    clips = [v.producer for v in (gate, up) if v.producer is not None and v.producer.op is ops.clip]
    if clips:
        high = clips[-1].attrs["high"]
        if high is None or [(c.attrs["low"], c.attrs["high"]) for c in clips] != [(None, high), (-high, high)]:
            return f"its clamps are not gate ≤ limit and |up| ≤ limit (%{clips[0].output.name})"
        limit, inside = high, [*inside, *clips]
        gate, up = (c.required_operand("x") for c in clips)
    projections = find_projection(gate), find_projection(up)
    if projections[0] is None:
        return None
    if projections[1] is None or not projections[0].has_same_input(projections[1]):
        return f"%{up.name} and %{gate.name} are not projections of the same value"
    for inner in inside[1:]:
        if any(n not in inside for n in inner.output.users) or inner.output.is_output:
            return f"%{inner.output.name} is also read elsewhere"
    return GatedUnit(gate, up, name, limit, shift, tuple(inside))


def match_feed_forward(down: Node) -> FeedForward | str | None:
    """Return the feed-forward whose last node is the linear `down`; None if the nodes before it do not form one.
    Return a reason (str) if they do, but a projection or the input of `down` has another reader or is an output."""
    out, hidden = find_projection(down.output), down.inputs[0] if down.inputs else None
    if down.op is not ops.linear or out is None or hidden is None or hidden.producer is None:
        return None
    gate = match_gate(hidden.producer)
    if isinstance(gate, str):
        return None
    if gate is not None:
        up, activated = find_projection(gate.up), find_projection(gate.gate)
        unit = gate.activation, gate.limit, gate.shift, gate.nodes
        if up is None or activated is None or not up.has_same_input(activated):
            return None
    else:
        match = match_activation(hidden)
        up, activated = (None if match is None else find_projection(match[1])), None
        if match is None or up is None:
            return None
        unit = match[0], None, 0.0, match[2]
    fused = FeedForward(down, up, activated, *unit)
    inside = {down, *fused.nodes, *(p.value.producer for p in fused.parts[:-1])}
    for value in [hidden, *(p.value for p in fused.parts[:-1]), *(p.node.output for p in fused.parts[:-1])]:
        outside = [n for n in value.users if n not in inside]
        if outside or value.is_output:
            return f"%{value.name} is read by {outside[0].op.name if outside else 'the caller'} too"
    return fused
