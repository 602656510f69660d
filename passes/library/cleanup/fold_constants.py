"""Constant folding: nodes over parameters become parameters."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import numpy as np

from weft.ir import Graph, Node, Op, Param, Recipe, ops
from weft.ir.interpreter import run_node, widen
from weft.ir.recipes import RANDOM, Add, Concat, Literal, Map, Permute, Reshape, Scale, Slice, Source, Take

from ... import Pass, Trace
from ...edits.edit import erase_unused, replace_uses, swap_names

Shape = tuple[int, ...]


class FoldConstants(Pass):
    """Replace nodes whose operands are all parameters, and iotas of fixed length, by parameters.

    Weights are not evaluated: their transposes, reshapes, slices, concatenations, scales, sums and elementwise maps
    become recipes, and other nodes stay. Constants that do not depend on weights are computed by the ops' references if
    operands and results have at most `limit` elements. With weights=false, only constants are folded, so that the
    trained parameters stay those of the architecture.

    Condition: every operand is a parameter, and the shape of the result is fixed.

    Source: Aho, Lam, Sethi and Ullman, Compilers, second edition (2006), 8.5.4.

    Example fold-constants::

        graph example {
          input %x: f32[batch, 4]
          param %w: f32[4, 3] = normal([4, 3], std=1.0, stream="w")
          param %g: f32[4] = normal([4], std=1.0, stream="g")
          %transposed: f32[3, 4] = transpose(%w, axes=[1, 0])
          %scaled: f32[3, 4] = mul(%transposed, %g)
          %y: f32[batch, 3] = linear(%x, %scaled)
          output y = %y
        }
    """

    name = "fold-constants"
    effect = "exact"
    purpose = "Simplify"
    on_fused = True
    limit: int = 4096
    weights: bool = True

    def run(self, graph: Graph, trace: Trace) -> None:
        for node in graph.nodes:
            is_iota = node.op is ops.iota
            operands = [v for v in node.inputs if isinstance(v, Param)]
            if not is_iota and len(operands) != len(node.inputs):
                continue
            if not self.weights and not all(p.recipe.is_constant for p in operands):
                continue
            shapes = [tuple(s for s in v.shape if isinstance(s, int)) for v in node.outputs]
            if any(len(s) != len(v.shape) for s, v in zip(shapes, node.outputs, strict=True)):
                continue
            if is_iota:
                (length,) = shapes[0]
                recipes: list[Recipe] = [Literal.from_array(np.arange(length))] if length <= self.limit else []
            else:
                recipes = _derive_recipes(node, operands, shapes[0]) or self._evaluate(graph, node, operands, shapes)
            if not recipes:
                continue
            trace.record_rewrite(node.op.name, node.output.name)
            base = operands[0].name if len(operands) == 1 else node.output.name
            for old, recipe in zip(node.outputs, recipes, strict=True):
                new = graph.add_param(f"{base}.{node.op.name}", old.type, recipe)
                replace_uses(old, new)
                # A name other than that of the op, with or without a number, was chosen and stays.
                if re.fullmatch(rf"{node.op.name}(_\d+)?", old.name.rpartition(".")[2]) is None:
                    swap_names(new, old)
            erase_unused(graph, [node])

    def _evaluate(self, graph: Graph, node: Node, operands: list[Param], shapes: list[Shape]) -> list[Recipe]:
        """Return the outputs as literals; [] if a tensor has more than `limit` elements or depends on a weight."""
        sizes = [*shapes, *(_get_shape(p) for p in operands)]
        if any(math.prod(s) > self.limit for s in sizes) or any(p.recipe.has(Source, *RANDOM) for p in operands):
            return []
        arrays = [widen(np.asarray(p.recipe.evaluate(graph.reader))) for p in operands]
        return [Literal.from_array(a) for a in run_node(node.op, list(arrays), node.attrs, {})]


def _get_shape(param: Param) -> Shape:
    return param.type.concrete({})


def _derive_recipes(node: Node, operands: list[Param], shape: Shape) -> list[Recipe]:
    """Return recipes of the outputs of `node`, in terms of its operands' recipes; [] if there is no rule for the op.
    `shape` is that of the first output."""
    build = _MOVES.get(node.op) or (_ARITHMETIC.get(node.op) if operands[0].type.dtype.is_float else None)
    recipes = build(node, operands, shape) if build else None
    return [] if recipes is None else recipes if isinstance(recipes, list) else [recipes]


def _transpose(node: Node, operands: list[Param], shape: Shape) -> Recipe:
    axes = tuple(a % len(shape) for a in node.attrs["axes"])
    return operands[0].recipe if axes == tuple(range(len(shape))) else Permute(operands[0].recipe, axes)


def _slice(node: Node, operands: list[Param], shape: Shape) -> Recipe:
    a = node.attrs
    return Slice(operands[0].recipe, a["axis"] % len(shape), a["start"], a["stop"], a["step"])


def _split(node: Node, operands: list[Param], shape: Shape) -> list[Recipe]:
    axis, recipes, start = node.attrs["axis"] % len(shape), list[Recipe](), 0
    for size in node.attrs["sizes"]:
        recipes.append(Slice(operands[0].recipe, axis, start, start + size))
        start += size
    return recipes


def _affine(node: Node, operands: list[Param], shape: Shape) -> Recipe:
    scaled = operands[0].recipe if node.attrs["by"] == 1 else Scale(operands[0].recipe, node.attrs["by"])
    return Add((scaled,), node.attrs["plus"]) if node.attrs["plus"] else scaled


def _add(node: Node, operands: list[Param], shape: Shape) -> Recipe | None:
    x, y = operands
    summand = y.recipe if node.op is ops.add else Scale(y.recipe, -1.0)
    return Add((x.recipe, summand)) if _get_shape(x) == _get_shape(y) else None


def _mul(node: Node, operands: list[Param], shape: Shape) -> Recipe | None:
    """Return the product as a tensor scaled by a vector; None unless one operand has the shape of the result and the
    other exactly one axis whose length is not 1."""
    for tensor, vector_param in (operands, operands[::-1]):
        factor, dims = vector_param.recipe, _get_shape(vector_param)
        if _get_shape(tensor) != shape or len(dims) > len(shape):
            continue
        dims = (1,) * (len(shape) - len(dims)) + dims
        long_axes = [a for a, n in enumerate(dims) if n != 1]
        if len(long_axes) == 1:
            (axis,) = long_axes
            vector = factor if len(_get_shape(vector_param)) == 1 else Reshape(factor, (dims[axis],))
            return Scale(tensor.recipe, vector, axis)
    return None


def _gather(node: Node, operands: list[Param], shape: Shape) -> Recipe | None:
    x, indices = operands
    if not isinstance(indices.recipe, Literal) or len(indices.recipe.dims) != 1:
        return None
    return Take(x.recipe, tuple(int(i) for i in indices.recipe.values), node.attrs["axis"] % len(_get_shape(x)))


def _map(node: Node, operands: list[Param], shape: Shape) -> Recipe:
    recipe, fn = operands[0].recipe, node.op.name
    # GGUF stores −e^A_log, read back as A_log: cancelling inverse maps is exact.
    return recipe.item if isinstance(recipe, Map) and _INVERSES.get(fn) == recipe.fn else Map(recipe, fn)


def _cast(node: Node, operands: list[Param], shape: Shape) -> Recipe | None:
    narrower = node.attrs["to"].is_float and node.attrs["to"].bits <= operands[0].type.dtype.bits
    return operands[0].recipe if narrower else None  # the parameter's own dtype rounds, as the last step


_INVERSES = {"exp": "log", "log": "exp", "neg": "neg", "reciprocal": "reciprocal"}
Builder = Callable[[Node, list[Param], Shape], Recipe | list[Recipe] | None]
_MOVES: dict[Op, Builder] = {
    **dict.fromkeys((ops.reshape, ops.squeeze, ops.unsqueeze), lambda node, xs, shape: Reshape(xs[0].recipe, shape)),
    ops.concat: lambda node, xs, shape: Concat(tuple(x.recipe for x in xs), node.attrs["axis"] % len(shape)),
    **{ops.transpose: _transpose, ops.slice_: _slice, ops.split: _split, ops.gather: _gather},
}
_ARITHMETIC: dict[Op, Builder] = {
    **{ops.affine: _affine, ops.add: _add, ops.sub: _add, ops.mul: _mul, ops.cast: _cast},
    **dict.fromkeys((ops.neg, ops.exp, ops.log, ops.reciprocal, ops.cos, ops.sin), _map),
}
