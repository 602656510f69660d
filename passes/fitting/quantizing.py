"""Weights rounded one product after the other, each for what the rounded ones before it make of a text.

`Activations` computes what a product multiplies on the graph as it is by then. All matrices that multiply the same
value share its second moment. Memory is needed for one such moment, the activations of the text at one place and one
weight.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

import numpy as np

from weft.ir import Graph, Node, Param, Recipe, Value, ops
from weft.ir.ops.experts import hidden_of
from weft.ir.recipes import Source
from weft.ir.recipes.blocks import (
    BlockRecipe,
    Dequantize,
    Quantize,
    ToFloat4,
    ToFloat8,
    as_stored,
    block_layout,
    grid_layout,
)
from weft.ir.recipes.blocks.quantize import joined
from weft.ir.recipes.readers import Array, SpilledTensors
from weft.ir.types.block_layouts import BlockLayout, Blocks, integer_layout, offset_layout, pack_codes

from ..core.resume import ResultStore
from ..edits.edit import derive, replace_param
from .calibration import Activations
from .gptq import AIM, RIDGE, SHRINK, Feedback, correction, feedback, gptq
from .matrices import Matrix

FOLLOWED = 1 << 29  # weights of a model up to which its original outputs are aimed at, which a second pass computes
POOLED = 0.1  # share of all tokens in the moment of an expert: it may have seen few of its own
ROWS = 2048  # activations that are multiplied at once, and
COLUMNS = 1024  # of their moment
NUMBERS = 1 << 23  # of a weight that are rounded at once
GRIDS = (  # that floats are recognized on: the fewest bits first
    *(integer_layout(4, group, zeros) for zeros in (False, True) for group in (128, 64, 32)),
    offset_layout(4, 32),
    integer_layout(8, 32, False),
)

Progress = Callable[[int, int], None]


def round_to_nearest(param: Param, layout: BlockLayout, scales: tuple[float, ...] = ()) -> None:
    """Let `param` be rounded to the nearest codes of `layout` whenever it is read; with the offsets of HQQ, if any, and
    with its `tensor_scales`, if `layout` has such."""
    if layout.small_floats:
        reweigh(param, ToFloat4(param.recipe, str(layout), scales))
        return
    if layout.floats:
        reweigh(param, ToFloat8(param.recipe))
        return
    search = "hqq" if layout.sums else ""
    reweigh(param, Quantize(param.recipe, layout.bits, layout.group, layout.has_zeros, layout.unit.name, search))


def stored_layout(param: Param) -> BlockLayout | None:
    """Return the layout of integers in blocks that the file has `param` in, or that it was in before somebody wrote it
    as floats; None if there is none."""
    recipe, reader = param.recipe, param.graph.reader
    layout = None if recipe.has(BlockRecipe) else block_layout(recipe, reader)
    if isinstance(layout, str):
        return grid_layout(recipe, reader, GRIDS)
    return layout if isinstance(layout, BlockLayout) and not layout.floats else None


def stored_bits(layout: BlockLayout | None) -> float:
    """Return the bits that a file takes for a number in `layout`, scales included; 16 where it has no such blocks."""
    return 16.0 if layout is None else 8 * layout.dtype.block_bytes / layout.dtype.block


def keep_stored(param: Param, layout: BlockLayout) -> None:
    """Let `param` be the blocks of its `stored_layout`."""
    reweigh(param, as_stored(param.recipe, param.graph.reader, layout))


def round_once(param: Param, layout: BlockLayout, search: str) -> None:
    """Let `param` be rounded to the nearest codes of `layout` now, with scales found by `search`, and be these from now
    on: targets read weights several times, and a search takes longer than all of that."""
    reader = param.graph.reader
    made = Quantize(param.recipe, layout.bits, layout.group, layout.has_zeros, layout.unit.name, search)
    count, *rest, width = param.type.concrete({})
    step = 1 if rest else max(1, NUMBERS // width)
    parts = [made.read_blocks(reader, i, min(i + step, count)) for i in range(0, count, step)]
    if rest:
        parts = [Blocks(b.codes[0], b.scales[0], None, None if b.zeros is None else b.zeros[0]) for b in parts]
    store(param, parts if rest else [joined(parts)], layout)


def store(param: Param, blocks: Sequence[Blocks], layout: BlockLayout) -> None:
    """Let `param` be the `blocks` of `layout` from now on, of a stack one for each matrix; they are spilled to disk."""
    graph = param.graph
    reader = graph.reader = SpilledTensors.over(graph.reader)
    packed: dict[str, list[Array]] = {}
    for one in blocks:
        rows = len(one.scales)
        packed.setdefault("codes", []).append(pack_codes(one.codes, layout.bits).reshape(rows, -1))
        packed.setdefault("scales", []).append(one.scales.astype(layout.numbers.numpy))
        if one.zeros is not None:
            packed.setdefault("zeros", []).append(pack_codes(one.zeros, layout.bits))
    parts: dict[str, Source] = {}
    for name, arrays in packed.items():
        key = reader.fresh(f"{param.name}.{name}")
        reader.put(key, np.stack(arrays) if len(param.shape) > 2 else arrays[0])
        parts[name] = Source(key)
    new = Dequantize(
        parts["codes"],
        parts["scales"],
        parts.get("zeros"),
        width=int(param.shape[-1]),
        bits=layout.bits,
        group=layout.group,
        scale=layout.unit.name,
        sums=layout.sums,
    )
    reweigh(param, new)


def reweigh(param: Param, recipe: Recipe) -> None:
    """Let `recipe` make the numbers of `param` from now on, under its name."""
    new = derive(param, recipe)
    param.replace_uses(new)
    replace_param(param, new)


def fit(
    graph: Graph,
    texts: Sequence[Array],
    plan: Mapping[Matrix, BlockLayout],
    progress: Progress = lambda done, total: None,
    resume: str | None = None,
) -> Iterator[str]:
    """Round the matrices of `plan` by GPTQ for the `texts` (ids [texts, length]), in the order in which they are read;
    yields the name of each. Tables that are looked up alone are rounded to the nearest. What is done is kept in the
    folder `resume`, and taken from there."""
    done, total = 0, sum(matrix.elements for matrix in plan)
    activations = Activations(graph, texts, dtype=np.float32)
    original = _Original(graph, texts) if total <= FOLLOWED else None
    finished = ResultStore(resume, texts, RIDGE, SHRINK, AIM if original else 0, POOLED)
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
            keys = {m: finished.advance(m.param, plan[m]) for m in chosen} if finished.keeps else {}
            blocks = {m: found for m, key in keys.items() if (found := finished.load(key)) is not None}
            layouts = {m: plan[m] for m in chosen if m not in blocks}
            if not layouts:
                fitted = {}
            elif node.op is ops.moe:
                fitted = _fit_experts(activations, node, layouts)
            else:
                fitted = _fit_products(activations, original, layouts)
            for matrix, found in fitted.items():
                if matrix in keys:
                    finished.save(keys[matrix], found)
            for matrix, found in (blocks | fitted).items():
                store(matrix.param, found, plan[matrix])
            for matrix in chosen:
                done += matrix.elements
                yield matrix.param.name
    progress(total, total)


class _Original:
    """Values of a graph as they were before its weights changed, by the values of the graph that changes."""

    def __init__(self, graph: Graph, texts: Sequence[Array]) -> None:
        copy = graph.clone()
        self._activations = Activations(copy, texts, dtype=np.float32)
        self._twins = {value: copy.inputs[name] for name, value in graph.inputs.items()}
        for node, twin in zip(graph.nodes, copy.nodes, strict=True):
            self._twins.update(zip(node.outputs, twin.outputs, strict=True))

    def __call__(self, value: Value) -> list[Array]:
        return self._activations(self._twins[value])

    def aside(self) -> AbstractContextManager[None]:
        """Discard what is computed inside."""
        return self._activations.aside()


def _beside(node: Node) -> list[Param]:
    """The weights that multiply the same value as `node`, whose moments are the same."""
    x = node.required("x")
    same = [n for n in x.users if n.op is node.op and n.inputs[0] is x and _norm(n) == _norm(node)]
    return [w for n in same if isinstance(w := n.operand("weight"), Param)]


def _norm(node: Node) -> tuple[object, ...]:
    return (node.attrs["kind"], node.attrs["eps"]) if node.op is ops.norm_linear else ()


def _fit_products(
    activations: Activations, original: _Original | None, layouts: Mapping[Matrix, BlockLayout]
) -> dict[Matrix, list[Blocks]]:
    """Round matrices whose first products multiply the same value."""
    by_readers: dict[tuple[Node, ...], list[Matrix]] = {}  # shared weights are rounded once, for all that they multiply
    for matrix in layouts:
        products = tuple(n for n in matrix.readers if n.op is not ops.embedding)
        by_readers.setdefault(products if len(products) > 1 else (), []).append(matrix)
    found: dict[Matrix, list[Blocks]] = {}
    for matrices in by_readers.values():
        first, *others = (n for n in matrices[0].readers if n.op is not ops.embedding)
        second, crossed = _moments_of(activations, original, first)
        for node in others:
            with activations.aside(), original.aside() if original else contextlib.nullcontext():
                more = _moments_of(activations, original, node)
            second += more[0]
            crossed = None if crossed is None or more[1] is None else crossed + more[1]
        corrected = None if crossed is None else correction(second, crossed)
        del crossed
        by_group: dict[int, list[Matrix]] = {}
        for matrix in matrices:
            by_group.setdefault(layouts[matrix].group, []).append(matrix)
        while by_group:
            group, members = by_group.popitem()
            factors = feedback(second, group)
            if not by_group:
                del second  # moments of wide inputs are large
            for matrix in members:
                found[matrix] = [_rounded(matrix, corrected, factors, layouts[matrix])]
            del factors
    return found


def _moments_of(activations: Activations, original: _Original | None, node: Node) -> tuple[Array, Array | None]:
    """The second moment of what the weight of `node` multiplies, and that of it with what it multiplied originally."""
    x = node.required("x")
    changed = _normed(node, activations(x))
    return moment(changed), None if original is None else moment(_normed(node, original(x)), changed)


def _normed(node: Node, parts: list[Array]) -> list[Array]:
    """The activations that the weight of `node` multiplies, where it reads `parts`."""
    if node.op is not ops.norm_linear:
        return parts
    norm = (ops.rms_norm if node.attrs["kind"] == "rms" else ops.layer_norm).reference
    return [np.asarray(norm(part, eps=node.attrs["eps"])) for part in parts]


def moment(parts: Sequence[Array], others: Sequence[Array] | None = None) -> Array:
    """Σ x yᵀ over the rows x of `parts` [..., n] and y of `others`, or of `parts` again, f32 [n, n]."""
    flat = [part.reshape(-1, part.shape[-1]) for part in parts]
    beside = flat if others is None else [part.reshape(-1, part.shape[-1]) for part in others]
    width = flat[0].shape[1]
    total = np.zeros((width, width), np.float32)
    together = max(1, ROWS // len(flat[0]))
    for i in range(0, len(flat), together):
        x = np.concatenate(flat[i : i + together]).astype(np.float32, copy=False)
        y = x if others is None else np.concatenate(beside[i : i + together]).astype(np.float32, copy=False)
        for start in range(0, width, COLUMNS):
            strip = slice(start, start + COLUMNS)
            rows = slice(start + COLUMNS if others is None else width)  # of a symmetric one the upper blocks
            total[rows, strip] += x[:, rows].T @ y[:, strip]
    if others is None:
        for start in range(0, width, COLUMNS):
            total[start + COLUMNS :, start : start + COLUMNS] = total[start : start + COLUMNS, start + COLUMNS :].T
    return total


def _rounded(matrix: Matrix, corrected: Array | None, factors: Feedback, layout: BlockLayout) -> Blocks:
    """A matrix [out, in], multiplied by what is `corrected` of its inputs, some rows at a time."""
    width, reader = int(matrix.param.shape[-1]), matrix.param.graph.reader
    found = []
    for rows in matrix.param.recipe.blocks(reader, max(1, NUMBERS // width) * width):
        weight = rows.astype(np.float32, copy=False)
        found.append(gptq(weight if corrected is None else weight @ corrected, factors, layout))
    return found[0] if len(found) == 1 else joined(found)


def _experts(node: Node) -> list[list[Param]]:
    """The weights of a mixture in the order in which tokens meet them."""
    found = [[node.operand(name) for name in names] for names in (("gate", "up"), ("down",))]
    return [[v for v in values if isinstance(v, Param)] for values in found]


def _fit_experts(
    activations: Activations, node: Node, layouts: Mapping[Matrix, BlockLayout]
) -> dict[Matrix, list[Blocks]]:
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
    return found
