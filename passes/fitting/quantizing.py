"""Round weights by GPTQ in graph order, each for the inputs it has when all earlier weights are already rounded.

`Activations` computes these inputs on calibration sequences. Matrices that multiply the same value share its second
moment. Memory is needed for one moment, one activation of all sequences, and one weight.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from weft.ir import Graph, Node, Param, Recipe, ops
from weft.ir.ops.experts import compute_expert_hidden
from weft.ir.recipes import Source
from weft.ir.recipes.blocks import (
    BlockRecipe,
    Dequantize,
    Quantize,
    ToFloat4,
    ToFloat8,
    find_block_layout,
    find_grid_layout,
    wrap_stored_blocks,
)
from weft.ir.recipes.blocks.quantize import concat_blocks
from weft.ir.recipes.readers import Array, SpilledTensors
from weft.ir.types.block_layouts import BlockLayout, Blocks, build_integer_layout, build_offset_layout, pack_codes

from ..core.resume import ResultStore
from ..edits.edit import derive_param, replace_param
from .calibration import Activations
from .gptq import CORRECTION, RIDGE, SHRINK, MomentFactors, compute_correction, factor_moment, quantize_gptq
from .matrices import Matrix

MAX_FOLLOWED = 1 << 29  # up to this number of weights, GPTQ aims at the original activations, from a second run
POOLED_SHARE = 0.1  # share of all tokens in the moment of an expert, which may get few tokens
ROWS = 2048  # activations that are multiplied at once for a moment
COLUMNS = 1024  # columns of the moment that are computed at once
NUMBERS = 1 << 23  # elements of a weight that are rounded at once
GRIDS = (  # integer layouts that are recognized in weights stored as floats: fewest bits first
    *(build_integer_layout(4, group, zeros) for zeros in (False, True) for group in (128, 64, 32)),
    build_offset_layout(4, 32),
    build_integer_layout(8, 32, False),
)

MEASURED = 8.0  # seconds of fitting from which the time of all is estimated

Progress = Callable[[int, int], None]
_log = logging.getLogger("weft")


def round_to_nearest(param: Param, layout: BlockLayout, scales: tuple[float, ...] = ()) -> None:
    """Replace `param` by a parameter whose recipe rounds it to the nearest codes of `layout` whenever it is read.
    Layouts with `sums` get the offsets of HQQ. `scales` come from `compute_tensor_scales` for nvfp4, else are empty."""
    recipe: Recipe
    if layout.small_floats:
        recipe = ToFloat4(param.recipe, str(layout), scales)
    elif layout.floats:
        recipe = ToFloat8(param.recipe)
    else:
        recipe = _make_quantize(param, layout, "hqq" if layout.sums else "")
    replace_recipe(param, recipe)


def _make_quantize(param: Param, layout: BlockLayout, search: str) -> Quantize:
    return Quantize(param.recipe, layout.bits, layout.group, layout.has_zeros, layout.range_dtype.name, search)


def find_stored_layout(param: Param) -> BlockLayout | None:
    """Return the layout of integer blocks in which the checkpoint stores `param`; None if it stores no integer blocks.
    Floats that one of `GRIDS` represents exactly, as after dequantization, count as stored in this layout."""
    recipe, reader = param.recipe, param.graph.reader
    layout = None if recipe.has(BlockRecipe) else find_block_layout(recipe, reader)
    if isinstance(layout, str):
        return find_grid_layout(recipe, reader, GRIDS)
    return layout if isinstance(layout, BlockLayout) and not layout.floats else None


def count_stored_bits(layout: BlockLayout | None) -> float:
    """Return the bits per weight that `layout` takes in a file, scales included; 16 for None."""
    return 16.0 if layout is None else 8 * layout.dtype.block_bytes / layout.dtype.block


def read_stored_codes(param: Param, layout: BlockLayout) -> None:
    """Replace `param` by a parameter whose recipe reads the stored codes; `layout` is its `find_stored_layout`."""
    replace_recipe(param, wrap_stored_blocks(param.recipe, param.graph.reader, layout))


def store_rounded(param: Param, layout: BlockLayout, search: str) -> None:
    """Replace `param` by its nearest codes of `layout`, computed now with scales from the algorithm `search`.
    The codes are stored because targets read weights several times, and a search takes longer than all reads."""
    reader = param.graph.reader
    recipe = _make_quantize(param, layout, search)
    count, *rest, width = param.type.concrete({})
    step = 1 if rest else max(1, NUMBERS // width)
    parts = [recipe.read_blocks(reader, i, min(i + step, count)) for i in range(0, count, step)]
    if rest:
        parts = [Blocks(b.codes[0], b.scales[0], None, None if b.zeros is None else b.zeros[0]) for b in parts]
    store_blocks(param, parts if rest else [concat_blocks(parts)], layout)


def store_blocks(param: Param, blocks: Sequence[Blocks], layout: BlockLayout) -> None:
    """Replace `param` by a parameter that reads `blocks` of `layout` (one per matrix of a stack) from disk."""
    graph = param.graph
    reader = graph.reader = SpilledTensors.wrap(graph.reader)
    packed: dict[str, list[Array]] = {}
    for block in blocks:
        rows = len(block.scales)
        packed.setdefault("codes", []).append(pack_codes(block.codes, layout.bits).reshape(rows, -1))
        packed.setdefault("scales", []).append(block.scales.astype(layout.scale_dtype.numpy))
        if block.zeros is not None:
            packed.setdefault("zeros", []).append(pack_codes(block.zeros, layout.bits))
    parts: dict[str, Source] = {}
    for name, arrays in packed.items():
        key = reader.unique_key(f"{param.name}.{name}")
        reader.put(key, np.stack(arrays) if len(param.shape) > 2 else arrays[0])
        parts[name] = Source(key)
    new = Dequantize(
        parts["codes"],
        parts["scales"],
        parts.get("zeros"),
        width=int(param.shape[-1]),
        bits=layout.bits,
        group=layout.group,
        scale=layout.range_dtype.name,
        sums=layout.sums,
    )
    replace_recipe(param, new)


def replace_recipe(param: Param, recipe: Recipe) -> None:
    """Replace `param` by a parameter with `recipe` and the same name."""
    new = derive_param(param, recipe)
    param.replace_uses(new)
    replace_param(param, new)


def fit_gptq(
    graph: Graph,
    texts: Sequence[Array],
    plan: Mapping[Matrix, BlockLayout],
    progress: Progress = lambda done, total: None,
    resume: str | Path | None = None,
) -> Iterator[str]:
    """Round the matrices of `plan` by GPTQ on the `texts` (ids [batch, length]); yield the name of each after rounding.
    The order is that of their first readers in the graph. Embedding tables are first rounded to nearest and not
    yielded. Unless `resume` is None, results are stored in this folder and loaded from it by a later run.
    `progress` is called as progress(elements done, elements in total). If the fit takes long, the time that it takes is
    logged once, measured on the first matrices."""
    done, total = 0, sum(matrix.elements for matrix in plan)
    loaded, times, estimated = 0, list[tuple[int, float]](), False
    activations = Activations(graph, texts, dtype=np.float32)
    original = Activations(graph.clone(), texts, dtype=np.float32) if total <= MAX_FOLLOWED else None
    finished = ResultStore(resume, texts, RIDGE, SHRINK, CORRECTION if original else 0, POOLED_SHARE)
    waiting = {matrix.param: matrix for matrix in plan}
    for matrix in plan:
        if matrix.kind == "table":
            round_to_nearest(matrix.param, plan[matrix])
    for node in list(graph.nodes):
        if node.erased or node.op not in (ops.linear, ops.norm_linear, ops.moe):
            continue
        for group in _list_expert_weights(node) if node.op is ops.moe else (_find_input_sharers(node),):
            chosen = [waiting.pop(param) for param in group if param in waiting]
            if not chosen:
                continue
            progress(done, total)
            keys = {m: finished.advance(m.param, plan[m]) for m in chosen} if finished.folder is not None else {}
            blocks = {m: result for m, key in keys.items() if (result := finished.load(key)) is not None}
            layouts = {m: plan[m] for m in chosen if m not in blocks}
            if blocks and not loaded:
                _log.warning("quantize: continues with results of an interrupted run, in %s", resume)
            loaded, start = loaded + len(blocks), time.perf_counter()
            if not layouts:
                fitted = {}
            elif node.op is ops.moe:
                fitted = _fit_experts(activations, node, layouts)
            else:
                fitted = _fit_products(activations, original, layouts)
            for matrix, result in fitted.items():
                if matrix in keys:
                    finished.save(keys[matrix], result)
            for matrix, result in (blocks | fitted).items():
                store_blocks(matrix.param, result, plan[matrix])
            for matrix in chosen:
                done += matrix.elements
                yield matrix.param.name
            if fitted:
                times.append((sum(matrix.elements for matrix in fitted), time.perf_counter() - start))
            # Without the first, which may compute the activations of many layers.
            elements, seconds = sum(n for n, _ in times[1:]), sum(s for _, s in times[1:])
            if not estimated and seconds >= MEASURED:
                estimated, minutes = True, max(1, round(seconds / elements * (total - done) / 60))
                read = f"gptq fits {len(plan)} matrices to {sum(ids.size for ids in texts):,} tokens of text"
                cost = f"about {minutes} minutes more, measured on the first"
                _log.warning("quantize: %s, %s; method=fast takes seconds and loses more", read, cost)
    progress(total, total)


def _find_input_sharers(node: Node) -> list[Param]:
    """Return the weights of `node` and of all nodes with its op, input and norm: they have the same input moment."""
    x = node.required_operand("x")
    same = [n for n in x.users if n.op is node.op and n.inputs[0] is x and _make_norm_key(n) == _make_norm_key(node)]
    return [w for n in same if isinstance(w := n.operand("weight"), Param)]


def _make_norm_key(node: Node) -> tuple[object, ...]:
    return (node.attrs["kind"], node.attrs["eps"]) if node.op is ops.norm_linear else ()


def _fit_products(
    activations: Activations, original: Activations | None, layouts: Mapping[Matrix, BlockLayout]
) -> dict[Matrix, list[Blocks]]:
    """Return, for each matrix of `layouts`, a list of one `Blocks`; all matrices multiply the same value. With
    `original`, weights are first corrected towards the original outputs (`compute_correction`)."""
    by_readers: dict[tuple[Node, ...], list[Matrix]] = {}  # shared weights are rounded once, for all that they multiply
    for matrix in layouts:
        products = tuple(n for n in matrix.readers if n.op is not ops.embedding)
        by_readers.setdefault(products if len(products) > 1 else (), []).append(matrix)
    blocks: dict[Matrix, list[Blocks]] = {}
    for matrices in by_readers.values():
        first, *other_readers = (n for n in matrices[0].readers if n.op is not ops.embedding)
        second, crossed = _compute_moments(activations, original, first)
        for node in other_readers:
            with activations.override(), original.override() if original else contextlib.nullcontext():
                moments = _compute_moments(activations, original, node)
            second += moments[0]
            crossed = None if crossed is None or moments[1] is None else crossed + moments[1]
        corrected = None if crossed is None else compute_correction(second, crossed)
        del crossed
        by_group: dict[int, list[Matrix]] = {}
        for matrix in matrices:
            by_group.setdefault(layouts[matrix].group, []).append(matrix)
        while by_group:
            group, members = by_group.popitem()
            factors = factor_moment(second, group)
            if not by_group:
                del second  # moments of wide inputs are large
            for matrix in members:
                blocks[matrix] = [_round_matrix(matrix, corrected, factors, layouts[matrix])]
            del factors
    return blocks


def _compute_moments(activations: Activations, original: Activations | None, node: Node) -> tuple[Array, Array | None]:
    """Return Σ x xᵀ and Σ x₀ xᵀ [in, in] over the inputs x of the weight of `node` and its original inputs x₀.
    Without `original`, the second is None."""
    x = node.required_operand("x")
    changed = apply_norm(node, activations(x))
    crossed = None if original is None else compute_moment(apply_norm(node, original(x)), changed)
    return compute_moment(changed), crossed


def apply_norm(node: Node, parts: list[Array]) -> list[Array]:
    """Return `parts` (one array per batch), normalized (without weight and bias) if `node` is a norm_linear."""
    if node.op is not ops.norm_linear:
        return parts
    norm = (ops.rms_norm if node.attrs["kind"] == "rms" else ops.layer_norm).reference
    return [np.asarray(norm(part, eps=node.attrs["eps"])) for part in parts]


def compute_moment(parts: Sequence[Array], others: Sequence[Array] | None = None) -> Array:
    """Return Σ x yᵀ, f32 [n, n], over the rows x of `parts` [..., n] and y of `others` (None: the rows x)."""
    flat = [part.reshape(-1, part.shape[-1]) for part in parts]
    other_rows = flat if others is None else [part.reshape(-1, part.shape[-1]) for part in others]
    width = flat[0].shape[1]
    total = np.zeros((width, width), np.float32)
    batches = max(1, ROWS // len(flat[0]))
    for i in range(0, len(flat), batches):
        x = np.concatenate(flat[i : i + batches]).astype(np.float32, copy=False)
        y = x if others is None else np.concatenate(other_rows[i : i + batches]).astype(np.float32, copy=False)
        for start in range(0, width, COLUMNS):
            strip = slice(start, start + COLUMNS)
            rows = slice(start + COLUMNS if others is None else width)  # of a symmetric moment only the upper blocks
            total[rows, strip] += x[:, rows].T @ y[:, strip]
    if others is None:
        for start in range(0, width, COLUMNS):
            total[start + COLUMNS :, start : start + COLUMNS] = total[start : start + COLUMNS, start + COLUMNS :].T
    return total


def _round_matrix(matrix: Matrix, corrected: Array | None, factors: MomentFactors, layout: BlockLayout) -> Blocks:
    """Return the GPTQ blocks of `matrix` [out, in], whose rows are first multiplied by `corrected` unless None."""
    width, reader = int(matrix.param.shape[-1]), matrix.param.graph.reader
    blocks = []
    for rows in matrix.param.recipe.blocks(reader, max(1, NUMBERS // width) * width):
        weight = rows.astype(np.float32, copy=False)
        blocks.append(quantize_gptq(weight if corrected is None else weight @ corrected, factors, layout))
    return blocks[0] if len(blocks) == 1 else concat_blocks(blocks)


def _list_expert_weights(node: Node) -> list[list[Param]]:
    """Return the weights of the moe `node` that are parameters, in the order of use: [[gate, up], [down]]."""
    operands = [[node.operand(name) for name in names] for names in (("gate", "up"), ("down",))]
    return [[v for v in values if isinstance(v, Param)] for values in operands]


def _fit_experts(
    activations: Activations, node: Node, layouts: Mapping[Matrix, BlockLayout]
) -> dict[Matrix, list[Blocks]]:
    """Return the blocks, one per expert, of each stacked weight in `layouts` (down, or gate and up) of the moe `node`.
    The moment of an expert is that of the inputs of the weight for its own tokens. For gate and up it is mixed with the
    moment of all tokens, whose share is `POOLED_SHARE` (1 for an expert without tokens)."""
    reader = node.graph.reader
    x = np.concatenate([part.reshape(-1, part.shape[-1]) for part in activations(node.required_operand("x"))])
    combine = np.concatenate([p.reshape(-1, p.shape[-1]) for p in activations(node.required_operand("combine"))])
    down = node.operand("down") in [matrix.param for matrix in layouts]
    # The inputs of down differ from expert to expert.
    pooled = None if down else compute_moment([x]) / len(x)
    blocks: dict[Matrix, list[Blocks]] = {matrix: [] for matrix in layouts}
    attrs = {name: node.attrs[name] for name in ("activation", "limit", "shift")}
    for expert in range(combine.shape[1]):
        routed = x[combine[:, expert] != 0]

        def read(name: str, at: int = expert) -> Array | None:
            value = node.operand(name)
            return value.recipe.read(reader, at, at + 1)[0] if isinstance(value, Param) else None

        if pooled is None:
            up, gate = read("up"), read("gate")
            assert up is not None
            biases = read("up_bias"), read("gate_bias")
            # An expert without tokens is rounded for the first `ROWS` tokens of the texts.
            routed = compute_expert_hidden(routed if len(routed) else x[:ROWS], up, gate, *biases, **attrs)
            second = compute_moment([routed])
        else:
            n, share = len(routed), POOLED_SHARE
            second = (1 - share) * compute_moment([routed]) / n + share * pooled if n else pooled
        factors: dict[int, MomentFactors] = {}
        for matrix, layout in layouts.items():
            if layout.group not in factors:
                factors[layout.group] = factor_moment(second, layout.group)
            weight = matrix.param.recipe.read(reader, expert, expert + 1)[0]
            blocks[matrix].append(quantize_gptq(weight, factors[layout.group], layout))
    return blocks
