"""Change the depth of a model: prune layers and insert layers."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from weft.ir import Graph, Node, Param, Recipe, Value, WeftError, interpret, ops
from weft.ir.recipes import Full
from weft.ir.recipes.readers import Array

from ... import Pass, Trace
from ...analysis.layers import Layer, Layers, expand_add_norms, find_stack, parse_layers, renumber_layers
from ...core.equivalence import EXACT, EquivalenceCheck
from ...edits.absorb import OUTPUT_WEIGHTS
from ...edits.edit import are_params, erase_unused
from ..cleanup.dce import Dce
from ..fuse.fuse_residual_norm import FuseResidualNorm

MOST_LAYERS = 1024  # inserted by one run


class PruneLayers(Pass):
    """Remove the layers `layers`, but not all: indices, "even", "odd", or a string such as "4-7, 9"; -1 is the last.

    The readers of a removed layer read its input, and later layers are renumbered; kv-cache then adds caches for the
    remaining layers only. In deep pre-norm models the layers after the middle change the residual stream least, so
    their removal costs least. `stack` names one of several stacks (encoder.layers, decoder.layers). A second run prunes
    again.

    Condition: every layer maps one value to one value of the same type. The pass runs before kv-cache.

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
        fused = expand_add_norms(graph)
        layers = find_stack(graph, self.stack, self.name)
        removed = self._select_layers(layers)
        for layer in reversed(removed):  # the input of a dropped layer may come from another one
            trace.record_rewrite(self.name, layer.y.name)
            layer.y.replace_uses(layer.x, keep=layer.nodes)
            erase_unused(graph, reversed(layer.nodes))
        Dce().run(graph, Trace())  # erases values that only these layers read, such as their own RoPE frequencies
        remaining = [layer.number for layer in layers if layer not in removed]
        renumber_layers(graph, layers[0].stack, {number: i for i, number in enumerate(remaining)})
        if fused:
            FuseResidualNorm().run(graph, Trace())

    def _select_layers(self, layers: list[Layer]) -> list[Layer]:
        try:
            indices = parse_layers(self.layers, len(layers))
        except WeftError as e:
            raise WeftError(f"{self.name}: {e}") from None
        if len(indices) == len(layers):
            raise WeftError(f"{self.name}: all layers of {layers[0].stack} would be removed; keep one")
        return [layers[i] for i in indices]

    def check(self, before: Graph, after: Graph, equivalence: EquivalenceCheck) -> None:
        """Check that outputs equal those of the graph before, with outputs of removed layers set to their inputs."""
        inputs, staged = equivalence.make_inputs(before), equivalence.randomize_weights(before)
        expand_add_norms(staged)
        sources = {layer.y: layer.x for layer in self._select_layers(find_stack(staged, self.stack, self.name))}
        arrays = {staged.inputs[name]: np.asarray(array) for name, array in inputs.items()}

        def record(node: Node, outputs: tuple[Array, ...]) -> None:
            for value, array in zip(node.outputs, outputs, strict=True):
                if value in sources:
                    # In place: later nodes read this array object.
                    array[...] = arrays[sources[value]]
                arrays[value] = array

        equivalence.check_close(interpret(staged, inputs, watch=record), equivalence.run(after, inputs), EXACT)


class InsertLayers(Pass):
    """Insert `count` copies of layer `after` (-1: the last) after it, initialized to add zero to the residual stream.

    In x + f(x), f ends in a linear (or the down projections of experts): with zero weight and bias, f(x) = 0 and the
    layer is the identity. All other weights of a copy equal those of the original, so further training starts from the
    same function and from trained layers. Later layers are renumbered; `stack` names one of several stacks
    (encoder.layers, decoder.layers).

    Condition: each layer only adds to its input (pre-norm). Post-norm layers normalize it, so no weights make them the
    identity. Nothing is inserted if the layer after `after` already adds zero. The pass runs before kv-cache.

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
        if not 1 <= self.count <= MOST_LAYERS:
            raise WeftError(f"{self.name}: count={self.count} must be from 1 to {MOST_LAYERS}")
        fused = expand_add_norms(graph)
        layers = find_stack(graph, self.stack, self.name)
        if not -len(layers) <= self.after < len(layers):
            raise WeftError(
                f"{self.name}: there is no layer {self.after}; {layers[0].stack} has 0 to {len(layers) - 1}"
            )
        at = self.after % len(layers)
        layer, next_layer = layers[at], layers[at + 1 : at + 2]
        zero_params = _find_zero_params(layer)
        if isinstance(zero_params, str):
            trace.refuse(self.name, layer.y.name, zero_params)
        elif next_layer and _adds_zero(next_layer[0]):
            trace.refuse(self.name, layer.y.name, f"{layer.stack}.{next_layer[0].number}, after it, already adds zero")
        else:
            self._insert(graph, layers, layer, zero_params)
            trace.record_rewrite(self.name, layer.y.name)
        if fused:
            FuseResidualNorm().run(graph, Trace())

    def _insert(self, graph: Graph, layers: list[Layer], layer: Layer, zero_params: set[Param]) -> None:
        # Copies first get numbers after the last layer, so that no scope occurs twice; `renumber_layers` orders them.
        next_number = layers[-1].number + 1
        anchor, x, copies = layer.nodes[-1], layer.y, list[Node]()
        for i in range(self.count):
            nodes, y = _copy_layer(layer, next_number + i, x, zero_params, anchor)
            anchor, x, copies = nodes[-1], y, [*copies, *nodes]
        # The first copy must go on reading layer.y itself.
        layer.y.replace_uses(x, keep=[*layer.nodes, *copies])
        new_numbers = {old.number: old.number + self.count * (old.number > layer.number) for old in layers}
        new_numbers |= {next_number + i: layer.number + 1 + i for i in range(self.count)}
        renumber_layers(graph, layer.stack, new_numbers)


def _find_zero_params(layer: Layer) -> set[Param] | str:
    """Return the parameters that, set to zero, make `layer` the identity; a reason (str) if none can."""
    branches = _find_summands(layer.y, layer.x)
    if branches is None:
        producer = layer.y.producer.op.name if layer.y.producer else "nothing"
        return f"it comes from {producer}: not a sum of %{layer.x.name} and outputs of sublayers"
    params: set[Param] = set()
    for branch in branches:
        reason = _collect_zero_params(branch, params)
        if reason is not None:
            return reason
    return params


def _find_summands(y: Value, x: Value) -> list[Value] | None:
    """Return [a, b, …] if y is a sum x + a + b + … in any order, [] if y is x; otherwise None."""
    if y is x:
        return []
    if y.producer is None or y.producer.op is not ops.add:
        return None
    a, b = (v for v in y.producer.inputs if v is not None)
    for stream, branch in ((a, b), (b, a)):
        inner = _find_summands(stream, x)
        if inner is not None:
            return [*inner, branch]
    return None


def _collect_zero_params(value: Value, params: set[Param]) -> str | None:
    """Add to `params` parameters that, set to zero, make `value` zero; return None, or a reason (str) if impossible."""
    node = value.producer
    if node is None:
        return f"%{value.name} is not computed in the layer"
    if node.op in (ops.linear, ops.norm_linear, ops.moe):
        weights = [v for k in OUTPUT_WEIGHTS[node.op] if (v := node.operand(k)) is not None]
        params.update(p for p in weights if isinstance(p, Param))
        return None if are_params(weights) else f"the weights of {node.op.name} (%{value.name}) are computed"
    if node.op is ops.mul:  # one zero is enough
        for factor in (v for v in node.inputs if v is not None):
            zeros = set[Param]()
            if (reason := _collect_zero_params(factor, zeros)) is None:
                params.update(zeros)
                return None
        return reason
    linear = node.op in (ops.add, ops.rms_norm, ops.layer_norm, ops.cast, ops.reshape)
    if linear or (node.op is ops.affine and node.attrs["plus"] == 0):
        bias = node.operand("bias") if node.op is ops.layer_norm else None
        if isinstance(bias, Param):
            params.add(bias)
        operands = node.inputs if node.op is ops.add else node.inputs[:1]
        return next((reason for v in operands if v is not None and (reason := _collect_zero_params(v, params))), None)
    return f"{node.op.name} (%{value.name}) is added to the residual stream, not the output of a linear"


def _adds_zero(layer: Layer) -> bool:
    params = _find_zero_params(layer)
    return not isinstance(params, str) and all(isinstance(p.recipe, Full) and p.recipe.value == 0 for p in params)


def _copy_layer(layer: Layer, number: int, x: Value, zero: set[Param], anchor: Node) -> tuple[list[Node], Value]:
    """Insert a copy of `layer` after the node `anchor`, with input x and number `number`; return (its nodes, output).
    Parameters in `zero` become zeros, other parameters in the layer's scope are copied, and the rest is shared."""
    graph, old, new = x.graph, f"{layer.stack}.{layer.number}.", f"{layer.stack}.{number}."
    copies: dict[Value | None, Value | None] = {None: None, layer.x: x}

    def copy_value(value: Value | None) -> Value | None:
        if value not in copies and isinstance(value, Param) and (value in zero or value.name.startswith(old)):
            recipe: Recipe = Full(0.0, value.type.concrete({})) if value in zero else value.recipe
            copies[value] = graph.add_param(value.name.replace(old, new, 1), value.type, recipe)
        return copies.get(value, value)

    nodes: list[Node] = []
    for node in layer.nodes:
        with graph.inserting(after=nodes[-1] if nodes else anchor):
            types = [v.type for v in node.outputs]
            names = [v.name.replace(old, new, 1) for v in node.outputs]
            # The dot keeps layers.1 from matching the start of layers.10.
            scope = f"{node.scope}.".replace(old, new, 1).removesuffix(".")
            nodes.append(graph.add_node(node.op, [copy_value(v) for v in node.inputs], node.attrs, types, names, scope))
        copies.update(zip(node.outputs, nodes[-1].outputs, strict=True))
    y = copies[layer.y]
    assert y is not None
    return nodes, y
