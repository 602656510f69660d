"""Rotary positions for attentions that have none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np

from weft.ir import Graph, Node, TensorType, Value, WeftError, ops
from weft.ir.recipes.frequencies import RopeFrequencies
from weft.ir.recipes.readers import Array
from weft.ir.types import dtypes

from ...analysis.layers import Layers, chosen
from ...analysis.rotary import ScalingArguments, check_scaling, expected, frequencies, rotations
from ...core.base import Pass
from ...core.equivalence import EXACT, EquivalenceCheck
from ...core.oracle import temperature
from ...core.trace import Trace


@dataclass(frozen=True)
class InsertRope(ScalingArguments, Pass):
    """Rotate the queries and keys of attentions that have no rotary positions.

    Pair k of every head of q and k is turned by position · theta^(−2k/rotary_dim) radians, right before the attention:
    behind norms of the heads, packed projections or not. The first `rotary_dim` numbers of a head are rotated (None:
    all of them). `layout` pairs number k with k + rotary_dim/2 (half; GPT-NeoX, Llama) or neighbours (interleaved;
    GPT-J). `scaling`, with `factor` and `original`, the context before it, as in extend-context. Decoders read the
    input position_ids, which is added where it is missing; attentions that see both ways count their tokens. `layers`
    says which layers: all, even, odd, numbers ("0-5, 8"), or a pattern ("local*3 + global").

    Condition: the model becomes another one, to be trained on. A layer that is rotated already stays as it is, and so
    does one whose values are part of its keys (latent attention); if no layer is left, that is an error, and so is a
    second run.

    Source: Su 2021 (RoFormer), arXiv:2104.09864.

    Example insert-rope{theta=10000}::

        graph example {
          input %x: f32[batch, seq, 8]
          param %w: f32[8, 8] = normal([8, 8], std=0.4, stream="w")
          %q: f32[batch, seq, 8] = linear(%x, %w)
          %y: f32[batch, seq, 8] = attention(%q, %x, %x, heads=2, kv_heads=2, causal=true)
          output y = %y
        }
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
            raise WeftError(f"{self.name}: factor={self.factor} needs a scaling: linear, ntk, yarn or llama3")
        counted = dict[Any, Value]()
        for node in chosen(graph, self.layers, self.name):
            why = self._misfit(node)
            if why is not None:
                trace.refuse(self.name, node.output.name, why)
                continue
            recipe = self._recipe(graph, node)
            options = {"interleaved": self.layout == "interleaved", "amplitude": recipe.attention_factor()}
            with graph.inserting(before=node):
                at = _positions(graph, node, counted)
                param = frequencies(graph, recipe)
                for i, heads in enumerate((node.attrs["heads"], node.attrs["kv_heads"])):
                    rotated = ops.rope(node.inputs[i], at, param, heads=heads, name=f"{'qk'[i]}_rope", **options)
                    node.set_input(i, rotated)
            trace.fired(self.name, node.output.name)
        if not trace.rewrites[self.name]:
            first = trace.refusals[0]
            raise WeftError(f"{self.name}: there is nothing to rotate; %{first.at}: {first.reason}")

    def check(self, before: Graph, after: Graph, equivalence: EquivalenceCheck) -> None:
        """The rotated attentions are those of `before` over pairs turned as complex numbers."""
        inputs = equivalence.inputs(after)
        meanings = {}
        known = {n.output.name: n for n in before.nodes}
        for node in after.nodes:
            old = known.get(node.output.name)
            if node.op is ops.attention and old is not None and not rotations(old) and (found := rotations(node)):
                amplitude, pairs = temperature(self.scaling, self.factor), self.layout == "interleaved"
                turn = expected(self._recipe(before, old), found[0], interleaved=pairs, amplitude=amplitude)
                meanings[node.output.name] = partial(_rotated, turn, inputs.get("position_ids"))
        given = {name: inputs[name] for name in before.inputs}
        equivalence.same(equivalence.run_as(before, given, meanings), equivalence.run(after, inputs), EXACT)

    def _misfit(self, node: Node) -> str | None:
        """Say why the attention `node` cannot be rotated; None if it can."""
        if node.op is ops.block_sparse_attention:
            return "its keys are seen in blocks, which insert-rope does not check"
        if node.op is not ops.attention:
            return f"{node.op.name} has positions already (strip-positions removes them)"
        if node.attrs["cache_bits"] is not None:
            return "its cache has scales of keys as they are; run insert-rope before quantize-cache"
        if rotations(node):
            return "it has rotary positions already (strip-positions removes them, extend-context changes them)"
        return "its values are part of its keys" if node.operand("v") is None else None

    def _recipe(self, graph: Graph, node: Node) -> RopeFrequencies:
        q = node.inputs[0]
        assert q is not None
        head = q.width // node.attrs["heads"]
        dim = head if self.rotary_dim is None else self.rotary_dim
        if dim > head:
            raise WeftError(f"{self.name}: rotary_dim={dim} exceeds the {head} numbers of a head")
        plain = RopeFrequencies(dim, self.theta)
        recipe = self.scaled(plain, self.scaling, self.factor, self.context(graph))
        check_scaling(recipe, self.name)
        return recipe


def _positions(graph: Graph, node: Node, counted: dict[Any, Value]) -> Value:
    """The positions [batch, seq] of the tokens of `node`: the input position_ids, or counted where there is none and
    the attention sees both ways; `counted` has those of earlier layers by shape."""
    q = node.inputs[0]
    assert q is not None
    shape = q.shape[:2]
    given = graph.inputs.get("position_ids")
    if given is not None and given.shape == shape:
        return given
    if node.attrs["causal"]:
        if given is not None:
            raise WeftError(f"insert-rope: input {given!r} should be a position per token, of shape {list(shape)}")
        return graph.add_input("position_ids", TensorType(dtypes.i64, shape))
    if shape not in counted:
        row = ops.unsqueeze(ops.iota(q, axis=1), axes=(0,))
        counted[shape] = ops.expand(row, shape=shape, name="positions")
    return counted[shape]


def _rotated(
    turn: Callable[..., Array], at: Array | None, q: Array, k: Array, *operands: Array | None, **attrs: Any
) -> Any:
    """The op `attention` over rotated q and k; without positions `at` tokens are counted."""
    if at is None or at.shape != q.shape[:2]:
        at = np.arange(q.shape[1])[None]
    heads = attrs["heads"], attrs["kv_heads"]
    q, k = (turn(x, at, heads=h) for x, h in zip((q, k), heads, strict=True))
    return ops.attention.reference(q, k, *operands, **attrs)
