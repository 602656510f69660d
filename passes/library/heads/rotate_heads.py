"""Rotate the values of attention heads."""

from __future__ import annotations

from weft.ir import Graph, Node, Param, Recipe, ops
from weft.ir.op import Trait
from weft.ir.recipes import Permute, Reshape
from weft.ir.recipes.matrices import MatMul, RandomOrthogonal

from ... import Pass, Trace
from ...analysis.projections import find_branch, find_output_linear, unpack_branch
from ...edits.edit import replace_weights, require_param


class RotateHeads(Pass):
    """Rotate the values of every attention head by a random orthogonal matrix R, and undo it in the output projection.

    The output of a head is a weighted sum of values: (Σ α v R) Rᵀ = Σ α v. So V → Rᵀ V for each key/value head, and
    O → O R for each query head. R mixes all features of a head, so that outliers in a few of them are spread over all:
    a preparation for quantization. R is a recipe, drawn from `seed`.

    Condition: values come directly from a linear and are not cached yet, only a linear reads the output, and no other
    nodes read the weights of these linears.

    Source: QuaRot (Ashkboos 2024, 2404.00456); SpinQuant (Liu 2024, 2405.16406), where R is called R2.

    Example rotate-heads, on the graph of mha-to-gqa.
    """

    name = "rotate-heads"
    effect = "exact"
    purpose = "Same function, other weights"
    see = ("rotate-residual", "quantize")
    seed: int = 1

    def run(self, graph: Graph, trace: Trace) -> None:
        for node in [n for n in graph.nodes if Trait.ATTENTION in n.op.traits]:
            name = node.output.name
            if (reason := self._find_obstacle(node)) is not None:
                trace.refuse(self.name, name, reason)
                continue
            v, o = unpack_branch(node, "v"), find_output_linear(node)
            assert isinstance(o, Node)
            kv_heads, heads = int(node.attrs["kv_heads"]), int(node.attrs["heads"])
            matrix = RandomOrthogonal(v.start.width // kv_heads, self.seed)
            bias = None if v.bias is None else _map_rows(v.bias, matrix, kv_heads)
            replace_weights(v.linear, _map_rows(v.weight, matrix, kv_heads), bias or "same")
            weight = require_param(o, "weight")
            shape = weight.type.concrete({})
            by_head = Reshape(weight.recipe, (shape[0], heads, matrix.size))
            replace_weights(o, Reshape(MatMul(by_head, matrix), shape))
            trace.record_rewrite(self.name, name)

    def _find_obstacle(self, node: Node) -> str | None:
        """Return a reason (str) why the values of the attention `node` cannot be rotated; None if they can."""
        if node.op is not ops.attention:
            return f"it is {node.op.name}"
        if node.operand("v") is None:
            return "its keys are its values too"
        if node.operand("past_v") is not None:
            return "its cache holds values; run rotate-heads before kv-cache"
        branch = find_branch(node, "v")
        if isinstance(branch, str):
            return branch
        if branch.between:
            return f"v passes {branch.between[0].op.name} (%{branch.between[0].output.name}) after its linear"
        if isinstance(o := find_output_linear(node), str):
            return o
        shared = [p for p in (branch.weight, o.operand("weight")) if p is not None and len(p.users) > 1]
        if shared:
            return f"%{shared[0].name} is shared by several nodes"
        recipe = branch.weight.recipe  # after a rotation it has the form that `_map_rows` returns
        if isinstance(recipe, Reshape) and recipe.has(RandomOrthogonal) and isinstance(recipe.item, Permute):
            return "its values are rotated already"
        return None


def _map_rows(param: Param, matrix: RandomOrthogonal, heads: int) -> Recipe:
    """Return Rᵀ times the rows of each head of a weight [heads · d, in] or bias [heads · d], with R = `matrix`."""
    shape = param.type.concrete({})
    by_head = Reshape(param.recipe, (heads, matrix.size, *shape[1:]))
    if len(shape) == 1:
        return Reshape(MatMul(by_head, matrix), shape)
    return Reshape(Permute(MatMul(Permute(by_head, (0, 2, 1)), matrix), (0, 2, 1)), shape)
