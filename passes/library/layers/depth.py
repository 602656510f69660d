"""Fewer layers, or more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from weft.ir import Graph, Node, Param, Recipe, Value, WeftError, interpret, ops
from weft.ir.recipes import Full
from weft.ir.recipes.readers import Array

from ...analysis.layers import Layer, Layers, numbers, renumber, stack_of, unfuse
from ...core.base import Pass
from ...core.equivalence import EXACT, EquivalenceCheck
from ...core.trace import Trace
from ...edits.absorb import WRITERS
from ...edits.edit import drop
from ..cleanup.dce import Dce
from ..fuse.fuse_residual_norm import FuseResidualNorm

MOST = 1024  # layers inserted at once


@dataclass(frozen=True)
class PruneLayers(Pass):
    """Leave out the layers called `layers`: numbers, "all", "even", "odd", or text such as "4-7, 9"; -1 is the last.

    What a layer takes in goes on to the next, and those behind are numbered anew; caches given afterwards are as many
    as are left. In deep pre-norm models the later layers of the middle change the stream least and are missed least.
    `stack` names one of several (encoder.layers, decoder.layers). A second run prunes again.

    Condition: every layer makes one value of one value of the same type. It runs before kv-cache.

    Source: Gromov 2024 (2403.17887); ShortGPT (Men 2024, 2403.03853).

    Example prune-layers{layers=[0]}::

        graph example {
          input %x: f32[batch, seq, 4]
          param %layers.0.up.weight: f32[4, 4] = normal([4, 4], std=0.5, stream="a")
          param %layers.1.up.weight: f32[4, 4] = normal([4, 4], std=0.5, stream="b")
          scope layers.0
            %.up: f32[batch, seq, 4] = linear(%x, %.up.weight)
            %.sum: f32[batch, seq, 4] = add(%x, %.up)
          scope layers.1
            %.up: f32[batch, seq, 4] = linear(%layers.0.sum, %.up.weight)
            %.sum: f32[batch, seq, 4] = add(%layers.0.sum, %.up)
          output y = %layers.1.sum
        }
    """

    name = "prune-layers"
    effect = "lossy"
    purpose = "Convert heads, cut heads and layers"
    see = ("insert-layers",)
    idempotent: ClassVar[bool] = False
    layers: Layers
    stack: str = ""

    def run(self, graph: Graph, trace: Trace) -> None:
        fused = unfuse(graph)
        layers = stack_of(graph, self.stack, self.name)
        dropped = self._chosen(layers)
        for layer in reversed(dropped):  # what a layer takes in may come from another of them
            trace.fired(self.name, layer.y.name)
            layer.y.replace_uses(layer.x, keep=layer.nodes)
            drop(graph, reversed(layer.nodes))
        Dce().run(graph, Trace())  # what only these layers read, such as frequencies of their own
        left = [layer.number for layer in layers if layer not in dropped]
        renumber(graph, layers[0].stack, {number: i for i, number in enumerate(left)})
        if fused:
            FuseResidualNorm().run(graph, Trace())

    def _chosen(self, layers: list[Layer]) -> list[Layer]:
        try:
            wanted = numbers(self.layers, len(layers))
        except WeftError as e:
            raise WeftError(f"{self.name}: {e}") from None
        if len(wanted) == len(layers):
            raise WeftError(f"{self.name}: of {layers[0].stack} no layer would be left")
        return [layers[i] for i in wanted]

    def check(self, before: Graph, after: Graph, equivalence: EquivalenceCheck) -> None:
        """Equals the graph before, run with the results of these layers overwritten by what they read."""
        inputs, staged = equivalence.inputs(before), equivalence.stage(before)
        unfuse(staged)
        sources = {layer.y: layer.x for layer in self._chosen(stack_of(staged, self.stack, self.name))}
        seen = {staged.inputs[name]: np.asarray(array) for name, array in inputs.items()}

        def watch(node: Node, outputs: tuple[Array, ...]) -> None:
            for value, array in zip(node.outputs, outputs, strict=True):
                if value in sources:
                    # In place: later nodes read this very array.
                    array[...] = seen[sources[value]]
                seen[value] = array

        equivalence.same(interpret(staged, inputs, watch=watch), equivalence.run(after, inputs), EXACT)


@dataclass(frozen=True)
class InsertLayers(Pass):
    """Insert `count` copies of layer `after` behind it, which add nothing to the residual stream yet.

    In x + f(x), f ends in a linear (or the downs of experts): where its weight and bias are zero, f(x) = 0 and the
    layer hands x on. All other weights of a copy are those of its original, so that training it on starts from a model
    that is the same and knows how a layer works. Layers behind are numbered anew; `stack` names one of several
    (encoder.layers, decoder.layers).

    Condition: pre-norm: a layer adds to what it takes in and does nothing else to it. Post-norm layers norm it, so no
    weights make them the identity. Where the layer behind `after` adds nothing already, nothing more is inserted. It
    runs before kv-cache.

    Source: LLaMA Pro (Wu 2024, 2401.02415), block expansion.

    Example insert-layers{after=0}::

        graph example {
          input %x: f32[batch, seq, 4]
          param %layers.0.up.weight: f32[6, 4] = normal([6, 4], std=0.5, stream="up")
          param %layers.0.down.weight: f32[4, 6] = normal([4, 6], std=0.5, stream="down")
          scope layers.0
            %.up: f32[batch, seq, 6] = linear(%x, %.up.weight)
            %.hidden: f32[batch, seq, 6] = relu(%.up)
            %.down: f32[batch, seq, 4] = linear(%.hidden, %.down.weight)
            %.sum: f32[batch, seq, 4] = add(%x, %.down)
          output y = %layers.0.sum
        }
    """

    name = "insert-layers"
    effect = "exact"
    purpose = "Exchange parts and grow"
    see = ("prune-layers",)
    tradeoff = "there are more layers to compute, and their weights"
    after: int
    count: int = 1
    stack: str = ""

    def run(self, graph: Graph, trace: Trace) -> None:
        if not 1 <= self.count <= MOST:
            raise WeftError(f"{self.name}: count={self.count} must be from 1 to {MOST}")
        fused = unfuse(graph)
        layers = stack_of(graph, self.stack, self.name)
        if not -len(layers) <= self.after < len(layers):
            raise WeftError(
                f"{self.name}: there is no layer {self.after}; {layers[0].stack} has 0 to {len(layers) - 1}"
            )
        at = self.after % len(layers)
        layer, behind = layers[at], layers[at + 1 : at + 2]
        written = _written(layer)
        if isinstance(written, str):
            trace.refuse(self.name, layer.y.name, written)
        elif behind and _adds_nothing(behind[0]):
            trace.refuse(self.name, layer.y.name, f"{layer.stack}.{behind[0].number}, behind it, adds nothing already")
        else:
            self._insert(graph, layers, layer, written)
            trace.fired(self.name, layer.y.name)
        if fused:
            FuseResidualNorm().run(graph, Trace())

    def _insert(self, graph: Graph, layers: list[Layer], layer: Layer, written: set[Param]) -> None:
        # Copies are numbered behind the last layer first, so that no scope is taken twice; `renumber` sorts them in.
        free = layers[-1].number + 1
        anchor, x, copied = layer.nodes[-1], layer.y, list[Node]()
        for i in range(self.count):
            nodes, y = _copied(layer, free + i, x, written, anchor)
            anchor, x, copied = nodes[-1], y, [*copied, *nodes]
        # The first copy must go on reading layer.y itself.
        layer.y.replace_uses(x, keep=[*layer.nodes, *copied])
        shifted = {old.number: old.number + self.count * (old.number > layer.number) for old in layers}
        renumber(graph, layer.stack, shifted | {free + i: layer.number + 1 + i for i in range(self.count)})


def _written(layer: Layer) -> set[Param] | str:
    """The parameters without which `layer` would add nothing to what it takes in, or why there are none."""
    branches = _added(layer.y, layer.x)
    if branches is None:
        maker = layer.y.producer.op.name if layer.y.producer else "nothing"
        return f"{maker} makes it: no sum of %{layer.x.name} and what the layer computes"
    found: set[Param] = set()
    for branch in branches:
        why = _ends(branch, found)
        if why is not None:
            return why
    return found


def _added(y: Value, x: Value) -> list[Value] | None:
    """Return the summands added to x to make y; None if y is not such a sum."""
    if y is x:
        return []
    if y.producer is None or y.producer.op is not ops.add:
        return None
    a, b = y.producer.inputs
    assert a is not None and b is not None
    for stream, branch in ((a, b), (b, a)):
        inner = _added(stream, x)
        if inner is not None:
            return [*inner, branch]
    return None


def _ends(value: Value, found: set[Param]) -> str | None:
    """Put into `found` the parameters that, if zero, make `value` zero; or say why there are none."""
    node = value.producer
    if node is None:
        return f"%{value.name} is not computed in the layer"
    if node.op in (ops.linear, ops.norm_linear, ops.moe):
        params = [v for k in WRITERS[node.op] if (v := node.operand(k)) is not None]
        found.update(p for p in params if isinstance(p, Param))
        return (
            None
            if all(isinstance(p, Param) for p in params)
            else f"the weights of {node.op.name} (%{value.name}) are computed"
        )
    if node.op is ops.mul:  # one zero is enough
        for factor in (v for v in node.inputs if v is not None):
            zeros = set[Param]()
            if (why := _ends(factor, zeros)) is None:
                found.update(zeros)
                return None
        return why
    linear = node.op in (ops.add, ops.rms_norm, ops.layer_norm, ops.cast, ops.reshape)
    if linear or (node.op is ops.affine and node.attrs["plus"] == 0):
        bias = node.operand("bias") if node.op is ops.layer_norm else None
        if isinstance(bias, Param):
            found.add(bias)
        operands = node.inputs if node.op is ops.add else node.inputs[:1]
        return next((why for v in operands if v is not None and (why := _ends(v, found))), None)
    return f"{node.op.name} (%{value.name}) makes what it adds, not a linear"


def _adds_nothing(layer: Layer) -> bool:
    written = _written(layer)
    return not isinstance(written, str) and all(isinstance(p.recipe, Full) and p.recipe.value == 0 for p in written)


def _copied(layer: Layer, number: int, x: Value, zero: set[Param], anchor: Node) -> tuple[list[Node], Value]:
    """A copy of `layer` called `number`, behind `anchor`, that takes in x: its nodes and what it hands on.

    Parameters of the layer are copied with it, those in `zero` as zeros; others are shared.
    """
    graph, old, new = x.graph, f"{layer.stack}.{layer.number}.", f"{layer.stack}.{number}."
    found: dict[Value | None, Value | None] = {None: None, layer.x: x}

    def copy(value: Value | None) -> Value | None:
        if value not in found and isinstance(value, Param) and (value in zero or value.name.startswith(old)):
            recipe: Recipe = Full(0.0, value.type.concrete({})) if value in zero else value.recipe
            found[value] = graph.add_param(value.name.replace(old, new, 1), value.type, recipe)
        return found.get(value, value)

    nodes: list[Node] = []
    for node in layer.nodes:
        with graph.inserting(after=nodes[-1] if nodes else anchor):
            types = [v.type for v in node.outputs]
            names = [v.name.replace(old, new, 1) for v in node.outputs]
            # The dot keeps layers.1 from matching the start of layers.10.
            scope = f"{node.scope}.".replace(old, new, 1).removesuffix(".")
            nodes.append(graph.add_node(node.op, [copy(v) for v in node.inputs], node.attrs, types, names, scope))
        found.update(zip(node.outputs, nodes[-1].outputs, strict=True))
    y = found[layer.y]
    assert y is not None
    return nodes, y
