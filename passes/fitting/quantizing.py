"""Weights rounded one product after the other, each for what the rounded ones before it make of a text.

`Activations` computes what a product multiplies on the graph as it is by then. All matrices that multiply the same
value share its second moment. Memory is needed for one such moment, the activations of the text at one place and one
weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from weft.ir import Graph, Node, Param, Recipe, Value, ops
from weft.ir.ops.experts import hidden_of
from weft.ir.recipes import Source
from weft.ir.recipes.blocks import Dequantize, Quantize
from weft.ir.recipes.blocks.quantize import joined
from weft.ir.recipes.readers import Array, SpilledTensors
from weft.ir.types.block_layouts import BlockLayout, Blocks, pack_codes

from ..edits.edit import derive, replace_param
from .calibration import Activations
from .gptq import Feedback, feedback, gptq
from .matrices import Matrix

POOLED = 0.1  # share of all tokens in the moment of an expert: it may have seen few of its own
ROWS = 4096  # activations that are multiplied at once
NUMBERS = 1 << 23  # of a weight that are rounded at once

Progress = Callable[[int, int], None]


def round_to_nearest(param: Param, layout: BlockLayout) -> None:
    """Let `param` be rounded to the nearest codes of `layout` whenever it is read."""
    _reweigh(param, Quantize(param.recipe, layout.bits, layout.group, layout.has_zeros, layout.scale.name))


def store(param: Param, blocks: Sequence[Blocks], layout: BlockLayout) -> None:
    """Let `param` be the `blocks` of `layout` from now on, of a stack one for each matrix; they are spilled to disk."""
    graph = param.graph
    if not isinstance(graph.reader, SpilledTensors):
        graph.reader = SpilledTensors(graph.reader)
    packed: dict[str, list[Array]] = {}
    for one in blocks:
        rows = len(one.scales)
        packed.setdefault("codes", []).append(pack_codes(one.codes, layout.bits).reshape(rows, -1))
        packed.setdefault("scales", []).append(one.scales.astype(layout.scale.numpy))
        if one.zeros is not None:
            packed.setdefault("zeros", []).append(pack_codes(one.zeros, layout.bits))
    parts: dict[str, Source] = {}
    for name, arrays in packed.items():
        key = graph.reader.fresh(f"{param.name}.{name}")
        graph.reader.put(key, np.stack(arrays) if len(param.shape) > 2 else arrays[0])
        parts[name] = Source(key)
    new = Dequantize(
        parts["codes"],
        parts["scales"],
        parts.get("zeros"),
        width=int(param.shape[-1]),
        bits=layout.bits,
        group=layout.group,
        scale=layout.scale.name,
    )
    _reweigh(param, new)


def _reweigh(param: Param, recipe: Recipe) -> None:
    new = derive(param, recipe)
    param.replace_uses(new)
    replace_param(param, new)


def fit(
    graph: Graph,
    texts: Sequence[Array],
    plan: Mapping[Matrix, BlockLayout],
    progress: Progress = lambda done, total: None,
) -> Iterator[str]:
    """Round the matrices of `plan` by GPTQ for the `texts` (ids [texts, length]), in the order in which they are read;
    yields the name of each. Tables that are looked up alone are rounded to the nearest."""
    activations = Activations(graph, texts)
    done, total = 0, sum(matrix.elements for matrix in plan)
    waiting = {matrix.param: matrix for matrix in plan}
    for matrix in plan:
        if matrix.kind == "table":
            round_to_nearest(matrix.param, plan[matrix])
    for node in list(graph.nodes):
        if node.erased or node.op not in (ops.linear, ops.norm_linear, ops.moe):
            continue
        for group in _experts(node) if node.op is ops.moe else (_beside(node),):
            chosen = [waiting.pop(param) for param in group if param in waiting]
            if not chosen:
                continue
            progress(done, total)
            if node.op is ops.moe:
                _fit_experts(activations, node, {m: plan[m] for m in chosen})
            else:
                _fit_products(activations, {m: plan[m] for m in chosen})
            for matrix in chosen:
                done += matrix.elements
                yield matrix.param.name
    progress(total, total)


def _beside(node: Node) -> list[Param]:
    """The weights that multiply the same value as `node`, whose moments are the same."""
    x = node.required("x")
    same = [n for n in x.users if n.op is node.op and n.inputs[0] is x and _norm(n) == _norm(node)]
    return [w for n in same if isinstance(w := n.operand("weight"), Param)]


def _norm(node: Node) -> tuple[object, ...]:
    return (node.attrs["kind"], node.attrs["eps"]) if node.op is ops.norm_linear else ()


def _fit_products(activations: Activations, layouts: Mapping[Matrix, BlockLayout]) -> None:
    """Round matrices whose first products multiply the same value."""
    moments: dict[tuple[Value, ...], Array] = {}
    factors: dict[tuple[tuple[Value, ...], int], Feedback] = {}
    for matrix in layouts:
        products = tuple(n for n in matrix.readers if n.op is not ops.embedding)
        key = tuple(n.output for n in products[1:])
        if key not in moments:  # shared weights are rounded once, for all that they multiply
            moments[key] = sum((_moment_of(activations, n) for n in products[1:]), _moment_of(activations, products[0]))
    for matrix, layout in layouts.items():
        key = tuple(n.output for n in matrix.readers if n.op is not ops.embedding)[1:]
        if (key, layout.group) not in factors:
            factors.clear()  # one at a time: they are as large as the moment
            factors[key, layout.group] = feedback(moments[key], layout.group)
        store(matrix.param, [_rounded(matrix.param.recipe, matrix, factors[key, layout.group], layout)], layout)


def _moment_of(activations: Activations, node: Node) -> Array:
    """The second moment of what the weight of `node` multiplies."""
    x = node.required("x")

    def rows(part: Array) -> Array:
        if node.op is ops.norm_linear:
            reference = (ops.rms_norm if node.attrs["kind"] == "rms" else ops.layer_norm).reference
            part = reference(part, eps=node.attrs["eps"])
        return np.asarray(part)

    return moment(rows(part) for part in activations(x))


def moment(parts: Iterator[Array] | Sequence[Array]) -> Array:
    """Σ x xᵀ over the rows of `parts` [..., n], f32 [n, n]."""
    total: Array | None = None
    for part in parts:
        flat = part.reshape(-1, part.shape[-1]).astype(np.float32, copy=False)
        for i in range(0, len(flat), ROWS):
            product = flat[i : i + ROWS].T @ flat[i : i + ROWS]
            total = product if total is None else np.add(total, product, out=total)
    assert total is not None
    return total


def _rounded(recipe: Recipe, matrix: Matrix, factors: Feedback, layout: BlockLayout) -> Blocks:
    """A matrix [out, in], some rows at a time."""
    reader = matrix.param.graph.reader
    step = max(1, NUMBERS // int(matrix.param.shape[-1]))
    parts = [gptq(rows, factors, layout) for rows in recipe.blocks(reader, step * int(matrix.param.shape[-1]))]
    return parts[0] if len(parts) == 1 else joined(parts)


def _experts(node: Node) -> list[list[Param]]:
    """The weights of a mixture in the order in which tokens meet them."""
    found = [[node.operand(name) for name in names] for names in (("gate", "up"), ("down",))]
    return [[v for v in values if isinstance(v, Param)] for values in found]


def _fit_experts(activations: Activations, node: Node, layouts: Mapping[Matrix, BlockLayout]) -> None:
    """Round stacked weights of the mixture `node`, each expert for the tokens that it gets, and a little for all."""
    reader = node.graph.reader
    x = np.concatenate([part.reshape(-1, part.shape[-1]) for part in activations(node.required("x"))])
    combine = np.concatenate([part.reshape(-1, part.shape[-1]) for part in activations(node.required("combine"))])
    down = node.operand("down") in [matrix.param for matrix in layouts]
    pooled = None if down else moment([x]) / len(x)
    found: dict[Matrix, list[Blocks]] = {matrix: [] for matrix in layouts}
    attrs = {name: node.attrs[name] for name in ("activation", "limit", "shift")}
    for expert in range(combine.shape[1]):
        own = x[combine[:, expert] != 0]

        def read(name: str, at: int = expert) -> Array | None:
            value = node.operand(name)
            return value.recipe.read(reader, at, at + 1)[0] if isinstance(value, Param) else None

        if down:
            up, gate = read("up"), read("gate")
            assert up is not None
            biases = read("up_bias"), read("gate_bias")
            # An expert that no token chose is rounded for all tokens.
            own = hidden_of(own if len(own) else x[:ROWS], up, gate, *biases, **attrs)
            second = moment([own])
        else:
            assert pooled is not None
            second = pooled if not len(own) else (1 - POOLED) * moment([own]) / len(own) + POOLED * pooled
        factors: dict[int, Feedback] = {}
        for matrix, layout in layouts.items():
            if layout.group not in factors:
                factors[layout.group] = feedback(second, layout.group)
            weight = matrix.param.recipe.read(reader, expert, expert + 1)[0]
            found[matrix].append(gptq(weight, factors[layout.group], layout))
    for matrix, blocks in found.items():
        store(matrix.param, blocks, layouts[matrix])
