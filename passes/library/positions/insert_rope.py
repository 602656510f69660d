"""Add rotary positions to attentions without RoPE."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import numpy as np

from weft.ir import Graph, Node, TensorType, Value, WeftError, ops
from weft.ir.recipes.frequencies import RopeFrequencies
from weft.ir.recipes.readers import Array
from weft.ir.types import dtypes

from ... import Pass, Trace
from ...analysis.layers import Layers, select_attentions
from ...analysis.rotary import ScalingArguments, check_scaling, find_or_add_frequencies, find_ropes, make_rope_reference
from ...core.equivalence import EXACT, EquivalenceCheck
from ...core.oracle import compute_amplitude


class InsertRope(ScalingArguments, Pass):
    """Add RoPE to the queries and keys of attentions that have no rotary positions.

    Pair k of every head of q and k is rotated by position · theta^(−2k/rotary_dim) radians, right before the attention,
    after any norms of the heads. The first `rotary_dim` features of a head are rotated (None: all of them). `layout`
    pairs feature k with k + rotary_dim/2 (half; GPT-NeoX, Llama) or neighbours (interleaved; GPT-J). `scaling`,
    `factor` and `original` (the context before scaling) work as in extend-context. Causal attentions read the input
    position_ids, which is added if it is missing; bidirectional attentions without this input count their tokens.
    `layers` selects the layers: all, even, odd, indices ("0-5, 8"), or a pattern ("local*3 + global").

    Condition: the model changes and needs further training. A layer with RoPE, with a quantized cache, with an op other
    than `attention`, or with values that are part of its keys does not change. It is an error if no layer changes.

    Source: Su 2021 (RoFormer), arXiv:2104.09864.

    Example insert-rope{theta=10000}, on the graph of sliding-window.
    """

    name = "insert-rope"
    effect = "changing"
    purpose = "Positions and windows"
    see = ("strip-positions", "extend-context")
    tradeoff = "two rotations for every layer"
    theta: float = 10_000.0
    rotary_dim: int | None = None
    layout: Literal["half", "interleaved"] = "half"
    layers: Layers = "all"
    scaling: Literal["none", "linear", "ntk", "yarn", "llama3"] = "none"
    factor: float = 1.0

    def run(self, graph: Graph, trace: Trace) -> None:
        if self.scaling == "none" and self.factor != 1:
            raise WeftError(
                f"{self.name}: factor={self.factor} has no effect without scaling=: choose linear, ntk, yarn or llama3"
            )
        counted_positions = dict[Any, Value]()
        for node in select_attentions(graph, self.layers, self.name):
            reason = self._find_obstacle(node)
            if reason is not None:
                trace.refuse(self.name, node.output.name, reason)
                continue
            recipe = self._get_recipe(graph, node)
            options = {"interleaved": self.layout == "interleaved", "amplitude": recipe.attention_factor()}
            with graph.inserting(before=node):
                at = _find_positions(graph, node, counted_positions)
                param = find_or_add_frequencies(graph, recipe)
                for i, heads in enumerate((node.attrs["heads"], node.attrs["kv_heads"])):
                    rotated = ops.rope(node.inputs[i], at, param, heads=heads, name=f"{'qk'[i]}_rope", **options)
                    node.set_input(i, rotated)
            trace.record_rewrite(self.name, node.output.name)
        if not trace.rewrites[self.name]:
            first = trace.refusals[0]
            raise WeftError(f"{self.name}: there is nothing to rotate; %{first.at}: {first.reason}")

    def check(self, before: Graph, after: Graph, equivalence: EquivalenceCheck) -> None:
        """Check that the attentions equal those of `before` with pairs rotated in complex arithmetic."""
        inputs = equivalence.make_inputs(after)
        references = {}
        nodes_before = {n.output.name: n for n in before.nodes}
        for node in after.nodes:
            old = nodes_before.get(node.output.name)
            if node.op is ops.attention and old is not None and not find_ropes(old) and (ropes := find_ropes(node)):
                amplitude = compute_amplitude(self.scaling, self.factor)
                settings = {"interleaved": self.layout == "interleaved", "amplitude": amplitude}
                rotate = make_rope_reference(self._get_recipe(before, old), ropes[0], **settings)
                references[node.output.name] = partial(_attend_rotated, rotate, inputs.get("position_ids"))
        old_inputs = {name: inputs[name] for name in before.inputs}
        equivalence.check_close(
            equivalence.run_as(before, old_inputs, references), equivalence.run(after, inputs), EXACT
        )

    def _find_obstacle(self, node: Node) -> str | None:
        if node.op is ops.block_sparse_attention:
            return "its keys are visible in blocks, which insert-rope does not check"
        if node.op is not ops.attention:
            return f"{node.op.name} already has positions (strip-positions removes them)"
        if node.attrs["cache_bits"] is not None:
            return "its cache has scales for the present keys; run insert-rope before quantize-cache"
        if find_ropes(node):
            return "it already has rotary positions (strip-positions removes them, extend-context changes them)"
        return "its values are part of its keys" if node.operand("v") is None else None

    def _get_recipe(self, graph: Graph, node: Node) -> RopeFrequencies:
        head = node.required_operand("q").width // node.attrs["heads"]
        dim = head if self.rotary_dim is None else self.rotary_dim
        if dim > head:
            raise WeftError(f"{self.name}: rotary_dim={dim} exceeds the {head} features of a head")
        plain = RopeFrequencies(dim, self.theta)
        recipe = self.scale_recipe(plain, self.scaling, self.factor, self.find_context(graph))
        check_scaling(recipe, self.name)
        return recipe


def _find_positions(graph: Graph, node: Node, counted_positions: dict[Any, Value]) -> Value:
    """Return the positions [batch, seq] for the attention `node`: the input position_ids, added if `node` is causal. A
    bidirectional attention without this input in its shape counts its tokens; `counted_positions`: shape → counts."""
    q = node.required_operand("q")
    shape = q.shape[:2]
    ids = graph.inputs.get("position_ids")
    if ids is not None and ids.shape == shape:
        return ids
    if node.attrs["causal"]:
        if ids is not None:
            raise WeftError(f"insert-rope: input {ids!r} must have shape {list(shape)}, a position per token")
        return graph.add_input("position_ids", TensorType(dtypes.i64, shape))
    if shape not in counted_positions:
        row = ops.unsqueeze(ops.iota(q, axis=1), axes=(0,))
        counted_positions[shape] = ops.expand(row, shape=shape, name="positions")
    return counted_positions[shape]


def _attend_rotated(
    rotate: Callable[..., Array], at: Array | None, q: Array, k: Array, *operands: Array | None, **attrs: Any
) -> Any:
    """Return the result of the op `attention` on q and k rotated by `rotate` at positions `at` [batch, seq].
    The positions are 0, 1, … if `at` is None or has another shape than the queries."""
    if at is None or at.shape != q.shape[:2]:
        at = np.arange(q.shape[1])[None]
    heads = attrs["heads"], attrs["kv_heads"]
    q, k = (rotate(x, at, heads=h) for x, h in zip((q, k), heads, strict=True))
    return ops.attention.reference(q, k, *operands, **attrs)
